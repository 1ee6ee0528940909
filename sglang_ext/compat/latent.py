"""MLA models: their KV pool holds one latent vector of a token, which all query heads read.

The first `kv_lora_rank` channels of a key are also the value. Queries reach the pool's channels by a product with a
layer's weights (*absorption*). SGLang absorbs them in decode steps, but not in a prefill without a cached prefix.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_ext.options import Build, Exactness, SparseAttnConfig

logger = logging.getLogger(__name__)

BACKENDS = ("triton", "TritonAttnBackend")
"""What may attend, by SGLang's names and by class."""
CPU_BACKENDS = (*BACKENDS, "torch_native", "TorchNativeAttnBackend")
"""The same on a CPU, where `cpu.extend_unabsorbed` mends SGLang's own."""
_NAMED = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
SHARED_MEMORY = 160_000
"""Bytes of such a tile, with room for the compiler (`tests/prefix_kernels/test_triton_compiles.py`)."""


def is_latent(config: Any) -> bool:
    """Whether a model is MLA, by SGLang's ModelConfig."""
    return getattr(getattr(config, "attention_arch", None), "name", "") == "MLA"


def kv_shape(config: Any) -> tuple[int, int, int]:
    """(KV heads, channels of a key, channels of a value) of the whole model's KV pool, by SGLang's ModelConfig. The
    config's own numbers of an MLA model are those without absorption.
    """
    if is_latent(config):
        rank = int(config.kv_lora_rank)
        return 1, rank + int(config.qk_rope_head_dim), rank
    head_dim = int(config.head_dim)
    return int(config.num_key_value_heads), head_dim, int(getattr(config, "v_head_dim", None) or head_dim)


def refusal(
    model: Any, config: SparseAttnConfig, backends: Sequence[str], kv_dtype: torch.dtype, device: str
) -> str | None:
    """Why an MLA model cannot be served with these settings; None if it can, or for another model.

    Args:
        model: SGLang's ModelConfig.
        config: ours.
        backends: of attention, by SGLang's names or by class.
        kv_dtype: of the KV pool.
        device: its type.
    """
    if not is_latent(model):
        return None
    backend = " and ".join(dict.fromkeys(backends))
    if getattr(model, "index_head_dim", None) is not None:
        return _message("all tokens to be attended", "DeepSeek Sparse Attention", "Serve this model without the plugin")
    if backend not in (CPU_BACKENDS if device == "cpu" else BACKENDS):
        return _message(
            "attention backend triton, or torch_native on a CPU", backend, "Choose --attention-backend triton"
        )
    if kv_dtype.itemsize == 1:
        what_to_do = "Remove --kv-cache-dtype, or set it to bfloat16 where the checkpoint asks for this one"
        return _message("a KV cache of float32, float16 or bfloat16", kv_dtype, what_to_do)
    if config.offload is not None:
        return _message("no offload", "offload", "Remove it from --sparse-attn-config")
    if config.exactness is Exactness.VERIFY:
        return _message("exactness selected", "verify", "Remove exactness from --sparse-attn-config")
    if config.build is Build.CAPTURE:
        return _message("build off, prefill or shared", "capture", "Serve without a profile")
    return None


def arguments(given: Any) -> dict[str, str]:
    """The attention backend of an MLA model, by field of ServerArgs, where no flag names one: SGLang's own choice may
    be another (on Hopper fa3). Empty for another model, or where one is named.

    Args:
        given: SGLang's flags as they were parsed.
    """
    if any(getattr(given, name, None) is not None for name in _NAMED) or not _is_latent_checkpoint(given):
        return {}
    from sglang.srt.utils import get_device

    backend = "torch_native" if (given.device or get_device()) == "cpu" else "triton"
    logger.info("sparse attention: --attention-backend %s, as none is named and the model is MLA", backend)
    return {_NAMED[0]: backend}


def _is_latent_checkpoint(given: Any) -> bool:
    """Whether flags name an MLA model; not where SGLang cannot read it, which its start says itself."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.environ import envs

    try:
        if envs.SGLANG_USE_MODELSCOPE.get():
            return False  # SGLang asks another hub, later
        model = ModelConfig(
            given.model_path,
            trust_remote_code=given.trust_remote_code,
            revision=given.revision,
            model_override_args=given.json_model_override_args,
        )
    except Exception:
        logger.debug("sparse attention: cannot tell whether %s is MLA", given.model_path, exc_info=True)
        return False
    return is_latent(model)


def _message(expected: str, got: object, what_to_do: str) -> str:
    return f"--sparse-attn: expected {expected} with an MLA model; got {got}. {what_to_do}."


def attention_modules(model: Any) -> list[Any]:
    """SGLang's MLA attention modules of a loaded model, in the order of layers."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    return [module for module in model.modules() if isinstance(module, DeepseekV2AttentionMLA)]


def model_refusal(runner: Any, build: Build) -> str | None:
    """Why a ModelRunner's loaded MLA model cannot be served; None if it can.

    Args:
        build: what the process makes of prompts.
    """
    found, pool = attention_modules(runner.model), runner.token_to_kv_pool
    layers, (_, width, _) = int(runner.model_config.num_hidden_layers), kv_shape(runner.model_config)
    if not len(found) == int(pool.layer_num) == layers or int(pool.kv_cache_dim) != width:
        return _message(
            f"{layers} layers of DeepseekV2AttentionMLA and so many of the KV pool, {width} wide",
            f"{len(found)} and {pool.layer_num}, {pool.kv_cache_dim} wide",
            "Serve this model without the plugin",
        )
    if any(one.qk_rope_head_dim == 0 for one in found):
        return _message(
            "keys that are wider than values", "qk_rope_head_dim of 0", "Serve this model without the plugin"
        )
    if build is not Build.OFF and any(getattr(one, "use_intel_amx_backend", False) for one in found):
        return _message("weights as they were loaded where queries are recorded", "AMX's", "Set build off")
    if build is not Build.OFF and any(one.use_deep_gemm_bmm or one.w_kc.itemsize == 1 for one in found):
        return _message(
            "absorbing weights of 16 or 32 bits where queries are recorded", "8 bits", "Set build off, or load bfloat16"
        )
    return None


def device_refusal(heads: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why our kernels cannot attend latent keys on a device; None if they can, and on any but a GPU. A tile has all
    query heads.

    Args:
        heads: query heads of this rank.
        dtype: of queries.
        device: that is there.
    """
    if device.type != "cuda":
        return None
    gpu: Any = torch.cuda.get_device_properties(device)
    most = 16 if dtype is torch.float32 else 64 if gpu.major == 9 else 32
    if heads > most:
        return _message(f"at most {most} query heads of {dtype} on this GPU", heads, "Raise --tp-size")
    if gpu.shared_memory_per_block_optin < SHARED_MEMORY:
        got = f"{gpu.shared_memory_per_block_optin} bytes of shared memory"
        return _message(f"a GPU with {SHARED_MEMORY} or more (A100, H100)", got, "Serve this model without the plugin")
    return None


def absorb(q: Tensor, w_kc: Tensor) -> Tensor:
    """Queries in the channels of an MLA model's KV pool: with its keys they have the scores that the model means.

    Args:
        q: [num_tokens, num_qo_heads, qk_nope_head_dim + qk_rope_head_dim], post-RoPE.
        w_kc: [num_qo_heads, qk_nope_head_dim, kv_lora_rank], the key part of a layer's `kv_b_proj`.

    Returns:
        [num_tokens, num_qo_heads, kv_lora_rank + qk_rope_head_dim], new memory.
    """
    nope = w_kc.shape[1]
    latent = torch.bmm(q[..., :nope].transpose(0, 1), w_kc).transpose(0, 1)
    return torch.cat([latent, q[..., nope:]], dim=-1)
