"""What an offline job hears of SGLang's own functions: signals, flags that it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("sglang")

_SIGNALS = """
import asyncio, json, os, signal, time
from types import SimpleNamespace
from sglang.srt.managers.tokenizer_manager import SignalHandler, TokenizerManager
from sglang_ext.cli.stopping import Terminated, heed_sigterm
from sglang_ext.compat.engine import EngineDiedError, take_signals_back

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

out = {}
for name, number in (("term", signal.SIGTERM), ("quit", signal.SIGQUIT)):
    for place in ("between", "within"):
        heed_sigterm()
        mine = signal.getsignal(signal.SIGTERM)
        started = engine()
        take_signals_back(started, mine)
        async def request():
            started.tokenizer_manager.auto_create_handle_loop()  # as each request does
            await asyncio.sleep(6)
        wait = (lambda: time.sleep(6)) if place == "between" else (lambda: started.loop.run_until_complete(request()))
        out[f"{name} {place}"] = heard(number, wait)
print("RESULT", json.dumps(out))
"""

_FLAGS = """
import json
from sglang_ext.compat.engine import EngineStartError, OfflineEngine
out = {}
for name, flags in json.loads(__import__("sys").argv[1]).items():
    engine = OfflineEngine(flags)
    try:
        engine.open()
        out[name] = "started"
    except EngineStartError as error:
        out[name] = str(error)
    finally:
        engine.close()
print("RESULT", json.dumps(out))
"""


def _run(code: str, *words: str) -> Any:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "PYTEST_"))}
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=600, env=clean)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(lines[-1][7:])


def test_signals_are_heard_at_once_within_a_request_and_between_two() -> None:
    assert _run(_SIGNALS) == {
        "term between": ["Terminated", True],
        "term within": ["Terminated", True],
        "quit between": ["EngineDiedError", True],
        "quit within": ["EngineDiedError", True],
    }


@pytest.mark.full
def test_flags_that_sglang_refuses_are_one_line_before_a_process_starts() -> None:
    base = ["--model-path", "models/needle", "--device", "cpu"]
    said = _run(_FLAGS, json.dumps({"unknown": [*base, "--pagesize", "16"], "bad": [*base, "--dtype", "float33"]}))
    assert "unrecognized arguments: --pagesize" in said["unknown"]
    assert "float33" in said["bad"]
    for line in said.values():
        assert line.startswith("expected flags of SGLang behind --, got: ")
        assert "\n" not in line
