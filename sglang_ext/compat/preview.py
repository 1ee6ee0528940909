"""What a server with given flags would be, by SGLang's own record of them: no process is started, no weights loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property

import torch

from prefix_index import ModelFingerprint
from sglang_ext.compat import adoption, flags, latent, memory
from sglang_ext.compat.checkpoint import (
    attention_backends,
    fingerprint,
    kv_dtype_of,
    latent_refusal,
    model_config_of,
    resolved,
)
from sglang_ext.compat.engine import checked_record
from sglang_ext.compat.request_tokens import RequestTokens
from sglang_ext.compat.runner import kv_dtype_refusal
from sglang_ext.compat.server_args import settings_of
from sglang_ext.config import Settings
from sglang_ext.options import SparseAttnConfig


class ServerPreview:
    """A server that could be started with these flags.

    What only a loaded model tells is not known: a KV dtype that a quantized checkpoint asks for, a sliding window that
    the model's code sets.

    Attributes:
        settings: the plugin's; None without `--sparse-attn`.
        device: `cuda`, `cpu`, ...
        tp_size: tensor-parallel ranks.
        num_qo_heads: of the whole model.
        vocab_size: of the model.
        dtype: of the model's queries.
        attention_backends: of prefill and of decode, by SGLang's names.
        decode_graphs: whether decode steps would replay CUDA graphs.

    Args:
        flags: SGLang's, `--model-path` and ours among them.

    Raises:
        EngineStartError: SGLang refuses the flags, or is not supported.
        SystemExit: the plugin refuses them; the message is printed to standard error.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        self._record = checked_record(flags)
        self._record.check_server_args()  # ours is called behind SGLang's own
        self._args = args = resolved(self._record)
        self._config = model_config_of(self._record)
        self.settings: Settings | None = settings_of(self._record)
        self.device, self.tp_size = str(args.device), int(args.tp_size)
        self.num_qo_heads = int(self._config.num_attention_heads)
        self.vocab_size = int(self._config.vocab_size)
        self.dtype: torch.dtype = self._config.dtype
        self.attention_backends = attention_backends(args)
        self.decode_graphs = self.device == "cuda" and not self._has_graphs("decode", "disabled")

    def promised_bytes(self, available: int) -> int:
        """Device memory that the plugin keeps beside the KV pool, of so many bytes for both."""
        if self.settings is None or self.device != "cuda":
            return 0
        return memory.promised_bytes(self.settings.config, available, graphs=self.decode_graphs)

    def _has_graphs(self, phase: str, backend: str) -> bool:
        config = self._args.cuda_graph_config
        return config is not None and bool(getattr(config, phase).backend == backend)

    @property
    def refusal(self) -> str | None:
        """Why the scheduler process would end its start, as far as the record says so; None where nothing does."""
        settings, config = self.settings, self._config
        ours = settings.config if settings else SparseAttnConfig()
        if getattr(config, "is_hybrid_swa", False):
            return "--sparse-attn: expected full attention; got a sliding-window model (unsupported_mode)."
        return (
            adoption.name_refusal(self.attention_backends)
            or kv_dtype_refusal(self._kv_dtype)
            or latent_refusal(self._record, ours)
            or self._gpu_refusal()
            or (settings and flags.refusal(self._args, settings.config))
            or (settings and flags.graph_refusal(self.device, settings.config, self._has_graphs))
            or None
        )

    def _gpu_refusal(self) -> str | None:
        """Of the GPUs that are there: those of ranks are of one kind."""
        if self.device != "cuda" or not torch.cuda.is_available() or not latent.is_latent(self._config):
            return None
        return latent.device_refusal(self.num_qo_heads // self.tp_size, self.dtype, torch.device("cuda", 0))

    @cached_property
    def _kv_dtype(self) -> torch.dtype:
        return kv_dtype_of(self._args, self._config)

    def model(self, *, weights: bool = True) -> ModelFingerprint:
        """Of the model served; see `checkpoint.fingerprint`."""
        return fingerprint(self._args, self._config, self._kv_dtype, weights=weights)

    @cached_property
    def tokens(self) -> RequestTokens:
        """Token ids as the server makes them of requests, by its tokenizer and chat template; takes a second."""
        from sglang.srt.entrypoints.engine import init_tokenizer_manager
        from sglang.srt.server_args import PortArgs

        try:
            from sglang.srt.runtime_context import publish
        except ImportError:  # 0.5.16 has no record to publish
            pass
        else:
            publish(self._record, role="tokenizer")
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        manager, templates = init_tokenizer_manager(self._record, PortArgs.init_new(self._record))
        return RequestTokens(manager, templates, loop.run_until_complete)
