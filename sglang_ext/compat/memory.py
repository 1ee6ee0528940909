"""Device memory of the plugin, promised before SGLang sizes its KV pool."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from sglang_ext.compat import latent
from sglang_ext.compat.server_args import settings_of
from sglang_ext.config import PAGE_TOKENS, Settings
from sglang_ext.decode.buffers import KEPT_BYTES
from sglang_ext.decode.planner import MAX_BATCH
from sglang_ext.methods import METHODS
from sglang_ext.methods.combined import CombinedSpec
from sglang_ext.methods.layer_plan import heads_of_rank
from sglang_ext.offload.attention import PLACES
from sglang_ext.offload.selecting import SELECTING_BYTES
from sglang_ext.options import KV_PER_INDEX_BYTE, Build, DecodePath, Offload, SparseAttnConfig
from sglang_ext.profiles import layer_plan_of_rank

logger = logging.getLogger(__name__)

BUFFER_BYTES = 768 << 20
"""For what shared and sparse steps need at a fixed place and while costs are measured: more than the table in
docs/operating.md adds up to for 8 KV heads of 128 and contexts of 131,072 tokens."""
COMBINED_BYTES = 256 << 20
"""For the scores of a second and a third method, or the lists between two."""
BUILD_BYTES = 768 << 20
"""For builds beside serving: four samples of queries of an 8B model, and a piece with what its builder makes of it."""


def promised_bytes(config: SparseAttnConfig, available: int, *, graphs: bool) -> int:
    """Device bytes that the plugin may take beside the KV pool.

    Args:
        config: the settings.
        available: bytes for the KV pool and for all that is promised.
        graphs: whether decode steps replay graphs; without them a ready index is always used.
    """
    if config.build is Build.CAPTURE or config.decode_path is DecodePath.STOCK:
        return 0  # a job, or a server in which nothing is attended here
    shares = config.share_prefixes is not False
    indexes = config.decode_path is not DecodePath.CASCADE
    if graphs:
        indexes = indexes and shares and METHODS[config.method].decode_op is not None
    total = BUFFER_BYTES if shares or indexes else 0
    if indexes:
        total += BUILD_BYTES if config.build is Build.SHARED else 0
        total += COMBINED_BYTES if graphs and issubclass(METHODS[config.method].spec, CombinedSpec) else 0
        total += config.suffix_index_bytes if config.suffix_dense_tokens is not None else 0
        kept = config.steps_per_search > 1 or config.select_ahead or _reuses_earlier(config.layer_plan)
        total += KEPT_BYTES if kept else 0
        total += KEPT_BYTES if config.trace_folder is not None else 0  # copies of lists
        # The pool takes what is left. So 1 of 21 parts is a twentieth of a pool that has the other 20.
        given, rest = config.index_gpu_bytes, max(0, available - total)
        total += rest // (KV_PER_INDEX_BYTE + 1) if given is None else given
    return total


def _reuses_earlier(layers: Sequence[Any]) -> bool:
    """Whether a layer of a plan reuses another one than the last that selects: lists of all of these are kept."""
    latest = None
    for layer, role in enumerate(layers):
        if role == "anchor":
            latest = layer
        if isinstance(role, Mapping) and role.get("reuse") != latest:
            return True
    return False


def decode_graphs(device: str) -> bool:
    """Whether decode steps of this process replay graphs, by SGLang's own word: several flags turn them off."""
    if device != "cuda":
        return False
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend

    return not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)


def offload_bytes(settings: Settings, configurator: Any) -> int:
    """Device bytes of offload, of one rank: rows behind the KV pool of all layers, pieces of one layer, of layers that
    attend all what the host has, too, and what prefills select with.
    """
    offload = settings.config.offload
    if offload is None or settings.config.build is Build.PREFILL:
        return 0
    model_config = configurator.model_config
    heads, *dims = latent.kv_shape(model_config)
    layers, widths = int(model_config.num_hidden_layers), sum(dims)
    sizes: Any = SimpleNamespace(num_layers=layers, num_kv_heads=heads)
    plan = layer_plan_of_rank(settings.config.layer_plan, settings.profile, sizes)
    ranks = int(getattr(configurator.server_args, "tp_size", 1) or 1)
    heads, host_bytes = len(heads_of_rank(heads, 0, ranks)), offload.host_bytes // ranks
    per_layer = heads * widths * int(model_config.dtype.itemsize)
    rows = offload.resident_tokens * layers + PLACES * offload.staging_tokens
    cells = host_bytes // per_layer * 4 * heads  # of `ResidentState.cell_of_row`, of all layers
    selecting = 0 if offload.select_prefill_tokens is None else SELECTING_BYTES
    return cells + rows * per_layer + len(plan.dense_layers) * host_bytes // layers + selecting


def cache_rank_bytes(config: SparseAttnConfig, configurator: Any) -> int:
    """Device bytes of what a cache rank reads and writes: queries of all layers, and lists as `COMBINED_BYTES` has."""
    if config.cache_device is None or config.decode_path in (DecodePath.STOCK, DecodePath.CASCADE):
        return 0
    model_config = configurator.model_config
    _, width, _ = latent.kv_shape(model_config)
    rows = int(model_config.num_hidden_layers) * MAX_BATCH
    return COMBINED_BYTES + rows * int(model_config.num_attention_heads) * width * int(model_config.dtype.itemsize)


_offload: Offload | None = None
"""What asks for rows behind the KV pool in this process."""


def offload_rows(page_size: int) -> int:
    """Rows for residents, as whole pages of SGLang's and of ours."""
    unit = math.lcm(page_size, PAGE_TOKENS)
    return 0 if _offload is None else -(-_offload.resident_tokens // unit) * unit


_kv_bytes = 0
"""What SGLang sizes the KV pool of this process's target model from."""


def kv_bytes() -> int:
    """Device bytes that the KV pool of the target model may take, the least of all ranks. 0 before it is sized."""
    return _kv_bytes


def after_profile_available_bytes(result: int, configurator: Any, *_args: Any, **_kwargs: Any) -> int:
    """Bytes left for the KV pool, less what is ours.

    Raises:
        ValueError: nothing would be left; as SGLang does where the weights leave nothing.
    """
    global _kv_bytes, _offload
    settings = None if configurator.is_draft_worker else settings_of(configurator.server_args)
    if settings is None:
        return result
    _kv_bytes = result
    _offload = settings.config.offload if settings.config.build is not Build.PREFILL else None
    if configurator.device != "cuda":
        return result
    behind = offload_bytes(settings, configurator) + cache_rank_bytes(settings.config, configurator)
    promised = behind + promised_bytes(settings.config, result - behind, graphs=decode_graphs(configurator.device))
    if promised >= result:
        config = settings.config
        given = {} if config.index_gpu_bytes is None else {"index_gpu_bytes": config.index_gpu_bytes}
        if config.suffix_dense_tokens is not None:
            given["suffix_index_bytes"] = config.suffix_index_bytes
        named = "".join(f", {name} {size}" for name, size in given.items())
        lower = f"Lower {' or '.join(given)} in --sparse-attn-config, set" if given else "Set"
        raise ValueError(
            f"--sparse-attn: expected more than {promised} bytes of device memory beside the weights, for buffers and "
            f"indexes{named}; got {result}. {lower} decode_path to cascade (no indexes), or raise "
            "--mem-fraction-static."
        )
    if promised:
        logger.info(
            "sparse attention: %.2f GiB of device memory are kept for indexes and buffers, %.2f GiB are left for KV",
            promised / (1 << 30),
            (result - promised) / (1 << 30),
        )
    _kv_bytes = result - promised
    return _kv_bytes
