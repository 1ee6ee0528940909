"""What `mutants.py` puts into pytest and into measured processes: a plugin of pytest, and one of coverage.py.

In pytest it says which test runs, writes what failed, and takes only the tests of a list, in its order. In every
measured process it saves what was executed every few seconds: servers are killed in the end. All of it is told by
environment variables, so that processes of processes know it, too. It is imported before pytest could rewrite it
(PYTEST_DONT_REWRITE).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

#: The context of what is executed now: a test's id, or a fixture's of more than one test.
CONTEXT = "MUTANTS_CONTEXT"
#: A folder; each process that runs tests appends to a file of its own there.
SEEN = "MUTANTS_SEEN"
#: A file: {"ids": tests to run, modules in this order, "limits": seconds of some of them}.
ONLY = "MUTANTS_ONLY"
#: A file that gets one line of JSON for each failure.
FAILED = "MUTANTS_FAILED"

FIXTURE = "fixture "
SAVED_EVERY_S = 4.0


# -- coverage ------------------------------------------------------------------------------------------------

_saving = threading.Lock()


def coverage_init(registry: Any, options: dict[str, Any]) -> None:
    """coverage.py calls this in each process that it measures. It registers nothing, and saves from then on."""
    # A child must not be born while a lock of the data is held: nobody would give it back there.
    os.register_at_fork(before=_saving.acquire, after_in_parent=_saving.release, after_in_child=_begin_in_child)
    _begin()


def _begin_in_child() -> None:
    _saving.release()
    _begin()


def _begin() -> None:
    threading.Thread(target=_save_from_time_to_time, name="mutants-coverage", daemon=True).start()


def _save_from_time_to_time() -> None:
    import coverage

    while True:
        time.sleep(SAVED_EVERY_S)
        current = coverage.Coverage.current()
        if current is None:
            continue
        with _saving:
            try:
                current.save()
            except Exception:  # the interpreter may be ending
                return


def _switch(context: str) -> None:
    """What is executed from now on, here and in processes started from now on, is of this context."""
    if SEEN not in os.environ:
        return
    import coverage

    os.environ[CONTEXT] = context
    current = coverage.Coverage.current()
    if current is not None:
        with _saving:
            current.switch_context(context)


# -- pytest: which test runs ---------------------------------------------------------------------------------


def plain_id(item: pytest.Item) -> str:
    """A test's id without the group that xdist writes behind it."""
    group = _group(item)
    return item.nodeid.removesuffix(f"@{group}") if group else item.nodeid


def _group(item: pytest.Item) -> str:
    mark = item.get_closest_marker("xdist_group")
    return "" if mark is None else str(mark.kwargs.get("name") or (mark.args[0] if mark.args else "default"))


def _fixture_name(base: str, name: str) -> str:
    return f"{FIXTURE}{name} of {base}"


def _fixtures(item: pytest.Item) -> list[str]:
    """The fixtures of more than one test that a test takes, as their contexts are called."""
    defined: dict[str, Any] = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return [
        _fixture_name(one.baseid, name)
        for name, definitions in defined.items()
        for one in definitions
        if one.scope != "function"
    ]


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if SEEN not in os.environ:
        yield
        return
    begun, name = time.monotonic(), plain_id(item)
    _switch(name)
    yield
    _switch("")
    line = {
        "id": name,
        "group": _group(item),
        "server": item.get_closest_marker("server") is not None,
        "fixtures": _fixtures(item),
        "seconds": round(time.monotonic() - begun, 3),
    }
    with (Path(os.environ[SEEN]) / f"tests-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[None]:
    """What a fixture of several tests executes is executed for all of them."""
    if SEEN not in os.environ or fixturedef.scope == "function":
        yield
        return
    before = os.environ.get(CONTEXT, "")
    _switch(_fixture_name(fixturedef.baseid, fixturedef.argname))
    yield
    _switch(before)


def pytest_sessionfinish() -> None:
    if SEEN in os.environ:
        import coverage

        current = coverage.Coverage.current()
        if current is not None:
            with _saving:
                current.save()


# -- pytest: which tests to run, and what failed -------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if ONLY not in os.environ:
        return
    wanted = json.loads(Path(os.environ[ONLY]).read_text())
    ids = set(wanted["ids"])
    left_out = [item for item in items if plain_id(item) not in ids]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    # Modules in the list's order; within one, pytest's own order spares fixtures. Tests of servers come last, as they
    # stand: the last one of a server may spoil what it serves.
    place = {
        module: number for number, module in enumerate(dict.fromkeys(name.split("::")[0] for name in wanted["ids"]))
    }
    chosen = [item for item in items if plain_id(item) in ids]
    served = [item for item in chosen if "tests/server/" in item.nodeid]
    others = [item for item in chosen if "tests/server/" not in item.nodeid]
    items[:] = [*sorted(others, key=lambda item: place[plain_id(item).split("::")[0]]), *served]
    for item in items:
        limit = wanted["limits"].get(plain_id(item))
        if limit is not None:
            item.add_marker(pytest.mark.timeout(limit), append=False)


def _write_failure(name: str) -> None:
    if FAILED in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ[FAILED]).open("a") as file:
            file.write(json.dumps(name) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _write_failure(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write_failure(report.nodeid)
