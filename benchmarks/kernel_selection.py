"""What `kernel_bench.py selection` measures: an anchor layer's selection, from queries to lists.

One token index of the default recipe, as the project's builder makes it of random keys: INT4 on 3/4 of the channels.
`token_index` is the kernel that serves, with the softmax summed over all tokens; `token_index_sums16` sums one token in
16. `token_index_torch` is the reference, plain torch.

Scores are compared with the reference's, lists with the scores that they were made by.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from kernel_problem import Gate
from torch import Tensor

from prefix_kernels.anchor_selection import AnchorSelection, Form, default_config
from prefix_kernels.budget import budget_for_group
from prefix_kernels.grouped_attention import AttentionShape
from prefix_kernels.pooled_scores import ScoredGroup, ScoreInputs, ScoreShape
from prefix_kernels.top_k_selection import SelectionGroup, pack_lists
from prefix_kernels.top_k_selection.plan import list_stride
from sglang_ext.methods import SelectArgs, make_builder, make_selector
from sglang_ext.methods.token_index import TokenIndexSpec

NUM_SINK, NUM_RECENT = 16, 64
_ALIGNED = 4
"""Scores of a KV head begin at multiples of this."""
_RAW_ROWS = 8
"""Query rows, at most, whose raw scores are written and read in place of codes that are scored twice."""

#: Largest error of a log-probability, natural log: where products are fp32, where queries are rounded to fp16, and
#: where Hopper's kernel rounds them to INT8. The tests of the kernels say to the bit what rounding does.
FP32_LIMIT, FP16_LIMIT, INT8_LIMIT = 1e-3, 1e-2, 1e-1
_STEPS_PER_LOG = 2045 / 44.0


class Prefix:
    """Queries, and the token index of one layer.

    Args:
        shape: of the layer.
        batch: requests of one group.
        prefix_len: tokens.
        device: where everything lies.
        keep: share of the prefix, times the square root of the group.
        sum_every: of how few tokens the sums of the softmax are, see `pooling.log_shares`.
    """

    def __init__(
        self, shape: AttentionShape, batch: int, prefix_len: int, device: torch.device, keep: float, sum_every: int
    ) -> None:
        gen = torch.Generator(device).manual_seed(prefix_len + batch)

        def randn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=gen, device=device).to(shape.dtype)

        spec = TokenIndexSpec()
        self.shape, self.prefix_len, self.sum_every, self.sm_scale = shape, prefix_len, sum_every, shape.head_dim**-0.5
        self.q = randn(batch, shape.num_qo_heads, shape.head_dim)
        keys = randn(prefix_len, shape.num_kv_heads, shape.head_dim)
        samples = randn(shape.num_kv_heads, 256, shape.head_dim)
        self.arrays = make_builder(spec).build_layer(keys, samples)
        self.nbytes = sum(array.nbytes for array in self.arrays.values())
        wanted = max(NUM_SINK + NUM_RECENT + 16, round(keep * prefix_len))
        self.budget = min(budget_for_group(wanted, batch), prefix_len)
        self.selector = make_selector(spec, sum_every)
        self.args = SelectArgs(
            prefix_len=prefix_len,
            budget=self.budget,
            num_sink=NUM_SINK,
            num_recent=NUM_RECENT,
            sm_scale=self.sm_scale,
        )

    @functools.cached_property
    def wanted(self) -> Tensor:
        """[num_kv_heads, prefix_len] fp32: pooled log-probabilities of the reference."""
        return self.selector.token_scores(self.arrays, self.q, self.args)

    def wrongly_chosen(self, scores: Tensor, positions: Tensor) -> float:
        """How many positions [num_kv_heads, budget] differ, by score, from the best ones; infinite for no positions.

        Sink and recent window have to be there. Scores are compared as keys of 11 bits tell them apart: by steps.
        """
        ascending = bool((positions.diff(dim=1) > 0).all())
        if not ascending or not bool(((positions >= 0) & (positions < self.prefix_len)).all()):
            return math.inf
        taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, positions.long(), True)
        token = torch.arange(self.prefix_len, device=scores.device)
        free = (token >= NUM_SINK) & (token < self.prefix_len - NUM_RECENT)
        missing = int((~taken & ~free).sum())
        if missing or self.budget == self.prefix_len:
            return float(missing)
        steps = ((scores.clamp(-44.0, 0.0) + 44.0) * _STEPS_PER_LOG).floor().masked_fill(~free, -1.0)
        count = self.budget - NUM_SINK - NUM_RECENT
        best = steps.topk(count, dim=1).values
        got = steps.masked_fill(~taken, -1.0).topk(count, dim=1).values
        return float((got != best).sum())


class Torch:
    """The reference."""

    eager_too = True

    def __init__(self, prefix: Prefix) -> None:
        self._prefix, self.nbytes = prefix, prefix.nbytes
        self.config: dict[str, Any] = {"budget": prefix.budget, "sum_every": prefix.sum_every}
        heads = prefix.shape.num_kv_heads
        self.positions = torch.empty(heads, prefix.budget, dtype=torch.int32, device=prefix.q.device)

    def poison(self) -> None:
        """Positions that are none."""
        self.positions.fill_(-1)

    def run(self) -> None:
        """Scores, then the best."""
        prefix = self._prefix
        self.positions.copy_(prefix.selector.select(prefix.arrays, prefix.q, prefix.args).positions)

    def check(self) -> Gate:
        """The lists."""
        wrong = self._prefix.wrongly_chosen(self._prefix.wanted, self.positions)
        return Gate(math.inf if wrong else 0.0, {"wrong_tokens": wrong})


class Ours:
    """In two launches. On a CPU in three, with two programs for every KV head."""

    eager_too = False

    def __init__(self, prefix: Prefix) -> None:
        self._prefix, self.nbytes = prefix, prefix.nbytes
        shape, device, (batch, _, _) = prefix.shape, prefix.q.device, prefix.q.shape
        heads, length, on_gpu = shape.num_kv_heads, prefix.prefix_len, device.type == "cuda"
        channels, packed, scale = (prefix.arrays[name] for name in ("channels", "keys_packed", "keys_scale"))
        scored = ScoreShape(
            shape.num_qo_heads,
            heads,
            channels.shape[1],
            listed_channels=True,
            sum_every=prefix.sum_every,
        )
        capability = torch.cuda.get_device_capability(device) if on_gpu else (9, 0)
        halves = prefix.q.dtype is not torch.float32
        config = default_config(scored, batch, capability, specialized=on_gpu and halves)
        self._limit = INT8_LIMIT if config.specialized else FP16_LIMIT if halves else FP32_LIMIT
        self._selection = AnchorSelection(
            scored,
            batch,
            1,
            length,
            heads * list_stride(prefix.budget),
            config,
            device,
            form=Form.FUSED if on_gpu else Form.UNFUSED,
            num_programs=None if on_gpu else 2 * heads,
        )
        stride = -(-length // _ALIGNED) * _ALIGNED
        firsts, begins = (tuple(range(0, heads * step, step)) for step in (length, stride))
        group = ScoredGroup(tuple(range(batch)), length, firsts, begins, (channels, packed, scale))
        selected = SelectionGroup(length, prefix.budget, num_sink=NUM_SINK, num_recent=NUM_RECENT)
        (self._selected,) = pack_lists([selected], heads)
        self._selection.plan([group], [self._selected])
        self._arena = torch.empty(heads * stride, device=device)
        self._scores = self._arena.view(heads, stride)[:, :length]
        self._lists = self._selection.new_lists(with_slots=True)
        order = torch.randperm(length, generator=torch.Generator().manual_seed(0))
        self._slots = order.to(device, torch.int32)
        raw, rows = None, batch * shape.gqa
        if rows <= _RAW_ROWS and not config.specialized and prefix.sum_every == 1:
            raw = torch.empty(1, heads, length, rows, device=device).transpose(2, 3)
        self._inputs = ScoreInputs(prefix.q, prefix.sm_scale, raw=raw)
        self.config: dict[str, Any] = {**vars(config), "budget": prefix.budget, "sum_every": prefix.sum_every}

    def poison(self) -> None:
        """Scores and lists."""
        self._arena.fill_(torch.nan)
        self._lists.positions.fill_(-1)

    def run(self) -> None:
        """As planned."""
        self._selection.run(self._inputs, self._arena, self._lists, slot_table=self._slots)

    def check(self) -> Gate:
        """Errors within a factor e^8 of the best score, which alone may rank; lists and slots."""
        wanted, heads = self._prefix.wanted, self._prefix.wanted.shape[0]
        positions = self._selected.lists_in(self._lists.positions, heads)
        error = (self._scores - wanted).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        worst = float(error[wanted > wanted.amax(dim=1, keepdim=True) - 8.0].max())
        wrong = self._prefix.wrongly_chosen(self._scores, positions)
        if wrong == 0.0:
            assert self._lists.slots is not None
            slots = self._selected.lists_in(self._lists.slots, heads)
            wrong = float((self._slots[positions.long()] != slots).sum())
        return Gate(math.inf if wrong else worst / self._limit, {"log_prob": worst, "wrong_tokens": wrong})


def _made(form: Callable[[Prefix], Any], sum_every: int, *of: Any) -> Any:
    return form(Prefix(*of, sum_every))


#: name -> builder from the arguments of `Prefix` but the last one. Its object has `run()` (what is timed), `check()`
#: (of what the last run wrote), `poison()` (before a run), `nbytes` (that must be read), `config` (for the row) and
#: `eager_too` (timed without a CUDA graph where none can hold it).
SELECTION: dict[str, Callable[[AttentionShape, int, int, torch.device, float], Any]] = {
    "token_index": functools.partial(_made, Ours, 1),
    "token_index_sums16": functools.partial(_made, Ours, 16),
    "token_index_torch": functools.partial(_made, Torch, 1),
}
