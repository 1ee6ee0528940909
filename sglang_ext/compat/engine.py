"""An offline SGLang engine for prebuild and calibration jobs, made from SGLang's own flags."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from sglang_ext.compat.request_tokens import RequestTokens


class OfflineEngine:
    """One engine process group. `open()` starts it, `close()` ends it.

    Args:
        flags: SGLang's command-line flags, ours among them.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        self._flags = list(flags)
        self._engine: Any = None

    def open(self) -> None:
        """Start the engine; takes as long as loading the model. Raises what SGLang raises."""
        from sglang.srt.plugins import load_plugins

        from sglang_ext.compat import versions

        message = versions.unsupported_message(versions.installed())
        if message:
            raise RuntimeError(message)
        load_plugins()
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.server_args import prepare_server_args

        self._engine = Engine(server_args=prepare_server_args(self._flags))

    def close(self) -> None:
        """Stop all processes of the engine."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    @cached_property
    def tokens(self) -> RequestTokens:
        """Token ids as the server makes them of requests."""
        engine = self._engine
        return RequestTokens(engine.tokenizer_manager, engine.template_manager, engine.loop.run_until_complete)

    @property
    def context_len(self) -> int:
        """Longest request in tokens, the generated one included."""
        return int(self._engine.tokenizer_manager.model_config.context_len)

    def state(self) -> dict[str, Any]:
        """The plugin's own state in the scheduler process."""
        info = self._engine.get_server_info()
        state: dict[str, Any] = info["internal_states"][0]["sparse_attn"]
        return state

    def prefill(
        self,
        rid: str,
        input_ids: Sequence[int],
        extra_key: str | None = None,
        cache_salt: str | None = None,
        *,
        max_new_tokens: int = 1,
    ) -> None:
        """Prefill one prompt and generate, greedily, until `max_new_tokens` or the model's end token.

        Raises:
            ValueError: SGLang refuses the request, for instance a cache_salt on 0.5.16.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        fields: dict[str, Any] = {"extra_key": extra_key}
        if cache_salt is not None:
            if "cache_salt" not in getattr(GenerateReqInput, "__annotations__", {}):
                raise ValueError(
                    "expected no cache_salt: this SGLang joins it into extra_key; give the joined value as extra_key"
                )
            fields["cache_salt"] = cache_salt
        request = GenerateReqInput(
            input_ids=list(input_ids),
            rid=rid,
            sampling_params={"temperature": 0.0, "max_new_tokens": max_new_tokens},
            **{name: value for name, value in fields.items() if value is not None},
        )
        generator = self._engine.tokenizer_manager.generate_request(request, None)
        self._engine.loop.run_until_complete(generator.__anext__())
