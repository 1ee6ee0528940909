"""`benchmarks/soak.py`: what counts as a wrong token."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TIE = 0.13


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("soak")


@pytest.fixture
def reference(soak: Any) -> Any:
    """At its third token, 9 is nearly as good as 7, and 5 is not."""
    return soak.Reference([1, 2], [5, 6, 7, 8], [{5: 0.0}, {6: 0.0}, {7: 0.0, 9: 0.125, 5: 0.5}, {8: 0.0}])


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ([5, 6, 7, 8], ("equal", 4, 0.0)),
        ([5, 6], ("equal", 2, 0.0)),  # aborted, or asked for fewer
        ([], ("equal", 0, 0.0)),
        ([5, 6, 9, 0], ("tie", 2, 0.125)),  # nothing behind a difference is compared
        ([5, 6, 5, 8], ("wrong", 2, 0.5)),
        ([5, 6, 4, 8], ("wrong", 2, math.inf)),  # not among the tokens whose probability was asked for
        ([0, 6, 7, 8], ("wrong", 0, math.inf)),
    ],
    ids=["equal", "shorter", "none", "tie", "wrong", "unknown token", "first token"],
)
def test_a_token_is_equal_or_as_good_or_wrong(soak: Any, reference: Any, tokens: list[int], wanted: Any) -> None:
    assert soak.compare(reference, tokens, TIE) == wanted


@pytest.mark.parametrize(
    ("histories", "size", "wanted"),
    [([], 1, True), ([5, 5], 2, True), ([5, 6], 2, False), ([5], 2, False), ([], 2, False)],
)
def test_ranks_took_the_same_paths_and_all_of_them_say_so(soak: Any, histories: Any, size: int, wanted: bool) -> None:
    assert soak.together(histories, size) == wanted


def test_a_tie_is_as_wide_as_is_asked_for(soak: Any, reference: Any) -> None:
    assert soak.compare(reference, [5, 6, 9], 0.125)[0] == "tie"
    assert soak.compare(reference, [5, 6, 9], 0.12)[0] == "wrong"
    assert soak.compare(reference, [5, 6, 5], math.inf)[0] == "tie"
