"""The needle model in plain torch, teacher-forced, with the selections that a server made: for `replay.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scripts.needle_network import Needle, rms_norm
from sglang_ext.decode.trace import Selected
from sglang_ext.methods.layer_plan import LayerMode, LayerPlan
from sglang_ext.prefill.prompt_tokens import count_common

ROWS = 256
"""That are computed at a time: memory grows with rows times tokens."""


class Replayer:
    """Computes one request at a time, of `max_len` tokens at most, in float32; the K and V of a prompt serve the next
    request that begins alike.
    """

    def __init__(self, model: Needle, plan: LayerPlan, *, max_len: int) -> None:
        self._model, self._plan = model, plan
        self._weights = model.layer_weights()
        shape = (model.shape.layers, 2, model.shape.kv_heads, max_len, model.shape.head_dim)
        self._cache = torch.zeros(shape, device=model.embed.device)
        self._known: list[int] = []

    @torch.no_grad()
    def run(self, prompt: Sequence[int], tokens: Sequence[int], steps: Sequence[Selected | None]) -> Tensor:
        """[1 + tokens, vocab_size] float32: logits that each token was chosen by, and those behind the last one.

        Args:
            prompt: token ids, at least one; all of them are attended densely.
            tokens: those behind it that were given in again.
            steps: per token, what the step selected that read it; None for a dense one.

        Raises:
            ValueError: more tokens than there is room for, not as many steps as tokens, or a damaged selection.
        """
        if len(steps) != len(tokens) or len(prompt) + len(tokens) > self._cache.shape[3]:
            raise ValueError(
                f"expected a step for each token and at most {self._cache.shape[3]} tokens in all, got {len(steps)} "
                f"steps, {len(prompt)} and {len(tokens)} tokens"
            )
        before = list(prompt[:-1])
        same = count_common(before, self._known)
        self._known = before[:same]
        for start in range(same, len(before), ROWS):
            self._advance(before[start : start + ROWS], start, None)
        self._known = before
        ids, read = [prompt[-1], *tokens], [None, *steps]
        parts = [
            self._advance(ids[at : at + ROWS], len(before) + at, read[at : at + ROWS])
            for at in range(0, len(ids), ROWS)
        ]
        return torch.cat(parts)

    def _advance(self, ids: Sequence[int], start: int, steps: Sequence[Selected | None] | None) -> Tensor:
        """Tokens at the positions from `start` on: logits where steps are given, else the residual stream."""
        model, device = self._model, self._cache.device
        end = start + len(ids)
        cos, sin = model.rope(start, len(ids), device)
        x = model.embed[torch.tensor(ids, device=device)]
        causal = torch.arange(end, device=device) <= torch.arange(start, end, device=device)[:, None]
        for layer, weights in enumerate(self._weights):
            q, k, v = model.before(x, cos, sin, weights, model.shape.head_dim, model.shape.eps)
            keys, values = self._cache[layer, :, :, :end]
            keys[:, start:], values[:, start:] = k.transpose(0, 1), v.transpose(0, 1)
            allowed = causal.expand(model.shape.kv_heads, -1, -1)
            if steps is not None:
                allowed = self._limited(allowed, layer, steps)
            x = model.after(x, _attend(q, keys, values, allowed), weights, model.shape.eps)
        return x if steps is None else model.logits(rms_norm(x, model.final_norm, model.shape.eps))

    def _limited(self, causal: Tensor, layer: int, steps: Sequence[Selected | None]) -> Tensor:
        """[num_kv_heads, rows, tokens] bool: what each KV head attends at this layer."""
        role = self._plan.layers[layer]
        if role.mode is LayerMode.DENSE:
            return causal
        allowed = causal.clone()
        for row, step in enumerate(steps):
            mask = None if step is None else step.mask(layer if role.anchor_layer is None else role.anchor_layer)
            if step is None or mask is None:
                continue
            chosen = torch.from_numpy(mask)[list(role.head_map)] if role.head_map else torch.from_numpy(mask)
            allowed[:, row, : step.prefix_len] &= chosen.to(allowed.device)
        return allowed


def _attend(q: Tensor, keys: Tensor, values: Tensor, allowed: Tensor) -> Tensor:
    """[rows, num_qo_heads * head_dim] float32 of q [rows, num_qo_heads, head_dim], keys and values [num_kv_heads,
    tokens, head_dim] and allowed [num_kv_heads, rows, tokens].
    """
    rows, heads, dim = q.shape
    grouped = q.view(rows, keys.shape[0], -1, dim).permute(1, 2, 0, 3)
    scores = torch.matmul(grouped * dim**-0.5, keys[:, None].transpose(2, 3))
    weights = scores.masked_fill_(~allowed[:, None], -torch.inf).softmax(-1)
    return torch.matmul(weights, values[:, None]).permute(2, 0, 1, 3).reshape(rows, heads * dim)
