"""Decode attention of FlashInfer and SGLang over the same pages, for `kernel_bench.py`; imported when measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from kernel_cases import Case, each_layer
from kernel_problem import Problem
from torch import Tensor

from prefix_kernels.types import PagedKV

_WORKSPACE_BYTES = 384 << 20


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
    module, sizes, shape = flashinfer(), problem.sizes, problem.shape
    workspace = _workspace(problem)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    pages = [
        torch.cat([problem.prefix_pages[row // sizes.rows], problem.suffix_pages[row]]) for row in range(sizes.batch)
    ]
    last = _last_page(sizes.suffix, sizes.page)
    wrapper.plan(
        _indptr([len(own) for own in pages]),
        torch.cat(pages),
        torch.full((sizes.batch,), last, dtype=torch.int32),
        shape.num_qo_heads,
        shape.num_kv_heads,
        shape.head_dim,
        sizes.page,
        q_data_type=shape.dtype,
        kv_data_type=shape.kv_dtype,
        sm_scale=problem.sm_scale,
    )
    out = torch.empty_like(problem.q)

    def attend(kv: PagedKV) -> None:
        wrapper.run(problem.q, _paged(problem, kv), out=out)

    return Case(problem, each_layer(problem, attend), out, None, "all", _config(module), kept=(wrapper, workspace))


def cascade(problem: Problem) -> Case:
    """Two levels: each prefix once for its group, each suffix alone, and their merge."""
    module, sizes, shape = flashinfer(), problem.sizes, problem.shape
    workspace = _workspace(problem)
    wrapper = module.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    device = problem.q.device

    def on_device(lengths: Sequence[int]) -> Tensor:
        return _indptr(lengths).to(device)

    def last_pages(count: int, length: int) -> Tensor:
        return torch.full((count,), _last_page(length, sizes.page), dtype=torch.int32, device=device)

    wrapper.plan(
        [on_device([sizes.rows] * sizes.groups), on_device([1] * sizes.batch)],
        [on_device([table.shape[1]] * table.shape[0]) for table in (problem.prefix_pages, problem.suffix_pages)],
        [problem.prefix_pages.flatten(), problem.suffix_pages.flatten()],
        [last_pages(sizes.groups, sizes.context), last_pages(sizes.batch, sizes.suffix)],
        shape.num_qo_heads,
        shape.num_kv_heads,
        shape.head_dim,
        sizes.page,
        q_data_type=shape.dtype,
        kv_data_type=shape.kv_dtype,
        sm_scale=problem.sm_scale,
    )
    out = torch.empty_like(problem.q)

    def attend(kv: PagedKV) -> None:
        out.copy_(wrapper.run(problem.q, _paged(problem, kv)))  # it has no `out`; the copy is timed with it

    return Case(problem, each_layer(problem, attend), out, None, "all", _config(module), kept=(wrapper, workspace))


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

    return Case(problem, each_layer(problem, attend), out, None, "all", {"splits": int(splits[0])}, kept=(slots, parts))


#: name -> builder. FlashInfer's decode kernels as SGLang's flashinfer backend calls them; on Hopper SGLang's default
#: is fa3.
RIVALS: dict[str, Callable[[Problem], Case]] = {
    "flashinfer": decode,
    "flashinfer_cascade": cascade,
    "sglang_triton": triton,
}


def _workspace(problem: Problem) -> Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=problem.q.device)


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
