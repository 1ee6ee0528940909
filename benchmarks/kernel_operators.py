"""What `kernel_bench.py operators` measures: an anchor layer's selection and attention, as a decode graph holds them.

A cell is a context and a batch, over one `kernel_problem.Problem`. Indexes are built of the keys that are attended, and
the slots that a selection lists are the pool's. The gate compares lists with the reference's ranking, then the
attention output with an fp64 oracle of the listed tokens and the suffixes.

One graph holds a step's layers, each with an index of its own, and with KV of its own as far as `POOL_BYTES` reach.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from kernel_problem import Gate, Problem, Sizes, make_problem, slot_bytes
from kernel_selection import AHEAD, SPECS, Ours, Prefixes, build_arrays
from torch import Tensor

from prefix_kernels.grouped_attention import AttentionShape, GroupedAttention, Segment, has_specialized, passes_for
from prefix_kernels.types import PagedKV
from sglang_ext.methods.base import Arrays, IndexSpec
from sglang_ext.methods.combined import part_arrays
from sglang_ext.methods.two_level import TwoLevelSpec

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

    def __init__(self, prefixes: Prefixes, problem: Problem, *, ahead: bool, names: bool) -> None:
        super().__init__(prefixes, len(problem.layers), ahead=ahead)
        self._problem, self._names = problem, names
        self._run_one = self._op.run_behind if ahead else self._op.run
        shape, sizes, device = problem.shape, problem.sizes, problem.q.device
        suffix_begin = len(self._slots)
        self._slots = torch.cat([self._slots, problem.suffix_slots.flatten()])
        specialized = has_specialized(device, shape.num_kv_heads)
        passes = passes_for(shape, sizes.batch, specialized=specialized, short=True)
        # On a CPU two thread blocks per KV head, so that the smoke run splits and merges, too.
        num_programs = None if device.type == "cuda" else 2 * shape.num_kv_heads
        self._attention = GroupedAttention(shape, sizes.batch, passes, device, num_programs=num_programs)
        listed = [
            Segment(rows, group.count, group.list_begin, group.head_stride, number)
            for number, (rows, group) in enumerate(zip(prefixes.rows, self._groups, strict=True))
        ]
        suffixes = [Segment((row,), sizes.suffix, suffix_begin + row * sizes.suffix) for row in range(sizes.batch)]
        self._attention.plan(listed, suffixes)
        self._out = torch.empty(sizes.batch, shape.num_qo_heads, shape.v_head_dim, dtype=shape.dtype, device=device)
        self._lse = torch.empty(sizes.batch, shape.num_qo_heads, device=device)
        self.nbytes = self._bytes(ahead, names)
        if ahead:
            self._look_ahead()

    def _bytes(self, ahead: bool, names: bool) -> int:
        """Of the index, and of listed and suffix KV, that a layer must read, each once."""
        own, spec = self._prefixes, self._prefixes.spec
        index = own.nbytes
        if isinstance(spec, TwoLevelSpec):
            first, second = (
                sum(array.nbytes for one in own.arrays for array in part_arrays(one, part).values())
                for part in ("first", "second")
            )
            named = spec.first_level(self._groups[0])
            candidates = spec.tokens_of(named, own.prefix_len)
            index = second * candidates // own.prefix_len + (0 if ahead and not names else first)
        return index + self._attended(self._found(self._lists.positions)).kv_bytes("sparse")

    def _attended(self, positions: list[Tensor]) -> Problem:
        """The problem whose selection these are."""
        return dataclasses.replace(self._problem, positions=torch.stack(positions), _oracles={})

    def poison(self) -> None:
        """Lists, and NaN where results are expected."""
        super().poison()
        for result in (self._out, self._lse):
            result.fill_(torch.nan)

    def run(self) -> None:
        for layer, kv in enumerate(self._problem.layers):
            self._select(self._run_one, layer)
            self._attend(kv)
        if self._names:
            self._look_ahead()

    def _look_ahead(self) -> None:
        own = self._prefixes
        self._op.look_ahead(own.batch, [own.q] * self.layers, own.args.sm_scale)

    def _attend(self, kv: PagedKV) -> None:
        lists, problem = self._lists, self._problem
        self._attention.run(
            problem.q,
            kv,
            self._slots,
            problem.sm_scale,
            self._out,
            self._lse,
            counts=lists.counts,
            head_slots=lists.slots,
        )

    def check(self) -> Gate:
        """Lists and slots, then what the last layer attended."""
        lists = super().check()
        if not lists.green:
            return lists
        attended = self._attended(self._found(self._lists.positions)).gate(self._out, self._lse, "sparse")
        return Gate(max(lists.error, attended.error), {**lists.figures, **attended.figures})


class Cell:
    """A problem, and what is measured over it; indexes are built when they are first asked for.

    Args:
        shape: of a layer.
        sizes: of the batch.
        layers: of a step.
        device: where everything lies.
        seed: of everything.
    """

    def __init__(self, shape: AttentionShape, sizes: Sizes, layers: int, device: torch.device, seed: int) -> None:
        kept = layers if device.type != "cuda" else min(layers, max(2, POOL_BYTES // pool_bytes(shape, sizes)))
        problem = make_problem(shape, sizes, 1 / sizes.context, device, seed, kept)
        pools = tuple(problem.layers[-1 - number % kept] for number in reversed(range(layers)))
        self.problem = dataclasses.replace(problem, layers=pools)
        self._arrays: dict[str, list[Arrays]] = {}

    def _arrays_of(self, spec: IndexSpec) -> list[Arrays]:
        """An index of each prefix, of the last layer's keys."""
        shape, tables, keys = self.problem.shape, self.problem.prefix_slots, self.problem.kv.k_cache
        gen = torch.Generator(keys.device).manual_seed(0)
        queries = torch.randn(shape.num_kv_heads, 256, shape.head_dim, generator=gen, device=keys.device)
        name = str(spec.to_dict())
        if name not in self._arrays:
            self._arrays[name] = [build_arrays(spec, keys[own.long()], queries.to(shape.dtype)) for own in tables]
        return self._arrays[name]

    def operator(self, name: str, budget: int) -> Operator:
        """One of `OPERATORS`.

        Args:
            name: of it.
            budget: tokens of a group.

        Raises:
            NoRoomError: a server attends such a batch exactly.
        """
        spec, ahead, names = OPERATORS[name]
        own = self.problem
        arrays = self._arrays_of(spec)
        prefixes = Prefixes(spec, own.shape, own.q, arrays, own.prefix_slots, min(budget, own.sizes.context))
        return Operator(prefixes, own, ahead=ahead, names=names)


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
