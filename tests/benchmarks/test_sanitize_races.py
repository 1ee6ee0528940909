"""`benchmarks/sanitize_races.py`: when what warp groups hand each other at their start is written, and when read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from prefix_kernels.launching import Launch
from tests.benchmarks.results import ROOT
from tests.prefix_kernels.compiling import compiled
from tests.prefix_kernels.test_triton_compiles import launches

KERNEL = "attend_items_sm90_kernel"
SOURCE = ROOT / "kernels" / "prefix_kernels" / "grouped_attention" / "sm90_kernels.py"
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


def test_a_barrier_of_some_threads_is_none(sanitize_races: Any) -> None:
    (attend,) = launches(CASES[0])
    ptx = re.sub(r"barrier\.sync\s+1;", "barrier.sync 1, 128;", compiled(attend, 90).asm["ptx"], count=1)
    with pytest.raises(ValueError, match=r"all threads, got barrier\.sync 1, 128"):
        phases(sanitize_races, attend, ptx)
    with pytest.raises(ValueError, match="once, got it 0 times"):
        sanitize_races.phases(ptx, Path("other.py"), {1})


def test_only_reports_of_the_start_are_its_own(sanitize_races: Any) -> None:
    start, *_, dispatch = sorted(sanitize_races.parts(SOURCE.read_text(), KERNEL))
    assert dispatch - start > 50
    assert not sanitize_races.parts(SOURCE.read_text(), "_fetch")

    def entry(*lines: int, kernel: str = KERNEL) -> str:
        accesses = [f"Write access at {kernel}+0x20 in {SOURCE.name}:{line}" for line in lines]
        return "========= Error: Race reported between " + "\n=========     and ".join(accesses) + "\n========= \n"

    told = (
        entry(start, dispatch, start) + "." + entry(start, start + 20) + entry(start) + entry(start, start, kernel="a")
    )
    told += f"noise in {SOURCE.name}:{start + 1}: Write access at {KERNEL}+0x2 in {SOURCE.name}:{start + 20}\n"
    found = list(sanitize_races.races(told, KERNEL, ROOT / "kernels"))
    assert [(race.accesses, race.dispatch) for race in found] == [(3, True), (2, False), (1, False), (2, False)]
