"""Similarity of layers by attention-mass recovery, per pair of KV heads, streamed layer by layer.

Source: Kascade, Eq. 3 (ratio of recovered to oracle Top-k mass), 3.3 (minimum over a prompt's tokens, mean over
prompts, k = 64), 3.4 (post-softmax pooling over the GQA group), 3.5 (the same score per head for remapping).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sglang_ext.calibration.capture import (
    LayerCapture,
    check_capture,
    check_state,
    log_attention,
    require_prompts,
    take_layers,
    token_chunks,
)

TOP_K = 64
"""Keys that the similarity compares (Kascade, 3.3)."""


@dataclass
class SimilarityAccumulator:
    """Mean over prompts of the head-level similarity. Mutable: `add_prompt` adds one prompt.

    Attributes:
        num_layers: layers of the model.
        num_kv_heads: KV heads per layer, before tensor parallelism.
        top_k: keys that are compared; a prefix with fewer is similar everywhere (1.0).
        num_prompts: prompts so far.
        total: [num_layers, num_layers, num_kv_heads, num_kv_heads] fp64, sum over prompts, see
            `prompt_similarity`. Owned.

    Raises:
        ValueError: a size below 1.
    """

    num_layers: int
    num_kv_heads: int
    top_k: int = TOP_K
    num_prompts: int = field(default=0, init=False)
    total: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_kv_heads, self.top_k) < 1:
            raise ValueError(
                "expected num_layers, num_kv_heads and top_k >= 1, got "
                f"{self.num_layers}, {self.num_kv_heads} and {self.top_k}"
            )
        shape = (self.num_layers, self.num_layers, self.num_kv_heads, self.num_kv_heads)
        self.total = torch.zeros(shape, dtype=torch.float64)

    def add_prompt(self, layers: Iterable[LayerCapture], sm_scale: float) -> None:
        """Measure one prompt and add it; after an error nothing was added.

        Args:
            layers: one capture per layer in layer order, each read once: a generator may make them one by one.
            sm_scale: the model's attention scale.

        Raises:
            ValueError: see `prompt_similarity`.
        """
        checked = take_layers(layers, self.num_layers, self.num_kv_heads)
        self.total += prompt_similarity(checked, sm_scale, self.top_k)
        self.num_prompts += 1

    def head_similarity(self) -> Tensor:
        """Mean over prompts, [num_layers a, num_layers b, num_kv_heads of b, num_kv_heads of a] fp64, new.

        Raises:
            ValueError: no prompt was added.
        """
        require_prompts(self.num_prompts)
        return self.total / self.num_prompts

    def state_dict(self) -> dict[str, object]:
        """Plain values that `load_state_dict` of an equally made accumulator goes on from; tensors are copies."""
        return {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "top_k": self.top_k,
            "num_prompts": self.num_prompts,
            "total": self.total.clone(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a saved state, which is copied.

        Raises:
            ValueError: it is of another accumulator, model or setting.
        """
        check_state(state, self.state_dict())
        num_prompts, total = state["num_prompts"], state["total"]
        assert isinstance(num_prompts, int)
        assert isinstance(total, Tensor)
        self.num_prompts, self.total = num_prompts, total.clone()


def prompt_similarity(layers: Iterable[LayerCapture], sm_scale: float, top_k: int = TOP_K) -> Tensor:
    """How much of each layer's Top-k mass the Top-k keys of every earlier layer recover, for the worst token.

    For the token t and the KV heads g of layer a and h of layer b, with P the post-softmax attention, mean over
    the head's GQA group, and I the Top-k positions:
    sim = sum P_b,h[t, I_a,g[t]] / sum P_b,h[t, I_b,h[t]], then the minimum over the prompt's tokens.

    In memory at once: the Top-k positions of all layers (int32), one layer's capture and a chunk of its
    attention.

    Args:
        layers: one capture per layer in layer order, of the same tokens over the same prefix; read once.
        sm_scale: the model's attention scale.
        top_k: keys compared, limited by prefix_len.

    Returns:
        [a, b, h, g] fp64 on the CPU in 0..1: layer a selects, layer b <= its successors attends; 0 where a > b.

    Raises:
        ValueError: no layer, layers of different tokens or heads, or unusable captures.
    """
    chosen: list[Tensor] = []
    worst: list[Tensor] = []
    first: LayerCapture | None = None
    for capture in layers:
        check_capture(capture)
        first = capture if first is None else first
        _check_same(first, capture, len(chosen))
        top = min(top_k, capture.prefix_len)
        shape = (capture.num_kv_heads, capture.num_tokens, top)
        chosen.append(torch.empty(shape, dtype=torch.int32, device=capture.keys.device))
        worst.append(_compare(capture, sm_scale, chosen))
    if first is None:
        raise ValueError("expected at least one layer, got none; capture every layer of the prompt")
    heads = first.num_kv_heads
    result = torch.zeros(len(worst), len(worst), heads, heads, dtype=torch.float64)
    for layer, column in enumerate(worst):
        result[: layer + 1, layer] = column.double().cpu()
    return result


def _check_same(first: LayerCapture, capture: LayerCapture, layer: int) -> None:
    """Positions chosen by one layer mean something to another only over the same prefix and tokens."""
    mine = (capture.num_tokens, capture.prefix_len, capture.num_kv_heads)
    expected = (first.num_tokens, first.prefix_len, first.num_kv_heads)
    if mine != expected or not torch.equal(first.positions, capture.positions):
        raise ValueError(
            f"layer {layer}: expected the tokens of layer 0 (num_tokens, prefix_len, num_kv_heads = {expected}), got "
            f"{mine}{' at other positions' if mine == expected else ''}; capture all layers in one run"
        )


def _compare(capture: LayerCapture, sm_scale: float, chosen: list[Tensor]) -> Tensor:
    """Fill in this layer's Top-k (the last of `chosen`), compare with all: [layers so far, h, g] fp32."""
    heads, num_tokens, top = chosen[-1].shape
    prefix_len = capture.prefix_len
    worst = torch.full((len(chosen), heads, heads), torch.inf, device=chosen[-1].device)
    per_token = max(capture.queries.shape[1] * prefix_len, heads * heads * top)
    for tokens in token_chunks(num_tokens, per_token):
        log_mass = log_attention(capture, tokens, sm_scale)
        own = log_mass.topk(top, dim=2).indices
        chosen[-1][:, tokens] = own.int()
        mass = log_mass.exp_()
        oracle = mass.gather(2, own).sum(dim=2)
        for layer, picks in enumerate(chosen):
            index = picks[:, tokens].long().transpose(0, 1).flatten(1)
            taken = mass.gather(2, index.expand(heads, *index.shape))
            taken = taken.view(heads, -1, heads, top).sum(dim=3)
            ratio = (taken / oracle[:, :, None]).amin(dim=1)
            worst[layer] = torch.minimum(worst[layer], ratio)
    # Sums in another order may exceed the oracle's by rounding.
    return worst.clamp_(max=1.0)


def layer_similarity(head_similarity: Tensor, *, remap: bool = True) -> Tensor:
    """From heads to layers: each KV head of layer b takes one of layer a, then the mean over b's heads.

    Source: Kascade, 3.3: the matrix that the anchors are chosen by incorporates pooling and remapping.

    Args:
        head_similarity: [num_layers a, num_layers b, num_kv_heads of b, num_kv_heads of a].
        remap: each head of b takes its best head of a (3.5); False: the head of the same number.

    Returns:
        [num_layers a, num_layers b], new.

    Raises:
        ValueError: another shape.
    """
    check_head_similarity(head_similarity)
    if remap:
        return head_similarity.amax(dim=3).mean(dim=2)
    return head_similarity.diagonal(dim1=2, dim2=3).mean(dim=2)


def check_head_similarity(head_similarity: Tensor) -> None:
    """Raise unless [num_layers, num_layers, num_kv_heads, num_kv_heads] and finite.

    Raises:
        ValueError: otherwise.
    """
    shape = tuple(head_similarity.shape)
    if len(shape) != 4 or shape[0] != shape[1] or shape[2] != shape[3] or 0 in shape:
        raise ValueError(
            "expected head_similarity [num_layers a, num_layers b, num_kv_heads of b, num_kv_heads of a], got "
            f"{shape}; pass what SimilarityAccumulator.head_similarity returns"
        )
    if not bool(torch.isfinite(head_similarity).all()):
        raise ValueError("expected finite similarities, got NaN or infinity; measure them again")
