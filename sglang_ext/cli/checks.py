"""What commands find out of a server before, or without, a start: each problem is one line."""

from __future__ import annotations

import argparse
import io
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.cli.arguments import checkpoint_options, sglang_option
from sglang_ext.compat.engine import EngineStartError
from sglang_ext.profiles import local_folder
from sglang_ext.storage import ENV_STORE, default_store

if TYPE_CHECKING:  # imports SGLang
    from sglang_ext.compat.preview import ServerPreview

SAID = "sglang-ext: "
"""What the plugin's own messages begin with."""


def engine_refusal(model_path: str, sglang_flags: Sequence[str]) -> str | None:
    """Why SGLang cannot be started with this model on this machine, as far as that is seen at once; None if it may."""
    return model_refusal(model_path, sglang_flags) or _device_refusal(sglang_option(sglang_flags, "--device"))


def model_refusal(model_path: str, sglang_flags: Sequence[str]) -> str | None:
    """Why SGLang cannot be started with this model, as far as that is seen at once; None if it may."""
    if local_folder(model_path, *checkpoint_options(sglang_flags)) is not None:
        return None
    owner, _, name = model_path.partition("/")  # of a name on the hub, which SGLang would download
    is_path = owner in ("", ".", "..", "~") or "/" in name or os.path.exists(model_path) or os.path.isdir(owner)
    if is_path or os.environ.get("HF_HUB_OFFLINE") == "1":
        return not_local(model_path)
    return None


def not_local(model_path: str) -> str:
    """What to tell of a model that is not on this machine."""
    return (
        f"expected --model-path to be a folder, or a name in the local Hugging Face cache; got {model_path!r}. Correct "
        "it, or download the model first"
    )


def _device_refusal(device: str | None) -> str | None:
    """Of SGLang's; without one it takes an accelerator."""
    import torch

    if device is None and not torch.accelerator.is_available() and os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return "expected a GPU, or --device among SGLang's flags (behind --); got neither. Add -- --device cpu"
    try:
        kind = device and torch.device(device).type
    except RuntimeError:
        return f"expected --device to be cpu, cuda or another device of PyTorch, got {device!r}. Choose one of them"
    if kind == "cuda" and not torch.cuda.is_available():
        return f"expected a GPU for --device {device}, got none. Say --device cpu, or run where there is one"
    return None


def measuring_refusal(device: str) -> str | None:
    """Why `--device` of calibrate cannot be used here; None if it can."""
    import torch

    kind, _, number = device.partition(":")
    if device in ("auto", "cpu"):
        return None
    if kind != "cuda" or not (number or "0").isdecimal():
        return f"expected --device to be cpu, cuda, cuda:NUMBER or auto, got {device!r}. Choose one of them"
    if int(number or 0) >= torch.cuda.device_count():
        return f"expected --device {device} to be there, got {torch.cuda.device_count()} CUDA devices. Say cpu"
    return None


def num_layers_of(model_path: str, sglang_flags: Sequence[str]) -> int | None:
    """Layers of a model, where its folder says so before it is loaded."""
    folder = local_folder(model_path, *checkpoint_options(sglang_flags))
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((Path(folder or "") / "config.json").read_text())["num_hidden_layers"])
    return None


def preview_server(args: argparse.Namespace, *, plugin: bool = True) -> ServerPreview:
    """The server of a command's --model-path, --store, --sparse-attn-config and SGLang's flags.

    Args:
        args: of the command.
        plugin: with `--sparse-attn`.

    Raises:
        EngineStartError: the model is not on this machine, or SGLang or the plugin refuses what was given.
    """
    if local_folder(args.model_path, *checkpoint_options(args.sglang_flags)) is None:
        raise EngineStartError(not_local(args.model_path))
    import torch

    said = io.StringIO()
    own = ["--model-path", args.model_path, "--log-level", "error", *args.sglang_flags]
    if sglang_option(own, "--device") is None and not torch.accelerator.is_available():
        own += ["--device", "cpu"]  # without an accelerator SGLang knows no device by itself
    with ExitStack() as opened:
        if plugin:
            store = args.store if args.store is not None else os.environ.get(ENV_STORE) or None
            if store is None and not os.path.isdir(default_store()):
                store = opened.enter_context(tempfile.TemporaryDirectory())  # a start would make the default one
            own += ["--sparse-attn", *(["--sparse-attn-store", store] if store is not None else [])]
            own += ["--sparse-attn-config", args.sparse_attn_config] if args.sparse_attn_config else []
        try:
            with redirect_stderr(said):
                from sglang_ext.compat.preview import ServerPreview

                return ServerPreview(own)
        except SystemExit as error:
            lines = [line for line in said.getvalue().splitlines() if line.startswith(SAID)]
            raise EngineStartError(lines[-1].removeprefix(SAID) if lines else said.getvalue()[-500:]) from error
        except Exception as error:  # SGLang's, of whatever kind
            raise EngineStartError(str(error) or repr(error)) from error
