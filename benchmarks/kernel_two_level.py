"""An anchor layer's selection in two levels: candidates from one index, ranked by a token index, as kernels.

The recipes are those of `kernel_indexes`; `joined` does `blocks` in one launch for each level. Every stage is compared
with fp64, given what the stage before it wrote.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from kernel_indexes import RECIPES, BlockIndex, CsaIndex, Prefix, config_of, first_gate, group_of, log_error
from kernel_naive import NUM_RECENT, NUM_SINK
from kernel_pipelines import keep_raw
from kernel_problem import Gate
from torch import Tensor

from prefix_kernels.anchor_selection import AnchorSelection, Form, default_config
from prefix_kernels.pooled_scores import PooledScores, ScoreShape
from prefix_kernels.top_k_selection import TopKSelection
from prefix_kernels.two_level_selection import JoinedTwoLevelSelection, TwoLevelSelection

_STEPS_PER_LOG = 65533 / 44.0


class FirstLevelAlone:
    """The first level's scores, and nothing after them."""

    eager_too = False

    def __init__(self, prefix: Prefix, index: CsaIndex | BlockIndex) -> None:
        self._prefix, self._index = prefix, index
        index.level.plan([group_of(prefix, index)])  # type: ignore[list-item]
        self.nbytes, self.config = index.nbytes, index.config

    def poison(self) -> None:
        """NaN where a score is expected."""
        self._index.level.scores.fill_(torch.nan)

    def run(self) -> None:
        """As planned."""
        self._index.level.run(self._prefix.q, self._prefix.sm_scale, 0)

    def check(self) -> Gate:
        """The scores against fp64."""
        level = self._index.level
        return first_gate(self._prefix, self._index, level.scores, level.score_stride)


@dataclass(frozen=True, eq=False)
class Written:
    """What a selection writes on its way; KV heads of scores lie `..._stride` apart."""

    first: Tensor
    first_stride: int
    second: Tensor
    second_stride: int
    candidates: Tensor


class TwoLevel:
    """From queries to positions and slots."""

    eager_too = False
    #: Also where all that is scored is chosen.
    always_scored = True

    def __init__(self, prefix: Prefix, index: CsaIndex | BlockIndex) -> None:
        self._prefix, self._index = prefix, index
        heads, device = prefix.shape.num_kv_heads, prefix.q.device
        token = prefix.second["keys_packed"][0, 0].nbytes
        self.nbytes = index.nbytes + heads * prefix.num_candidates * token
        self.config: dict[str, Any] = {**index.config, "budget": prefix.budget, "candidates": prefix.num_candidates}
        self.config |= {"num_sink": NUM_SINK, "num_recent": NUM_RECENT}
        self._selection, self._written = self._made()
        self._selection.plan([group_of(prefix, index)])
        self._lists = self._selection.new_lists(with_slots=True)
        self._slots = torch.randperm(prefix.prefix_len, generator=torch.Generator().manual_seed(0)).to(device).int()

    def _made(self) -> tuple[Any, Written]:
        prefix, index = self._prefix, self._index
        shape, device, rows = prefix.shape, prefix.q.device, prefix.q.shape[0]
        heads, length = shape.num_kv_heads, prefix.prefix_len
        programs = None if device.type == "cuda" else 2 * heads
        nominate = TopKSelection(
            1,
            heads,
            length,
            prefix.num_candidates,
            device,
            key_bits=16,
            num_programs=programs,
            max_block_size=index.block_size,
        )
        second = PooledScores(prefix.tokens, rows, 1, config_of(prefix), device, listed=True)
        select = TopKSelection(
            1,
            heads,
            prefix.num_candidates,
            prefix.budget,
            device,
            key_bits=16,
            num_programs=programs,
            max_block_size=1,
        )
        level: Any = index.level
        self.config["codes"] = vars(config_of(prefix))
        made: TwoLevelSelection[Any] = TwoLevelSelection(level, nominate, second, select)
        scores = (level.scores, level.score_stride, made.scores, made.score_stride)
        return made, Written(*scores, made.candidates.positions)

    def poison(self) -> None:
        """Scores, candidates and lists."""
        for scores in (self._written.first, self._written.second):
            scores.fill_(torch.nan)
        assert self._lists.slots is not None
        for places in (self._written.candidates, self._lists.positions, self._lists.slots):
            places.fill_(-1)

    def run(self) -> None:
        """Everything."""
        prefix = self._prefix
        self._selection.run(prefix.q, self._lists, prefix.sm_scale, slot_table=self._slots, pad=False)

    def check(self) -> Gate:
        """Scores of both levels against fp64; both choices against the scores that they were made by; slots."""
        prefix, index, written = self._prefix, self._index, self._written
        named = written.candidates[0].long()
        taken = self._lists.positions[0].long()
        assert self._lists.slots is not None
        if not (ascending(named, prefix.prefix_len) and ascending(taken, prefix.prefix_len)):
            return Gate(math.inf, {"positions_that_are_none": math.inf})
        gate = Gate(0.0, {})
        if self.always_scored or prefix.num_candidates < prefix.prefix_len:
            gate = first_gate(prefix, index, written.first, written.first_stride)
        share, worst, wrong = gate.error, 0.0, int((self._slots[taken] != self._lists.slots[0]).sum())
        for head in range(prefix.shape.num_kv_heads):
            blocks = written.first[head * written.first_stride :][: -(-prefix.prefix_len // index.block_size)]
            tokens = blocks.repeat_interleave(index.block_size)[: prefix.prefix_len]
            wrong += wrongly_chosen(tokens, named[head])
            scores = written.second[head * written.second_stride :][: prefix.num_candidates]
            if self.always_scored or prefix.budget < prefix.num_candidates:
                error = log_error(scores, prefix.listed(head, named[head]))
                share, worst = max(share, error / prefix.limit(head, named[head])), max(worst, error)
            places = torch.searchsorted(named[head], taken[head])
            missing = int((named[head, places.clamp_max(prefix.num_candidates - 1)] != taken[head]).sum())
            wrong += missing + (0 if missing else wrongly_chosen(scores, places))
        figures = {**gate.figures, "second_log_prob": worst, "wrong_tokens": float(wrong)}
        return Gate(math.inf if wrong else share, figures)


class JoinedTwoLevel(TwoLevel):
    """The same in one launch for each level. On a CPU in four each, with two programs for every KV head."""

    always_scored = False

    def _made(self) -> tuple[Any, Written]:
        prefix, index = self._prefix, self._index
        assert isinstance(index, BlockIndex)
        device, heads, batch = prefix.q.device, prefix.shape.num_kv_heads, prefix.q.shape[0]
        on_gpu = device.type == "cuda"
        how: dict[str, Any] = {"form": Form.JOINED if on_gpu else Form.SPLIT}
        how["num_programs"] = None if on_gpu else 2 * heads
        capability = torch.cuda.get_device_capability(device) if on_gpu else (9, 0)

        def stage(shape: ScoreShape, length: int, budget: int, **options: Any) -> AnchorSelection:
            config = default_config(shape, batch, capability)
            self.config[shape.source.name] = vars(config)
            return AnchorSelection(shape, batch, 1, length, budget, config, device, **how, **options)

        first = stage(index.shape, prefix.prefix_len, prefix.num_candidates, max_block_size=index.block_size)
        second = stage(prefix.tokens, prefix.num_candidates, prefix.budget, listed=True, max_block_size=1)
        num_blocks = -(-prefix.prefix_len // index.block_size)
        made = JoinedTwoLevelSelection(first, second, num_blocks)
        self._raw: tuple[Tensor | None, Tensor | None] = (None, None)
        rows = batch * prefix.shape.gqa
        self.config["raw_kept"] = keep_raw(rows)
        if keep_raw(rows):
            rooms = [torch.empty(1, heads, count, rows, device=device) for count in (num_blocks, prefix.num_candidates)]
            self._raw = (rooms[0].transpose(2, 3), rooms[1].transpose(2, 3))
        if prefix.num_candidates == prefix.prefix_len:
            self.nbytes -= index.nbytes  # no block is scored
        scores = (made.first_scores, made.first_stride, made.second_scores, made.second_stride)
        return made, Written(*scores, made.candidates.positions)

    def run(self) -> None:
        """Two launches."""
        q, sm_scale = self._prefix.q, self._prefix.sm_scale
        self._selection.run(q, self._lists, sm_scale, slot_table=self._slots, raw=self._raw, pad=False)


def ascending(positions: Tensor, prefix_len: int) -> bool:
    """Whether every row names positions of the prefix, each once and in order."""
    inside = bool(((positions >= 0) & (positions < prefix_len)).all())
    return inside and bool((positions.diff(dim=1) > 0).all())


def wrongly_chosen(scores: Tensor, places: Tensor) -> int:
    """How many of the chosen places [count] differ, by score, from the best ones; windows that are missing.

    Scores are compared as 16-bit keys tell them apart: by steps, rounded down.
    """
    length, count = scores.shape[0], places.shape[0]
    if count == length:
        return 0
    per_log = torch.tensor(_STEPS_PER_LOG, dtype=torch.float32, device=scores.device)
    steps = ((scores.clamp(-44.0, 0.0) + 44.0) * per_log).floor().clamp_max(65533.0)
    steps = torch.where(scores > -torch.inf, steps, -1.0)
    place = torch.arange(length, device=scores.device)
    free = (place >= NUM_SINK) & (place < length - NUM_RECENT)
    taken = torch.zeros_like(free)
    taken[places] = True
    best = steps[free].sort(descending=True).values[: count - NUM_SINK - NUM_RECENT]
    got = steps[free & taken].sort(descending=True).values
    missing = int((~taken & ~free).sum())
    return missing + (int((got != best).sum()) if got.shape == best.shape else length)


def _prefix(recipe: str, *of: Any) -> Prefix:
    return Prefix(*of, RECIPES[recipe])


def _csa(*of: Any) -> FirstLevelAlone:
    prefix = _prefix("csa", *of)
    return FirstLevelAlone(prefix, CsaIndex(prefix))


def _two_level_csa(*of: Any) -> TwoLevel:
    prefix = _prefix("csa", *of)
    return TwoLevel(prefix, CsaIndex(prefix))


def _two_level_blocks(*of: Any) -> TwoLevel:
    prefix = _prefix("blocks", *of)
    return TwoLevel(prefix, BlockIndex(prefix))


def _two_level_joined(*of: Any) -> JoinedTwoLevel:
    prefix = _prefix("blocks", *of)
    return JoinedTwoLevel(prefix, BlockIndex(prefix))


TWO_LEVEL = {
    "csa/ours": _csa,
    "anchor/two_level_csa": _two_level_csa,
    "anchor/two_level_blocks": _two_level_blocks,
    "anchor/two_level_joined": _two_level_joined,
}
