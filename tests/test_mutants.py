"""Planting faults: sites of mutants, and the patches that put faults of the past back."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from mutant_map import Change, places_of  # noqa: E402
from mutant_sites import PACKAGES, sampled, sites_of  # noqa: E402
from mutants import changed_lines, reverted  # noqa: E402

PATCHES = sorted((ROOT / "scripts" / "reverts").glob("*.patch"))

SOURCE = b'''"""Text with 1 < 2."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import os
__all__ = ["a" + "b"]
LIMIT: int = 4


def work(items: "list[1]", most=3):
    """More text: 5."""
    assert isinstance(items, list)
    total = 0
    for item in items:
        if item < most and not item == 7:
            continue
        total += item * (
            2
        )
        note(total, "\xc3\xa9" if total else "")
    logger.info("%d of %d", total, 9)
    if total > 9:
        raise ValueError(f"expected at most {9 - 1}")
    return (
        total
    )
'''


def test_each_operator_has_its_sites() -> None:
    found = sites_of("a.py", SOURCE)
    assert [(site.id, site.new.strip().decode()) for site in found] == [
        ("a.py:6:integer", "5"),
        ("a.py:9:integer", "4"),
        ("a.py:12:integer", "1"),
        ("a.py:14:condition", "(not (item < most and not item == 7))"),
        ("a.py:14:compare", "<="),
        ("a.py:14:boolean", "or"),
        ("a.py:14:not", ""),
        ("a.py:14:compare.2", "!="),
        ("a.py:14:integer", "8"),
        ("a.py:15:jump", "break"),
        ("a.py:16:delete", "pass"),
        ("a.py:16:arithmetic", "//"),
        ("a.py:17:integer", "3"),
        ("a.py:19:delete", "pass"),
        ("a.py:19:condition", "(not (total))"),
        ("a.py:21:condition", "(not (total > 9))"),
        ("a.py:21:compare", ">="),
        ("a.py:21:integer", "10"),
        ("a.py:24:return", "None"),
    ]
    for site in found:  # each differs in one place, and moves no line
        text = site.plant(SOURCE)
        ast.parse(text)
        assert text.count(b"\n") == SOURCE.count(b"\n"), site.id
        assert text.startswith(SOURCE[: site.begin]), site.id
        assert text.endswith(SOURCE[site.end :]), site.id


def test_the_seed_fixes_the_mutants(tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "a.py").write_bytes(SOURCE)
    first = sampled(tmp_path, 26, 8)
    assert sampled(tmp_path, 26, 4) == first[:4]
    assert sampled(tmp_path, 27, 4) != first[:4]
    everything = sampled(tmp_path, 26, 1000)
    assert len({site.id for site in everything}) == len(everything) == len(PACKAGES) * len(sites_of("a.py", SOURCE))


@pytest.mark.parametrize(
    ("line", "whole", "lines", "names"),
    [
        (14, False, {14}, set()),
        (17, False, {16, 17, 18}, set()),
        (17, True, set(range(10, 26)), set()),
        (6, False, set(range(10, 26)), {"LIMIT"}),
        (9, False, set(range(10, 26)), {"work"}),
    ],
    ids=["head of a statement", "statement of three lines", "hunk", "constant", "default of a parameter"],
)
def test_what_has_to_be_executed(line: int, whole: bool, lines: set[int], names: set[str], tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(SOURCE)
    places = places_of(tmp_path, [Change("a.py", frozenset({line}), whole)])
    assert places.lines["a.py"] == lines
    assert places.names == names


def test_lines_of_a_patch() -> None:
    patch = "text\n\ndiff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -3,4 +3,4 @@ def f\n a\n-b\n+c\n d\n+e\n f\n"
    assert changed_lines(patch) == {"x": {4, 5, 6}}


def test_each_of_twenty_patches_says_what_was_wrong_and_can_be_applied() -> None:
    assert len(PATCHES) == 20
    for path in PATCHES:
        assert len(reverted(path).title) > 20, path.name
    run = [
        subprocess.run(["git", "apply", "--check", path], cwd=ROOT, capture_output=True, text=True) for path in PATCHES
    ]
    assert not [one.stderr for one in run if one.returncode]
