"""What the runtime sees of SGLang's ModelRunner: plain tensors and numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, MLATokenToKVPool
from torch import Tensor

from prefix_index import ModelFingerprint
from prefix_kernels.types import PagedKV
from sglang_ext.compat import latent, memory
from sglang_ext.compat.checkpoint import fingerprint
from sglang_ext.methods.layer_plan import heads_of_rank
from sglang_ext.options import Build

_FP8 = torch.float8_e4m3fn
_KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16, _FP8)

_SCALELESS = "TorchNativeAttnBackend"
"""The backend that reads and writes fp8 keys and values without the checkpoint's scales."""


class RunnerView:
    """Reads of one target ModelRunner. Owns nothing.

    Attributes:
        tp_rank, tp_size: this process's place in its tensor-parallel group.
        num_layers: of the model.
        head_dim, v_head_dim: of K and of V in the KV pool.
        num_qo_heads, num_kv_heads: of this rank. SGLang's model_config counts those of the whole model.
        dtype, kv_dtype: of queries, and of the KV pool.
        num_slots: of the KV pool.
        kv_bytes: that SGLang sized the KV pool from.
        max_requests: that can run at a time.
        decode_graphs: whether decode steps replay CUDA graphs.
        device: of the KV pool, with its number: a thread of ours that says "cuda" would get the first GPU.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        config = runner.model_config
        self._latent = latent.is_latent(config)
        self.tp_rank, self.tp_size = _tensor_parallel(runner)
        self.num_layers = int(config.num_hidden_layers)
        self.num_qo_heads = int(config.num_attention_heads) // self.tp_size
        heads, self.head_dim, self.v_head_dim = latent.kv_shape(config)
        self.num_kv_heads = len(heads_of_rank(heads, self.tp_rank, self.tp_size))
        self.dtype: torch.dtype = config.dtype
        self.kv_dtype: torch.dtype = runner.token_to_kv_pool.dtype
        self.num_slots = int(runner.max_total_num_tokens)
        self.kv_bytes = memory.kv_bytes()
        self.max_requests = int(runner.req_to_token_pool.size)
        self.device: torch.device = runner.req_to_token_pool.req_to_token.device
        self.decode_graphs = memory.decode_graphs(runner.device)

    @cached_property
    def _absorbing(self) -> dict[Any, Any]:
        """RadixAttention -> the module whose weights absorb, of those that are called without absorption."""
        return {one.attn_mha: one for one in latent.attention_modules(self.runner.model)} if self._latent else {}

    @cached_property
    def _scales(self) -> dict[int, tuple[float, float]]:
        """Layer -> scales of K and V of an fp8 pool, as the checkpoint gives them."""
        if _is_scaleless(self.runner.attn_backend):
            return {}
        return {int(layer.layer_id): kv_scales(layer) for layer in self._scaled_layers()}

    def _scaled_layers(self) -> list[RadixAttention]:
        """Those whose K or V has a scale in an fp8 pool."""
        if self.kv_dtype is not _FP8:
            return []
        layers = (module for module in self.runner.model.modules() if isinstance(module, RadixAttention))
        return [one for one in layers if one.k_scale is not None or one.v_scale is not None]

    @property
    def has_kv_scales(self) -> bool:
        """Whether a checkpoint's scales belong to what is in the KV pool: with its weights they may change in place."""
        return bool(self._scaled_layers())

    def refusal(self, build: Build = Build.OFF) -> str | None:
        """Why this model or its KV pool cannot be served sparsely; None if it can.

        Args:
            build: what this process makes of prompts.
        """
        runner = self.runner
        pool, plain = runner.token_to_kv_pool, MLATokenToKVPool if self._latent else MHATokenToKVPool
        if type(pool) is not plain:
            return (
                f"--sparse-attn: expected SGLang's plain KV pool ({plain.__name__}); got {type(pool).__name__}. "
                "Hybrid, sliding-window and quantized pools are not supported yet."
            )
        message = kv_dtype_refusal(pool.dtype, quantized=getattr(pool, "is_quantized_kv_cache", False))
        if message:
            return message
        if not self._latent and int(pool.head_num) != self.num_kv_heads:
            return (
                f"--sparse-attn: expected a KV pool of {self.num_kv_heads} KV heads on this rank; got {pool.head_num}: "
                "SGLang shares this model's heads out in another way, which is not supported yet."
            )
        if not self._latent and int(pool.layer_num) != self.num_layers:
            return (
                f"--sparse-attn: expected a KV pool of {self.num_layers} layers, one for each of the model's; got "
                f"{pool.layer_num}: models that run their layers several times are not supported yet."
            )
        if getattr(pool, "post_capture_active", False):
            return (
                "--sparse-attn: expected a KV pool that is sized before graphs are captured; it is sized behind them, "
                "out of memory that is promised to indexes. Unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING."
            )
        if getattr(runner, "sliding_window_size", None):
            return "--sparse-attn: expected full attention; got a sliding-window model (unsupported_mode)."
        if not self._latent:
            return None
        message = latent.model_refusal(runner, build)
        return message or latent.device_refusal(self.num_qo_heads, self.dtype, self.device)

    @property
    def req_to_token(self) -> Tensor:
        """[num_rows, max_context_len] SGLang's table of slots; read it in a step, never keep it."""
        table: Tensor = self.runner.req_to_token_pool.req_to_token
        return table

    def kv(self, layer: int) -> PagedKV:
        """One layer's K and V, through the pool's getters (they wait for layer-wise loads)."""
        k_cache, v_cache = self.runner.token_to_kv_pool.get_kv_buffer(layer)
        return PagedKV(k_cache, v_cache, *self._scales.get(layer, (1.0, 1.0)))

    def layer_refusal(self, layer: Any, kwargs: dict[str, Any]) -> str | None:
        """Why a layer's decode must stay dense, with these extra arguments; None if it need not."""
        return layer_refusal(layer, kwargs) or scales_refusal(layer, self.runner.attn_backend, self.kv_dtype)

    def write_kv(self, layer: Any, forward_batch: Any, k: Tensor, v: Tensor) -> None:
        """Write the new tokens' K and V, as the inner backends do in decode."""
        scales = () if self._latent else (layer.k_scale, layer.v_scale)
        self.runner.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v, *scales)

    def absorption(self, layer: Any) -> Callable[[Tensor], Tensor] | None:
        """See `ModelView`."""
        module = self._absorbing.get(layer)
        return None if module is None else lambda q: latent.absorb(q, module.w_kc)

    def fingerprint(self) -> ModelFingerprint:
        """Identity of the model served. Reads the checkpoint's files once."""
        return fingerprint(self.runner.server_args, self.runner.model_config, self.kv_dtype, weights=True)


def kv_dtype_refusal(dtype: torch.dtype, *, quantized: bool = False) -> str | None:
    """Why a KV pool of this dtype cannot be served sparsely; None if it can.

    Args:
        quantized: in blocks with scales of their own.
    """
    if dtype in _KV_DTYPES and not quantized:
        return None
    return (
        f"--sparse-attn: expected a KV cache in float32, float16, bfloat16 or fp8_e4m3; got {dtype}. Remove "
        "--kv-cache-dtype, or set it to fp8_e4m3."
    )


def _tensor_parallel(runner: Any) -> tuple[int, int]:
    """(rank, size): before 0.5.21 on the runner, then in a context of the process."""
    place = getattr(runner, "ps", None)
    if place is None:
        from sglang.srt.runtime_context import get_parallel

        place = get_parallel()
    return int(place.tp_rank), int(place.tp_size)


def kv_scales(layer: Any) -> tuple[float, float]:
    """What a RadixAttention's stored keys and values are multiplied with when they are read; 1 where it has none."""
    return float(layer.k_scale_float or 1.0), float(layer.v_scale_float or 1.0)


def scales_refusal(layer: Any, backend: Any, kv_dtype: torch.dtype) -> str | None:
    """Why the scales of a layer's K and V cannot be followed; None if they can, or if there are none.

    Args:
        layer: a RadixAttention.
        backend: the attention backend; adopted or not.
        kv_dtype: of the pool.
    """
    for written, read in ((layer.k_scale, layer.k_scale_float), (layer.v_scale, layer.v_scale_float)):
        if kv_dtype is _FP8 and (written is None) != (read is None):
            return "scales of K or V that SGLang only writes with, or only reads with"
    if kv_scales(layer) == (1.0, 1.0):
        return None
    if kv_dtype is not _FP8:
        return "scaled K or V"
    return f"scaled K or V, which {_SCALELESS} does not scale" if _is_scaleless(backend) else None


def _is_scaleless(backend: Any) -> bool:
    """Whether an attention backend, or a part of it, leaves scales out."""
    parts = (backend, getattr(backend, "prefill_backend", None), getattr(backend, "decode_backend", None))
    return any(type(part).__name__ == _SCALELESS for part in parts)


def layer_refusal(layer: Any, kwargs: dict[str, Any]) -> str | None:
    """Why a layer's decode must stay dense; None if the sparse path computes exactly what it asks for.

    Scales are looked at apart (`scales_refusal`).
    """
    extras = sorted(name for name, value in kwargs.items() if value is not None and value is not False)
    checks = (
        (bool(extras), f"extra inputs {extras}"),
        (layer.logit_cap not in (0, 0.0, None), "a logit cap"),
        (layer.sliding_window_size is not None and layer.sliding_window_size > -1, "a sliding window"),
        (layer.is_cross_attention, "cross attention"),
        (str(getattr(layer.attn_type, "value", layer.attn_type)) != "decoder", "another attention type"),
        (layer.xai_temperature_len > 0, "temperature scaling"),
    )
    return next((what for bad, what in checks if bad), None)
