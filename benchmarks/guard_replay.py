"""Attention mass recall of a server's sparse steps, computed offline: the model as transformers has it, in another
process and other kernels, is given the same tokens and attends what the server's trace says that it selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sglang_ext.decode.trace import Selected, Start, read_trace
from sglang_ext.methods.layer_plan import LayerPlan


class Offline(NamedTuple):
    """Per layer, means over the steps: recall, and relative output error."""

    recall: list[float]
    output_error: list[float]


class Trace(NamedTuple):
    """Of a server: the layers' roles, and by request its steps by an index, in order."""

    plan: LayerPlan
    steps: dict[str, list[Selected]]


def read(folder: Path, num_layers: int) -> Trace:
    """The one trace in a folder.

    Raises:
        ValueError: there is none, or several.
    """
    (path,) = folder.glob("steps-*.trace")
    start, *records = read_trace(path)
    assert isinstance(start, Start)
    plan = LayerPlan.from_dict(start.layer_plan, num_layers=num_layers, num_kv_heads=start.num_kv_heads)
    steps: dict[str, list[Selected]] = {}
    for record in records:
        for group in getattr(record, "groups", ()):
            for rid in group.rids:
                steps.setdefault(rid, []).append(group)
    return Trace(plan, steps)


class Replay:
    """Gives requests in again. Each step must be one of a request alone.

    Args:
        model: folder of the model.
        plan: role of each layer.
        device: to compute on.
    """

    def __init__(self, model: Path, plan: LayerPlan, device: torch.device) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register("guard_replay", self._attend)
        kind = torch.float32
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=kind, attn_implementation="guard_replay")
        self._model, self._plan, self._device = loaded.to(device).eval(), plan, device
        self._step: Selected | None = None
        self._found: list[tuple[float, float]] = []

    @torch.no_grad()
    def run(self, prompt: Sequence[int], tokens: Sequence[int], steps: Sequence[Selected]) -> Offline:
        """Figures of a request's steps.

        Args:
            prompt: token ids; attended densely.
            tokens: that were generated; those before the first step by an index were attended densely, too.
            steps: the first ones of the request by an index, without a gap.
        """
        first = steps[0].seq_lens[0] - 1  # position of the token that the first one reads
        ids = torch.tensor([[*prompt, *tokens]], device=self._device)
        self._step = None
        out = self._model(ids[:, :first], use_cache=True, logits_to_keep=1)
        figures = []
        for number, step in enumerate(steps):
            at = first + number
            assert step.seq_lens == [at + 1], "expected steps of a request alone, without a gap"
            self._step, self._found = step, []
            out = self._model(ids[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
            figures.append(self._found)
        means = torch.tensor(figures).mean(dim=0)
        return Offline(means[:, 0].tolist(), means[:, 1].tolist())

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """As transformers calls it: q [1, heads, rows, dim], k and v [1, kv_heads, tokens, dim]."""
        heads, layer = k.shape[1], int(module.layer_idx)
        if self._step is None:
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
            return out.transpose(1, 2), None
        role = self._plan.layers[layer]
        mask_of = self._step.mask(layer if role.anchor_layer is None else role.anchor_layer)
        allowed = torch.ones(heads, k.shape[2], dtype=torch.bool, device=k.device)
        if mask_of is not None and role.mode.value != "dense":
            chosen = torch.from_numpy(mask_of)[list(role.head_map)] if role.head_map else torch.from_numpy(mask_of)
            allowed[:, : self._step.prefix_len] = chosen.to(k.device)
        scores = scaling * q.view(heads, -1, q.shape[3]).double() @ k[0].double().transpose(1, 2)
        kept = scores.masked_fill(~allowed[:, None], -torch.inf)
        exact, out = (one.softmax(-1) @ v[0].double() for one in (scores, kept))
        recall = (kept.logsumexp(-1) - scores.logsumexp(-1)).exp().mean()
        self._found.append((float(recall), float((out - exact).norm() / exact.norm())))
        return out.to(q.dtype).view(1, 1, -1, v.shape[3]), None
