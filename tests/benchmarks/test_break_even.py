"""`benchmarks/break_even.py`: what an index costs against what it saves."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("break_even")


def row(engine: str, path: str, ms: float, batch: int = 8) -> dict[str, Any]:
    return {"engine": engine, "path": path, "plan": "kascade", "context": 1024, "batch": batch, "ms": ms, "start": 0}


BUILD: list[dict[str, Any]] = [
    {
        "bench": "layer",
        "method": "token_index",
        "num_tokens": 1024,
        "seconds": {"median": 0.009},
        "prepare_seconds": {"median": 0.001},
        "layers": 10,
    },
    {"bench": "recording", "num_tokens": 1024, "plain": {"median": 1.0}, "recorded": {"median": 1.09}},
]


def test_cost_over_savings_is_steps_and_tokens(bench: ModuleType) -> None:
    rows = [row("flashinfer", "stock", 9.0), row("triton", "stock", 7.0), row("plugin", "shared", 3.0)]
    rows += [
        row("sparse", "sparse", 2.0),
        row("flashinfer", "stock", 1.0, batch=1),
        row("sparse", "sparse", 2.0, batch=1),
    ]
    alone, eight = bench.table(BUILD, rows, "token_index", "sparse, kascade").splitlines()[2:]
    assert alone == "| 1,024 | 1 | 0.19 | 1.00 | nan | 2.00 | never |  |"
    assert eight == "| 1,024 | 8 | 0.19 | 7.00 | 3.00 | 2.00 | 39 steps, 312 tokens | 191 steps, 1,528 tokens |"


def test_cells_that_were_not_measured_are_left_out(bench: ModuleType) -> None:
    rows = [row("flashinfer", "stock", 9.0), row("sparse", "sparse", 2.0)]
    for build, decode in ((BUILD[1:], rows), (BUILD, rows[:1]), (BUILD, rows[1:])):
        assert len(bench.table(build, decode, "token_index", "sparse, kascade").splitlines()) == 2


def test_the_sentence_in_the_documents_is_the_printed_table(bench: ModuleType) -> None:
    build, decode = (bench.read(str(RESULTS / f"{name}.jsonl")) for name in ("build-h200", "decode-h200-grid"))
    table = bench.table(build, decode, "token_index", "sparse, kascade")
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert {one[0] for one in cells} == {"32,768", "131,072"}
    stock, exact = (sorted(int(one[at].split()[0]) for one in cells) for at in (6, 7))
    said = f"pays after {stock[0]} to {stock[-1]} steps beside flashinfer, and after {exact[0]} to {exact[-1]} beside"
    assert said in (ROOT / "docs" / "benchmarks.md").read_text()
