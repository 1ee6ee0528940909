"""Table of the rows of `serving.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median
from typing import Any

from engines import BUILDING, INDEXED, STOCK, Row, markdown

_FIGURES = ("output_throughput", "ttft_ms", "ttft_ms_p99", "tpot_ms", "tpot_ms_p99", "itl_ms_p99")
_STEPS = ("cascade_steps", "sparse_steps")
_RUNS = ("groups", "agent", "branches", "long")
"""The last two are those of older rows."""
_ORDER = ("flashinfer", "triton", "shared", "sparse", "auto", BUILDING)


def name_of(row: Row) -> str:
    """Engine of a row, with the layer plan where it has one, and the plugin's settings that were given."""
    parts = [row["engine"], *([row["plan"]] if row["engine"] in (*INDEXED, BUILDING) else [])]
    return ", ".join(parts + ([json.dumps(row["config"])] if row["config"] and row["engine"] not in STOCK else []))


def run_of(row: Row) -> str:
    """Run of a row, with the flags that every engine was given beside its own."""
    return " ".join([row["run"], *row["flags"]])


def place_of(name: str) -> tuple[int, str]:
    """Stock engines first."""
    return _ORDER.index(name.split(",")[0]), name


def medians(rows: Sequence[Row]) -> dict[tuple[str, ...], dict[str, dict[str, float]]]:
    """Medians over the starts: by (device, shape, page, run and flags, sizes) and engine, in the order of `_RUNS`."""
    found: dict[tuple[str, ...], dict[str, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: (_RUNS.index(row["run"]), place_of(name_of(row)))):
        cell = (row["device"], row["shape"], str(row["page"]), run_of(row), json.dumps(row["sizes"], sort_keys=True))
        found.setdefault(cell, {}).setdefault(name_of(row), []).append(row)
    return {
        cell: {name: {key: median(row[key] for row in of) for key in _FIGURES + _STEPS} for name, of in engines.items()}
        for cell, engines in found.items()
    }


def best_stock(engines: dict[str, dict[str, float]]) -> dict[str, float]:
    """The best of each figure that a stock engine reached; empty where none was measured."""
    stock = [of for name, of in engines.items() if name in STOCK]
    better = {key: max if key == "output_throughput" else min for key in _FIGURES}
    return {key: better[key](of[key] for of in stock) for key in _FIGURES} if stock else {}


def table(rows: Sequence[Row]) -> str:
    """Medians over the starts; ours with their share of the best stock engine's, where one was measured."""
    head = ["device, shape, page", "run", "engine", "output, tokens/s", "TTFT p50, p99, ms", "TPOT p50, ms"]
    head += ["TPOT p99, ms", "ITL p99, ms", "steps shared, sparse"]
    lines = []
    for (device, shape, page, run, _), engines in medians(rows).items():
        best = best_stock(engines)
        for name, of in engines.items():

            def text(key: str, digits: int, name: str = name, of: dict[str, float] = of, best: Any = best) -> str:
                share = f", {of[key] / best[key]:.3f}" if best and name not in STOCK else ""
                return f"{of[key]:.{digits}f}{share}"

            cells = [f"{device}, {shape}, {page}", run, name, text("output_throughput", 0)]
            cells += [f"{of['ttft_ms']:.0f}, {of['ttft_ms_p99']:.0f}", text("tpot_ms", 2), text("tpot_ms_p99", 2)]
            steps = "" if name in STOCK else f"{of['cascade_steps']:.0f}, {of['sparse_steps']:.0f}"
            lines.append([*cells, text("itl_ms_p99", 2), steps])
    return markdown(head, lines)
