"""`benchmarks/sanitize.py`: what it takes for clean, with a program of our own in the sanitizer's place."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def sanitize(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("sanitize")


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Puts a `compute-sanitizer` that says this, and ends so, first on the path."""

    def make(script: str, status: int = 0) -> None:
        path = tmp_path / "compute-sanitizer"
        path.write_text(f"#!/bin/sh\n{script}\nexit {status}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


CLEAN = "echo '========= ERROR SUMMARY: 0 errors'; echo '3 passed in 1s'; echo 'launched a_kernel 7 times'"


@pytest.mark.parametrize(
    ("script", "status", "good"),
    [
        (CLEAN, 0, True),
        (CLEAN.replace("a_kernel", "another_kernel"), 0, False),
        (CLEAN.replace("3 passed", "3 failed"), 1, False),
        (CLEAN.replace("0 errors", "2 errors"), 86, False),
        (CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors)"), 0, True),
        (CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 1 hazard displayed (1 error)"), 0, False),
        ("echo '3 passed'; echo 'launched a_kernel 7 times'", 0, False),
    ],
    ids=["clean", "never launched", "failed tests", "errors", "no hazards", "a hazard", "the tool said nothing"],
)
def test_what_counts_as_clean(sanitize: Any, tool: Any, script: str, status: int, good: bool) -> None:
    tool(script, status)
    case = sanitize.Case(("a_kernel",), "triton/test_slot_lists.py", "follow")
    row = sanitize.run_case(argparse.Namespace(case_seconds=20.0), frozenset(), ("memcheck", "a_kernel", case))
    assert row["good"] == good
    assert ("told" in row) == (status != 0 or row["errors"] != 0)


def report(sanitize: Any, others: str = "", body: bool = False, count: int = 2) -> str:
    """Of racecheck's, on Hopper's attention: reads and writes where its warp groups are started."""
    import sanitize_races

    file = "hopper_kernels.py"
    source = (ROOT / "kernels" / "prefix_kernels" / "grouped_attention" / file).read_text()
    lines = sanitize_races.parts(source, "attend_items_hopper_kernel")
    start, dispatch = (min(line for line, part in lines.items() if part == one) for one in ("start", "dispatch"))
    assert dispatch - start > 50
    kernel = "attend_items_hopper_kernel"
    second = start + 20 if body else start
    return f"""
.========= Error: Race reported between Read access at {kernel}+0x190 in {file}:{start}
=========     and Write access at {kernel}+0x2130 in {file}:{second} [4 hazards]
=========     and Write access at {kernel}+0xc800 in {file}:{dispatch} [3 hazards]
=========
========= Error: Race reported between Write access at {kernel}+0x21e0 in {file}:{start}
=========     and Read access at {kernel}+0x240 in {file}:{start} [16 hazards]
=========
launched {kernel} 7 times
3 passed{others} in 1s
========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)"""


@pytest.mark.parametrize(
    ("what", "errors", "good"),
    [({}, 0, True), ({"others": ", 1 failed"}, 0, False), ({"body": True}, 1, False), ({"count": 3}, 1, False)],
    ids=["of the dispatch only", "a failed test", "a line of the body", "more than are told"],
)
def test_races_of_the_dispatch_of_warp_groups_are_counted_apart(
    sanitize: Any, tool: Any, what: dict[str, Any], errors: int, good: bool
) -> None:
    import sanitize_races

    tool("cat <<'END'\n" + report(sanitize, **what) + "\nEND", 86)
    pairs = (("Read", "start"), ("Write", "start"), ("Write", "dispatch"))
    known = frozenset(sanitize_races.Access(*pair) for pair in pairs)
    case = sanitize.Case(("attend_items_hopper_kernel",), "test_specialized_attention.py", "share_a_launch")
    work = ("racecheck", "attend_items_hopper_kernel", case)
    row = sanitize.run_case(argparse.Namespace(case_seconds=20.0), known, work)
    assert (row["errors"], row["good"]) == (errors, good)
    assert not sanitize.run_case(argparse.Namespace(case_seconds=20.0), frozenset(), work)["good"]


def test_a_kernel_that_starts_its_warp_groups_apart_tells_what_is_reported_of_that(sanitize: Any, tool: Any) -> None:
    import sanitize_races

    lines = sanitize_races.parts((ROOT / "benchmarks" / "sanitize_races.py").read_text(), "dispatched_kernel")
    start, dispatch = sorted(lines)
    one = f"Race reported between Read access at dispatched_kernel+0x10 in sanitize_races.py:{start}"
    other = f"and Write access at dispatched_kernel+0x20 in sanitize_races.py:{dispatch} [1 hazards]"
    summary = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
    tool(f"echo '========= Error: {one}'; echo '=========     {other}'; echo '{summary}'", 86)
    known = sanitize.known_races(20.0)
    assert known == {sanitize_races.Access("Read", "start"), sanitize_races.Access("Write", "dispatch")}
    tool("echo broken", 1)
    with pytest.raises(SystemExit, match="exit status 1"):
        sanitize.known_races(20.0)


def test_the_kernel_that_starts_its_warp_groups_apart_compiles_for_hopper(sanitize: Any) -> None:
    import sanitize_races
    import torch

    from prefix_kernels.launching import Launch, compiled

    values = {"handed_ptr": torch.zeros(1).int(), "numbers_ptr": torch.zeros(8, 9, 512).int(), "blocks": 7}
    found = compiled(Launch(sanitize_races.dispatched_kernel, (8,), values, {"num_warps": 4, "maxnreg": 256}), 90)
    ptx = found.asm["ptx"]
    assert ptx.count("barrier.sync \t1;") >= 6
    assert all(
        word in ptx for word in ("setmaxnreg", "cp.async.mbarrier.arrive.noinc", "bar.sync \t0, 128", "mbarrier")
    )


def test_a_case_that_takes_too_long_is_ended_with_all_that_it_started(sanitize: Any, tool: Any, tmp_path: Path) -> None:
    tool(f"sleep 60 & echo $! > {tmp_path}/pid; wait")
    row = sanitize.sanitize("memcheck", "a_kernel", ["-c", ""], 1.0)
    assert (row["status"], row["errors"]) == (None, None)
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{child}/stat").read_text().rsplit(") ", 1)[1].startswith("Z"):
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}").exists()


def test_every_kernel_is_looked_at_and_none_that_is_not_there(sanitize: Any) -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "kernels").rglob("*.py"))
    there = re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE)
    named = {kernel for case in sanitize.CASES for kernel in case.kernels}
    assert named == set(there)
    assert all((ROOT / "tests" / "prefix_kernels" / case.file).exists() for case in sanitize.CASES)


def test_launches_are_counted(sanitize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sanitize_launches
    from triton.runtime.jit import JITFunction

    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: (args, kwargs))
    monkeypatch.setattr(sanitize_launches, "_launched", type(sanitize_launches._launched)())
    sanitize_launches.pytest_configure()
    assert sanitize.planted_race_kernel[(3,)](5, BLOCK=2) is not None
    assert sanitize_launches._launched == {"planted_race_kernel": 1}
