"""Flags, and the settings they become, on SGLang's ServerArgs record."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from prefix_index import printable
from sglang_ext.compat import administration, flags, latent
from sglang_ext.compat.seam import assert_in_place
from sglang_ext.config import ENV_CONFIG, ConfigError, Settings, enabled_by_env, make_settings, settings_from_env
from sglang_ext.profiles import local_folder
from sglang_ext.storage import ENV_STORE, default_store

#: Attribute of the record. It is pickled with the record in every supported version (a test starts both).
ATTRIBUTE = "_sparse_attn"


def refuse(message: str) -> NoReturn:
    """Stop the start with one clear line; SystemExit passes SGLang's `except Exception` in its loader."""
    print(f"sglang-ext: {printable(message)}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def after_add_cli_args(_result: None, parser: argparse.ArgumentParser) -> None:
    """Add the flags in a group of their own."""
    group = parser.add_argument_group("sparse attention (sglang-ext)")
    group.add_argument(
        "--sparse-attn",
        action="store_true",
        help="Decode behind an indexed shared prefix by reading a selected part of its KV. Prompts without "
        "an index, and all prefill, run on SGLang's own attention backend.",
    )
    group.add_argument(
        "--sparse-attn-config",
        metavar="JSON|@FILE",
        default=os.environ.get(ENV_CONFIG),
        help="Settings as a JSON object, for instance '{\"keep_ratio\": 0.1}', or @file. Unknown keys are "
        f"an error. Environment: {ENV_CONFIG}.",
    )
    group.add_argument(
        "--sparse-attn-store",
        metavar="DIR|ipc://SOCKET",
        default=os.environ.get(ENV_STORE),
        help="Index store: a folder, which must exist, or the socket of a service (sglang-ext store serve). Default: "
        f"{default_store().replace('%', '%%')}. Environment: {ENV_STORE}.",
    )


def attach(record: Any, settings: Settings) -> None:
    """Put settings on a ServerArgs record, so that every process of this server sees them."""
    setattr(record, ATTRIBUTE, settings.dump())


def settings_of(record: Any) -> Settings | None:
    """The settings of a record; None when sparse attention is off.

    The environment counts where a record was made without a command line (`sglang.Engine`).
    """
    text = getattr(record, ATTRIBUTE, None)
    if text is not None:
        return Settings.load(text) if text else None
    return settings_from_env(os.environ, model_folder(record) if enabled_by_env(os.environ) else None)


def model_folder(source: Any) -> str | None:
    """Where the model's files are, by a record or by parsed flags; None where they are not on this machine yet."""
    names = ("model_path", "revision", "download_dir")
    return local_folder(*(getattr(source, name, None) for name in names))


def around_from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """Check our flags before SGLang looks at its own, and attach the settings to the record."""
    settings = None
    config, store = getattr(args, "sparse_attn_config", None), getattr(args, "sparse_attn_store", None)
    if getattr(args, "sparse_attn", False) or enabled_by_env(os.environ):
        try:
            settings = make_settings(config, store, model_folder(args))
        except ConfigError as error:
            refuse(str(error))
    elif (config, store) != (os.environ.get(ENV_CONFIG), os.environ.get(ENV_STORE)):
        refuse(
            "expected --sparse-attn together with --sparse-attn-config or --sparse-attn-store; got one of these "
            "alone. Add --sparse-attn, or remove it."
        )
    if settings is not None:
        if message := flags.given_twice(args, settings.config):
            refuse(message)
        vars(args).update(flags.verify_arguments(settings.config) | latent.arguments(args))
    record = original(cls, args)
    if settings is not None:
        attach(record, settings)
    return record


def after_check_server_args(_result: None, record: Any) -> None:
    """The launcher's last word before processes start."""
    try:
        settings = settings_of(record)
    except ConfigError as error:
        refuse(str(error))
    if settings is None:
        return
    from sglang_ext.compat import checkpoint

    # What the user left open is decided by now, and as good as given.
    message = flags.refusal(checkpoint.resolved(record), settings.config)
    message = message or checkpoint.latent_refusal(record, settings.config)
    if message := message or checkpoint.model_refusal(record, settings):
        refuse(message)
    try:
        assert_in_place(launcher=True)
    except RuntimeError as error:
        refuse(str(error))
    attach(record, settings)
    administration.serve(settings)
