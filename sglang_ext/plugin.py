"""The entry point that SGLang calls in each of its processes (group `sglang.srt.plugins`).

`register()` opens no file, socket or device: it only registers hooks. With `--sparse-attn` given, a failure
here stops the start; SGLang itself would log it and serve without the plugin.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from sglang_ext.compat import versions

# Nothing else of ours is imported here: an import that fails in SGLang's loader would only be logged.
_ENV_ENABLE = "SGLANG_SPARSE_ATTN"


def _asked_for() -> bool:
    """Whether the user asked for sparse attention, as far as can be known before SGLang parses its flags."""
    enabled = os.environ.get(_ENV_ENABLE, "").strip().lower() in ("1", "true", "yes", "on")
    return enabled or any(arg.split("=")[0].startswith("--sparse-attn") for arg in sys.argv[1:])


def register() -> None:
    """Register the hooks. Raises SystemExit, with a message, where `--sparse-attn` cannot work."""
    message = versions.unsupported_message(versions.installed())
    if message is None:
        try:
            from sglang_ext.compat import seams

            seams.register()
            return
        except Exception as error:
            message = f"sglang-ext: could not hook into SGLang: {type(error).__name__}: {error}"
            if not _asked_for():
                raise
    if _asked_for():
        print(message, file=sys.stderr, flush=True)
        raise SystemExit(2)


def server_args(*, config: dict[str, Any] | None = None, store: str | None = None, **kwargs: Any) -> Any:
    """ServerArgs for `sglang.Engine(server_args=...)`, with sparse attention.

    Args:
        config: what `--sparse-attn-config` takes, as a dict.
        store: what `--sparse-attn-store` takes.
        **kwargs: SGLang's own arguments.

    Raises:
        ConfigError: a bad configuration or a missing store folder.
        RuntimeError: an SGLang that is not supported, or the plugin is not loaded (`SGLANG_PLUGINS`).

    Example:
        >>> engine = sglang.Engine(server_args=server_args(model_path="M", config={"keep_ratio": 0.1}))
    """
    import json
    from types import SimpleNamespace

    from sglang.srt.plugins import load_plugins

    message = versions.unsupported_message(versions.installed())
    if message:
        raise RuntimeError(message)
    load_plugins()
    from sglang.srt.server_args import ServerArgs

    from sglang_ext.compat import flags
    from sglang_ext.compat.seam import assert_in_place
    from sglang_ext.compat.server_args import attach, model_folder
    from sglang_ext.config import ConfigError, make_settings

    kwargs.setdefault("log_level", "error")
    given = SimpleNamespace(**kwargs)
    settings = make_settings(json.dumps(config) if config else None, store, model_folder(given))
    if message := flags.given_twice(given, settings.config):
        raise ConfigError(message)
    record = ServerArgs(**kwargs, **flags.verify_arguments(settings.config))
    assert_in_place(launcher=True)
    attach(record, settings)
    return record
