"""The selection benchmark's winner by time: on made-up rows, and the committed rows against the documents."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.calibration.step_time import attention_us
from sglang_ext.config import SparseAttnConfig
from sglang_ext.indexing import METHODS, parse_spec
from sglang_ext.prefill.builder import method_specs

ROOT = Path(__file__).resolve().parents[2]
TOKENS = METHODS["token_index"].spec().to_dict()
BLOCKS = {**METHODS["ab_sparse"].spec().to_dict(), "representation": "minmax"}
UNION = METHODS["union"].spec().to_dict()


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    names = ("selection", "selection_methods", "selection_winner")
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def committed(bench: SimpleNamespace) -> list[Any]:
    found: list[Any] = bench.selection_winner.candidates(
        bench.selection.read_rows(ROOT / "benchmarks" / "results" / "selection-h200.jsonl.xz")
    )
    return found


def row(method: str, spec: dict[str, Any], errors: tuple[float, float], **own: Any) -> dict[str, Any]:
    """One prompt of 1,000 tokens, heads of 64; errors at 5% and 20% kept."""
    points = {
        keep: {"budget": budget, "error": error, "kv_bytes": budget * 256}
        for keep, budget, error in zip(("0.05", "0.2"), (50, 200), errors, strict=True)
    }
    fixed = {"source": "captured", "kind": "method", "layer_plan": None, "stored_share": 0.1, "prefix_len": 1000}
    return {**fixed, "method": method, "spec": spec, "points": points, **own}


def test_the_least_time_wins_and_every_other_says_why_not(bench: SimpleNamespace) -> None:
    winner = bench.selection_winner
    rows = [
        row("tokens", TOKENS, (0.4, 0.1)),
        row("tokens", TOKENS, (0.6, 0.15)),
        row("blocks", BLOCKS, (0.8, 0.22)),
        row("48 of 64", {**TOKENS, "num_channels": 48}, (0.45, 0.15)),
        row("far", TOKENS, (0.9, 0.8)),
        row("untimed", UNION, (0.1, 0.05)),
        row("large", TOKENS, (0.1, 0.05), stored_share=0.151),
        row("rival", {"anything": 1}, (0.1, 0.05), kind="rival"),
        row("tokens + reuse", TOKENS, (0.1, 0.05), layer_plan=["anchor"]),
        row("planted", TOKENS, (0.1, 0.05), source="planted"),
    ]
    found = winner.candidates(rows)
    assert [one.method for one in found] == ["tokens", "blocks", "48 of 64", "far", "untimed"]
    # The mean of two prompts is 0.5 and 0.125: half of the way to 0.25, on log axes.
    at = found[0].at(1.0)
    assert at.keep_ratio == pytest.approx(0.1)
    assert at.most_us == pytest.approx(97.792 + attention_us(0.1))
    assert found[2].selection == found[0].selection
    assert [one.method for one in winner.ranking(found)] == ["tokens", "48 of 64", "blocks"]
    assert next(iter(winner.ranking(found, 1.0))).method == "blocks"
    text = winner.verdict(found)
    assert "Least time where 1/8 of the layers select: **tokens**." in text
    assert "Least time where all of the layers select: **blocks**." in text
    assert "| far | 10.0% | - | 97.8 | - | - | - |" in text
    assert "Left out, as their selection was not timed (kept at that error): untimed (5.0%)." in text
    assert "large" not in text


def test_the_default_is_the_committed_rows_winner(bench: SimpleNamespace, committed: list[Any]) -> None:
    best = bench.selection_winner.ranking(committed)[0]
    assert best.method == bench.selection_methods.DEFAULT
    served = method_specs(SparseAttnConfig())[SparseAttnConfig().method]
    own = parse_spec(bench.selection_methods.SPECS[best.method][1])
    assert (own.method, own.kept_channels(64)) == (served.method, served.kept_channels(64))
    everywhere = bench.selection_winner.ranking(committed, 1.0)
    assert [one.method for one in everywhere[:2]] == ["ab minmax int4", bench.selection_methods.DEFAULT]
    # Documented: blocks begin to win between 0.26 and 0.44 of the layers, as their bounds leave open.
    blocks = everywhere[0]
    assert best.at(0.255).most_us < blocks.at(0.255).least_us
    assert blocks.at(0.265).least_us < best.at(0.265).most_us
    assert best.at(0.435).most_us < blocks.at(0.435).most_us
    assert blocks.at(0.445).most_us < best.at(0.445).most_us


def test_the_documented_times_are_those_of_the_committed_rows(bench: SimpleNamespace, committed: list[Any]) -> None:
    """Each row of the table in docs/selection.md begins with the recipe, its cells are the printed ones."""
    printed = {
        cells[1]: cells[2:-1]
        for line in bench.selection_winner.verdict(committed).splitlines()
        if len(cells := [cell.strip() for cell in line.split("|")]) == 9
    }
    names = {
        "**default** (`token_index`, INT4, 75% of the channels)": "tokens int4 48ch",
        "`token_index`, INT4, all channels": "tokens int4",
        "`ab_sparse`, min/max blocks of 16": "ab minmax int4",
        "`two_level` (CSAttention names, tokens rank)": "csa > tokens48 .25",
        "`csattention` alone (alpha 0.02)": "csa a.02",
        "`csattention` alone (alpha 0.078)": "csa",
    }
    lines = (ROOT / "docs" / "selection.md").read_text().splitlines()
    begun = lines.index(next(line for line in lines if line.startswith("| recipe | stored | kept | selection |")))
    documented = {}
    for line in lines[begun + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.split("|")]
        documented[cells[1]] = cells[2:-1]
    assert {names[name]: cells for name, cells in documented.items()} == {
        name: cells for name, cells in printed.items() if name in names.values()
    }
