"""What `kernel_bench.py attention` measures: decode attention, ours, FlashInfer's and SGLang's, over the same pages."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kernel_problem import Gate, Problem
from torch import Tensor

from prefix_kernels.grouped_attention import (
    AttentionConfig,
    Segment,
    default_config,
    has_specialized,
    passes_for,
)
from prefix_kernels.grouped_attention.runner import GroupedAttention
from prefix_kernels.launching import programs_at_once
from prefix_kernels.types import PagedKV


@dataclass(eq=False)
class Case:
    """One measured form of attention over a problem.

    Attributes:
        problem: what is attended.
        attend: launches it for one layer; what it uses lives as long as the graph.
        out: [batch, num_qo_heads, v_head_dim], where `attend` leaves its output.
        lse: [batch, num_qo_heads] or None.
        reads: `all`, `sparse` or `suffix`.
        config: for the row.
    """

    problem: Problem
    attend: Callable[[PagedKV], Any]
    out: Tensor
    lse: Tensor | None
    reads: str
    config: dict[str, Any]

    @property
    def layers(self) -> int:
        """Of a run."""
        return len(self.problem.layers)

    @property
    def nbytes(self) -> int:
        """Of a layer, see `Problem.kv_bytes`."""
        return self.problem.kv_bytes(self.reads)

    def run(self) -> None:
        """All layers, one after the other."""
        for kv in self.problem.layers:
            self.attend(kv)

    def poison(self) -> None:
        """NaN where a result is expected."""
        self.out.fill_(torch.nan)
        if self.lse is not None:
            self.lse.fill_(torch.nan)

    def check(self) -> Gate:
        """The last layer's output."""
        return self.problem.gate(self.out, self.lse, self.reads)


def exact(problem: Problem) -> Case:
    """Whole prefixes, suffixes and their merge: one plan of two passes."""
    length = problem.sizes.context
    groups = [
        Segment(problem.members(group), length, list_begin=group * length) for group in range(problem.sizes.groups)
    ]
    return _case(problem, "all", problem.prefix_slots, groups)


def sparse(problem: Problem) -> Case:
    """Selected positions per KV head, as lists of slots with counts on the device, and suffixes."""
    lists = problem.selected_slots
    num_groups, num_heads, count = lists.shape
    groups = [
        Segment(problem.members(group), count, list_begin=group * num_heads * count, head_stride=count, list_id=group)
        for group in range(num_groups)
    ]
    counts = torch.full((num_groups, num_heads), count, dtype=torch.int32, device=lists.device)
    return _case(problem, "sparse", lists, groups, counts)


def suffix(problem: Problem) -> Case:
    """Private suffixes and the merge kernel, apart."""
    return _case(problem, "suffix", problem.prefix_slots[:0], [])


#: name -> builder, in the order in which they are measured. Rivals come first.
ATTENTION: dict[str, Callable[[Problem], Case]] = {
    "exact": exact,
    "sparse": sparse,
    "suffix": suffix,
}


def suffixes(problem: Problem, begin: int) -> list[Segment]:
    """Each request's own list; they lie one behind the other."""
    length = problem.sizes.suffix
    return [Segment((row,), length, list_begin=begin + row * length) for row in range(problem.sizes.batch)]


def _case(problem: Problem, reads: str, listed: Tensor, groups: list[Segment], counts: Tensor | None = None) -> Case:
    """Groups attend what is listed, in a pass of their own; requests their suffixes, where there are."""
    shape, sizes, device = problem.shape, problem.sizes, problem.q.device
    slots = torch.cat([listed.flatten(), problem.suffix_slots.flatten()])
    plan = [groups] if groups else []
    plan += [suffixes(problem, listed.numel())] if sizes.suffix else []
    specialized = has_specialized(device)
    if groups:
        passes = passes_for(shape, sizes.rows, specialized=specialized)[: len(plan)]
    else:
        passes = [default_config(shape, 1, specialized=specialized)]
    attention, out, lse = grouped_attention(problem, passes)
    attention.plan(*plan)

    def attend(kv: PagedKV) -> None:
        attention.run(problem.q, kv, slots, problem.sm_scale, out, lse, counts=counts)

    config = {
        "passes": [dataclasses.asdict(one) for one in passes],
        "programs": [programs_at_once(device, one.programs_per_sm) for one in passes],
        "workspace_bytes": attention.workspace_bytes,
    }
    return Case(problem, attend, out, lse, reads, config)


def grouped_attention(problem: Problem, passes: list[AttentionConfig]) -> tuple[GroupedAttention, Tensor, Tensor]:
    """Our kernel for a problem's batch, without a plan, and room for out and lse."""
    shape, batch, device = problem.shape, problem.sizes.batch, problem.q.device
    # On a CPU two thread blocks per KV head, so that the smoke run splits and merges, too.
    num_programs = None if device.type == "cuda" else 2 * shape.num_kv_heads
    attention = GroupedAttention(shape, batch, passes, device, num_programs=num_programs)
    out = torch.empty(batch, shape.num_qo_heads, shape.v_head_dim, dtype=shape.dtype, device=device)
    return attention, out, torch.empty(batch, shape.num_qo_heads, device=device)


class RivalMissingError(RuntimeError):
    """A rival that was asked for cannot be imported here."""


def flashinfer() -> Any:
    """The module.

    Raises:
        RivalMissingError: it is not installed, or its parts are not.
    """
    try:
        import flashinfer as module
    except ImportError as error:
        raise RivalMissingError(
            f"expected FlashInfer to be installed, got {error!r}; install flashinfer-python, or measure without it: "
            "--rivals none"
        ) from error
    return module


def decode(problem: Problem) -> Case:
    """Paged decode on tensor cores; every request lists all of its pages, so a shared prefix is read per request."""
    module, sizes, out = flashinfer(), problem.sizes, torch.empty_like(problem.q)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(_workspace(problem), "NHD", use_tensor_cores=True)
    pages = [
        torch.cat([problem.prefix_pages[row // sizes.rows], problem.suffix_pages[row]]) for row in range(sizes.batch)
    ]
    last = torch.full((sizes.batch,), _last_page(sizes.suffix, sizes.page), dtype=torch.int32)
    _plan(problem, wrapper, _indptr([len(own) for own in pages]), torch.cat(pages), last)

    def attend(kv: PagedKV) -> None:
        wrapper.run(problem.q, _paged(problem, kv), out=out)

    return Case(problem, attend, out, None, "all", _config(module))


def cascade(problem: Problem) -> Case:
    """Two levels: each prefix once for its group, each suffix alone, and their merge."""
    module, sizes, out = flashinfer(), problem.sizes, torch.empty_like(problem.q)
    wrapper = module.MultiLevelCascadeAttentionWrapper(2, _workspace(problem), "NHD")
    device = problem.q.device

    def on_device(lengths: Sequence[int]) -> Tensor:
        return _indptr(lengths).to(device)

    def last_pages(count: int, length: int) -> Tensor:
        return torch.full((count,), _last_page(length, sizes.page), dtype=torch.int32, device=device)

    _plan(
        problem,
        wrapper,
        [on_device([sizes.rows] * sizes.groups), on_device([1] * sizes.batch)],
        [on_device([table.shape[1]] * table.shape[0]) for table in (problem.prefix_pages, problem.suffix_pages)],
        [problem.prefix_pages.flatten(), problem.suffix_pages.flatten()],
        [last_pages(sizes.groups, sizes.context), last_pages(sizes.batch, sizes.suffix)],
    )

    def attend(kv: PagedKV) -> None:
        out.copy_(wrapper.run(problem.q, _paged(problem, kv)))  # it has no `out`; the copy is timed with it

    return Case(problem, attend, out, None, "all", _config(module))


def triton(problem: Problem) -> Case:
    """SGLang's own kernels, as its triton backend calls them for MLA; every request lists all of its slots."""
    try:
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
        from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton
    except ImportError as error:
        raise RivalMissingError(f"expected SGLang's kernels, got {error!r}; install SGLang, or leave it out") from error
    sizes, shape, device = problem.sizes, problem.shape, problem.q.device
    length, heads = sizes.context + sizes.suffix, (sizes.batch, shape.num_qo_heads)
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    most = 1 << (cores - 1).bit_length()  # splits, as the backend bounds them
    splits = torch.empty(sizes.batch, dtype=torch.int32, device=device)
    lengths = torch.full((sizes.batch,), length, device=device)
    counts = (sizes.batch, 1, shape.num_qo_heads, shape.num_kv_heads, most, cores)
    get_num_kv_splits_triton[(1,)](splits, lengths, *counts, MAX_NUM_SEQ=256)
    prefixes = problem.prefix_slots.repeat_interleave(sizes.rows, dim=0)
    slots = torch.cat([prefixes, problem.suffix_slots], dim=1).flatten()
    indptr = _indptr([length] * sizes.batch).to(device)
    out = torch.empty(*heads, shape.v_head_dim, dtype=shape.dtype, device=device)
    parts = torch.empty(*heads, most, shape.v_head_dim, device=device)
    lse = torch.empty(*heads, most, device=device)

    def attend(kv: PagedKV) -> None:
        decode_attention_fwd(
            problem.q, kv.k_cache, kv.v_cache, out, indptr, slots, parts, lse, splits, most, problem.sm_scale,
            1.0, 1.0, has_mla=kv.latent, use_pdl=True,
        )  # fmt: skip

    return Case(problem, attend, out, None, "all", {"splits": int(splits[0])})


class PageBounds:
    """The greatest and the least value that each channel has in a page's keys, and pages by what they bound.

    Args:
        keys: [slots, num_kv_heads, head_dim], of a layer.
        pages: slots, [batch, pages, page].
    """

    def __init__(self, keys: Tensor, pages: Tensor) -> None:
        found = [torch.cat([own.amax(1), own.amin(1)], 2) for own in (keys[slots.long()] for slots in pages)]
        self._bounds = torch.stack(found).permute(0, 2, 3, 1).flatten(0, 1).contiguous()  # [lists, channels, pages]

    @property
    def nbytes(self) -> int:
        """That a layer reads."""
        return self._bounds.nbytes

    def scores(self, q: Tensor) -> Tensor:
        """What q.k is at most in each page (Quest, Algorithm 1), [batch * num_kv_heads, pages], in the keys' dtype.

        Args:
            q: [batch * num_kv_heads, query heads of each, head_dim]; the greatest of these counts.
        """
        return torch.bmm(torch.cat([q.relu(), -(-q).relu()], 2), self._bounds).amax(1)


@dataclass(eq=False)
class _QuestCase(Case):
    """Compared with an oracle of the pages that were found, [batch * num_kv_heads, pages].

    Attributes:
        bounds: of the last layer.
    """

    found: Tensor
    bounds: PageBounds

    @property
    def nbytes(self) -> int:
        """Of a layer: bounds, and what is attended."""
        return self.bounds.nbytes + super().nbytes

    def check(self) -> Gate:
        own = self.problem
        tokens = self.found[:, :, None] * own.sizes.page + torch.arange(own.sizes.page, device=self.found.device)
        positions = tokens.view(own.positions.shape)
        return dataclasses.replace(own, positions=positions, _oracles={}).gate(self.out, self.lse, self.reads)


def quest(problem: Problem) -> Case:
    """Each KV head of a request attends its best pages, as many tokens as `problem.positions`, and its suffix.

    Raises:
        ValueError: requests share a prefix, or the budget is not whole pages.
    """
    module, sizes, shape = flashinfer(), problem.sizes, problem.shape
    count, heads, device = problem.positions.shape[2], shape.num_kv_heads, problem.q.device
    if sizes.rows > 1 or count % sizes.page:
        raise ValueError(
            f"expected one request on each prefix and a budget of whole pages, got {sizes} and {count} tokens; give "
            "--groups Nx1 or --batches 1, and a --keep of whole pages"
        )
    lists, width = sizes.batch * heads, count + sizes.suffix
    pages = problem.prefix_slots.view(sizes.batch, -1, sizes.page)
    bounds = {id(kv): PageBounds(kv.k_cache, pages) for kv in problem.layers}

    # To FlashInfer each KV head of a request is a request of one head, and each head of a slot a page of one token.
    of_head = torch.arange(heads, dtype=torch.int32, device=device)[:, None]
    entries = (pages[:, None] * heads + of_head[..., None]).flatten(0, 1)
    indices = torch.zeros(sizes.batch, heads, width, dtype=torch.int32, device=device)
    indices[:, :, count:] = problem.suffix_slots[:, None] * heads + of_head
    indices = indices.flatten(0, 1)
    indptr = torch.arange(0, lists * width + 1, width, dtype=torch.int32, device=device)
    last = torch.ones(lists, dtype=torch.int32, device=device)
    buffers = {"paged_kv_indptr_buffer": indptr.clone(), "paged_kv_last_page_len_buffer": last.clone()}
    buffers["paged_kv_indices_buffer"] = indices.flatten()
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(problem), "NHD", use_cuda_graph=True, use_tensor_cores=True, **buffers
    )
    dtypes = {"q_data_type": shape.dtype, "kv_data_type": shape.kv_dtype}
    tables = indptr, indices.flatten().clone(), last
    wrapper.plan(*tables, shape.gqa, 1, shape.head_dim, 1, sm_scale=problem.sm_scale, **dtypes)

    q = problem.q.view(lists, shape.gqa, -1)
    out, found = torch.empty_like(q), torch.empty(lists, count // sizes.page, dtype=torch.int64, device=device)

    def attend(kv: PagedKV) -> None:
        found.copy_(bounds[id(kv)].scores(q).topk(found.shape[1], sorted=False).indices)
        chosen = entries.gather(1, found[:, :, None].expand(-1, -1, sizes.page))
        indices[:, :count] = chosen.flatten(1)
        wrapper.run(q, tuple(cache.view(-1, 1, 1, cache.shape[2]) for cache in (kv.k_cache, kv.v_cache)), out=out)

    config = _config(module) | {"page": sizes.page}
    own = bounds[id(problem.kv)]
    return _QuestCase(problem, attend, out.view(problem.q.shape), None, "sparse", config, found, own)


#: name -> builder. FlashInfer's decode kernels as SGLang's flashinfer backend calls them; on Hopper SGLang's default
#: is fa3.
RIVALS: dict[str, Callable[[Problem], Case]] = {
    "flashinfer": decode,
    "flashinfer_cascade": cascade,
    "sglang_triton": triton,
    "quest": quest,
}


def _plan(problem: Problem, wrapper: Any, *tables: Any) -> None:
    """FlashInfer's plan of a problem, of tables as the wrapper wants them."""
    shape = problem.shape
    dtypes = {"q_data_type": shape.dtype, "kv_data_type": shape.kv_dtype}
    heads = (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim)
    wrapper.plan(*tables, *heads, problem.sizes.page, sm_scale=problem.sm_scale, **dtypes)


def _workspace(problem: Problem) -> Tensor:
    return torch.empty(384 << 20, dtype=torch.uint8, device=problem.q.device)


def _paged(problem: Problem, kv: PagedKV) -> tuple[Tensor, Tensor]:
    """A pool as FlashInfer sees it: [num_pages, page, num_kv_heads, head_dim], no copy."""
    page = problem.sizes.page
    k, v = (cache.view(-1, page, *cache.shape[1:]) for cache in (kv.k_cache, kv.v_cache))
    return k, v


def _indptr(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def _last_page(length: int, page: int) -> int:
    return (length - 1) % page + 1


def _config(module: Any) -> dict[str, Any]:
    return {"flashinfer": getattr(module, "__version__", "unknown")}
