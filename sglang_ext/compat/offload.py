"""Offload: what it does not go with, as messages."""

from __future__ import annotations

from typing import Any

from sglang_ext.compat.tensor_parallel import conflict
from sglang_ext.compat.versions import installed
from sglang_ext.options import Build, SparseAttnConfig

TREES = {"0.5.16": "RadixCache", "0.5.23": "UnifiedRadixCache"}
"""The prefix cache of each release on which offload was run, by its class."""

#: (field of ServerArgs, value that is fine, name the user knows it by)
_UNSUPPORTED: tuple[tuple[str, Any, str], ...] = (
    ("enable_mixed_chunk", False, "mixed chunks (--enable-mixed-chunk)"),
    ("speculative_algorithm", None, "speculative decoding (--speculative-algorithm)"),
    ("disable_radix_cache", False, "a server without a prefix cache (--disable-radix-cache)"),
    ("radix_cache_backend", None, "another prefix cache (--radix-cache-backend)"),
    ("enable_hierarchical_cache", False, "HiCache (--enable-hierarchical-cache)"),
    ("hicache_storage_backend", None, "HiCache's storage (--hicache-storage-backend)"),
    ("enable_lmcache", False, "LMCache (--enable-lmcache)"),
    ("enable_flexkv", False, "FlexKV (--enable-flexkv)"),
    ("kv_canary", "none", "the KV canary (--kv-canary)"),
    ("enable_streaming_session", False, "streaming sessions (--enable-streaming-session)"),
    ("enable_session_radix_cache", False, "sessions in the prefix cache (--enable-session-radix-cache)"),
    ("disaggregation_decode_retraction_backup", None, "backups of retracted requests"),
    ("kv_events_config", None, "KV events (--kv-events-config)"),
    ("enable_lora", False, "LoRA (--enable-lora)"),
)


def refusal(record: Any, config: SparseAttnConfig) -> str | None:
    """Why a server cannot keep prefixes in host memory, as a message; None where it can, or does not.

    Args:
        record: SGLang's ServerArgs.
        config: ours.
    """
    if config.offload is None:
        return None
    if config.build is Build.PREFILL:  # which writes files, each of all KV heads
        return conflict(record, (("tp_size", 1, "tensor parallelism (--tp-size)"),), " beside offload")
    found = installed()
    if found not in TREES:
        return (
            f"--sparse-attn: expected SGLang {' or '.join(TREES)} with offload, which was run on no other release; "
            f"found {found}. Install one of them, or remove offload."
        )
    return conflict(record, _UNSUPPORTED, " beside offload")


def graph_refusal(device: str, config: SparseAttnConfig) -> str | None:
    """Why the server's prefill graphs do not go with it, as a message; None where they do. A decode step that selects
    has its graph; one that attends exactly behind host memory runs without.
    """
    if config.offload is None or config.build is Build.PREFILL or device != "cuda":
        return None
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend

    if check_cuda_graph_backend(Phase.PREFILL, Backend.DISABLED):
        return None
    return (
        "--sparse-attn: expected prefill CUDA graphs to be off with offload, which was not tried in them; they are on. "
        "Add --disable-prefill-cuda-graph, or remove offload."
    )


def tree_refusal(tree_cache: Any) -> str | None:
    """Why a prefix cache cannot hold suffixes of offloaded prefixes, as a message; None if it can."""
    expected, found = TREES[str(installed())], type(tree_cache).__name__
    if found == expected:
        return None
    return (
        f"--sparse-attn: expected the prefix cache {expected} with offload; got {found}. Remove the flag or the "
        "environment variable that chooses it, or remove offload."
    )
