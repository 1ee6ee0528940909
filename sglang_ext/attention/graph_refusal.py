"""What the decode graphs with an index cannot hold yet."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_ext.config import SparseAttnConfig
from sglang_ext.indexing.base import IndexSpec
from sglang_ext.indexing.layer_plan import LayerMode, LayerPlan
from sglang_ext.indexing.token_index import TokenIndexSpec


def graph_refusal(
    config: SparseAttnConfig, spec: IndexSpec, plan: LayerPlan, dense_heads: Sequence[Sequence[int]]
) -> str | None:
    """Why indexes cannot be used inside decode graphs with these settings; None if they can."""
    if not isinstance(spec, TokenIndexSpec):
        return f"method {spec.method} has no kernels in the decode graph yet; token_index has"
    if any(dense_heads):
        named = ", ".join(f"layer {layer} head {head}" for layer, row in enumerate(dense_heads) for head in row)
        return (
            f"dense heads of the profile ({named}) are not in the decode graph yet; calibrate again, or make their "
            "layers dense in layer_plan"
        )
    latest: int | None = None
    for number, role in enumerate(plan.layers):
        if role.mode is LayerMode.ANCHOR:
            latest = number
        if role.anchor_layer is not None and role.anchor_layer != latest and config.search_period == 1:
            return (
                f"layer {number} reuses layer {role.anchor_layer}, not the last one that selects ({latest}): lists of "
                "all anchors are kept with a search_period above 1 only"
            )
    return None
