"""What `kernel_bench.py` measures: an anchor layer's selection, from queries to lists, by every method; and operators.

Indexes of one layer, as the project's builders make them of a problem's keys, in the recipes of `SPECS`; with
`--groups 16x1` of 16 prefixes. A case is the method's operation as decode graphs hold it.

Lists are compared with the reference's ranking: listed tokens that rank clearly below the last one that it chooses are
wrong, and unlisted ones that rank clearly above. Each of two levels is compared by itself, the second one among the
candidates that the kernel named: where one block at the edge is another one, by rounding, all candidates between have
other places, and sums of the second level, of a sample by places, are of other tokens.

An operator is an anchor layer's selection and attention, as a decode graph holds them. The slots that a selection lists
are the pool's. The gate compares the attention output, too, with an fp64 oracle of the listed tokens and the suffixes.
One graph holds a step's layers, each with an index of its own, and with KV of its own as far as `POOL_BYTES` reach.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from kernel_cases import ATTENTION, RIVALS, grouped_attention, suffixes
from kernel_problem import Gate, Problem, Sizes, make_problem, slot_bytes
from torch import Tensor

from prefix_kernels.budget import budget_for_group
from prefix_kernels.grouped_attention import AttentionShape, Segment, has_specialized, passes_for
from prefix_kernels.top_k_selection import NUM_KEYS
from prefix_kernels.types import Selection, SelectionGroup, list_stride, new_lists, pack_lists
from sglang_ext.config import config_from_dict
from sglang_ext.decode.select_op import ListSizes, OpContext, Selecting, graph_op
from sglang_ext.methods import SelectArgs, make_builder, make_selector
from sglang_ext.methods.ab_sparse import BLOCK_SIZES, ABSparseSpec
from sglang_ext.methods.base import Arrays, IndexSpec, LayerProfile, summed_every
from sglang_ext.methods.combined import part_arrays
from sglang_ext.methods.csattention import CSAttentionSpec
from sglang_ext.methods.token_index import TokenIndexSpec
from sglang_ext.methods.two_level import TwoLevelSpec
from sglang_ext.methods.union import UnionSpec

NUM_SINK, NUM_RECENT = 16, 64
WINDOWS = {"num_sink": NUM_SINK, "num_recent": NUM_RECENT}


class Limit(NamedTuple):
    """What is allowed.

    Attributes:
        keys: steps of 0.0215 of a natural log, that a chosen token may rank below the last one of the reference, and
            one that is not chosen above.
        share: of all lists, that may be farther off.
    """

    keys: int
    share: float


OF_TOKENS = Limit(5, 1e-3)
"""Hopper's kernel rounds queries to INT8."""
OF_BLOCKS = Limit(2, 1e-5)
"""Queries are rounded to fp16, which moves a block's score, and that of the last one, by less than a key: no block is
off (one of 16 tokens is more than that share of 8 heads' lists)."""
OF_CANDIDATES = Limit(5, 1e-5)
"""Hopper's kernel rounds queries to INT8, which moves no block by more."""
OF_UNION = Limit(5, 1e-2)
"""Ranks are depths, which all tokens of a key share: beside a key's edge they are a whole key's tokens apart."""

_BLOCKS = ABSparseSpec(sizes="profile")
#: What is built. Heads of `ab_sparse` have blocks of 16, 32 and 64 in turns.
SPECS: dict[str, IndexSpec] = {
    "token_index": TokenIndexSpec(),
    "ab_sparse": _BLOCKS,
    "ab_sparse_minmax64": ABSparseSpec(block_size=64, representation="minmax"),
    "csattention": CSAttentionSpec(),
    "two_level": TwoLevelSpec(first=_BLOCKS),
    "union": UnionSpec(first=CSAttentionSpec(), second=_BLOCKS),
}
#: What names candidates a step ahead: a quarter of the prefix by blocks, and four budgets or a sixteenth by tokens.
AHEAD: dict[str, TwoLevelSpec] = {
    "two_level": TwoLevelSpec(first=_BLOCKS),
    "two_level_tokens": TwoLevelSpec(first=TokenIndexSpec(), candidate_ratio=0.0625),
}


class NoRoomError(ValueError):
    """What a server attends exactly (`no_room`)."""


@dataclass(frozen=True, kw_only=True)
class _RankedArgs(SelectArgs):
    """Keeps by what a reference ranked."""

    ranked: list[Tensor]

    def top_k(self, scores: Tensor) -> Selection:
        self.ranked[:] = [scores]
        return super().top_k(scores)


class Prefixes:
    """Queries [batch, num_qo_heads, head_dim], and indexes of one layer.

    Args:
        arrays: of each prefix; equally many requests, that follow each other, are behind each.
        tables: int32 [prefixes, prefix_len], slots.
        budget: of a group.
    """

    def __init__(
        self, spec: IndexSpec, shape: AttentionShape, q: Tensor, arrays: list[Arrays], tables: Tensor, budget: int
    ) -> None:
        self.spec, self.shape, self.q, self.arrays, self.tables, self.budget = spec, shape, q, arrays, tables, budget
        self.batch, self.prefix_len = len(q), tables.shape[1]
        size = self.batch // len(arrays)
        self.rows = [tuple(range(first, first + size)) for first in range(0, self.batch, size)]
        self.config = config_from_dict({"method": spec.method, "top_k": budget})
        self.nbytes = sum(array.nbytes for one in arrays for array in one.values())
        self.selector = make_selector(spec, summed_every(self.config))
        self.ranked: list[Tensor] = []
        sizes = {"prefix_len": self.prefix_len, "budget": budget, **WINDOWS}
        self.args = _RankedArgs(**sizes, sm_scale=shape.head_dim**-0.5, ranked=self.ranked)

    @property
    def told(self) -> dict[str, Any]:
        """What a row says of it."""
        of_kv = self.nbytes / (self.prefix_len * len(self.rows) * slot_bytes(self.shape))
        return {"spec": self.spec.to_dict(), "budget": self.budget, "of_kv_bytes": round(of_kv, 4)}

    def gate(self, lists: list[Tensor], candidates: Sequence[Tensor] = ()) -> Gate:
        """How far lists are from the reference's, group by group.

        Args:
            lists: positions [num_kv_heads, budget].
            candidates: positions [num_kv_heads, n] that the first of two levels named, of which lists are chosen; none:
                as the reference names them. Lists of wrong ones are not looked at.
        """
        if not candidates:
            return self._compared("wrong_share", lists, _limit_of(self.spec), "select")
        named = self._compared("wrong_candidates", candidates, OF_CANDIDATES, "candidates")
        if not named.green:
            return named
        masks = [of.new_zeros(len(of), self.prefix_len, dtype=torch.bool) for of in candidates]
        among = [mask.scatter_(1, of.long(), True) for mask, of in zip(masks, candidates, strict=True)]
        chosen = self._compared("wrong_share", lists, _limit_of(self.spec), "select_among", among)
        return Gate(max(named.error, chosen.error), {**named.figures, **chosen.figures})

    def _compared(
        self, figure: str, lists: Sequence[Tensor], limit: Limit, step: str, *among: Sequence[Tensor]
    ) -> Gate:
        ranks = [partial(self._rank, number, step, *(of[number] for of in among)) for number in range(len(lists))]
        wrong = max(self._wrong(of, limit, rank) for of, rank in zip(lists, ranks, strict=True))
        return Gate(wrong / limit.share, {figure: wrong})

    def _rank(self, number: int, step: str, *among: Tensor) -> Tensor:
        """[num_kv_heads, prefix_len]: what a step of the reference's selector ranks tokens by."""
        getattr(self.selector, step)(self.arrays[number], self.q[list(self.rows[number])], self.args, *among)
        (ranked,) = self.ranked
        # Blocks' tokens are ranked together, see `TwoLevelSpec.entry_tokens`.
        return ranked.repeat_interleave(-(-self.prefix_len // ranked.shape[1]), dim=1)[:, : self.prefix_len]

    def _wrong(self, positions: Tensor, limit: Limit, rank: Callable[[], Tensor]) -> float:
        """Share of the lists that ranks too low, or that tokens which rank too high to be left out would be."""
        ascending = bool((positions.diff(dim=1) > 0).all())
        if not ascending or not bool(((positions >= 0) & (positions < self.prefix_len)).all()):
            return math.inf
        if positions.shape[1] == self.prefix_len:
            return 0.0
        ranked = rank()
        token = torch.arange(self.prefix_len, device=ranked.device)
        window = (token < NUM_SINK) | (token >= self.prefix_len - NUM_RECENT)
        keys = ranked.floor().masked_fill(window, NUM_KEYS)
        last = keys.topk(positions.shape[1], dim=1).values[:, -1:]
        got = keys.gather(1, positions.long())
        if bool(((got == NUM_KEYS).sum(dim=1) < NUM_SINK + NUM_RECENT).any()):
            return math.inf
        lower, higher = (got < last - limit.keys).sum(), (got > last + limit.keys).sum()
        lost = (keys > last + limit.keys).sum() - higher
        return float(lower.maximum(lost)) / positions.numel()


def _limit_of(spec: IndexSpec) -> Limit:
    """Of lists that a method ranks; of two levels, those of the second."""
    if isinstance(spec, TwoLevelSpec):
        return _limit_of(spec.second)
    return OF_UNION if isinstance(spec, UnionSpec) else OF_BLOCKS if isinstance(spec, ABSparseSpec) else OF_TOKENS


def build_arrays(spec: IndexSpec, keys: Tensor, queries: Tensor) -> Arrays:
    """An index of one layer of keys [prefix_len, num_kv_heads, head_dim] and queries [num_kv_heads, n, head_dim]."""
    sizes = tuple(BLOCK_SIZES[head % len(BLOCK_SIZES)] for head in range(keys.shape[1]))
    return make_builder(spec, LayerProfile(block_sizes=sizes)).build_layer(keys, queries)


def budget_of(keep: float, sizes: Sizes) -> int:
    """Tokens of a group that keeps a share of the prefix, times the square root of its requests."""
    wanted = max(NUM_SINK + NUM_RECENT + 16, round(keep * sizes.context))
    return min(budget_for_group(wanted, sizes.rows), sizes.context)


class Ours:
    """The method's operation. On a CPU phase by phase, with two programs for every KV head.

    Args:
        prefixes: what is selected from.
        layers: that have an index.
        ahead: whether candidates are named for all of them at once.

    Raises:
        NoRoomError: a server would not select in such a step.
    """

    def __init__(self, prefixes: Prefixes, layers: int = 1, *, ahead: bool = False) -> None:
        self._prefixes, self.nbytes, self.config, self.layers = prefixes, prefixes.nbytes, prefixes.told, layers
        device, heads, length = prefixes.q.device, prefixes.shape.num_kv_heads, prefixes.prefix_len
        count = len(prefixes.rows)
        entries, room = count * heads * list_stride(prefixes.budget), count * (length + 4)
        sizes = ListSizes(count, entries, prefixes.batch, length, room, 1, tuple(range(layers)) if ahead else ())
        self._op: Any = graph_op(prefixes.spec, OpContext(prefixes.shape, prefixes.config, layers, sizes, device))
        if not self._op.fits([length] * count, [prefixes.budget] * count):
            raise NoRoomError(f"expected room for {count} prefixes of {length} tokens, got none: they attend exactly")
        indexes: list[Any] = [_Index(arrays, length, layers) for arrays in prefixes.arrays]
        for index in indexes:
            self._op.number_of(index)
        groups = [SelectionGroup(length, prefixes.budget, slot_start=n * length, **WINDOWS) for n in range(count)]
        self._groups = pack_lists(groups, heads)
        self._op.plan(Selecting(prefixes.batch, prefixes.rows, self._groups), indexes)
        self._indexes = indexes
        self._lists = new_lists(entries, (count, heads), device, with_slots=True)
        self._slots = prefixes.tables.flatten()

    def poison(self) -> None:
        """Lists."""
        self._lists.positions.fill_(-1)

    def run(self) -> None:
        """As planned."""
        self._select(self._op.run, 0)

    def _select(self, run: Callable[..., None], layer: int) -> None:
        own = self._prefixes
        run(own.batch, own.q, own.args.sm_scale, self._slots, layer, self._lists)

    def _found(self, arena: Tensor) -> list[Tensor]:
        """[num_kv_heads, budget] of each group, of positions or of slots."""
        return [group.lists_in(arena, self._prefixes.shape.num_kv_heads) for group in self._groups]

    def check(self) -> Gate:
        """Candidates, lists and slots."""
        positions, slots = self._found(self._lists.positions), self._found(self._lists.slots)
        named = self._op.candidates_of(self._groups) if isinstance(self._prefixes.spec, TwoLevelSpec) else ()
        gate = self._prefixes.gate(positions, named)
        tables = self._prefixes.tables
        same = all(torch.equal(own[of.long()], at) for own, of, at in zip(tables, positions, slots, strict=True))
        return gate if same or not gate.green else Gate(math.inf, gate.figures)


class _Index:
    """The arrays of an index; each layer has its own, with the values of the first."""

    def __init__(self, arrays: Arrays, prefix_len: int, layers: int) -> None:
        copies = [{name: array.clone() for name, array in arrays.items()} for _ in range(1, layers)]
        self.layers, self.prefix_len = [arrays, *copies], prefix_len


FLOOR_RATE = 3.0e12
"""Bytes a second that kernels read of an H100's memory."""
POOL_BYTES = 36 << 30
"""Of all layers' KV, at most, where it is more than that of two layers; further layers attend the first ones' again."""


class Operator(Ours):
    """Selection and attention, layer by layer; the time of one.

    Args:
        prefixes: what is selected from.
        problem: of the same queries and prefixes.
        ahead: candidates are those that the step before named (`select_ahead`).
        names: and those of the next step are named behind the last layer.
    """

    def __init__(self, prefixes: Prefixes, problem: Problem, ahead: bool, names: bool) -> None:
        super().__init__(prefixes, len(problem.layers), ahead=ahead)
        self._problem, self._names = problem, names
        self._run_one = self._op.run_behind if ahead else self._op.run
        shape = problem.shape
        suffix_begin = len(self._slots)
        self._slots = torch.cat([self._slots, problem.suffix_slots.flatten()])
        specialized = has_specialized(problem.q.device)
        passes = passes_for(shape, problem.sizes.batch, specialized=specialized, short=True)
        self._attention, self._out, self._lse = grouped_attention(problem, passes)
        listed = [
            Segment(rows, group.count, group.list_begin, group.head_stride, number)
            for number, (rows, group) in enumerate(zip(prefixes.rows, self._groups, strict=True))
        ]
        self._attention.plan(listed, suffixes(problem, suffix_begin))
        self.nbytes = self._index_bytes(names or not ahead) + self._attended().kv_bytes("sparse")
        if ahead:
            self._look_ahead()

    def _index_bytes(self, names: bool) -> int:
        """Of an index, that a layer must read, each once."""
        own, spec = self._prefixes, self._prefixes.spec
        if not isinstance(spec, TwoLevelSpec):
            return own.nbytes
        first, second = (
            sum(array.nbytes for one in own.arrays for array in part_arrays(one, part).values())
            for part in ("first", "second")
        )
        candidates = spec.tokens_of(spec.first_level(self._groups[0]), own.prefix_len)
        return second * candidates // own.prefix_len + (first if names else 0)

    def _attended(self) -> Problem:
        """The problem whose selection is what was found."""
        positions = torch.stack(self._found(self._lists.positions))
        return dataclasses.replace(self._problem, positions=positions, _oracles={})

    def poison(self) -> None:
        """Lists, and NaN where results are expected."""
        super().poison()
        self._out.fill_(torch.nan)
        self._lse.fill_(torch.nan)

    def run(self) -> None:
        problem, lists = self._problem, self._lists
        of_lists: dict[str, Any] = {"counts": lists.counts, "head_slots": lists.slots}
        of_lists["after_lists"] = self._op.ends_in_lists
        for layer, kv in enumerate(problem.layers):
            self._select(self._run_one, layer)
            self._attention.run(problem.q, kv, self._slots, problem.sm_scale, self._out, self._lse, **of_lists)
        if self._names:
            self._look_ahead()

    def _look_ahead(self) -> None:
        own = self._prefixes
        self._op.look_ahead(own.batch, [own.q] * self.layers, own.args.sm_scale)

    def check(self) -> Gate:
        """Lists and slots, then what the last layer attended."""
        lists = super().check()
        if not lists.green:
            return lists
        attended = self._attended().gate(self._out, self._lse, "sparse")
        return Gate(max(lists.error, attended.error), {**lists.figures, **attended.figures})


class Cell:
    """A problem, and what is measured over it; indexes are built when they are first asked for.

    Args:
        keep: of a prefix, for a group of one; where no budget is given.
        layers: of a step.
    """

    def __init__(
        self, shape: AttentionShape, sizes: Sizes, keep: float, layers: int, device: torch.device, seed: int
    ) -> None:
        kept = layers if device.type != "cuda" else min(layers, max(2, POOL_BYTES // pool_bytes(shape, sizes)))
        problem = make_problem(shape, sizes, keep, device, seed, kept)
        pools = tuple(problem.layers[-1 - number % kept] for number in reversed(range(layers)))
        self.problem = dataclasses.replace(problem, layers=pools)
        self._keep = keep
        self._arrays: dict[str, list[Arrays]] = {}

    def case(self, part: str, name: str, budget: int | None = None) -> Any:
        """One of `PARTS`, or a rival.

        Args:
            budget: tokens of a group; None: by the share that is kept.

        Raises:
            NoRoomError: a server attends such a batch exactly.
        """
        own = self.problem
        if name in RIVALS or part == "attention":
            return (RIVALS | ATTENTION)[name](own)
        spec, *how = OPERATORS[name] if part == "operators" else (SPECS[name],)
        if budget is None:
            budget = budget_of(self._keep, own.sizes)
        arrays = self._arrays_of(spec)
        prefixes = Prefixes(spec, own.shape, own.q, arrays, own.prefix_slots, min(budget, own.sizes.context))
        return Operator(prefixes, own, *how) if how else Ours(prefixes)

    def _arrays_of(self, spec: IndexSpec) -> list[Arrays]:
        """An index of each prefix, of the last layer's keys."""
        shape, tables, keys = self.problem.shape, self.problem.prefix_slots, self.problem.kv.k_cache
        gen = torch.Generator(keys.device).manual_seed(0)
        queries = torch.randn(shape.num_kv_heads, 256, shape.head_dim, generator=gen, device=keys.device)
        name = str(spec.to_dict())
        if name not in self._arrays:
            self._arrays[name] = [build_arrays(spec, keys[own.long()], queries.to(shape.dtype)) for own in tables]
        return self._arrays[name]


def pool_bytes(shape: AttentionShape, sizes: Sizes) -> int:
    """Of one layer's pool, roughly."""
    tokens = sizes.groups * sizes.context + sizes.batch * (sizes.suffix + sizes.page)
    return max(math.ceil(1.25 * tokens) * slot_bytes(shape), 1 << 29)


#: name -> method, and `ahead` and `names` of `Operator`. `_ahead` are all launches of a step with `select_ahead`,
#: `_behind` the same less those that name the next step's candidates.
OPERATORS: dict[str, tuple[IndexSpec, bool, bool]] = {
    **{name: (SPECS[name], False, False) for name in ("token_index", "ab_sparse", "two_level")},
    **{f"{name}_ahead": (spec, True, True) for name, spec in AHEAD.items()},
    **{f"{name}_behind": (spec, True, False) for name, spec in AHEAD.items()},
}
#: By part, the cases that may be asked for.
PARTS: dict[str, tuple[str, ...]] = {
    "attention": tuple(ATTENTION),
    "selection": tuple(SPECS),
    "operators": tuple(OPERATORS),
}
