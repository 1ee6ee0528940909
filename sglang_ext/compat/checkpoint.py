"""Which model a checkpoint is, by SGLang's own view of its configuration: before it is loaded, and when it serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from prefix_index import ModelFingerprint, canonical_digest
from sglang_ext.compat import latent
from sglang_ext.compat.latent import kv_shape
from sglang_ext.config import Settings
from sglang_ext.fingerprint import config_digests, read_config, resolve_folder, weights_digest
from sglang_ext.methods.profile import ProfileError
from sglang_ext.options import SparseAttnConfig
from sglang_ext.profiles import check_profile, layer_plan_of_rank, local_folder
from sglang_ext.ranks import build_refusal

logger = logging.getLogger(__name__)

#: In place of what is known only when the model is loaded; a profile is not compared by it.
_UNREAD = "unread"
_SUMMED_WORDS = 1 << 20


def fingerprint(
    args: Any, config: Any, kv_dtype: torch.dtype | None = None, *, weights: bool = False
) -> ModelFingerprint:
    """Identity of the model that a server serves. Reads the checkpoint's configuration, and its weights if asked for.

    Args:
        args: resolved ServerArgs.
        config: SGLang's ModelConfig.
        kv_dtype: of the KV pool; None: not known yet, the fingerprint's is no value.
        weights: whether to read them; otherwise their digest is no value, and their files need not be there.

    Raises:
        FileNotFoundError: the model, or its weights, are not on this machine.
    """
    folder = resolve_folder(config.model_path, args.revision, args.download_dir)
    raw = read_config(folder, args.json_model_override_args)
    raw["torchao_config"] = getattr(args, "torchao_config", "") or ""
    num_kv_heads, head_dim, v_head_dim = kv_shape(config)
    config_digest, rope_digest = config_digests(raw, getattr(config, "quantization", None))
    return ModelFingerprint(
        config_digest=config_digest,
        weights_digest=_weights_of(args, folder) if weights else _UNREAD,
        rope_digest=rope_digest,
        kv_dtype=_UNREAD if kv_dtype is None else str(kv_dtype).removeprefix("torch."),
        num_layers=int(config.num_hidden_layers),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
    )


def _weights_of(args: Any, folder: str) -> str:
    if str(getattr(args.load_format, "value", args.load_format)) == "dummy":
        return canonical_digest({"dummy": int(args.random_seed or 0)})
    return weights_digest(folder)


def model_refusal(record: Any, settings: Settings) -> str | None:
    """Why the profile or the layer plan is not the model's of this resolved ServerArgs, before processes start; None
    where nothing says so yet.
    """
    plan = settings.config.layer_plan
    if settings.profile is None and not plan:
        return None
    config = model_config_of(record)
    if local_folder(config.model_path, record.revision, record.download_dir) is None:  # not on this machine yet
        return None
    model = fingerprint(record, config)
    try:
        if settings.profile is not None:
            if config.quantization or record.quantization:  # which of these it is, SGLang may find out later
                model = msgspec.structs.replace(model, config_digest=settings.profile.model.config_digest)
            check_profile(settings.profile, model)
        layer_plan_of_rank(plan, settings.profile, model, 0, int(record.tp_size))
    except ProfileError as error:
        return str(error)
    except (TypeError, ValueError) as error:
        return f"--sparse-attn-config: layer_plan: {error}"
    return None


def latent_refusal(record: Any, config: SparseAttnConfig) -> str | None:
    """Why a server of this ServerArgs cannot serve its MLA model with our settings, before processes start; None if it
    can, or for another model.
    """
    model = model_config_of(record)
    if not latent.is_latent(model):
        return None
    args = resolved(record)
    message = latent.refusal(model, config, attention_backends(args), kv_dtype_of(args, model), str(args.device))
    return message or build_refusal(config.build, int(args.tp_size), kv_shape(model)[0])


def resolved(record: Any) -> Any:
    """What SGLang made of what the flags leave open: 0.5.16 writes it into the record."""
    try:
        from sglang.srt.arg_groups.model_override_base import resolving_view
    except ImportError:
        return record
    view: Callable[[Any], Any] = resolving_view
    return view(record)


def attention_backends(args: Any) -> tuple[str, str]:
    """Of prefill and of decode, by SGLang's names, of resolved ServerArgs."""
    both = args.attention_backend
    return args.prefill_attention_backend or both, args.decode_attention_backend or both


def kv_dtype_of(args: Any, config: Any) -> torch.dtype:
    """Of the KV pool, by SGLang's own function; what a quantized checkpoint asks for is not known.

    Args:
        args: resolved ServerArgs.
        config: SGLang's ModelConfig.
    """
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype

    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=args.kv_cache_dtype,
        model=SimpleNamespace(quant_config=None),
        model_dtype=config.dtype,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend="",
    )
    found: torch.dtype = dtype
    return found


def model_config_of(record: Any) -> Any:
    """SGLang's ModelConfig, which it keeps with the record."""
    if hasattr(record, "get_model_config"):  # before 0.5.19
        return record.get_model_config()
    from sglang.srt.arg_groups import model_override_base

    return model_override_base.model_config_of(record)


def weight_sums(model: torch.nn.Module) -> list[int] | None:
    """A sum for each 4 MiB of the bits of a model's weights and buffers, in which each word has a factor of its place;
    None: they cannot be read, as some quantized ones.
    """
    try:
        tensors = {one.untyped_storage().data_ptr(): one for one in (*model.parameters(), *model.buffers())}
        factors = torch.randint(1 << 31, (_SUMMED_WORDS,), generator=torch.Generator().manual_seed(0)) | 1
        on = {device: factors.to(device) for device in {one.device for one in tensors.values()}}
        for device in on:
            torch.get_device_module(device).synchronize(device)  # loaders copy by streams of other threads
        sums = []
        for tensor in tensors.values():
            bits = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            words = bits if len(bits) % 4 else bits.view(torch.int32)
            sums += [int((part * on[tensor.device][: len(part)]).sum()) for part in torch.split(words, _SUMMED_WORDS)]
        return sums
    except Exception as error:
        logger.info("sparse attention: the weights in memory could not be compared: %r", error)
        return None
