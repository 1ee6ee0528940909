"""What `kernel_bench.py` measures at one context and batch, its operators among it.

An operator is an anchor layer's selection and attention, as a decode graph holds them. Indexes are built of the keys
that are attended, and the slots that a selection lists are the pool's. The gate compares lists with the reference's
ranking, then the attention output with an fp64 oracle of the listed tokens and the suffixes.

One graph holds a step's layers, each with an index of its own, and with KV of its own as far as `POOL_BYTES` reach.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from kernel_cases import ATTENTION, grouped_attention, suffixes
from kernel_problem import Gate, Problem, Sizes, make_problem, slot_bytes
from kernel_rivals import RIVALS
from kernel_selection import AHEAD, SPECS, Ours, Prefixes, budget_of, build_arrays
from torch import Tensor

from prefix_kernels.grouped_attention import AttentionShape, Segment, has_specialized, passes_for
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

    def __init__(self, prefixes: Prefixes, problem: Problem, ahead: bool, names: bool) -> None:
        super().__init__(prefixes, len(problem.layers), ahead=ahead)
        self._problem, self._names = problem, names
        self._run_one = self._op.run_behind if ahead else self._op.run
        shape = problem.shape
        suffix_begin = len(self._slots)
        self._slots = torch.cat([self._slots, problem.suffix_slots.flatten()])
        specialized = has_specialized(problem.q.device, shape.num_kv_heads)
        passes = passes_for(shape, problem.sizes.batch, specialized=specialized, short=True)
        self._attention, self._out, self._lse = grouped_attention(problem, passes)
        listed = [
            Segment(rows, group.count, group.list_begin, group.head_stride, number)
            for number, (rows, group) in enumerate(zip(prefixes.rows, self._groups, strict=True))
        ]
        self._attention.plan(listed, suffixes(problem, suffix_begin))
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
        problem, lists = self._problem, self._lists
        of_lists: dict[str, Any] = {"counts": lists.counts, "head_slots": lists.slots}
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
        attended = self._attended(self._found(self._lists.positions)).gate(self._out, self._lse, "sparse")
        return Gate(max(lists.error, attended.error), {**lists.figures, **attended.figures})


class Cell:
    """A problem, and what is measured over it; indexes are built when they are first asked for.

    Args:
        shape: of a layer.
        sizes: of the batch.
        keep: of a prefix, for a group of one; where no budget is given.
        layers: of a step.
        device: where everything lies.
        seed: of everything.
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
            part: what is measured.
            name: of the case.
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
