"""Device memory of the plugin, promised before SGLang sizes its KV pool."""

from __future__ import annotations

import logging
from typing import Any

from sglang_ext.compat.server_args import settings_of
from sglang_ext.config import Build, DecodePath, SparseAttnConfig

logger = logging.getLogger(__name__)

BUFFER_BYTES = 512 << 20
"""For what shared and sparse steps need at a fixed place, and for builds beside serving (a piece, samples): more than
the table in docs/operating.md adds up to for 8 KV heads of 128 and contexts of 131,072 tokens."""


def promised_bytes(config: SparseAttnConfig) -> int:
    """Device bytes that the plugin may take beside the KV pool."""
    if config.decode_path is DecodePath.STOCK or config.build is Build.CAPTURE:
        return 0
    buffers = 0 if config.share_prefixes is False else BUFFER_BYTES
    return buffers + (0 if config.decode_path is DecodePath.EXACT else config.index_gpu_bytes)


def after_profile_available_bytes(result: int, configurator: Any, *_args: Any, **_kwargs: Any) -> int:
    """Bytes left for the KV pool, less what is ours.

    Raises:
        ValueError: nothing would be left; as SGLang does where the weights leave nothing.
    """
    settings = None if configurator.is_draft_worker else settings_of(configurator.server_args)
    if settings is None or configurator.device != "cuda":
        return result
    promised = promised_bytes(settings.config)
    if promised >= result:
        raise ValueError(
            f"--sparse-attn: expected more than {promised} bytes of device memory beside the weights, for indexes "
            f"(index_gpu_bytes {settings.config.index_gpu_bytes}) and buffers; got {result}. Lower index_gpu_bytes in "
            "--sparse-attn-config, set decode_path to exact (no indexes), or raise --mem-fraction-static."
        )
    if promised:
        logger.info(
            "sparse attention: %.2f GiB of device memory are kept for indexes and buffers, %.2f GiB are left for KV",
            promised / (1 << 30),
            (result - promised) / (1 << 30),
        )
    return result - promised
