"""Which operation selects, for a method: its own where it has one, else the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch

from prefix_kernels.anchor_selection import Form
from prefix_kernels.grouped_attention import AttentionShape
from prefix_kernels.pooling import Pooling
from sglang_ext.config import SparseAttnConfig
from sglang_ext.decode.select_op import ListSizes, ReferenceOp, SelectOp
from sglang_ext.decode.token_index_op import TokenIndexOp
from sglang_ext.indexing import make_selector
from sglang_ext.indexing.base import IndexSpec
from sglang_ext.indexing.token_index import TokenIndexSpec


def graph_refusal(spec: IndexSpec) -> str | None:
    """Why a method's indexes cannot be used inside decode graphs; None if they can."""
    if isinstance(spec, TokenIndexSpec):
        return None
    return f"method {spec.method} has no kernels in the decode graph yet; token_index has"


def op_maker(
    shape: AttentionShape,
    config: SparseAttnConfig,
    spec: IndexSpec,
    num_layers: int,
    device: torch.device,
    *,
    captured: bool,
) -> Callable[[ListSizes], SelectOp]:
    """What makes the operation of a method, once the sizes of lists are known.

    Args:
        shape: of a layer.
        config: pooling, and how many tokens enter its sums.
        spec: of the method. What `graph_refusal` names has the reference only.
        num_layers: of the model.
        device: of the KV pool.
        captured: whether decode steps replay graphs.
    """
    on_gpu = device.type == "cuda"

    def make(sizes: ListSizes) -> SelectOp:
        pooling = Pooling(config.pooling)
        if not (on_gpu or captured) or not isinstance(spec, TokenIndexSpec):
            return ReferenceOp(make_selector(spec, config.summed_every), pooling)
        every, form = config.summed_every, Form.JOINED if on_gpu else Form.SPLIT
        return TokenIndexOp(shape, spec, pooling, every, num_layers, sizes, form=form, device=device)

    return make
