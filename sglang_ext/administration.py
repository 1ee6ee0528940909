"""What operators ask a running server, and what they tell it: each command by name, with a JSON body and answer.

Knows no SGLang: `compat.administration` brings commands from HTTP routes to every scheduler process, where `answered`
runs between two steps. With tensor parallelism all ranks run a command in the same scheduler step, with the same body.
So what a command changes of the choice of paths must come of its body and of the configuration alone.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import msgspec

from prefix_index import printable, printable_values
from sglang_ext import __version__

if TYPE_CHECKING:
    from sglang_ext.runtime import SparseRuntime

logger = logging.getLogger(__name__)

GOOD, BAD, UNKNOWN, CONFLICT, FAILED = 200, 400, 404, 409, 500
"""Statuses of answers, as HTTP has them: done, a bad body, nothing by that name, not possible now, our own fault."""


class CommandError(Exception):
    """A command that is refused: what was expected, what came, what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """Of one command.

    Attributes:
        status: GOOD, or why not.
        body: JSON values; of a refusal {"error": message}.
    """

    status: int
    body: dict[str, Any]


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a command that needs none."""


@dataclass(frozen=True)
class Command:
    """One thing that can be asked or told.

    Attributes:
        body: what its JSON body must be.
        run: gives the answer, on the scheduler's thread, on every rank. Never waits for a disk or a network. A
            collective in it must be reached on all ranks.
        asks: changes nothing and needs no body, so its route is GET; of all others POST.
    """

    body: type[msgspec.Struct]
    run: Callable[[SparseRuntime, Any], dict[str, Any]]
    asks: bool = False


def answered(runtime: SparseRuntime, name: str, body: Mapping[str, Any]) -> Answer:
    """Run a command. With several ranks a collective; never raises an `Exception`.

    Returns:
        This process's answer; where a rank refused or failed, that of the first one that did.
    """
    mine = _answer(runtime, name, body)
    of_ranks: list[Answer] = runtime.ranks.gathered(mine)
    return next((one for one in of_ranks if one.status != GOOD), of_ranks[0])


def _answer(runtime: SparseRuntime, name: str, body: Mapping[str, Any]) -> Answer:
    try:
        command = COMMANDS.get(name)
        if command is None:
            raise CommandError(UNKNOWN, f"expected a command of {', '.join(COMMANDS)}; got {name[:80]!r}")
        try:
            given = msgspec.convert(body, command.body)
        except msgspec.ValidationError as error:
            raise CommandError(BAD, f"{name}: {error}; correct the body") from error
        return Answer(GOOD, printable_values(command.run(runtime, given)))
    except CommandError as error:
        return Answer(error.status, {"error": printable(str(error))})
    except Exception as error:  # the server lives on, and other ranks wait
        logger.exception("sparse attention: command %s failed", name[:80])
        return Answer(FAILED, {"error": printable(f"{name} failed: {type(error).__name__}: {error}; see the log")})


# -- what is asked -------------------------------------------------------------------------------------------


def _status(runtime: SparseRuntime, _: Nothing) -> dict[str, Any]:
    """What is on, and what it did. Waits for all ranks."""
    counters = runtime.counters
    rows = {"sparse": counters.sparse_rows, "cascade": counters.cascade_rows}
    rows["dense"] = counters.dense_rows - counters.cascade_rows
    total = sum(rows.values())
    return {
        "summary": runtime.summary(),
        "shared_prefixes": _mode(runtime.planner.cascade is not None, runtime.planner.refusal),
        "indexes": _mode(runtime.planner.uses_indexes, runtime.planner.refusal or runtime.ready.stale),
        "path_shares": {path: count / total if total else 0.0 for path, count in rows.items()},
        "versions": versions(),
        "state": runtime.snapshot(),
    }


def _mode(wanted: bool, why_not: str | None) -> dict[str, Any]:
    return {"on": wanted and why_not is None, "why_not": why_not}


def versions() -> dict[str, str | None]:
    """Of what this process runs."""
    found: dict[str, str | None] = {"sglang-ext": __version__, "python": sys.version.split()[0]}
    for name in ("sglang", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


COMMANDS: dict[str, Command] = {
    "status": Command(Nothing, _status, asks=True),
}
"""By name: the last word of its route."""
