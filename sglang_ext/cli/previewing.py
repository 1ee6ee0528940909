"""The server that a command is asked about, without a start: from the command's own arguments."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
from typing import TYPE_CHECKING

from sglang_ext.cli.arguments import checkpoint_options, sglang_option
from sglang_ext.cli.checks import not_local
from sglang_ext.compat.engine import EngineStartError
from sglang_ext.profiles import local_folder
from sglang_ext.storage import ENV_STORE, default_store

if TYPE_CHECKING:  # imports SGLang
    from sglang_ext.compat.preview import ServerPreview

SAID = "sglang-ext: "
"""What the plugin's own messages begin with."""


def config_text(args: argparse.Namespace) -> str | None:
    """The configuration that was given, with the profile that was. Raises ConfigError."""
    from sglang_ext.config import decode_config

    given: str | None = args.sparse_attn_config
    return given if args.profile is None else json.dumps({**decode_config(given), "profile": args.profile})


def preview_server(args: argparse.Namespace, *, plugin: bool = True) -> ServerPreview:
    """The server of a command's --model-path, --store, --sparse-attn-config, --profile and SGLang's flags.

    Args:
        args: of the command.
        plugin: with `--sparse-attn`.

    Raises:
        EngineStartError: the model is not on this machine, or SGLang or the plugin refuses what was given.
    """
    if local_folder(args.model_path, *checkpoint_options(args.sglang_flags)) is None:
        raise EngineStartError(not_local(args.model_path))
    said = io.StringIO()
    with contextlib.ExitStack() as opened:
        own = ["--model-path", args.model_path, "--log-level", "error", *args.sglang_flags]
        if plugin:
            store = args.store or os.environ.get(ENV_STORE)
            if store is None and not os.path.isdir(default_store()):
                store = opened.enter_context(tempfile.TemporaryDirectory())  # a start would make the default one
            own += ["--sparse-attn", *(["--sparse-attn-store", store] if store else [])]
        try:
            text = config_text(args) if plugin else None
            own += ["--sparse-attn-config", text] if text else []
            with contextlib.redirect_stderr(said):
                from sglang_ext.compat.preview import ServerPreview

                return ServerPreview([*own, *device_flags(own)])
        except SystemExit as error:
            lines = [line for line in said.getvalue().splitlines() if line.startswith(SAID)]
            raise EngineStartError(lines[-1].removeprefix(SAID) if lines else said.getvalue()[-500:]) from error
        except Exception as error:  # SGLang's, of whatever kind
            raise EngineStartError(str(error) or repr(error)) from error


def device_flags(flags: list[str]) -> list[str]:
    """To add to SGLang's: without an accelerator it knows no device by itself."""
    import torch

    named = sglang_option(flags, "--device") is not None or torch.accelerator.is_available()
    return [] if named else ["--device", "cpu"]
