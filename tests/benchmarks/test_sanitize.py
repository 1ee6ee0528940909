"""`benchmarks/sanitize.py`: what it takes for clean, with a program of our own in the sanitizer's place; and when what
warp groups hand each other at their start is written and read (`sanitize_races.py`).
"""

from __future__ import annotations

import argparse
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefix_kernels.launching import Launch
from tests.benchmarks.results import ROOT
from tests.prefix_kernels.compiling import compiled
from tests.prefix_kernels.test_triton_compiles import launches


@pytest.fixture
def sanitize(load: Any) -> Any:
    pytest.importorskip("triton")
    return load("sanitize").sanitize


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
    row = sanitize.run_case(argparse.Namespace(case_seconds=20.0), ("memcheck", "a_kernel", case))
    assert row["good"] == good
    assert ("told" in row) == (status != 0 or row["errors"] != 0)


def report(body: bool, apart: bool, others: str, count: int) -> str:
    """Of racecheck's, on Hopper's attention: a read and a write where its warp groups are started."""
    import sanitize_races

    kernel, file = "attend_items_sm90_kernel", "sm90_kernels.py"
    source = (ROOT / "kernels" / "prefix_kernels" / "grouped_attention" / file).read_text()
    start = min(sanitize_races.parts(source, kernel))
    second = start + 20 if body else start
    return f"""
.========= Error: Race reported between Read access at {kernel}+0x190 in {file}:{start}
=========     and Write access at {kernel}+0x2130 in {file}:{second} [4 hazards]
=========
launched {kernel} 7 times
dispatch of {kernel}, 2 variants: {"apart" if apart else "not apart: [...]"}
3 passed{others} in 1s
========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)"""


@pytest.mark.parametrize(
    ("body", "apart", "others", "count", "errors", "good"),
    [
        (False, True, "", 1, 0, True),
        (False, True, ", 1 failed", 1, 0, False),
        (True, True, "", 1, 1, False),
        (False, False, "", 1, 1, False),
        (False, True, "", 2, 1, False),
    ],
    ids=["of the dispatch only", "a failed test", "a line of the body", "at the same time", "more than are told"],
)
def test_races_of_the_dispatch_of_warp_groups_are_counted_apart(
    sanitize: Any, tool: Any, body: bool, apart: bool, others: str, count: int, errors: int, good: bool
) -> None:
    tool("cat <<'END'\n" + report(body, apart, others, count) + "\nEND", 86)
    case = sanitize.Case(("attend_items_sm90_kernel",), "triton/test_grouped_attention.py", "reuse_heads")
    work = ("racecheck", "attend_items_sm90_kernel", case)
    row = sanitize.run_case(argparse.Namespace(case_seconds=20.0), work)
    assert (row["errors"], row["of the dispatch"], row["good"]) == (errors, int(apart and not body), good)
    assert "told" in row


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
    for case in sanitize.CASES:
        text = (ROOT / "tests" / "prefix_kernels" / case.file).read_text()
        assert all(word in text for word in re.findall(r"[a-z_]{4,}", case.tests)), case


# -- races ----------------------------------------------------------------------------------------------------------

CASES = [
    "specialized attention of 64 rows",
    "specialized attention of 64 rows, one program",
    "specialized attention of 128 rows",
    "specialized attention in three passes",
    "specialized attention with heads of 64",
]


@pytest.fixture
def sanitize_races(load: Any) -> Any:
    return load("sanitize_races").sanitize_races


def phases(races: Any, launch: Launch, ptx: str) -> dict[str, set[int]]:
    path = Path(launch.kernel.fn.__code__.co_filename)
    found: dict[str, set[int]] = races.phases(ptx, path, races.parts(path.read_text(), launch.kernel.fn.__name__))
    return found


@pytest.mark.parametrize("case", CASES)
def test_no_phase_has_both_a_read_and_a_write(case: str, sanitize_races: Any) -> None:
    (attend,) = launches(case)
    assert phases(sanitize_races, attend, compiled(attend, 90).asm["ptx"]) == sanitize_races.APART


def test_a_barrier_that_is_missing_is_found(sanitize_races: Any) -> None:
    (attend,) = launches(CASES[0])
    pieces = re.split(r"(\n\s*barrier\.sync\s+1;)", compiled(attend, 90).asm["ptx"])
    found = []
    for left_out in range(1, len(pieces), 2):
        ptx = "".join(piece for at, piece in enumerate(pieces) if at != left_out)
        found.append(phases(sanitize_races, attend, ptx) != sanitize_races.APART)
    # The first warps' before their last write, and the others' on their way round.
    assert found.count(True) >= 2 * sanitize_races.START_TO_END, found
    # Nothing is read behind the last one, and a warp group without work does not come by.
    assert found.count(False) <= sanitize_races.START_TO_END, found
