"""Table, limits and plot from the rows of `serving.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

from engines import BUILDING, INDEXED, STOCK
from serving_runs import RUNS

Row = dict[str, Any]

LEAST_THROUGHPUT = 2.0
"""Of the best stock engine's output throughput, in the run `groups`."""
_FIGURES = ("output_throughput", "ttft_ms", "ttft_ms_p99", "tpot_ms", "tpot_ms_p99", "itl_ms_p99")
_STEPS = ("shared_steps", "sparse_steps")
_ORDER = ("flashinfer", "triton", "shared", "sparse", "auto", BUILDING)
_COLORS = 64
"""Of the PNG: less than a third of the bytes that all would take."""


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
    """Medians over the starts: by (device, shape, page, run and flags, sizes) and engine, in the order of `RUNS`."""
    found: dict[tuple[str, ...], dict[str, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: (list(RUNS).index(row["run"]), place_of(name_of(row)))):
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
    lines = [
        "| device, shape, page | run | engine | output, tokens/s | TTFT p50, p99, ms | TPOT p50, ms | TPOT p99, ms "
    ]
    lines[0] += "| ITL p99, ms | steps shared, sparse |"
    lines.append("|---" * 9 + "|")
    for (device, shape, page, run, _), engines in medians(rows).items():
        best = best_stock(engines)
        for name, of in engines.items():

            def text(key: str, digits: int, name: str = name, of: dict[str, float] = of, best: Any = best) -> str:
                share = f", {of[key] / best[key]:.3f}" if best and name not in STOCK else ""
                return f"{of[key]:.{digits}f}{share}"

            cells = [f"{device}, {shape}, {page}", run, name, text("output_throughput", 0)]
            cells += [f"{of['ttft_ms']:.0f}, {of['ttft_ms_p99']:.0f}", text("tpot_ms", 2), text("tpot_ms_p99", 2)]
            steps = "" if name in STOCK else f"{of['shared_steps']:.0f}, {of['sparse_steps']:.0f}"
            lines.append("| " + " | ".join([*cells, text("itl_ms_p99", 2), steps]) + " |")
    return "\n".join(lines)


def broken_limits(rows: Sequence[Row]) -> list[str]:
    """What the run `groups` does not reach: twice the output throughput of stock SGLang, a p99 of TPOT no worse.

    `building` is not asked: for a part of the run it has no index.
    """
    broken = []
    for (device, shape, _, run, _), engines in medians(rows).items():
        best = best_stock(engines)
        for name, of in engines.items() if run.split()[0] == "groups" and best else ():
            if name.split(",")[0] == BUILDING:
                continue
            at = f"{device}, {shape}, {run}, {name}"
            share = of["output_throughput"] / best["output_throughput"]
            if name not in STOCK and share < LEAST_THROUGHPUT:
                broken.append(f"{at}: expected {LEAST_THROUGHPUT} x the output throughput of stock, got {share:.3f}")
            if name not in STOCK and of["tpot_ms_p99"] > best["tpot_ms_p99"]:
                limit = best["tpot_ms_p99"]
                broken.append(f"{at}: expected a p99 TPOT of at most {limit:.2f} ms, got {of['tpot_ms_p99']:.2f}")
    return broken


def plot(rows: Sequence[Row], path: str | Path) -> Path:
    """Output throughput, and TPOT p50 (bar) and p99 (line above it), by run and engine.

    Raises:
        RuntimeError: matplotlib is not installed.
        ValueError: nothing to draw, or rows of several devices, shapes, page sizes, or sizes of one run.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("expected matplotlib to be installed: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    cells = medians(rows)
    titles = sorted({", ".join(cell[:3]) for cell in cells})
    runs = {cell[3]: engines for cell, engines in cells.items()}
    if len(titles) != 1 or len(runs) != len(cells):
        raise ValueError(
            f"expected rows of one device, shape and page size, and of one size of each run, got {titles or 'no rows'}"
            f" and runs {[cell[3] for cell in cells]}"
        )
    names = sorted({name for engines in runs.values() for name in engines}, key=place_of)
    figure, panels = pyplot.subplots(1, 2, figsize=(9.6, 3.8))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [n + (i - (len(names) - 1) / 2) * width for n, of in enumerate(runs.values()) if name in of]
        found = [of[name] for of in runs.values() if name in of]
        panels[0].bar(places, [of["output_throughput"] for of in found], width, color=f"C{i}", label=name)
        p50, p99 = [of["tpot_ms"] for of in found], [of["tpot_ms_p99"] for of in found]
        panels[1].bar(places, p50, width, color=f"C{i}")
        panels[1].vlines(places, p50, p99, color="black", lw=1)
        panels[1].scatter(places, p99, marker="_", color="black", s=30)
    for panel, label in zip(panels, ("output, tokens/s", "TPOT: p50 (bar), p99 (line), ms"), strict=True):
        panel.set_xticks(range(len(runs)), list(runs))
        panel.set_ylabel(label)
        panel.grid(axis="y", alpha=0.3)
    figure.suptitle(titles[0])
    figure.legend(fontsize=8, loc="lower center", ncols=len(names), frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    drawing = BytesIO()
    figure.savefig(drawing, dpi=100)
    pyplot.close(figure)
    Image.open(drawing).convert("RGB").quantize(_COLORS).save(path, optimize=True)
    return Path(path)
