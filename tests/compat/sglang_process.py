"""Runs a function in a process of its own, in which SGLang was imported and no plugin was loaded.

Importing SGLang takes 14 to 30 s, so one process imports it and every call is a fork of that one. Tests that ask for it
are of one group (`GROUP`), or each process of pytest-xdist would have one.
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

GROUP = pytest.mark.xdist_group("sglang_process")

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["sglang.srt.managers.scheduler", "sglang.srt.entrypoints.engine"])


def _answer(answers: Connection, function: str, arguments: tuple[Any, ...]) -> None:
    try:
        answers.send((pkgutil.resolve_name(function)(*arguments), None))
    except BaseException:
        answers.send((None, traceback.format_exc()))


def _started(target: Callable[..., None], theirs: Connection, *arguments: Any) -> Any:
    """A fork, without environment variables of SGLang and of pytest, in which nothing is downloaded."""
    process = _forks.Process(target=target, args=(theirs, *arguments))
    with pytest.MonkeyPatch.context() as environment:  # the process that forks keeps the one of its start
        for name in [name for name in os.environ if name.startswith(("SGLANG_", "PYTEST_"))]:
            environment.delenv(name)
        environment.setenv("HF_HUB_OFFLINE", "1")
        process.start()
    theirs.close()
    return process


def _answered(mine: Connection, function: str) -> Any:
    assert mine.poll(600), f"{function} did not end in 600 s"
    found, error = mine.recv()
    assert error is None, error
    return found


def in_sglang(function: str, *arguments: Any) -> Any:
    """Call a function there. Environment variables of SGLang and of pytest are unset, and nothing is downloaded.

    Args:
        function: as `module:name`.
        arguments: of its call.

    Returns:
        What the function returned.
    """
    mine, theirs = _forks.Pipe(duplex=False)
    process = _started(_answer, theirs, function, arguments)
    try:
        return _answered(mine, function)
    except EOFError:
        process.join()
        pytest.fail(f"{function} ended with exit status {process.exitcode} before it answered")
    finally:
        process.kill()
        process.join()


def _answer_all(calls: Connection) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    forks = multiprocessing.get_context("fork")
    while True:
        try:
            function, arguments = calls.recv()
        except EOFError:
            return
        process = forks.Process(target=_answer, args=(calls, function, arguments))
        process.start()
        process.join()
        if process.exitcode:
            calls.send((None, f"{function} ended with exit status {process.exitcode}"))


@contextmanager
def plugged_sglang() -> Iterator[Callable[..., Any]]:
    """`in_sglang` for many calls, each a fork of one process that has loaded the plugins, which takes SGLang 2 s."""
    mine, theirs = _forks.Pipe()
    process = _started(_answer_all, theirs)

    def call(function: str, *arguments: Any) -> Any:
        mine.send((function, arguments))
        return _answered(mine, function)

    try:
        yield call
    finally:
        mine.close()
        process.join(10)
        process.kill()
