"""Tables and plots from the rows of `kernels.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kernel_rows import MEMORY_RATE, Row

_KEY = ("bench", "case", "context", "batch", "groups", "suffix", "keep", "shape", "dtype", "device")
_KEY += ("layers", "tuned", "launch")

#: Cases that are drawn: color, marker, name.
_LOOKS = {
    "flashinfer": ("tab:red", "s", "FlashInfer decode"),
    "flashinfer_cascade": ("tab:orange", "^", "FlashInfer cascade"),
    "exact": ("tab:blue", "o", "exact"),
    "sparse": ("tab:green", "o", "sparse, 5% x sqrt(batch)"),
    "suffix": ("tab:purple", ".", "suffix + merge"),
}


def read(paths: Iterable[str | Path]) -> list[Row]:
    """Rows of result files; of several with one key the last one counts."""
    rows: dict[str, Row] = {}
    for path in paths:
        for line in Path(path).read_text().splitlines():
            row = json.loads(line)
            key = json.dumps([row.get(name, 1 if name == "layers" else None) for name in _KEY])
            rows.pop(key, None)
            rows[key] = row
    return list(rows.values())


def tables(rows: Sequence[Row]) -> str:
    """Markdown: a table per device, conditions and part, one per height of the tile of a sweep."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        what = f"sweep, {row['block_m']} rows" if row["bench"] == "tune" else row["bench"]
        groups.setdefault((_title(row), what), []).append(row)
    return "\n\n".join(
        f"{title}; {what}\n\n{_sweep(own) if own[0]['bench'] == 'tune' else _table(own)}"
        for (title, what), own in groups.items()
    )


def _title(row: Row) -> str:
    qo, kv, dim = row["shape"]
    parts = [f"{row['device']}, torch {row['torch']}, Triton {row['triton']}, FlashInfer {row['flashinfer']}"]
    parts.append(f"{qo} query heads, {kv} KV heads of {dim}, {row['dtype']}")
    if row.get("layers", 1) > 1:
        parts.append(f"{row['layers']} layers a graph, times of one")
    if row["tuned"]:
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
        name = row["case"] if row.get("suffix", 1) or row["case"] == "plain" else f"{row['case']}, plain"
        if row["green"]:
            cells.setdefault((name, row["context"]), {})[_column(row)] = _cell(row)
            if row["case"] == "exact":
                floor = f"{row['bytes'] / MEMORY_RATE * 1e6:.1f}"
                cells.setdefault(("K and V once, at 4.3 TB/s", row["context"]), {})[_column(row)] = floor
        else:
            why = row.get("error") or f"gate {row['gate']}"
            failed.append(f"**FAILED**: {name}, {row['context']} tokens, {_column(row)}: {why}; no time.\n")
    names = sorted(columns, key=lambda column: ("groups" in column, columns[column]))
    lines = ["us (10th to 90th percentile; share of 4.3 TB/s; FlashInfer's time over ours):", ""]
    lines += ["| case | tokens | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for (name, context), own in sorted(cells.items(), key=lambda cell: cell[0][1]):
        lines.append(f"| {name} | {context} | " + " | ".join(own.get(column, "-") for column in names) + " |")
    return "\n".join([*failed, *lines])


def _column(row: Row) -> str:
    """Requests that share nothing have no groups to name."""
    if row["groups"] == 1 or not row.get("suffix", 1):
        return f"batch {row['batch']}"
    return f"{row['groups']} groups of {row['batch'] // row['groups']}"


def _cell(row: Row) -> str:
    text = f"{row['us_p10']:.1f}-{row['us_p90']:.1f}"
    if row["bench"] == "attention" and row.get("share") is not None:
        text += f"; {row['share']:.1%}"
    ratio = row.get("ratio", {}).get("flashinfer")
    return f"{row['us']:.1f} ({text}{'' if ratio is None else f'; {ratio:.2f} x'})"


def _sweep(rows: Sequence[Row]) -> str:
    """What `--tune` measured for one height: its configurations, the fastest first, by the first case."""
    cases = list(dict.fromkeys((row["case"], row["context"], row["batch"]) for row in rows))
    times: dict[str, dict[Any, float]] = {}
    for row in rows:
        if row["green"]:
            at = times.setdefault(_configuration(row["launch"]), {})
            at[row["case"], row["context"], row["batch"]] = row["us"]
    named = " | ".join(f"{name} {context} x {batch}, us" for name, context, batch in cases)
    lines = [f"| kernel | block | warps | stages | programs | {named} |", "|---" * (5 + len(cases)) + "|"]
    for name, of_case in sorted(times.items(), key=lambda item: item[1].get(cases[0], math.inf)):
        lines.append(f"| {name} | " + " | ".join(f"{of_case[c]:.1f}" if c in of_case else "-" for c in cases) + " |")
    return "\n".join(lines)


def _configuration(launch: Row) -> str:
    """Cells of a sweep's table."""
    kernel = "specialized" if launch.get("specialized") else "portable"
    bound = f" (registers <= {launch['max_registers']})" if launch["max_registers"] else ""
    block = f"{launch['block_m']} x {launch['block_n']}"
    return f"{kernel}{bound} | {block} | {launch['num_warps']} | {launch['num_stages']} | {launch['programs_per_sm']}"


def plots(rows: Sequence[Row], folder: str | Path) -> list[Path]:
    """Latency against context and share of the limit, one PNG each.

    Raises:
        ValueError: nothing to draw.
    """
    drawn = [r for r in rows if r["bench"] == "attention" and r["green"] and r["groups"] == 1 and r["suffix"]]
    drawn = [row for row in drawn if _title(row) == _title(drawn[-1])]  # one device and one way to measure a plot
    if not drawn:
        raise ValueError("expected green rows of attention with one group, found none; measure some first")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(drawn, folder / f"kernels-{name}.png", of) for name, of in (("latency", "us"), ("share", "share"))]


def _draw(rows: Sequence[Row], path: Path, figure_of: str) -> Path:
    """One panel a batch; `us` is drawn log-log with the floor of reading K and V once."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    batches = sorted({row["batch"] for row in rows})
    figure, panels = pyplot.subplots(1, len(batches), figsize=(4.6 * len(batches), 4.4), squeeze=False, sharey=True)
    for panel, batch in zip(panels[0], batches, strict=True):
        own = [row for row in rows if row["batch"] == batch]
        for case, (color, marker, label) in _LOOKS.items():
            points = sorted((row["context"], row[figure_of], row["bytes"]) for row in own if row["case"] == case)
            if not points or (figure_of == "share" and case == "suffix"):
                continue
            contexts, values, sizes = zip(*points, strict=True)
            panel.plot(contexts, values, color=color, marker=marker, label=label)
            if figure_of == "us" and case == "exact":
                floor = [size / MEMORY_RATE * 1e6 for size in sizes]
                panel.plot(contexts, floor, color="gray", linestyle="--", label="K and V once, at 4.3 TB/s")
        panel.set(title=f"batch {batch}", xlabel="tokens of prefix")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}K" if tokens >= 1024 else f"{tokens:g}")
        panel.grid(alpha=0.3)
        if figure_of == "us":
            panel.set_yscale("log")
    panels[0][0].set_ylabel("us, one layer" if figure_of == "us" else "share of 4.3 TB/s")
    panels[0][0].legend(fontsize=8)
    figure.suptitle(_title(rows[-1]), fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
