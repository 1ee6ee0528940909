#!/usr/bin/env python3
"""Result files of `soak.py` and `replay.py` as Markdown.

    python benchmarks/soak_tables.py benchmarks/results/soak-h200*.json benchmarks/results/replay-h200*.json

One row for each half of a soak, and one for each kind of request of a replay, in the order of the files; replays are
added up. An answer is *equal* to the dense one (of a replay: each token is the best one), it differs at a *tie*, or it
is *wrong*: at a token further behind the best than a tie (`--tie`, nats). *Farthest*: how far behind the farthest such
token is; older files do not say. *Would show*: how many wrong ones of these
answers chance would not explain beside the dense ones (`verdicts.detectable`). *Good* is what the file says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verdicts import counted, detectable, excusing

Row = dict[str, Any]

VERDICTS = ("equal", "tie", "wrong")
HALVES = {"control": "dense control", "shared": "shared steps", "beside": "exact, beside sparse steps"}
"""What a soak compares with dense decode, as the table says it."""
_SECONDS = {"control": "control", "shared": "seconds", "beside": "sparse_seconds"}
"""What was asked of each, in rows that do not say how long it ran."""
_SOAK_HEAD = ["file", "commit", "half", "seconds", "answers", *VERDICTS, "farthest behind, nats", "would show", "good"]
_REPLAY_HEAD = ["file", "commit", "requests", "tokens of sparse steps", "replayed", *VERDICTS, "would show"]
_REPLAY_HEAD += ["farthest behind, nats", "good"]


def soak_rows(name: str, row: Row) -> list[list[str]]:
    """Cells of one soak: file, commit, half, seconds, answers by verdict, the farthest one, how many wrong ones would
    show, good.
    """
    rows = []
    for half, title in HALVES.items():
        counts = row["found"].get(half)
        if not counts:
            continue
        seconds = row.get("ran", {}).get("sparse" if half == "beside" else half, row.get(_SECONDS[half], 0.0))
        excuse = excusing(row["found"].get("control"), row.get("dtype", ""))
        least = "" if half == "control" else f"{detectable(excuse, counted(counts)):,}"
        good = "yes" if row["good"] else "no"
        farthest = told(row.get("farthest", {}).get(half, ""))
        rows.append([name, row["commit"], title, f"{seconds:.0f}", *answers(counts), farthest, least, good])
    return rows


def replay_rows(name: str, row: Row) -> list[list[str]]:
    """Cells of one replay: file, commit, kind, tokens of sparse steps, answers by verdict, how many wrong ones would
    show, farthest behind, good.
    """
    excuse = excusing(row["dense"], row.get("dtype", ""))
    farthest = {kind: row[kind]["max_nats"] for kind in ("sparse", "dense")}
    return _replay_rows([name, row["commit"]], row, excuse, farthest, "yes" if row["good"] else "no")


def _replay_rows(first: list[str], row: Row, excuse: Any, farthest: dict[str, float], good: str) -> list[list[str]]:
    least = {"sparse": f"{detectable(excuse, counted(row['sparse'])):,}", "dense": ""}
    return [
        [*first, kind, f"{of['tokens of sparse steps']:,}", *answers(of), least[kind], f"{farthest[kind]:.3f}", good]
        for kind, of in ((kind, row[kind]) for kind in least)
    ]


def told(nats: float | str | None) -> str:
    """How far behind, as a cell; None: not among the tokens whose probability was asked for."""
    return f"{nats:.3f}" if isinstance(nats, float) else "not told" if nats is None else nats


def answers(counts: Row) -> list[str]:
    """All that were compared, and of each verdict, the wrong ones with their share."""
    all_of = sum(counts.get(one, 0) for one in VERDICTS)
    equal, tie, wrong = (counts.get(one, 0) for one in VERDICTS)
    return [f"{all_of:,}", f"{equal:,}", f"{tie:,}", f"{wrong:,} ({100 * wrong / max(all_of, 1):.2f}%)"]


def total(rows: Sequence[Row]) -> list[list[str]]:
    """All replays in one, by kind. Where some server ran in float32, no wrong answer is excused."""
    names = (*VERDICTS, "tokens of sparse steps")
    sums = {kind: {name: sum(row[kind].get(name, 0) for row in rows) for name in names} for kind in ("sparse", "dense")}
    farthest = {kind: max(row[kind]["max_nats"] for row in rows) for kind in sums}
    strict = any(row.get("dtype") == "float32" for row in rows)
    excuse = excusing(sums["dense"], "float32" if strict else "")
    return _replay_rows([f"all {len(rows)}", ""], sums, excuse, farthest, "")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "\n".join("| " + " | ".join(one) + " |" for one in (head, ["---"] * len(head), *rows))


def main() -> int:
    """Print; 2 where a file is neither a soak's nor a replay's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    soaks: list[list[str]] = []
    replays: list[list[str]] = []
    replayed: list[Row] = []
    for path in parser.parse_args().files:
        try:
            row = json.loads(path.read_text())
            if "found" in row:
                soaks += soak_rows(path.stem, row)
            else:
                replays += replay_rows(path.stem, row)
                replayed.append(row)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            print(f"{path}: expected a row of soak.py or replay.py: {error!r}", file=sys.stderr)
            return 2
    replays += total(replayed) if len(replayed) > 1 else []
    tables = [markdown(head, rows) for head, rows in ((_SOAK_HEAD, soaks), (_REPLAY_HEAD, replays)) if rows]
    print("\n\n".join(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
