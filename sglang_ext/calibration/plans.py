"""Layer plans: which layers select for themselves (anchors), and which KV head of its anchor each KV head of a reuse
layer follows.

Source: Kascade, Algorithm 1, 3.3 and 3.5. Every layer takes the selection of the nearest anchor at or before it; the
programme maximizes the sum over layers j of w_j * S[anchor of j, j]. Every KV head of a reuse layer takes the most
similar KV head of its anchor; many heads may take one. Heads are those of the whole model: with tensor parallelism a
head may follow one that another rank holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sglang_ext.methods.layer_plan import LayerMode, LayerPlan, LayerRole

HeadMap = tuple[int, ...]
"""[num_kv_heads of the reuse layer], the KV head of the anchor that each takes."""


def layer_similarity(head_similarity: Tensor) -> Tensor:
    """[num_layers a, num_layers b, num_kv_heads of b, of a] -> [num_layers a, num_layers b]: each KV head of layer b
    takes its best one of layer a, then the mean over b's heads.

    Source: Kascade, 3.3: the matrix that the anchors are chosen by incorporates pooling and remapping (3.5).
    """
    return head_similarity.amax(dim=3).mean(dim=2)


def choose_anchors(similarity: Tensor, importance: Tensor, num_anchors: int, first_layer: int) -> tuple[int, ...]:
    """The best `num_anchors` anchors, in O(num_layers^2 * num_anchors) steps.

    The paper's base case adds S[1][1] once more to every choice (dp[1][1] = S[1][1], and the first sum begins
    with it again); the constant changes no choice and is left out here.

    Args:
        similarity: [num_layers a, num_layers b], how well layer a selects for layer b; entries a > b are not read.
        importance: [num_layers] weights w of the layers; finite, as similarity.
        num_anchors: exactly so many, 1..num_layers - first_layer.
        first_layer: the first layer that takes part, always an anchor, as nothing before it could be reused. In
            the paper that is layer 0, which attends densely but still selects for its followers. Where layer 0 is
            dense and selects nothing, as in `LayerPlan`, it is 1.

    Returns:
        Layer numbers, ascending, the first is `first_layer`. Of equal choices that with the earliest last anchor.
    """
    weighted = similarity.double().cpu().triu() * importance.double().cpu()
    size = weighted.shape[0] - first_layer
    # reach[i, j]: what anchor i is worth for the layers i..j - 1.
    reach = torch.zeros(size, size + 1, dtype=torch.float64)
    reach[:, 1:] = weighted[first_layer:, first_layer:].cumsum(dim=1)
    best = torch.full((size + 1,), -torch.inf, dtype=torch.float64)
    best[0] = 0.0
    before = torch.arange(size)[:, None] < torch.arange(size + 1)
    path: list[Tensor] = []
    for _ in range(num_anchors):
        best, last = (best[:size, None] + reach).masked_fill(~before, -torch.inf).max(dim=0)
        path.append(last)
    end, anchors = size, []
    for last in reversed(path):
        end = int(last[end])
        anchors.append(end + first_layer)
    return tuple(reversed(anchors))


def assigned_anchors(anchors: Sequence[int], num_layers: int) -> dict[int, int]:
    """The nearest anchor at or before each layer from the first anchor on.

    Raises:
        ValueError: anchors that are not ascending or name a layer that is not there.
    """
    listed = list(anchors)
    ascending = all(left < right for left, right in itertools.pairwise(listed))
    if not listed or not ascending or listed[0] < 0 or listed[-1] >= num_layers:
        raise ValueError(
            f"expected at least one anchor, ascending, in 0..{num_layers - 1}, got {listed}; name layers of the model"
        )
    return {layer: max(anchor for anchor in listed if anchor <= layer) for layer in range(listed[0], num_layers)}


def best_head_map(similarity: Tensor) -> HeadMap:
    """For each head of the reuse layer the anchor head with the best similarity [heads of the reuse layer, of the
    anchor]; of equal ones that of the same number if it is among them, else the first."""
    heads = []
    for head, row in enumerate(similarity):
        tied = (row == row.max()).nonzero().flatten().tolist()
        heads.append(head if head in tied else int(tied[0]))
    return tuple(heads)


def make_layer_plan(anchors: Sequence[int], head_similarity: Tensor, dense_layers: Sequence[int] = (0,)) -> LayerPlan:
    """The plan in which every layer reuses the nearest anchor before it, each head the most similar one.

    Args:
        anchors, dense_layers: see `plan_from_maps`.
        head_similarity: [num_layers a, num_layers b, num_kv_heads of b, num_kv_heads of a].

    Raises:
        ValueError: anchors break a rule.
    """
    num_layers, _, num_kv_heads, _ = head_similarity.shape
    nearest = assigned_anchors(anchors, num_layers)
    maps = {layer: best_head_map(head_similarity[anchor, layer]) for layer, anchor in nearest.items()}
    return plan_from_maps(anchors, maps, num_layers, num_kv_heads, dense_layers)


def plan_from_maps(
    anchors: Sequence[int],
    maps: Mapping[int, HeadMap],
    num_layers: int,
    num_kv_heads: int,
    dense_layers: Sequence[int] = (0,),
) -> LayerPlan:
    """The plan of given anchors and head maps.

    The paper's layer 0 attends densely and still selects for its followers. A dense layer of a `LayerPlan` selects
    nothing, so a layer whose anchor is dense becomes an anchor itself: exact for that layer, at the price of its
    own selection.

    Args:
        anchors: ascending; layers before the first are dense.
        maps: head map of every layer that reuses one; others are not read.
        num_layers, num_kv_heads: of the whole model.
        dense_layers: layers that read the whole prefix, anchors or not.

    Raises:
        ValueError: anchors or maps break a rule.
    """
    roles = [LayerRole(LayerMode.DENSE)] * num_layers
    for layer, anchor in assigned_anchors(anchors, num_layers).items():
        reuses = layer != anchor
        roles[layer] = LayerRole(LayerMode.REUSE, anchor, maps[layer]) if reuses else LayerRole(LayerMode.ANCHOR)
    return LayerPlan(tuple(roles), num_kv_heads).with_dense(dense_layers)
