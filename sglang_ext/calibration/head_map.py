"""Which KV head of its anchor each KV head of a reuse layer follows, and the layer plan that results.

Source: Kascade, 3.5: every KV head of a reuse layer takes the most similar KV head of its anchor, by the same score
as the layers' at head level; many heads may take one. Heads are those of the whole model: with tensor parallelism a
head may follow one that another rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sglang_ext.calibration.anchors import assigned_anchors
from sglang_ext.calibration.similarity import check_head_similarity
from sglang_ext.methods.layer_plan import LayerMode, LayerPlan, LayerRole

MIN_TOP_K = 128
"""Fewest keys that a layer attends (Kascade, 4.1: k = min(max(0.1 L, 128), L))."""

HeadMap = tuple[int, ...]
"""[num_kv_heads of the reuse layer], the KV head of the anchor that each takes."""


def kascade_budget(prefix_len: int, keep_ratio: float, min_top_k: int = MIN_TOP_K) -> int:
    """k = min(max(keep_ratio * L, min_top_k), L) tokens. Source: Kascade, 4.1.

    Args:
        prefix_len: L, at least 1.
        keep_ratio: above 0 and at most 1; the product is rounded down.
        min_top_k: at least 1.

    Raises:
        ValueError: a value out of range.
    """
    if prefix_len < 1 or not 0.0 < keep_ratio <= 1.0 or min_top_k < 1:
        raise ValueError(
            "expected prefix_len >= 1, keep_ratio above 0 and at most 1, and min_top_k >= 1, got "
            f"{prefix_len}, {keep_ratio} and {min_top_k}"
        )
    return min(max(int(keep_ratio * prefix_len), min_top_k), prefix_len)


def best_head_map(similarity: Tensor) -> HeadMap:
    """For each head of the reuse layer the anchor head with the best similarity.

    Args:
        similarity: [num_kv_heads of the reuse layer, num_kv_heads of the anchor], finite.

    Returns:
        The map; of equal heads that of the same number if it is among them, else the first.

    Raises:
        ValueError: another shape, or NaN.
    """
    if similarity.dim() != 2 or 0 in similarity.shape or not bool(torch.isfinite(similarity).all()):
        raise ValueError(
            "expected finite similarity [num_kv_heads of the reuse layer, num_kv_heads of the anchor], got "
            f"{tuple(similarity.shape)}; take one layer pair of SimilarityAccumulator.head_similarity"
        )
    heads = []
    for head, row in enumerate(similarity):
        tied = (row == row.max()).nonzero().flatten().tolist()
        heads.append(head if head in tied else int(tied[0]))
    return tuple(heads)


def identity_head_map(num_kv_heads: int) -> HeadMap:
    """Each head takes the head of its own number: the rival of the remapping."""
    return tuple(range(num_kv_heads))


def make_layer_plan(
    anchors: Sequence[int], head_similarity: Tensor, *, dense_layers: Sequence[int] = (0,), remap: bool = True
) -> LayerPlan:
    """The plan in which every layer reuses the nearest anchor before it, head by head.

    Args:
        anchors: ascending, as `choose_anchors` returns them; the first is layer 0, or the first layer that is not
            dense.
        head_similarity: [num_layers a, num_layers b, num_kv_heads of b, num_kv_heads of a], see
            `SimilarityAccumulator.head_similarity`.
        dense_layers: layers that read the whole prefix, anchors or not.
        remap: heads by best similarity; False: the identity.

    Returns:
        A valid plan, see `plan_from_maps` for anchors that are dense.

    Raises:
        ValueError: shapes do not fit, or anchors or dense layers break a rule.
    """
    check_head_similarity(head_similarity)
    num_layers, _, num_kv_heads, _ = head_similarity.shape
    first_layer = anchors[0] if len(anchors) else 0
    nearest = assigned_anchors(anchors, num_layers, first_layer=first_layer)
    maps: dict[int, HeadMap] = {}
    for layer, anchor in enumerate(nearest, start=first_layer):
        pair = head_similarity[anchor, layer]
        maps[layer] = best_head_map(pair) if remap else identity_head_map(num_kv_heads)
    return plan_from_maps(anchors, maps, num_layers, num_kv_heads, dense_layers=dense_layers)


def plan_from_maps(
    anchors: Sequence[int],
    maps: Mapping[int, HeadMap],
    num_layers: int,
    num_kv_heads: int,
    *,
    dense_layers: Sequence[int] = (0,),
) -> LayerPlan:
    """The plan of given anchors and head maps.

    The paper's layer 0 attends densely and still selects for its followers. A dense layer of a `LayerPlan` selects
    nothing, so a layer whose anchor is dense becomes an anchor itself: exact for that layer, at the price of its
    own selection.

    Args:
        anchors: ascending; layers before the first must be dense.
        maps: head map of every layer that reuses one; others are not read.
        num_layers, num_kv_heads: of the whole model.
        dense_layers: layers that read the whole prefix, anchors or not.

    Raises:
        ValueError: anchors, dense layers or maps break a rule.
    """
    dense = set(dense_layers)
    odd = sorted(layer for layer in dense if not 0 <= layer < num_layers)
    if odd:
        raise ValueError(f"expected dense layers in 0..{num_layers - 1}, got {odd[0]}; name layers of the model")
    first_layer = anchors[0] if len(anchors) else 0
    nearest = assigned_anchors(anchors, num_layers, first_layer=first_layer)
    uncovered = sorted(set(range(first_layer)) - dense)
    if uncovered:
        raise ValueError(
            f"expected the layers before the first anchor {first_layer} to be dense, got layer {uncovered[0]} with "
            "nothing to reuse; make it dense or an anchor"
        )
    roles = []
    for layer in range(num_layers):
        anchor = nearest[layer - first_layer] if layer >= first_layer else layer
        if layer in dense:
            roles.append(LayerRole(LayerMode.DENSE))
        elif anchor == layer or anchor in dense:
            roles.append(LayerRole(LayerMode.ANCHOR))
        else:
            roles.append(LayerRole(LayerMode.REUSE, anchor, tuple(maps[layer])))
    return LayerPlan(tuple(roles), num_kv_heads)
