"""A pool of host memory, made of SGLang's own class for such pools, and rows of ours behind SGLang's KV pool."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from sglang_ext.compat import memory
from sglang_ext.compat.versions import older_than
from sglang_ext.config import PAGE_TOKENS
from sglang_ext.methods.layer_plan import LayerPlan
from sglang_ext.model_view import ModelView
from sglang_ext.offload.host import HostPool
from sglang_ext.offload.offloading import Offloading
from sglang_ext.options import Offload
from sglang_ext.ranks import Ranks

logger = logging.getLogger(__name__)


def around_create_buffers(original: Callable[..., None], pool: Any, *args: Any) -> None:
    """The tensors of the KV pool get rows for residents behind those that the allocator knows."""
    rows = memory.offload_rows(pool.page_size)
    pool.size += rows
    try:
        original(pool, *args)
    finally:
        pool.size -= rows


def rows_behind(pool: Any) -> range:
    """Rows of a KV pool's tensors that the allocator does not know, of all layers.

    Raises:
        RuntimeError: there are none.
    """
    begin = int(pool.size) + int(pool.page_size)
    end = begin + memory.offload_rows(pool.page_size)
    held = min(int(buffer.shape[0]) for buffer in (*pool.k_buffer, *pool.v_buffer))
    if end == begin or held < end:
        raise RuntimeError(
            f"--sparse-attn: expected KV tensors of {end} rows for offload, the last {end - begin} for it; got "
            f"{held}. Another plugin or a changed SGLang is the likely cause: remove offload"
        )
    return range(begin, end)


def offloading(
    runner: Any, view: ModelView, options: Offload, ranks: Ranks, plan: LayerPlan, *, waits_s: float
) -> Offloading:
    """What keeps prefixes in host memory, behind the KV pool of a model runner. A collective with several ranks, which
    share what is given. Raises RuntimeError: no room for it.
    """
    pool = runner.token_to_kv_pool
    rows = rows_behind(pool)
    options = msgspec.structs.replace(options, host_bytes=options.host_bytes // ranks.size)
    host = host_pool(pool, options, plan.dense_layers, rows.stop, ranks)
    if (tokens := host.num_pages * PAGE_TOKENS) < options.min_tokens:
        needed = -(-options.min_tokens // PAGE_TOKENS) * ranks.size * (host.nbytes // host.num_pages)
        raise RuntimeError(
            f"--sparse-attn: expected offload.host_bytes for a prefix of offload.min_tokens, {options.min_tokens}; got "
            f"room for {tokens}: no prefix would be kept. Raise host_bytes to {needed} or more, or lower min_tokens"
        )
    found = Offloading(options, view, host, rows, int(pool.page_size), waits_s=waits_s, ranks=ranks)
    logger.info("sparse attention: offload: %s", found.summary())
    return found


def host_pool(
    device_pool: Any, options: Offload, dense_layers: Sequence[int], dense_begin: int, ranks: Ranks | None = None
) -> HostPool:
    """Host memory of an `MHATokenToKVPoolHost`.

    Args:
        device_pool: SGLang's KV pool. Tensors of layers that attend all are replaced by larger ones.
        options: what is to be kept.
        dense_layers: that attend all: they have it in rows of the device pool, too.
        dense_begin: first of these rows.
        ranks: of the tensor-parallel group: all have as many pages.

    Raises:
        RuntimeError: the host has not so much memory, or it cannot be pinned.
    """
    pinned = device_pool.k_buffer[0].device.type == "cuda"
    heads, width = device_pool.k_buffer[0].shape[1:]
    try:
        made = _made(device_pool, options.host_bytes, pinned=pinned)
    except (ValueError, RuntimeError, MemoryError) as error:
        raise RuntimeError(
            f"--sparse-attn: expected {options.host_bytes} bytes of host memory for offload, and some GB beside; "
            f"got: {error}. Lower offload.host_bytes"
        ) from error
    for name in ("_buffer_infos", "device_k_buffers", "device_v_buffers"):  # from 0.5.23 on: of layers replaced below
        if hasattr(made, name):
            setattr(made, name, ())
    [num_pages] = (ranks or Ranks()).least([int(made.size) // PAGE_TOKENS])
    sizes = len(device_pool.k_buffer), num_pages, heads, PAGE_TOKENS, 2 * width
    if device_pool.v_buffer[0].shape[1:] != (heads, width):
        raise RuntimeError(
            f"--sparse-attn: expected values as wide as keys, {width}, with offload; got "
            f"{device_pool.v_buffer[0].shape[2]}. Remove offload from --sparse-attn-config"
        )
    for buffers in (device_pool.k_buffer, device_pool.v_buffer):
        for layer in dense_layers:
            before = buffers[layer]
            buffers[layer] = before.new_zeros(dense_begin + num_pages * PAGE_TOKENS, *before.shape[1:])
            buffers[layer][: len(before)] = before
    if dense_layers:
        device_pool._init_data_ptrs_and_strides()
    # SGLang has all keys first. Nothing but what is here reads this pool.
    pages = made.kv_buffer.view(-1)[: math.prod(sizes)].view(sizes)
    return HostPool(pages, device_pool, device_pool.dtype, dense_layers, dense_begin, owner=made)


def _made(device_pool: Any, nbytes: int, *, pinned: bool) -> Any:
    """SGLang's pool; from 0.5.23 on it takes a description of the device pool and exact tokens."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    if older_than("0.5.23"):
        return MHATokenToKVPoolHost(device_pool, 0.0, nbytes / 1e9, PAGE_TOKENS, "layer_first", pin_memory=pinned)
    info = device_pool._mha_buffer_info()
    per_token = (info.head_dim + info.v_head_dim) * info.head_num * info.dtype.itemsize * len(info.buffers.k)
    return MHATokenToKVPoolHost(
        info,
        0.0,
        0,
        PAGE_TOKENS,
        "layer_first",
        pin_memory=pinned,
        device_capacity_tokens=int(device_pool.size),
        start_layer=int(device_pool.start_layer),
        end_layer=int(device_pool.end_layer),
        host_token_capacity=max(1, nbytes // (per_token * PAGE_TOKENS)) * PAGE_TOKENS,
    )
