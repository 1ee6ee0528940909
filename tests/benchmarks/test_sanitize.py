"""`benchmarks/sanitize.py`: what it takes for clean, with a program of our own in the sanitizer's place; and when what
warp groups hand each other at their start is written and read.
"""

from __future__ import annotations

import argparse
import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefix_kernels.launching import Launch
from tests.benchmarks.results import ROOT
from tests.prefix_kernels.compiling import compiled
from tests.prefix_kernels.test_triton_compiles import launches


@pytest.fixture
def sanitize(bench: Any) -> Any:
    return bench.sanitize


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


def report(body: bool, others: str, count: int) -> str:
    """Of racecheck's, on Hopper's attention: a read and a write where its warp groups are started."""
    import sanitize

    kernel, file = "attend_items_sm90_kernel", "sm90_kernels.py"
    source = (ROOT / "kernels" / "prefix_kernels" / "grouped_attention" / file).read_text()
    start = min(sanitize.parts(source, kernel))
    second = start + 20 if body else start
    return f"""
.========= Error: Race reported between Read access at {kernel}+0x190 in {file}:{start}
=========     and Write access at {kernel}+0x2130 in {file}:{second} [4 hazards]
=========
launched {kernel} 7 times
3 passed{others} in 1s
========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)"""


@pytest.mark.parametrize(
    ("body", "others", "count", "errors", "good"),
    [(False, "", 1, 0, True), (False, ", 1 failed", 1, 0, False), (True, "", 1, 1, False), (False, "", 2, 1, False)],
    ids=["of the dispatch only", "a failed test", "a line of the body", "more than are told"],
)
def test_races_of_the_dispatch_of_warp_groups_are_counted_apart(
    sanitize: Any, tool: Any, body: bool, others: str, count: int, errors: int, good: bool
) -> None:
    tool("cat <<'END'\n" + report(body, others, count) + "\nEND", 86)
    case = sanitize.Case(("attend_items_sm90_kernel",), "triton/test_grouped_attention.py", "reuse_heads")
    work = ("racecheck", "attend_items_sm90_kernel", case)
    row = sanitize.run_case(argparse.Namespace(case_seconds=20.0), work)
    assert (row["errors"], row["of the dispatch"], row["good"]) == (errors, int(not body), good)
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


_LABEL = re.compile(r"^([\w$]+):")
_JUMP = re.compile(r"^(@!?%\w+ )?bra(?:\.uni)?\s+([\w$]+);")
_ACCESS = re.compile(r"^(?:@!?%\w+ )?(ld|st)\.shared\S*\s")
START_TO_END = 3
"""Barriers from one start of the warp groups to the next: they begin, have read what they were handed, have ended."""
APART = {"ld": {1}, "st": {0}}
"""Phases of reads and of writes, as Triton has them."""


def phases(ptx: str, path: Path, lines: set[int]) -> dict[str, set[int]]:
    """Of reads ("ld") and writes ("st") of shared memory at these lines of a kernel's source: how many `barrier.sync 1`
    there are before them, modulo `START_TO_END`, on any way from the beginning. All threads take part in each of them,
    so what is in another phase is at another time.
    """
    (number,) = re.findall(rf'^\s*\.file\s+(\d+) "[^"]*{path.parent.name}/{path.name}"', ptx, re.MULTILINE)
    code = [re.sub(r"\s*//.*", "", line).strip() for line in ptx[ptx.index("\n{") :].splitlines()]
    labels: dict[str, list[int]] = defaultdict(list)
    here: list[bool] = []
    for at, line in enumerate(code):
        if found := _LABEL.match(line):
            labels[found[1]].append(at)
        assert not re.match(r"barrier\.sync\s+1,|bar\.sync\s+1\b|barrier\.cta", line), "barrier 1 is one of all threads"
        place = re.match(r"\.loc\s+(\d+) (\d+)", line)
        here.append((place[1] == number and int(place[2]) in lines) if place else bool(here) and here[-1])
    known: list[set[int]] = [set() for _ in code]
    todo = [(0, 0)]
    while todo:
        at, phase = todo.pop()
        if at >= len(code) or phase in known[at]:
            continue
        known[at].add(phase)
        if re.match(r"barrier\.sync\s+1;", code[at]):
            phase = (phase + 1) % START_TO_END
        jump = _JUMP.match(code[at])
        if jump:
            # A label of an inline block is there once for each block.
            todo.append((min(labels[jump[2]], key=lambda to, at=at: abs(to - at)), phase))
        if not (jump and not jump[1]) and not re.match(r"(ret|trap|exit);", code[at]):
            todo.append((at + 1, phase))
    found_in: dict[str, set[int]] = {"ld": set(), "st": set()}
    for line, ours, of in zip(code, here, known, strict=True):
        if ours and (access := _ACCESS.match(line)):
            found_in[access[1]] |= of
    return found_in


def phases_of(sanitize: Any, launch: Launch, ptx: str) -> dict[str, set[int]]:
    path = Path(launch.kernel.fn.__code__.co_filename)
    return phases(ptx, path, sanitize.parts(path.read_text(), launch.kernel.fn.__name__))


@pytest.mark.parametrize("case", CASES)
def test_no_phase_has_both_a_read_and_a_write(case: str, sanitize: Any) -> None:
    attend, _ = launches(case)
    assert phases_of(sanitize, attend, compiled(attend, 90).asm["ptx"]) == APART


def test_a_barrier_that_is_missing_is_found(sanitize: Any) -> None:
    attend, _ = launches(CASES[0])
    pieces = re.split(r"(\n\s*barrier\.sync\s+1;)", compiled(attend, 90).asm["ptx"])
    found = []
    for left_out in range(1, len(pieces), 2):
        ptx = "".join(piece for at, piece in enumerate(pieces) if at != left_out)
        found.append(phases_of(sanitize, attend, ptx) != APART)
    # The first warps' before their last write, and the others' on their way round.
    assert found.count(True) >= 2 * START_TO_END, found
    # Nothing is read behind the last one, and a warp group without work does not come by.
    assert found.count(False) <= START_TO_END, found
