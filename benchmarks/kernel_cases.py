"""What `kernels.py` measures: the cases of decode attention, and the registry of selection pipelines.

To add a selection pipeline, put a builder into `SELECTION` under the name `stage/form`:

    SELECTION["anchor/mine"] = lambda shape, batch, prefix_len, device: Mine(...)

Its object has `run()` (what is timed and captured), `check()` (a `Gate` of what the last run wrote) and, if it likes,
`poison()` (fill every output with NaN or -1 before a run), `nbytes` (that must be read), `config` (for the row) and
`eager_too` (True: timed without a CUDA graph where none can hold it).
Stages: `estimation`, `top_k` (AB-Sparse's kernels 1 and 2), `token_estimation` (the INT4 token index), `csa` (scores
from CSAttention's lists, pooled) and `anchor` (from queries to lists). A stage's forms are compared with `loops` (per
KV head, as in the paper) and `vector` (torch).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from kernel_naive import NAIVE
from kernel_pipelines import OURS
from kernel_problem import Gate, Problem
from kernel_two_level import TWO_LEVEL
from torch import Tensor

from prefix_kernels.grouped_attention import (
    AttentionConfig,
    AttentionShape,
    GroupedAttention,
    Segment,
)
from prefix_kernels.grouped_attention.config import programs_at_once
from prefix_kernels.grouped_attention.tuned import passes_of
from prefix_kernels.types import PagedKV


class Pipeline(Protocol):
    """See the module."""

    def run(self) -> None:
        """Launch everything on the current stream, without a wait."""

    def check(self) -> Gate:
        """What the last run wrote, against an oracle."""


#: Launch parameters by shape and requests of a tile: `TunedConfigs`, or a sweep's candidate.
Launching = Callable[[AttentionShape, int], AttentionConfig]

SELECTION: dict[str, Callable[[AttentionShape, int, int, torch.device], Pipeline]] = {**NAIVE, **OURS, **TWO_LEVEL}


@dataclass(eq=False)
class Case:
    """One measured form of attention over a problem.

    Attributes:
        run: launches it, for each layer of the problem.
        out: [batch, num_qo_heads, v_head_dim], written by `run`, or what `run` put into `results`.
        lse: [batch, num_qo_heads] or None.
        reads: `all`, `sparse` or `suffix`.
        config: for the row.
        eager_too: whether it may be timed without a CUDA graph where none can hold it.
        kept: what must live as long as the graph.
    """

    run: Callable[[], Any]
    out: Tensor
    lse: Tensor | None
    reads: str
    config: dict[str, Any] = field(default_factory=dict)
    eager_too: bool = False
    kept: tuple[Any, ...] = ()

    def poison(self) -> None:
        """NaN where a result is expected."""
        self.out.fill_(torch.nan)
        if self.lse is not None:
            self.lse.fill_(torch.nan)


def each_layer(problem: Problem, attend: Callable[[PagedKV], Any]) -> Callable[[], None]:
    """What attends all layers of a problem, one after the other."""

    def run() -> None:
        for kv in problem.layers:
            attend(kv)

    return run


def exact(problem: Problem, configs: Launching) -> Case:
    """Whole prefixes, suffixes and their merge: one plan of two passes."""
    sizes = problem.sizes
    slots = torch.cat([problem.prefix_slots.flatten(), problem.suffix_slots.flatten()])
    groups = [
        Segment(problem.members(group), sizes.context, list_begin=group * sizes.context)
        for group in range(sizes.groups)
    ]
    return _grouped(problem, configs, slots, groups, sizes.groups * sizes.context, "all")


def sparse(problem: Problem, configs: Launching) -> Case:
    """Selected positions per KV head, as lists of slots with counts on the device, and suffixes."""
    lists = problem.selected_slots
    num_groups, num_heads, count = lists.shape
    slots = torch.cat([lists.flatten(), problem.suffix_slots.flatten()])
    groups = [
        Segment(problem.members(group), count, list_begin=group * num_heads * count, head_stride=count, list_id=group)
        for group in range(num_groups)
    ]
    counts = torch.full((num_groups, num_heads), count, dtype=torch.int32, device=slots.device)
    return _grouped(problem, configs, slots, groups, lists.numel(), "sparse", counts)


def suffix(problem: Problem, configs: Launching) -> Case:
    """Private suffixes and the merge kernel, apart."""
    slots = problem.suffix_slots.flatten()
    return _alone(problem, configs(problem.shape, 1), slots, _suffixes(problem, 0), "suffix")


def plain(problem: Problem, configs: Launching) -> Case:
    """The suffix pass from position 0: every request reads the whole of its own sequence."""
    context = problem.sizes.context
    if problem.sizes.rows != 1 or problem.sizes.suffix:
        raise ValueError(f"expected one prefix a request and no suffix, got {problem.sizes}")
    segments = [Segment((row,), context, list_begin=row * context) for row in range(problem.sizes.batch)]
    return _alone(problem, configs(problem.shape, 1), problem.prefix_slots.flatten(), segments, "all")


def loops(problem: Problem, reads: str) -> Case:
    """Naive: per request and KV head, gather K and V, then torch's attention."""
    sizes, shape = problem.sizes, problem.shape
    lists = _lists(problem, reads)
    suffixes = problem.suffix_slots.long()
    out = torch.empty(sizes.batch, shape.num_qo_heads, shape.v_head_dim, dtype=shape.dtype, device=problem.q.device)

    def attend(kv: PagedKV) -> None:
        for row in range(sizes.batch):
            for head in range(shape.num_kv_heads):
                slots = torch.cat([lists[row // sizes.rows, head], suffixes[row]])
                part = slice(head * shape.gqa, (head + 1) * shape.gqa)
                k, v = kv.k_cache[slots, head], kv.v_cache[slots, head]
                out[row, part] = torch.nn.functional.scaled_dot_product_attention(
                    problem.q[row, part][None, None], k[None, None], v[None, None], scale=problem.sm_scale
                )[0, 0]

    return Case(each_layer(problem, attend), out, None, reads, eager_too=True)


def vector(problem: Problem, reads: str) -> Case:
    """Naive: per group, gather K and V of all KV heads once, then matrix products and a softmax of torch."""
    sizes, shape = problem.sizes, problem.shape
    lists, suffixes = _lists(problem, reads), problem.suffix_slots.long()
    heads = torch.arange(shape.num_kv_heads, device=lists.device)[:, None]
    out = torch.empty(sizes.batch, shape.num_qo_heads, shape.v_head_dim, dtype=shape.dtype, device=problem.q.device)
    tiles = problem.q.view(sizes.groups, sizes.rows, shape.num_kv_heads, shape.gqa, shape.head_dim)
    results = out.view(sizes.groups, sizes.rows, shape.num_kv_heads, shape.gqa, shape.v_head_dim)

    def attend(kv: PagedKV) -> None:
        for group in range(sizes.groups):
            own = suffixes[group * sizes.rows : (group + 1) * sizes.rows]
            tile = tiles[group].transpose(0, 1).flatten(1, 2)
            k, v = kv.k_cache[lists[group], heads], kv.v_cache[lists[group], heads]
            far = _product(tile, k.transpose(1, 2))
            near = torch.einsum("rhgd,rshd->hrgs", tiles[group].float(), kv.k_cache[own].float()).flatten(1, 2)
            weight = (torch.cat([far, near], dim=2) * problem.sm_scale).softmax(dim=2)
            split = far.shape[2]
            near_weight = weight[..., split:].unflatten(1, (sizes.rows, shape.gqa))
            state = _product(weight[..., :split].to(shape.dtype), v).unflatten(1, (sizes.rows, shape.gqa))
            state = state + torch.einsum("hrgs,rshd->hrgd", near_weight, kv.v_cache[own].float())
            results[group] = state.transpose(0, 1)

    return Case(each_layer(problem, attend), out, None, reads, eager_too=True)


#: name -> builder, in the order in which they are measured. Rivals come first (see `kernel_rivals`).
ATTENTION: dict[str, Callable[[Problem, Launching], Case]] = {
    "exact": exact,
    "sparse": sparse,
    "suffix": suffix,
    "plain": plain,
    "exact_loops": lambda problem, configs: loops(problem, "all"),
    "exact_vector": lambda problem, configs: vector(problem, "all"),
    "sparse_loops": lambda problem, configs: loops(problem, "sparse"),
    "sparse_vector": lambda problem, configs: vector(problem, "sparse"),
}


def _product(left: Tensor, right: Tensor) -> Tensor:
    """fp32 matrix products of whatever dtype: scores rounded to bf16 would be wrong by percents."""
    if left.dtype is torch.float32 or left.device.type != "cuda":
        return left.float() @ right.float()
    return torch.bmm(left, right, out_dtype=torch.float32)


def _lists(problem: Problem, reads: str) -> Tensor:
    """int64 [groups, num_kv_heads, count] slots."""
    if reads == "sparse":
        return problem.selected_slots.long()
    return problem.prefix_slots.long()[:, None].expand(-1, problem.shape.num_kv_heads, -1)


def _suffixes(problem: Problem, begin: int) -> list[Segment]:
    length = problem.sizes.suffix
    return [Segment((row,), length, list_begin=begin + row * length) for row in range(problem.sizes.batch)]


def _grouped(
    problem: Problem,
    configs: Launching,
    slots: Tensor,
    groups: Sequence[Segment],
    suffix_begin: int,
    reads: str,
    counts: Tensor | None = None,
) -> Case:
    shape = problem.shape
    passes = passes_of(configs, shape, problem.sizes.rows)
    plan = (list(groups), _suffixes(problem, suffix_begin))
    if not problem.sizes.suffix:
        passes, plan = passes[:1], plan[:1]
    return _case(problem, passes, slots, plan, reads, counts)


def _alone(problem: Problem, config: AttentionConfig, slots: Tensor, segments: list[Segment], reads: str) -> Case:
    return _case(problem, [config], slots, (segments,), reads, None)


def _case(
    problem: Problem,
    passes: list[AttentionConfig],
    slots: Tensor,
    plan: Sequence[list[Segment]],
    reads: str,
    counts: Tensor | None,
) -> Case:
    shape, device = problem.shape, problem.q.device
    # On a CPU two thread blocks per KV head, so that the smoke run splits and merges, too.
    num_programs = None if device.type == "cuda" else 2 * shape.num_kv_heads
    attention = GroupedAttention(shape, problem.sizes.batch, passes, device, num_programs=num_programs)
    attention.plan(*plan)
    out = torch.empty(problem.sizes.batch, shape.num_qo_heads, shape.v_head_dim, dtype=shape.dtype, device=device)
    lse = torch.empty(problem.sizes.batch, shape.num_qo_heads, device=device)

    def attend(kv: PagedKV) -> None:
        attention.run(problem.q, kv, slots, problem.sm_scale, out, lse, counts=counts)

    config: Mapping[str, Any] = {
        "passes": [dataclasses.asdict(one) for one in passes],
        "programs": [programs_at_once(device, one) for one in passes],
        "workspace_bytes": attention.workspace_bytes,
    }
    return Case(each_layer(problem, attend), out, lse, reads, dict(config), kept=(attention, slots, counts))
