"""Tables from the rows of `kernel_bench.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from engines import markdown, read
from kernel_rows import MEMORY_RATE, Row, named

_KEY = ("bench", "case", "context", "batch", "groups", "suffix", "keep", "shape", "dtype", "device")
_KEY += ("layers", "tuned", "budget")


def last_rows(paths: Sequence[str | Path]) -> list[Row]:
    """Rows of result files; of several with one key the last one counts."""
    rows: dict[str, Row] = {}
    for row in read(paths):
        key = json.dumps([row.get(name, 1 if name == "layers" else None) for name in _KEY])
        rows.pop(key, None)
        rows[key] = row
    return list(rows.values())


def tables(rows: Sequence[Row]) -> str:
    """Markdown: a table per device, conditions and part."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((_title(row), row["bench"]), []).append(row)
    return "\n\n".join(f"{title}; {what}\n\n{_table(own)}" for (title, what), own in groups.items())


def _title(row: Row) -> str:
    qo, kv, *dims = row["shape"]
    parts = [f"{row['device']}, torch {row['torch']}, Triton {row['triton']}, FlashInfer {row['flashinfer']}"]
    parts.append(f"{qo} query heads, {kv} KV heads of {' and '.join(map(str, dims))}, {row['dtype']}")
    if row.get("layers", 1) > 1:
        parts.append(f"{row['layers']} layers a graph, times of one")
    if row.get("tuned"):
        parts.append(f"tuned by {row['tuned']}")
    if not row["meaningful"]:
        parts.append("**smoke run on a CPU: these times mean nothing**")
    return ", ".join(parts)


def _table(rows: Sequence[Row]) -> str:
    """A line per case and length, a column per batch."""
    cells: dict[tuple[str, int], dict[str, str]] = {}
    failed = []
    columns = {_column(row): row["batch"] for row in rows}
    for row in rows:
        name = named(row)
        if row["green"]:
            cells.setdefault((name, row["context"]), {})[_column(row)] = _cell(row)
            if row["case"] == "exact":
                floor = f"{row['bytes'] / MEMORY_RATE * 1e6:.1f}"
                cells.setdefault(("K and V once, at 4.3 TB/s", row["context"]), {})[_column(row)] = floor
        else:
            why = row.get("error") or f"gate {row['gate']}"
            failed.append(f"**FAILED**: {name}, {row['context']} tokens, {_column(row)}: {why}; no time.\n")
    names = sorted(columns, key=lambda column: ("groups" in column, columns[column]))
    cell = "floor at 3.0 TB/s" if rows[0]["bench"] == "operators" else "10th to 90th percentile; share of 4.3 TB/s"
    lines = [
        [name, str(context), *(own.get(column, "-") for column in names)]
        for (name, context), own in sorted(cells.items(), key=lambda cell: cell[0][1])
    ]
    head = f"us ({cell}; {_rival(rows)}'s time over ours):"
    return "\n".join([*failed, head, "", markdown(["case", "tokens", *names], lines)])


def _rival(rows: Sequence[Row]) -> str:
    """What rows are compared with: the first rival of their run."""
    found = next((next(iter(row["ratio"])) for row in rows if row.get("ratio")), "flashinfer")
    return {"flashinfer": "FlashInfer"}.get(found, found)


def _column(row: Row) -> str:
    if row["groups"] == 1:
        return f"batch {row['batch']}"
    return f"{row['groups']} groups of {row['batch'] // row['groups']}"


def _cell(row: Row) -> str:
    parts = [f"{row['floor_us']:.1f}" if row["bench"] == "operators" else f"{row['us_p10']:.1f}-{row['us_p90']:.1f}"]
    if row["bench"] == "attention" and row.get("share") is not None:
        parts.append(f"{row['share']:.1%}")
    parts += [f"{ratio:.2f} x" for ratio in list(row.get("ratio", {}).values())[:1]]
    return f"{row['us']:.1f} ({'; '.join(parts)})"
