"""An offline SGLang engine for prebuild and calibration jobs, made from SGLang's own flags."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NoReturn

from sglang_ext.compat.request_tokens import RequestTokens


class EngineDiedError(KeyboardInterrupt):
    """A process of the engine ended by itself. It is raised out of whatever the main thread does or waits for.

    asyncio would keep another kind of exception for whoever asks the task that was running; nobody does.
    """


class EngineStartError(RuntimeError):
    """The engine cannot be started with these flags; no process was."""


class OfflineEngine:
    """One engine process group. `open()` starts it, `close()` ends it.

    While it is open, the end of one of its processes raises `EngineDiedError` in the main thread, and SIGTERM does what
    it did before: SGLang would go on until no request is left.

    Args:
        flags: SGLang's command-line flags, ours among them.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        self._flags = list(flags)
        self._engine: Any = None
        self._launched = False
        self._in_main_thread = threading.current_thread() is threading.main_thread()

    def open(self) -> None:
        """Start the engine; takes as long as loading the model.

        Raises:
            EngineStartError: before any process is started: an SGLang that is not supported, or flags that it refuses.
            SystemExit: the same, of what the plugin refuses; the message is printed.
            EngineDiedError: it does not start, or a process ended meanwhile.
        """
        record = checked_record(self._flags)
        from sglang.srt.entrypoints.engine import Engine

        on_sigterm = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
        logging.getLogger("sglang.srt.entrypoints.engine").addFilter(_says_more_than_that)
        self._launched = True
        try:
            self._engine = Engine(server_args=record)
        except Exception as error:
            said = " ".join(str(error).split())
            raise EngineDiedError(f"expected SGLang to start, got {type(error).__name__}: {said}") from error
        if self._in_main_thread:
            take_signals_back(self._engine, on_sigterm)

    def close(self) -> None:
        """Stop all processes of the engine, and those of a start that failed."""
        if not self._launched:
            return
        if self._in_main_thread:
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # that they end is no news now
        if self._engine is not None:
            self._engine.shutdown()
        else:
            from sglang.srt.utils import kill_process_tree

            kill_process_tree(os.getpid(), include_parent=False, wait_timeout=60)
        self._engine, self._launched = None, False

    @cached_property
    def tokens(self) -> RequestTokens:
        """Token ids as the server makes them of requests."""
        engine = self._engine
        return RequestTokens(engine.tokenizer_manager, engine.template_manager, engine.loop.run_until_complete)

    @property
    def context_len(self) -> int:
        """Longest request in tokens, the generated one included."""
        return int(self._engine.tokenizer_manager.model_config.context_len)

    @property
    def vocab_size(self) -> int:
        """Token ids of this model are below it."""
        return int(self._engine.tokenizer_manager.model_config.vocab_size)

    def state(self) -> dict[str, Any]:
        """The plugin's own state in the scheduler process. Raises EngineDiedError where it could not be told."""
        info = self._engine.get_server_info()
        state: dict[str, Any] = info["internal_states"][0]["sparse_attn"]
        if "error" in state:
            raise EngineDiedError(f"expected the plugin's state in the engine, got an error: {state['error']}")
        return state

    def generate(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Answers of requests that run together, in their order.

        Args:
            requests: fields of `/generate`, one request each.

        Raises:
            ValueError: SGLang refuses one of them.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        async def one(fields: dict[str, Any]) -> Any:
            return await self._engine.tokenizer_manager.generate_request(GenerateReqInput(**fields), None).__anext__()

        async def together() -> list[Any]:
            return await asyncio.gather(*map(one, requests))

        return list(self._engine.loop.run_until_complete(together()))

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
            ValueError: a token id is none of the model's; or SGLang refuses the request, for instance a cache_salt
                before 0.5.18.
        """
        refusal = unknown_ids(input_ids, self.vocab_size) or salt_refusal(cache_salt)
        if refusal:
            raise ValueError(refusal)
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens}
        request = {"input_ids": list(input_ids), "rid": rid, "sampling_params": sampling}
        namespace = {"extra_key": extra_key, "cache_salt": cache_salt}
        self.generate([request | {name: value for name, value in namespace.items() if value is not None}])


def take_signals_back(engine: Any, on_sigterm: Any) -> None:
    """Have SGLang take SIGTERM and SIGQUIT, which it does with its first request, and put other handlers in place.

    It takes both for its event loop, which looks at them only while it runs: between requests a job would hear neither.

    Args:
        engine: SGLang's; its loop does not run.
        on_sigterm: handler of SIGTERM from now on.
    """

    async def take() -> None:
        engine.tokenizer_manager.auto_create_handle_loop()

    engine.loop.run_until_complete(take())
    for number, handler in ((signal.SIGTERM, on_sigterm), (signal.SIGQUIT, _raise_died)):
        engine.loop.remove_signal_handler(number)
        signal.signal(number, handler)


def salt_refusal(cache_salt: str | None) -> str | None:
    """Why a prompt cannot have this cache_salt, as a message; None where it can."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    if cache_salt is None or "cache_salt" in getattr(GenerateReqInput, "__annotations__", {}):
        return None
    return "expected no cache_salt: this SGLang joins it into extra_key; give the joined value as extra_key"


def unknown_ids(input_ids: Sequence[int], vocab_size: int) -> str | None:
    """Which token id the model does not have, as a message; None where it has all. SGLang looks at none of them, or at
    those that are too large, and its scheduler dies of the others.
    """
    found = next((place for place, one in enumerate(input_ids) if not 0 <= one < vocab_size), None)
    if found is None:
        return None
    return (
        f"expected token ids in 0..{vocab_size - 1} (the model's vocabulary), got {input_ids[found]} at position "
        f"{found}; tokenize with this model's tokenizer"
    )


class _FlagParser(argparse.ArgumentParser):
    """Raises instead of printing SGLang's whole usage."""

    def error(self, message: str) -> NoReturn:
        raise EngineStartError(f"expected flags of SGLang behind --, got: {message}")


def checked_record(flags: Sequence[str]) -> Any:
    """ServerArgs of the flags, as far as they can be checked before any process is started.

    Raises:
        EngineStartError: an SGLang that is not supported, or SGLang refuses the flags.
        SystemExit: the plugin refuses them; the message is printed.
    """
    from sglang.srt.plugins import load_plugins

    from sglang_ext.compat import versions

    message = versions.unsupported_message(versions.installed())
    if message:
        raise EngineStartError(message)
    load_plugins()
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    parser = _FlagParser(prog="sglang")
    ServerArgs.add_cli_args(parser)
    parser.parse_args(list(flags))
    try:
        record = prepare_server_args(list(flags))
        # SGLang's own handler ends this process by SIGKILL. Before 0.5.19 a record is resolved, and sealed, by now.
        put = object.__setattr__ if versions.older_than("0.5.19") else setattr
        put(record, "custom_sigquit_handler", _raise_died)
        getattr(record, "resolve_once", lambda: None)()  # later ones would do it when they launch
    except Exception as error:
        said = " ".join(str(error).split())
        raise EngineStartError(f"expected flags that SGLang starts with, got {type(error).__name__}: {said}") from error
    return record


def _raise_died(number: int, frame: object) -> NoReturn:
    """SIGQUIT: a process of SGLang says that it fails, or its watchdog that one is gone."""
    signal.signal(number, signal.SIG_IGN)  # the others follow
    raise EngineDiedError("expected SGLang's processes to live, got the end of one; its log above says why")


def _says_more_than_that(record: logging.LogRecord) -> bool:
    """Not the error that SGLang logs about a handler of one's own."""
    return "custom SIGQUIT handler" not in record.getMessage()
