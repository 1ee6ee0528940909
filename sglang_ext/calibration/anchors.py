"""Which layers select for themselves (anchors) when only so many may: the dynamic programme.

Source: Kascade, Algorithm 1 and 3.3. Every layer takes the selection of the nearest anchor at or before it; the
programme maximizes the sum over layers j of w_j * S[anchor of j, j].
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class AnchorChoice(NamedTuple):
    """Anchors and what they are worth.

    Attributes:
        anchors: layer numbers, ascending, the first is `first_layer`.
        total: the objective, see `anchor_total`.
    """

    anchors: tuple[int, ...]
    total: float


def choose_anchors(
    similarity: Tensor, num_anchors: int, *, importance: Tensor | None = None, first_layer: int = 0
) -> AnchorChoice:
    """The best `num_anchors` anchors, in O(num_layers^2 * num_anchors) steps.

    The paper's base case adds S[1][1] once more to every choice (dp[1][1] = S[1][1], and the first sum begins
    with it again); the constant changes no choice and is left out of the total here.

    Args:
        similarity: [num_layers a, num_layers b], how well layer a selects for layer b; entries a > b are not read.
        num_anchors: exactly so many, 1..num_layers - first_layer.
        importance: [num_layers] weights w of the layers; None for equal ones.
        first_layer: the first layer that takes part, always an anchor, as nothing before it could be reused. In
            the paper that is layer 0, which attends densely but still selects for its followers. Where layer 0 is
            dense and selects nothing, as in `LayerPlan`, it is 1.

    Returns:
        The anchors and the total over layers first_layer..num_layers - 1. Of equal choices that with the
        earliest last anchor.

    Raises:
        ValueError: shapes or sizes out of range, or similarities that are NaN or infinite.
    """
    weighted = _weighted(similarity, importance)
    num_layers = weighted.shape[0]
    if not 0 <= first_layer < num_layers:
        raise ValueError(f"expected first_layer in 0..{num_layers - 1}, got {first_layer}; name a layer of the model")
    _check_count(num_anchors, num_layers, first_layer)
    size = num_layers - first_layer
    kept = weighted[first_layer:, first_layer:]
    # reach[i, j]: what anchor i is worth for the layers i..j - 1.
    reach = torch.zeros(size, size + 1, dtype=torch.float64)
    reach[:, 1:] = kept.cumsum(dim=1)
    best = torch.full((size + 1,), -torch.inf, dtype=torch.float64)
    best[0] = 0.0
    before = torch.arange(size)[:, None] < torch.arange(size + 1)
    path: list[Tensor] = []
    for _ in range(num_anchors):
        value = (best[:size, None] + reach).masked_fill(~before, -torch.inf)
        best, last = value.max(dim=0)
        path.append(last)
    end, anchors = size, []
    for last in reversed(path):
        end = int(last[end])
        anchors.append(end + first_layer)
    chosen = tuple(reversed(anchors))
    return AnchorChoice(chosen, float(best[size]))


def anchor_total(
    similarity: Tensor, anchors: Sequence[int], *, importance: Tensor | None = None, first_layer: int = 0
) -> float:
    """The programme's objective for any anchors: sum over layers j of w_j * S[anchor of j, j].

    Args:
        similarity, importance, first_layer: as in `choose_anchors`.
        anchors: ascending, the first is `first_layer`.

    Raises:
        ValueError: anchors that break a rule, or shapes that do not fit.
    """
    weighted = _weighted(similarity, importance)
    nearest = assigned_anchors(anchors, weighted.shape[0], first_layer=first_layer)
    return sum(float(weighted[anchor, layer]) for layer, anchor in enumerate(nearest, start=first_layer))


def assigned_anchors(anchors: Sequence[int], num_layers: int, *, first_layer: int = 0) -> tuple[int, ...]:
    """The nearest anchor at or before each of the layers first_layer..num_layers - 1.

    Raises:
        ValueError: anchors that are not ascending, begin elsewhere or name a layer that is not there.
    """
    listed = list(anchors)
    ascending = all(left < right for left, right in itertools.pairwise(listed))
    if not listed or listed[0] != first_layer or not ascending or listed[-1] >= num_layers:
        raise ValueError(
            f"expected ascending anchors from layer {first_layer} on, below num_layers={num_layers}, got {listed}; "
            "the first layer that takes part has nothing to reuse and must be an anchor"
        )
    nearest: list[int] = []
    for layer in range(first_layer, num_layers):
        nearest.append(layer if layer in listed else nearest[-1])
    return tuple(nearest)


def evenly_spaced_anchors(num_layers: int, num_anchors: int, *, first_layer: int = 0) -> tuple[int, ...]:
    """`num_anchors` anchors with equal distances, up to rounding, from `first_layer` on: the rival.

    Raises:
        ValueError: sizes out of range.
    """
    _check_count(num_anchors, num_layers, first_layer)
    return tuple(first_layer + i * (num_layers - first_layer) // num_anchors for i in range(num_anchors))


def _check_count(num_anchors: int, num_layers: int, first_layer: int) -> None:
    most = num_layers - first_layer
    if not 1 <= num_anchors <= most:
        raise ValueError(
            f"expected num_anchors in 1..{most} (layers {first_layer}..{num_layers - 1}), got {num_anchors}; "
            "choose a number in that range"
        )


def _weighted(similarity: Tensor, importance: Tensor | None) -> Tensor:
    """sim[i][j] = w_j * sim[i][j] in fp64 on the CPU."""
    if similarity.dim() != 2 or similarity.shape[0] != similarity.shape[1] or similarity.shape[0] == 0:
        raise ValueError(
            f"expected similarity [num_layers, num_layers], got {tuple(similarity.shape)}; for heads take "
            "layer_similarity first"
        )
    num_layers = similarity.shape[0]
    matrix = similarity.double().cpu().triu()
    if importance is not None:
        if importance.shape != (num_layers,):
            raise ValueError(
                f"expected importance [num_layers={num_layers}], got {tuple(importance.shape)}; measure both over "
                "the same model"
            )
        matrix = matrix * importance.double().cpu()
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError("expected finite similarities and importances, got NaN or infinity; measure them again")
    return matrix
