"""What SGLang lacks on a machine without an accelerator: torch forms in place of compiled operations.

A plugin of its own (`sparse_attn_cpu`), so that a stock server runs there too and can be compared with. On a
machine with CUDA, and for SGLang's own CPU engine, it registers nothing. Every mend stands where SGLang
would otherwise stop with an ImportError or launch a Triton kernel without a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from sglang_ext.compat import versions


def _no_accelerator() -> bool:
    import torch

    return not torch.accelerator.is_available() and os.environ.get("SGLANG_USE_CPU_ENGINE") != "1"


def _stub_rope_operation() -> None:
    """RoPE imports a vLLM operation on platforms it does not know; `forward_native` is what then runs."""
    if "vllm._custom_ops" in sys.modules or importlib.util.find_spec("vllm") is not None:
        return
    stub = types.ModuleType("vllm._custom_ops")

    def rotary_embedding(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("expected RotaryEmbedding.forward_native on this machine, got the compiled form")

    stub.rotary_embedding = rotary_embedding  # type: ignore[attr-defined]
    # Only the submodule: code that probes `import vllm` must still find none.
    sys.modules["vllm._custom_ops"] = stub


def alloc_naive(original: Callable[..., Any], allocator: Any, *args: Any, **kwargs: Any) -> Any:
    """`PagedTokenToKVPoolAllocator.alloc_extend` and `alloc_decode` before 0.5.22, with its own naive form in place of
    their kernels; the scheduler is single-threaded here.
    """
    from sglang.srt.mem_cache.allocator import paged

    def extend(prefix_lens: Any, seq_lens: Any, last_loc: Any, free_pages: Any, out: Any, *_rest: Any) -> None:
        page = allocator.page_size
        pages = ((seq_lens + page - 1) // page - (prefix_lens + page - 1) // page).sum()
        if int(pages) > len(free_pages):
            return  # the caller counts the pages itself, and gives up
        paged.alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out, page, allocator.device)

    def decode(seq_lens: Any, *rest: Any) -> None:
        extend(seq_lens - 1, seq_lens, *rest)

    kernels = paged.alloc_extend_kernel, paged.alloc_decode_kernel
    # They are launched as kernel[grid](...).
    paged.alloc_extend_kernel, paged.alloc_decode_kernel = defaultdict(lambda: extend), defaultdict(lambda: decode)
    try:
        return original(allocator, *args, **kwargs)
    finally:
        paged.alloc_extend_kernel, paged.alloc_decode_kernel = kernels


def extend_new_rows(original: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
    """`TorchNativeAttnBackend._run_sdpa_forward_extend`, computing the new rows only.

    SGLang's own form recomputes attention for all rows of a request whenever a few are added, N x N work for a
    question of ten tokens behind a prompt of N. The rows it keeps are the same up to rounding. Only with
    SGLANG_EXT_CPU_SHORT_EXTEND=1, and only for plain causal attention behind a cached prefix.
    """
    import inspect

    import torch
    from torch.nn.functional import scaled_dot_product_attention

    bound = inspect.signature(original).bind(backend, *args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    window = a["sliding_window_size"]
    plain = a["causal"] and a["encoder_lens"] is None and not a["is_cross_attn"] and (window is None or window < 0)
    prefix_lens = a["extend_prefix_lens"].tolist()
    if not plain or not any(prefix_lens):
        return original(backend, *args, **kwargs)
    query, output, row = a["query"], a["output"], 0
    lens = zip(a["req_pool_indices"], a["seq_lens"].tolist(), prefix_lens, strict=True)
    for pool_idx, seq_len, prefix_len in lens:
        end = row + seq_len - prefix_len
        slots = a["req_to_token"][pool_idx, :seq_len]
        key = a["k_cache"][slots].movedim(0, 1).to(query.dtype)
        value = a["v_cache"][slots].movedim(0, 1).to(query.dtype)
        mask = torch.arange(seq_len)[None] <= torch.arange(prefix_len, seq_len)[:, None]
        out = scaled_dot_product_attention(
            query[row:end].movedim(0, 1)[None],
            key[None],
            value[None],
            attn_mask=mask,
            enable_gqa=a["enable_gqa"],
            scale=a["scaling"],
        )
        output[row:end] = out[0].movedim(1, 0)
        row = end
    return output


def extend_unabsorbed(
    original: Callable[..., Any], backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, **kwargs: Any
) -> Any:
    """`TorchNativeAttnBackend.forward_extend` of an MLA model's prefill without a cached prefix: by keys and values of
    all heads, with which it is called. SGLang's own form takes those of the KV pool, which are others.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    if kwargs.get("save_kv_cache", True) or not hasattr(backend.token_to_kv_pool, "kv_lora_rank"):
        return original(backend, q, k, v, layer, batch, **kwargs)
    parts = (x.transpose(0, 1).split(list(batch.extend_seq_lens_cpu), dim=1) for x in (q, k, v))
    outs = [
        scaled_dot_product_attention(query, key, value, is_causal=True, scale=layer.scaling)
        for query, key, value in zip(*parts, strict=True)
    ]
    return torch.cat(outs, dim=1).transpose(0, 1).flatten(1)


def no_copies(_original: Callable[..., Any], pool: Any, *_args: Any) -> None:
    """`MHATokenToKVPool._init_kv_copy_and_warmup`, which compiles what moves accepted drafts: none of ours move."""
    pool._kv_copy_config = None


def poison_padding(_result: None, pool: Any, *_args: Any) -> None:
    """Behind `MHATokenToKVPool._create_buffers_normal`: whatever reads the padding page says so."""
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[: pool.page_size].fill_(float("nan"))


def assign_slots(
    _original: Callable[..., Any], rows: Any, table: Any, begins: Any, ends: Any, slots: Any, _size: int
) -> None:
    """`assign_req_to_token_pool_func`: slots of tokens to come, which a step with drafts takes ahead."""
    at = 0
    for row, begin, end in zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True):
        table[row, begin:end] = slots[at : at + end - begin]
        at += end - begin


def register() -> None:
    """Entry point: mend what is missing, on machines without an accelerator only."""
    if not _no_accelerator():
        return
    _stub_rope_operation()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if versions.older_than("0.5.22"):
        allocator = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
        HookRegistry.register(f"{allocator}.alloc_extend", alloc_naive, HookType.AROUND)
        HookRegistry.register(f"{allocator}.alloc_decode", alloc_naive, HookType.AROUND)
    assign = "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func"
    HookRegistry.register(assign, assign_slots, HookType.AROUND)
    pool = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
    HookRegistry.register(f"{pool}._init_kv_copy_and_warmup", no_copies, HookType.AROUND)
    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(f"{backend}.forward_extend", extend_unabsorbed, HookType.AROUND)
    if os.environ.get("SGLANG_EXT_CPU_POISON") == "1":
        HookRegistry.register(f"{pool}._create_buffers_normal", poison_padding, HookType.AFTER)
    if os.environ.get("SGLANG_EXT_CPU_SHORT_EXTEND") == "1":
        HookRegistry.register(f"{backend}._run_sdpa_forward_extend", extend_new_rows, HookType.AROUND)
