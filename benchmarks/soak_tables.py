#!/usr/bin/env python3
"""Result files of `soak.py` and `replay.py` as Markdown.

    python benchmarks/soak_tables.py benchmarks/results/soak-h200*.json benchmarks/results/replay-h200*.json

One row for each half of a soak, and one for each kind of request of a replay, in the order of the files; replays are
added up. An answer is *equal* to the dense one (of a replay: each token is the best one), it differs at a *tie*, or it
is *wrong*: at a token further behind the best than a tie (`--tie`, nats). *Would show*: how many wrong ones of these
answers chance would not explain beside the dense ones (`verdicts.detectable`). *Good* is what the file says.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from engines import Row, markdown
from verdicts import counted, detectable, excusing

VERDICTS = ("equal", "tie", "wrong")
HALVES = {"control": "dense control", "shared": "shared steps", "beside": "exact, beside sparse steps"}
"""What a soak compares with dense decode, as the table says it."""
KINDS = ("sparse", "dense")
_HEAD = ["file", "commit", "what", "answers", *VERDICTS, "would show", "good"]


def rows_of(name: str, row: Row) -> list[list[str]]:
    """Cells of one file: of a soak a row for each half that ran, of a replay one for each kind of request."""
    if "found" in row:
        found = {title: row["found"][half] for half, title in HALVES.items() if row["found"].get(half)}
        return cells([name, row["commit"]], row, found, HALVES["control"])
    return cells([name, row["commit"]], row, {kind: row[kind] for kind in KINDS}, "dense")


def cells(first: list[str], row: Row, found: dict[str, Row], control: str) -> list[list[str]]:
    """A row for each of `found`: its name, and answers by verdict. The control itself can show nothing.

    Args:
        first: cells before them.
        row: with the model's dtype, and whether all was good.
        found: counts by verdict.
        control: the name of those that were dense.
    """
    excuse = excusing(found.get(control), row.get("dtype", ""))
    rows = []
    for name, counts in found.items():
        equal, tie, wrong = (counts.get(one, 0) for one in VERDICTS)
        every = equal + tie + wrong
        least = "" if name == control else f"{detectable(excuse, counted(counts)):,}"
        good = {True: "yes", False: "no"}.get(row.get("good"), "")
        share = f"{wrong:,} ({100 * wrong / max(every, 1):.2f}%)"
        rows.append([*first, name, f"{every:,}", f"{equal:,}", f"{tie:,}", share, least, good])
    return rows


def total(rows: Sequence[Row]) -> list[list[str]]:
    """All replays in one, by kind. Where some server ran in float32, no wrong answer is excused."""
    found = {kind: {name: sum(row[kind].get(name, 0) for row in rows) for name in VERDICTS} for kind in KINDS}
    strict = any(row.get("dtype") == "float32" for row in rows)
    return cells([f"all {len(rows)}", ""], {"dtype": "float32" if strict else ""}, found, "dense")


def main() -> None:
    """Print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    files = [(path.stem, json.loads(path.read_text())) for path in parser.parse_args().files]
    rows = [line for name, row in files for line in rows_of(name, row)]
    replayed = [row for _, row in files if "found" not in row]
    rows += total(replayed) if len(replayed) > 1 else []
    print(markdown(_HEAD, rows))


if __name__ == "__main__":
    main()
