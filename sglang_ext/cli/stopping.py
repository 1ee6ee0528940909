"""How commands end that are stopped from outside, and jobs whose engine ends before they do."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from sglang_ext.compat.engine import EngineDiedError, EngineStartError

#: As a shell reports a process that SIGINT, SIGPIPE or SIGTERM ended.
INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143


class Terminated(KeyboardInterrupt):
    """SIGTERM came. Whatever lets Ctrl-C pass lets this pass, too: asyncio does, for instance."""


def heed_sigterm() -> None:
    """From now on SIGTERM raises `Terminated` in the main thread, once: another one does not stop the closing."""
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise Terminated


def refuse(command: str, why: object, status: int = 2) -> int:
    """Say what a command is refused for; returns the exit status."""
    print(f"sglang-ext {command}: {why}", file=sys.stderr)
    return status


def run_job(command: str, job: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run what may be run again to go on, and say so where it did not come to its end, or why it did not begin.

    Args:
        command: its name, for messages.
        job: returns the exit status; closes what it opened, whatever it raises.
        args: of the job.
    """
    try:
        return job(args)
    except EngineStartError as error:
        return refuse(command, error)
    except Terminated:
        print("terminated; run the same command again to go on", file=sys.stderr)
        return TERMINATED
    except EngineDiedError as error:
        return refuse(command, f"{error}; run the same command again to go on", 1)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return INTERRUPTED
