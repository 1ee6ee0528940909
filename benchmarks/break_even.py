#!/usr/bin/env python3
"""After how many decoded tokens an index has paid for its build, from the rows of `build.py` and `decode.py`.

    python benchmarks/break_even.py --build build.jsonl --decode decode.jsonl

What an index costs is GPU time: building it by itself, all layers, and recording the queries in the prefill. What it
saves in each decode step is the difference of the medians, to the fastest stock engine, and to exact steps in which the
group's prefix is read once, which need no index.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from decode import STOCK
from decode_plot import name_of

Row = dict[str, Any]


def read(path: str) -> list[Row]:
    """Rows of a result file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def cost_s(rows: Sequence[Row], method: str, tokens: int) -> float | None:
    """GPU seconds of one index: all layers built, and what recording adds to the prefill; None where not measured."""
    built = [row for row in rows if row["bench"] == "layer" and row["method"] == method and row["num_tokens"] == tokens]
    if not built:
        return None
    layer = built[-1]
    recorded = [row for row in rows if row["bench"] == "recording" and row["num_tokens"] == tokens]
    extra = max(0.0, recorded[-1]["recorded"]["median"] - recorded[-1]["plain"]["median"]) if recorded else 0.0
    return float((layer["seconds"]["median"] + layer["prepare_seconds"]["median"]) * layer["layers"] + extra)


def table(build: Sequence[Row], decode: Sequence[Row], method: str, ours: str) -> str:
    """One line per prefix length and batch that both files know."""
    lines = [
        "| prefix | batch | index, s | step without, ms | exact, shared | with index | pays after | than exact |",
        "|---" * 8 + "|",
    ]
    cells: dict[tuple[int, int], dict[str, list[float]]] = {}
    for row in decode:
        cells.setdefault((row["context"], row["batch"]), {}).setdefault(name_of(row), []).append(row["ms"])
    for (tokens, batch), found in sorted(cells.items()):
        cost = cost_s(build, method, tokens)
        stock = [median(ms) for name, ms in found.items() if name in STOCK]
        if cost is None or ours not in found or not stock:
            continue
        sparse, exact = median(found[ours]), found.get("plugin, shared")
        than_exact = _tokens(cost, median(exact) - sparse, batch) if exact else ""
        lines.append(
            f"| {tokens:,} | {batch} | {cost:.2f} | {min(stock):.2f} | {median(exact) if exact else math.nan:.2f} "
            f"| {sparse:.2f} | {_tokens(cost, min(stock) - sparse, batch)} | {than_exact} |"
        )
    return "\n".join(lines)


def _tokens(cost: float, saved_ms: float, batch: int) -> str:
    if saved_ms <= 0:
        return "never"
    steps = math.ceil(1e3 * cost / saved_ms)
    return f"{steps:,} steps, {steps * batch:,} tokens"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True, metavar="FILE", help="rows of build.py")
    parser.add_argument("--decode", required=True, metavar="FILE", help="rows of decode.py")
    parser.add_argument("--method", default="token_index", help="whose index")
    parser.add_argument("--steps", default="sparse, kascade", help="column of decode.py's table: steps with that index")
    args = parser.parse_args(argv)
    print(table(read(args.build), read(args.decode), args.method, args.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
