"""SGLang's flags beside ours: what our settings set, and why a server is refused, as messages; None where it is not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from sglang_ext.compat.versions import installed
from sglang_ext.options import Build, Exactness, SparseAttnConfig

VERIFY = "SPARSE_VERIFY"
"""What SGLang knows lossless decode by."""

MOST_BY_TOKEN = 7
"""Tokens of a round of lossless decode with pages of one token: SGLang takes slots for two rounds ahead, and makes rows
of `req_to_token` so long only with longer pages. At the end of the context, the slots of more would stand in the next
request's row.
"""

TREES = {"0.5.16": "RadixCache", "0.5.23": "UnifiedRadixCache"}
"""The prefix cache of each release on which offload was run, by its class."""

#: Formats whose weights are the files of the model's folder.
_LOAD_FORMATS = ("auto", "safetensors", "pt", "sharded_state", "dummy")

_CLOCKS = ("SGLANG_REQ_RUNNING_TIMEOUT", "SGLANG_REQ_WAITING_TIMEOUT")
"""Of SGLang before 0.5.21: each rank looks at them by itself."""

Fields = tuple[tuple[str, Any, str], ...]
"""(field of ServerArgs, value that is fine, name the user knows it by)."""

_TP: Fields = (("tp_size", 1, "tensor parallelism (--tp-size)"),)
_MIXED: Fields = (("enable_mixed_chunk", False, "mixed chunks (--enable-mixed-chunk)"),)
_LORA: Fields = (("enable_lora", False, "LoRA (--enable-lora)"),)

UNSUPPORTED: Fields = (
    ("pp_size", 1, "pipeline parallelism (--pp-size)"),
    ("dp_size", 1, "data parallelism (--dp-size)"),
    ("enable_two_batch_overlap", False, "two-batch overlap (--enable-two-batch-overlap)"),
    ("enable_pdmux", False, "prefill-decode multiplexing (--enable-pdmux)"),
    ("enable_nvidia_megakernel", False, "fused decode kernels (--enable-nvidia-megakernel)"),
    ("enable_amd_monokernel", False, "fused decode kernels (--enable-amd-monokernel)"),
    ("enable_torch_compile", False, "torch.compile (--enable-torch-compile)"),
    ("speculative_algorithm", VERIFY, "speculative decoding (--speculative-algorithm)"),
    ("disaggregation_mode", "null", "disaggregation (--disaggregation-mode)"),
    ("dllm_algorithm", None, "diffusion language models (--dllm-algorithm)"),
    ("encoder_only", False, "encoder-only serving (--encoder-only)"),
    ("weight_cache_mode", "off", "weights of another process, which may not be the folder's (--weight-cache-mode)"),
    ("modelopt_checkpoint_restore_path", None, "weights of another file (--modelopt-checkpoint-restore-path)"),
    ("kt_weight_path", None, "experts of another folder (--kt-weight-path)"),
    ("decrypted_config_file", None, "configuration of another file (--decrypted-config-file)"),
    ("enable_deterministic_inference", False, "deterministic inference (--enable-deterministic-inference)"),
)

BESIDE_RANKS: Fields = (
    ("nnodes", 1, "more than one machine (--nnodes)"),
    ("attn_cp_size", 1, "context parallelism (--attn-cp-size)"),
    ("dcp_size", 1, "decode context parallelism (--dcp-size)"),
    ("enable_dp_attention", False, "attention data parallelism (--enable-dp-attention)"),
    ("attn_dp_size", 1, "attention data parallelism (--attn-dp-size)"),  # 0.5.23, and what it makes of the other flag
    ("elastic_ep_backend", None, "elastic expert parallelism (--elastic-ep-backend)"),
)

_BESIDE_OFFLOAD: Fields = (
    *_MIXED,
    ("speculative_algorithm", None, "speculative decoding (--speculative-algorithm)"),
    ("disable_radix_cache", False, "--disable-radix-cache"),
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
    *_LORA,
)


def verify_arguments(config: SparseAttnConfig) -> dict[str, Any]:
    """What lossless decode sets in a server's record, by field; empty where steps by an index answer."""
    if config.exactness is not Exactness.VERIFY:
        return {}
    return {
        "speculative_algorithm": VERIFY,
        "speculative_num_draft_tokens": config.draft_tokens + 1,
        "speculative_num_steps": config.draft_tokens,
        "speculative_eagle_topk": 1,
    }


def given_twice(given: Any, config: SparseAttnConfig) -> str | None:
    """What the flags as they were parsed say that lossless decode sets."""
    for name in verify_arguments(config):
        if getattr(given, name, None) is not None:
            flag = "--" + name.replace("_", "-")
            return f"--sparse-attn: expected no {flag} with exactness verify, which sets it; remove {flag}."
    return None


def refusal(record: Any, config: SparseAttnConfig) -> str | None:
    """The first thing in a ServerArgs that sparse attention, or one of these settings, does not work with."""
    return (
        unsupported(record)
        or ranks_refusal(record, config)
        or _verify_refusal(record, config)
        or offload_refusal(record, config)
    )


def _conflict(record: Any, fields: Fields, beside: str = "", got: str = "") -> str | None:
    """The first of these fields that is set otherwise.

    Args:
        beside: what else it does not go with, as ` beside ...`.
        got: that one's value, as ` and field=...`.
    """
    for field, fine, name in fields:
        value = getattr(record, field, fine)
        if value is not None and value != fine:
            return (
                f"--sparse-attn: expected no {name}{beside}; got {field}={value!r}{got}. "
                "This combination is not supported yet: remove one of the two."
            )
    return None


def unsupported(record: Any) -> str | None:
    """Modes that nothing of ours works with."""
    load_format = getattr(record, "load_format", "auto")
    load_format = str(getattr(load_format, "value", load_format))  # an enum in some releases
    if load_format not in _LOAD_FORMATS:
        return (
            f"--sparse-attn: expected --load-format {', '.join(_LOAD_FORMATS)}; got {load_format!r}. The model's "
            "identity is taken from its folder, which may not be what this format loads: use one of these."
        )
    return _conflict(record, UNSUPPORTED)


def ranks_refusal(record: Any, config: SparseAttnConfig) -> str | None:
    """What does not go with tensor parallelism."""
    size = int(getattr(record, "tp_size", 1) or 1)
    if size == 1:
        return None
    if config.build is Build.CAPTURE:
        return (
            "--sparse-attn: expected build off, prefill or shared with tensor parallelism (--tp-size); got "
            f"build={config.build.value!r} and tp_size={size}. A rank sees only its own KV heads: calibrate on one GPU."
        )
    if config.trace_folder is not None:
        return (
            f"--sparse-attn: expected no trace_folder with tensor parallelism (--tp-size); got tp_size={size}. A rank "
            "selects for its own KV heads only: remove trace_folder, or serve on one GPU."
        )
    if config.cache_device is not None:
        return (
            f"--sparse-attn: expected no cache_device with tensor parallelism (--tp-size); got tp_size={size}. Remove "
            "it: each rank names its own candidates."
        )
    for name in _CLOCKS:
        if os.environ.get(name, "-1").strip() not in ("", "-1", "0"):
            return (
                f"--sparse-attn: expected {name} unset with tensor parallelism; got {os.environ[name]!r}. A rank ends "
                "requests by its own clock then, so ranks may run different batches: unset it, or end requests from "
                "the client."
            )
    return _conflict(record, BESIDE_RANKS, " beside tensor parallelism", f" and tp_size={size}")


def _verify_refusal(record: Any, config: SparseAttnConfig) -> str | None:
    """Why a server cannot verify."""
    named = getattr(record, "speculative_algorithm", None) == VERIFY
    if config.exactness is not Exactness.VERIFY:
        if not named:
            return None
        return (
            f"--sparse-attn: expected exactness verify in --sparse-attn-config with {VERIFY}; got "
            f"{config.exactness.value}. Set it, and leave --speculative-algorithm out."
        )
    if not named:
        return (
            "--sparse-attn: expected the server to be started with --sparse-attn-config, or by "
            "sglang_ext.plugin.server_args, for exactness verify; the configuration came later, by the environment."
        )
    if getattr(record, "page_size", None) == 1 and config.draft_tokens > MOST_BY_TOKEN:
        return (
            f"--sparse-attn: expected draft_tokens of at most {MOST_BY_TOKEN} with pages of one token, for more of "
            "which SGLang's table of slots has no room at the end of the context; got "
            f"{config.draft_tokens}. Lower it, or add --page-size 16."
        )
    return _conflict(record, (*_MIXED, *_TP, *_LORA), " beside exactness verify")


def offload_refusal(record: Any, config: SparseAttnConfig) -> str | None:
    """Why a server cannot keep prefixes in host memory."""
    if config.offload is None:
        return None
    if config.build is Build.PREFILL:  # which writes files, each of all KV heads
        return _conflict(record, _TP, " beside offload")
    found = installed()
    if found not in TREES:
        return (
            f"--sparse-attn: expected SGLang {' or '.join(TREES)} with offload, which was run on no other release; "
            f"found {found}. Install one of them, or remove offload."
        )
    from sglang.srt.environ import envs

    if envs.SGLANG_RADIX_FORCE_MISS.get():  # it takes back what was found in host memory
        return (
            "--sparse-attn: expected SGLANG_RADIX_FORCE_MISS unset with offload; got it set. Unset it, or remove "
            "offload."
        )
    return _conflict(record, _BESIDE_OFFLOAD, " beside offload")


def in_vain(record: Any, config: SparseAttnConfig) -> Iterator[str]:
    """What does nothing beside SGLang's flags."""
    if config.build is Build.SHARED and getattr(record, "disable_radix_cache", False):
        yield (
            "expected SGLang's prefix cache with build shared, which finds there what requests share; got "
            "--disable-radix-cache. Only prompts that an operator names are indexed: remove the flag, or prebuild"
        )
    from sglang.srt.environ import envs

    rust = getattr(envs, "SGLANG_RUST_SERVER", None)  # later releases have it
    others = {
        "SGLANG_RUST_SERVER": rust is not None and rust.get(),
        "--smg-grpc-mode": getattr(record, "smg_grpc_mode", False),
    }
    for got in (name for name, asked in others.items() if asked):
        yield (
            "expected SGLang's Python server, which has /sparse_attn, our state in /server_info and what responses say "
            f"of their decode steps; got {got}, which has none of these. Remove it to see or change them"
        )
    if (workers := getattr(record, "tokenizer_worker_num", 1)) > 1:  # the state and `meta_info` are the scheduler's
        yield (
            "expected one tokenizer process, whose server has /sparse_attn and usage.sparse_attn; got "
            f"--tokenizer-worker-num {workers}, which has neither. Remove it to see or change them"
        )


def tree_refusal(tree_cache: Any) -> str | None:
    """Why a prefix cache cannot hold suffixes of offloaded prefixes."""
    expected, found = TREES[str(installed())], type(tree_cache).__name__
    if found == expected:
        return None
    return (
        f"--sparse-attn: expected the prefix cache {expected} with offload; got {found}. Remove the flag or the "
        "environment variable that chooses it, or remove offload."
    )


def graph_refusal(device: str, config: SparseAttnConfig, has: Callable[[str, str], bool] | None = None) -> str | None:
    """Why the server's CUDA graphs do not go with ours. Graphs replay without Python: what is recorded, and what is
    decided per layer, does not run in them. With offload a decode step that selects has its graph; one that attends
    exactly behind host memory runs without.

    Args:
        device: of the model.
        config: ours.
        has: (phase, backend) -> whether graphs are of that; None: SGLang's own word on this process.
    """
    if device != "cuda":
        return None
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend

    has, build = has or check_cuda_graph_backend, config.build
    no_decode_graph, no_prefill_graph = (has(phase, Backend.DISABLED) for phase in (Phase.DECODE, Phase.PREFILL))
    if build is Build.CAPTURE and not no_decode_graph:
        return (
            "--sparse-attn: expected decode CUDA graphs to be off while prompts are captured; they are on. A graph "
            "replays attention without Python, so decode steps cannot be recorded: add --disable-decode-cuda-graph."
        )
    if config.cache_device is not None and no_decode_graph and build in (Build.OFF, Build.SHARED):
        return (
            "--sparse-attn: expected decode CUDA graphs with cache_device; they are off. Remove the flag that turns "
            "them off, or cache_device."
        )
    if not (no_decode_graph or has(Phase.DECODE, Backend.FULL)):
        return (
            "--sparse-attn: expected the decode graph backend 'full' (SGLang's default on CUDA) or none; got another "
            "one. Remove --cuda-graph-backend-decode, or add --disable-decode-cuda-graph."
        )
    if no_prefill_graph:
        return None
    if build is Build.CAPTURE:
        return (
            "--sparse-attn: expected prefill CUDA graphs to be off while prompts are captured; they are on. The "
            "residual stream is read between layers: add --disable-prefill-cuda-graph."
        )
    if config.offload is not None and build is not Build.PREFILL:
        return (
            "--sparse-attn: expected prefill CUDA graphs to be off with offload, which was not tried in them; they are "
            "on. Add --disable-prefill-cuda-graph, or remove offload."
        )
    if build in (Build.PREFILL, Build.SHARED) and not has(Phase.PREFILL, Backend.BREAKABLE):
        return (
            "--sparse-attn: expected the prefill graph backend 'breakable' (SGLang's default on CUDA) or none "
            "while indexes are built; another one replays attention without Python, so queries cannot be "
            "recorded. Remove --cuda-graph-backend-prefill, or add --disable-prefill-cuda-graph."
        )
    return None
