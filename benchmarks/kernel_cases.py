"""What `kernel_bench.py attention` measures: the cases of decode attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from kernel_problem import Gate, Problem
from torch import Tensor

from prefix_kernels.grouped_attention import (
    AttentionConfig,
    GroupedAttention,
    Segment,
    default_config,
    has_specialized,
    passes_for,
)
from prefix_kernels.launching import programs_at_once
from prefix_kernels.types import PagedKV


@dataclass(eq=False)
class Case:
    """One measured form of attention over a problem.

    Attributes:
        problem: what is attended.
        run: launches it, for each layer of the problem.
        out: [batch, num_qo_heads, v_head_dim], written by `run`, or what `run` put into `results`.
        lse: [batch, num_qo_heads] or None.
        reads: `all`, `sparse` or `suffix`.
        config: for the row.
        kept: what must live as long as the graph.
    """

    problem: Problem
    run: Callable[[], Any]
    out: Tensor
    lse: Tensor | None
    reads: str
    config: dict[str, Any] = field(default_factory=dict)
    kept: tuple[Any, ...] = ()

    @property
    def layers(self) -> int:
        """Of a run."""
        return len(self.problem.layers)

    @property
    def nbytes(self) -> int:
        """Of a layer, see `Problem.kv_bytes`."""
        return self.problem.kv_bytes(self.reads)

    def poison(self) -> None:
        """NaN where a result is expected."""
        self.out.fill_(torch.nan)
        if self.lse is not None:
            self.lse.fill_(torch.nan)

    def check(self) -> Gate:
        """The last layer's output."""
        return self.problem.gate(self.out, self.lse, self.reads)


def each_layer(problem: Problem, attend: Callable[[PagedKV], Any]) -> Callable[[], None]:
    """What attends all layers of a problem, one after the other."""

    def run() -> None:
        for kv in problem.layers:
            attend(kv)

    return run


def exact(problem: Problem) -> Case:
    """Whole prefixes, suffixes and their merge: one plan of two passes."""
    sizes = problem.sizes
    slots = torch.cat([problem.prefix_slots.flatten(), problem.suffix_slots.flatten()])
    groups = [
        Segment(problem.members(group), sizes.context, list_begin=group * sizes.context)
        for group in range(sizes.groups)
    ]
    return _grouped(problem, slots, groups, sizes.groups * sizes.context, "all")


def sparse(problem: Problem) -> Case:
    """Selected positions per KV head, as lists of slots with counts on the device, and suffixes."""
    lists = problem.selected_slots
    num_groups, num_heads, count = lists.shape
    slots = torch.cat([lists.flatten(), problem.suffix_slots.flatten()])
    groups = [
        Segment(problem.members(group), count, list_begin=group * num_heads * count, head_stride=count, list_id=group)
        for group in range(num_groups)
    ]
    counts = torch.full((num_groups, num_heads), count, dtype=torch.int32, device=slots.device)
    return _grouped(problem, slots, groups, lists.numel(), "sparse", counts)


def suffix(problem: Problem) -> Case:
    """Private suffixes and the merge kernel, apart."""
    slots = problem.suffix_slots.flatten()
    config = default_config(problem.shape, 1, specialized=has_specialized(slots.device))
    return _case(problem, [config], slots, (suffixes(problem, 0),), "suffix", None)


#: name -> builder, in the order in which they are measured. Rivals come first (see `kernel_rivals`).
ATTENTION: dict[str, Callable[[Problem], Case]] = {
    "exact": exact,
    "sparse": sparse,
    "suffix": suffix,
}


def suffixes(problem: Problem, begin: int) -> list[Segment]:
    """Each request's own list; they lie one behind the other."""
    length = problem.sizes.suffix
    return [Segment((row,), length, list_begin=begin + row * length) for row in range(problem.sizes.batch)]


def _grouped(
    problem: Problem,
    slots: Tensor,
    groups: Sequence[Segment],
    suffix_begin: int,
    reads: str,
    counts: Tensor | None = None,
) -> Case:
    shape = problem.shape
    passes = passes_for(shape, problem.sizes.rows, specialized=has_specialized(slots.device))
    plan = (list(groups), suffixes(problem, suffix_begin))
    if not problem.sizes.suffix:
        passes, plan = passes[:1], plan[:1]
    return _case(problem, passes, slots, plan, reads, counts)


def _case(
    problem: Problem,
    passes: list[AttentionConfig],
    slots: Tensor,
    plan: Sequence[list[Segment]],
    reads: str,
    counts: Tensor | None,
) -> Case:
    device = problem.q.device
    attention, out, lse = grouped_attention(problem, passes)
    attention.plan(*plan)

    def attend(kv: PagedKV) -> None:
        attention.run(problem.q, kv, slots, problem.sm_scale, out, lse, counts=counts)

    config: Mapping[str, Any] = {
        "passes": [dataclasses.asdict(one) for one in passes],
        "programs": [programs_at_once(device, one.programs_per_sm) for one in passes],
        "workspace_bytes": attention.workspace_bytes,
    }
    kept = (attention, slots, counts)
    return Case(problem, each_layer(problem, attend), out, lse, reads, dict(config), kept)


def grouped_attention(problem: Problem, passes: list[AttentionConfig]) -> tuple[GroupedAttention, Tensor, Tensor]:
    """Our kernel for a problem's batch, without a plan, and room for out and lse."""
    shape, batch, device = problem.shape, problem.sizes.batch, problem.q.device
    # On a CPU two thread blocks per KV head, so that the smoke run splits and merges, too.
    num_programs = None if device.type == "cuda" else 2 * shape.num_kv_heads
    attention = GroupedAttention(shape, batch, passes, device, num_programs=num_programs)
    out = torch.empty(batch, shape.num_qo_heads, shape.v_head_dim, dtype=shape.dtype, device=device)
    return attention, out, torch.empty(batch, shape.num_qo_heads, device=device)
