"""How many lists of selections decode graphs keep, and for how many groups: one set, or one for each anchor layer."""

from __future__ import annotations

from sglang_ext.indexing.layer_plan import LayerPlan

KEPT_BYTES = 512 << 20
"""Device memory of the lists beside the first set, at most: fewer groups have lists before there are more."""


class ListsTooLargeError(ValueError):
    """Kept lists of one group alone would take more than `KEPT_BYTES`."""


def num_sets(layer_plan: LayerPlan, search_period: int) -> int:
    """Sets of lists: one serves all anchor layers in turns, unless later steps read them; then each has its own."""
    return max(1, len(layer_plan.anchor_layers)) if search_period > 1 else 1


def groups_that_fit(num_groups: int, num_sets: int, num_kv_heads: int, width: int) -> int:
    """Groups of a batch, at most `num_groups`, whose kept lists take no more than `KEPT_BYTES`.

    Args:
        num_groups: at most.
        num_sets: from `num_sets`; the first one is not counted.
        num_kv_heads: KV heads.
        width: entries of a list.

    Raises:
        ListsTooLargeError: not even those of one group do.
    """
    of_one = (num_sets - 1) * num_kv_heads * width * 4
    if of_one > KEPT_BYTES:
        raise ListsTooLargeError(
            f"expected lists of at most {KEPT_BYTES} bytes for one group with a search_period above 1, got {of_one} "
            f"({num_sets} anchor layers, {num_kv_heads} KV heads, {width} positions); set search_period to 1, or lower "
            "max_keep_ratio, --context-length or the number of anchor layers"
        )
    return min(num_groups, KEPT_BYTES // of_one) if of_one else num_groups
