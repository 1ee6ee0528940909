"""What an offline job hears of SGLang's own functions: signals, flags that it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.compat.engine import EngineDiedError, OfflineEngine
from tests.compat.sglang_process import GROUP, in_sglang

pytestmark = GROUP


def heard_signals() -> dict[str, Any]:
    import asyncio
    import functools
    import os
    import signal
    import time
    from types import SimpleNamespace

    from sglang.srt.entrypoints import engine as entrypoint
    from sglang.srt.managers.tokenizer_manager import SignalHandler, TokenizerManager

    from sglang_ext.cli import heed_sigterm
    from sglang_ext.compat.engine import OfflineEngine

    async def forever():
        await asyncio.Event().wait()

    def heard(number, wait):
        # What the main thread hears of a signal in the middle of a wait.
        begun = time.monotonic()
        if os.fork() == 0:
            time.sleep(0.2)
            os.kill(os.getppid(), number)
            os._exit(0)
        try:
            wait()
            said = "nothing"
        except KeyboardInterrupt as error:
            said = type(error).__name__
        return [said, time.monotonic() - begun < 3]

    def engine():
        # SGLang's own functions on a manager without sockets.
        manager = TokenizerManager.__new__(TokenizerManager)
        manager.event_loop, manager.asyncio_tasks, manager.gracefully_exit = None, set(), False
        manager.signal_handler_class = SignalHandler
        manager.handle_loop = manager.sigterm_watchdog = forever
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return SimpleNamespace(tokenizer_manager=manager, loop=loop)

    def within(started: SimpleNamespace) -> None:
        async def request() -> None:
            started.tokenizer_manager.auto_create_handle_loop()  # as each request does
            await asyncio.sleep(6)

        started.loop.run_until_complete(request())

    waits = {"between": lambda started: time.sleep(6), "within": within}
    out = {}
    for name, number in (("term", signal.SIGTERM), ("quit", signal.SIGQUIT)):
        for place, wait in waits.items():
            heed_sigterm()
            started = engine()
            entrypoint.Engine = lambda server_args, started=started: started
            OfflineEngine(["--model-path", "models/needle", "--device", "cpu"]).open()
            out[f"{name} {place}"] = heard(number, functools.partial(wait, started))
    return out


def said_of_flags(given: dict[str, list[str]]) -> dict[str, str]:
    from sglang_ext.compat.engine import EngineStartError, OfflineEngine

    out = {}
    for name, flags in given.items():
        engine = OfflineEngine(flags)
        try:
            engine.open()
            out[name] = "started"
        except EngineStartError as error:
            out[name] = str(error)
        finally:
            engine.close()
    return out


def test_signals_are_heard_at_once_within_a_request_and_between_two() -> None:
    assert in_sglang("tests.compat.test_offline_engine:heard_signals") == {
        "term between": ["Terminated", True],
        "term within": ["Terminated", True],
        "quit between": ["EngineDiedError", True],
        "quit within": ["EngineDiedError", True],
    }


@pytest.mark.full
def test_flags_that_sglang_refuses_are_one_line_before_a_process_starts() -> None:
    base = ["--model-path", "models/needle", "--device", "cpu"]
    given = {"unknown": [*base, "--pagesize", "16"], "bad": [*base, "--dtype", "float33"]}
    said = in_sglang("tests.compat.test_offline_engine:said_of_flags", given)
    assert "unrecognized arguments: --pagesize" in said["unknown"]
    assert "float33" in said["bad"]
    for line in said.values():
        assert line.startswith("expected flags of SGLang behind --, got: ")
        assert "\n" not in line


def test_a_state_that_cannot_be_told_ends_a_job_with_what_the_scheduler_says() -> None:
    engine = OfflineEngine.__new__(OfflineEngine)
    told = {"internal_states": [{"sparse_attn": {"error": "KeyError: 1; see the log"}}]}
    engine._engine = SimpleNamespace(get_server_info=lambda: told)
    with pytest.raises(EngineDiedError, match="expected the plugin's state in the engine, got an error: KeyError: 1"):
        engine.state()
