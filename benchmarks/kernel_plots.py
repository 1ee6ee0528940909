"""Tables and plots from the rows of `kernels.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kernel_rows import MEMORY_RATE, Row

ISSUE_CONTEXT = 131072
#: (title, case, what it is compared with: microseconds at batches 1, 8 and 32, whether these are upper limits).
ISSUE: tuple[tuple[str, str, dict[int, float], bool], ...] = (
    ("FlashInfer tensor-core decode", "flashinfer", {1: 144, 8: 452, 32: 1734}, False),
    ("FlashInfer cascade", "flashinfer_cascade", {1: 1714, 8: 1724, 32: 1725}, False),
    ("plain Triton draft, exact", "", {1: 138, 8: 142, 32: 199}, False),
    ("plain Triton draft, sparse at 5%", "", {1: 20, 8: 38, 32: 74}, False),
    ("exact, prefix + suffix + merge", "exact", {1: 136, 8: 140, 32: 180}, True),
    ("sparse at 5%, prefix + suffix + merge", "sparse", {1: 15, 8: 28, 32: 58}, True),
    ("suffix + merge, apart", "suffix", {1: 6, 8: 6, 32: 8}, True),
    ("anchor selection", "anchor/", {1: 35, 8: 45, 32: 70}, True),
)
PLAIN_LIMIT = 1.03
#: Best speedup over the naive form that AB-Sparse reports (4.4), by stage; (our case, naive cases).
PAPER: dict[str, float] = {"estimation": 5.6, "top_k": 9.4, "attention": 3.1}
_NAIVE_FORMS = ("loops", "vector")

_KEY = ("bench", "case", "context", "batch", "groups", "suffix", "keep", "shape", "dtype", "device", "flush")
_KEY += ("in_graph", "layers", "overlapped", "tuned", "launch")

Point = tuple[str, str, int, int, int]


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


def tables(rows: Sequence[Row], context: int | None = None) -> str:
    """Markdown: per device and conditions the issue's table, all contexts, plain decode, selection, ratios, sweeps.

    Args:
        rows: from `read`.
        context: of the issue's table; None for 131072, or the longest measured.
    """
    groups: dict[str, list[Row]] = {}
    sweeps: dict[str, list[Row]] = {}
    for row in rows:
        (sweeps if row["bench"] == "tune" else groups).setdefault(_title(row), []).append(row)
    found = [_section(title, own, context) for title, own in groups.items()]
    return "\n\n".join([*found, *(_sweep(title, own) for title, own in sweeps.items())])


def _sweep(title: str, rows: Sequence[Row]) -> str:
    """What `--tune` measured: per height of the tile its configurations, the fastest first, by the first case."""
    parts = [title]
    for height in sorted({row["block_m"] for row in rows}):
        own = [row for row in rows if row["block_m"] == height]
        cases = list(dict.fromkeys((row["case"], row["context"], row["batch"]) for row in own))
        times: dict[str, dict[Any, float]] = {}
        for row in own:
            if row["green"]:
                at = times.setdefault(_configuration(row["launch"]), {})
                at[row["case"], row["context"], row["batch"]] = row["us"]
        lines = [
            f"us, for {height} rows:",
            "",
            "| kernel | block | warps | stages | programs | "
            + " | ".join(f"{name} {context} x {batch}" for name, context, batch in cases)
            + " |",
            "|---" * (5 + len(cases)) + "|",
        ]
        for name, of_case in sorted(times.items(), key=lambda item: item[1].get(cases[0], math.inf)):
            lines.append(
                f"| {name} | " + " | ".join(f"{of_case[c]:.1f}" if c in of_case else "-" for c in cases) + " |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _configuration(launch: Row) -> str:
    """Cells of a sweep's table."""
    kernel = "specialized" if launch.get("specialized") else "portable"
    bound = f" (registers <= {launch['max_registers']})" if launch["max_registers"] else ""
    block = f"{launch['block_m']} x {launch['block_n']}"
    return f"{kernel}{bound} | {block} | {launch['num_warps']} | {launch['num_stages']} | {launch['programs_per_sm']}"


def _title(row: Row) -> str:
    qo, kv, dim = row["shape"]
    parts = [f"{row['device']}, torch {row['torch']}, Triton {row['triton']}, FlashInfer {row['flashinfer']}"]
    parts.append(f"{qo} query heads, {kv} KV heads of {dim}, {row['dtype']}, L2 flushed by {row['flush']}s")
    parts.append("inside one graph" if row["in_graph"] else "graph replays")
    if row.get("layers", 1) > 1:
        parts.append(f"{row['layers']} layers a graph, times of one")
    if row.get("overlapped"):
        parts.append("our launches overlapped")
    if row["tuned"]:
        parts.append(f"tuned by {row['tuned']}")
    if not row["meaningful"]:
        parts.append("**smoke run on a CPU: these times mean nothing**")
    return ", ".join(parts)


def _section(title: str, rows: Sequence[Row], context: int | None) -> str:
    times = {_point(row): row for row in rows if row["green"]}
    contexts = sorted({row["context"] for row in rows if row["bench"] == "attention" and row["suffix"]})
    if context is None:
        context = ISSUE_CONTEXT if ISSUE_CONTEXT in contexts or not contexts else contexts[-1]
    parts = [title]
    failed = [row for row in rows if not row["green"] and _point(row) not in times]
    for row in failed:
        why = row.get("error") or f"gate {row['gate']}"
        parts.append(f"**FAILED**: {row['case']}, {row['context']} tokens, batch {row['batch']}: {why}; no time.")
    found = [_issue(times, rows, context), _all(times), _plain(times), _selection(times), _naive(times)]
    return "\n\n".join([*parts, *(text for text in found if text)])


def _point(row: Row) -> Point:
    private = "shared" if row.get("suffix", 1) else "plain"
    return (row["case"], private, row["context"], row["batch"], row["groups"])


def _issue(times: dict[Point, Row], rows: Sequence[Row], context: int) -> str:
    """The table of the issue: measured beside the target."""
    shared = {row["batch"] for row in rows if row["groups"] == 1 and row["context"] == context}
    batches = sorted(shared - {64}) or [1, 8, 32]
    batches = [*batches, *sorted(shared & {64})]
    lines = [f"One layer, {context} tokens of prefix, us (limit or earlier figure in brackets, for 131072):", ""]
    lines += ["| | " + " | ".join(f"batch {batch}" for batch in batches) + " |", "|---" * (len(batches) + 1) + "|"]
    for title, case, wanted, limit in ISSUE:
        names = [case] if not case.endswith("/") else sorted({name for name, *_ in times if _is_ours(name, case)})
        for name in names or [case]:
            label = f"{title}: {name.removeprefix(case)}" if name != case else title
            cells = [
                _cell(times.get((name, "shared", context, batch, 1)), wanted.get(batch), limit, context)
                for batch in batches
            ]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _is_ours(name: str, stage: str) -> bool:
    return name.startswith(stage) and not name.endswith(_NAIVE_FORMS)


def _cell(row: Row | None, wanted: float | None, limit: bool, context: int) -> str:
    aim = "" if wanted is None else f" ({'at most ' if limit else ''}{wanted:g})"
    if row is None:
        return f"-{aim}"
    missed = limit and wanted is not None and context == ISSUE_CONTEXT and row["meaningful"] and row["us"] > wanted
    return f"{row['us']:.1f}{aim}{' **missed**' if missed else ''}"


def _all(times: dict[Point, Row]) -> str:
    """Every context, batch and grouping: times, share of the limit, ratio to FlashInfer."""
    points = sorted(
        {
            (groups > 1, context, batch, groups)
            for _, private, context, batch, groups in times
            if private == "shared" and ("exact", private, context, batch, groups) in times
        }
    )
    if not points:
        return ""
    lines = ["us (share of 4.3 TB/s; FlashInfer's time over ours):", ""]
    lines.append("| tokens | batch | groups | KV once | FlashInfer | cascade | exact | sparse | suffix + merge |")
    lines.append("|---" * 9 + "|")
    for _, context, batch, groups in points:
        at = ("shared", context, batch, groups)
        floor = times[("exact", *at)].get("bytes", math.nan) / MEMORY_RATE * 1e6
        cells = [_timed(times.get((name, *at))) for name in ("flashinfer", "flashinfer_cascade")]
        cells += [_shared(times.get((name, *at))) for name in ("exact", "sparse")]
        cells.append(_timed(times.get(("suffix", *at))))
        lines.append(f"| {context} | {batch} | {groups} | {floor:.1f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _timed(row: Row | None) -> str:
    return "-" if row is None else f"{row['us']:.1f} ({row['us_p10']:.1f}-{row['us_p90']:.1f})"


def _shared(row: Row | None) -> str:
    if row is None:
        return "-"
    ratio = row.get("ratio", {}).get("flashinfer")
    return f"{row['us']:.1f} ({row['share']:.1%}{'' if ratio is None else f'; {ratio:.2f} x'})"


def _plain(times: dict[Point, Row]) -> str:
    """The suffix pass from position 0 beside FlashInfer."""
    points = sorted((context, batch) for name, private, context, batch, _ in times if name == "plain")
    if not points:
        return ""
    batches = sorted({batch for _, batch in points})
    lines = [f"Plain paged decode (suffix pass from 0), us; over FlashInfer's time (at most {PLAIN_LIMIT}):", ""]
    lines += ["| tokens | " + " | ".join(f"batch {batch}" for batch in batches) + " |"]
    lines.append("|---" * (len(batches) + 1) + "|")
    for context in sorted({context for context, _ in points}):
        cells = []
        for batch in batches:
            ours, theirs = (times.get((name, "plain", context, batch, batch)) for name in ("plain", "flashinfer"))
            text = "-" if ours is None else f"{ours['us']:.1f}"
            if ours is not None and theirs is not None:
                over = ours["us"] / theirs["us"]
                text += f" / {theirs['us']:.1f} = {over:.3f}"
                text += " **missed**" if over > PLAIN_LIMIT and ours["meaningful"] else ""
            cells.append(text)
        lines.append(f"| {context} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _selection(times: dict[Point, Row]) -> str:
    """All pipelines."""
    own = sorted((point, row) for point, row in times.items() if row["bench"] == "selection")
    if not own:
        return ""
    batches = sorted({point[3] for point, _ in own})
    lines = ["Selection, us (10th-90th percentile):", ""]
    lines += ["| pipeline | tokens | " + " | ".join(f"batch {batch}" for batch in batches) + " |"]
    lines.append("|---" * (len(batches) + 2) + "|")
    for name, context in sorted({(point[0], point[2]) for point, _ in own}):
        cells = [_timed(times.get((name, "shared", context, batch, 1))) for batch in batches]
        lines.append(f"| {name} | {context} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def naive_ratios(rows: Iterable[Row]) -> list[tuple[str, str, int, int, str, float]]:
    """(stage, our case, context, batch, naive form, naive time over ours) of green rows; one group."""
    return _ratios({_point(row): row for row in rows if row["green"]})


def _ratios(times: dict[Point, Row]) -> list[tuple[str, str, int, int, str, float]]:
    found = []
    for (case, private, context, batch, groups), row in sorted(times.items(), key=lambda item: item[0]):
        stage, _, form = case.partition("/")
        if row["bench"] == "attention" and case == "sparse":
            stage, names = "attention", {naive: f"sparse_{naive}" for naive in _NAIVE_FORMS}
        elif row["bench"] == "selection" and stage != "anchor" and form not in _NAIVE_FORMS:
            names = {naive: f"{stage}/{naive}" for naive in _NAIVE_FORMS}
        else:
            continue
        for naive, name in names.items():
            other = times.get((name, private, context, batch, groups))
            if other is not None:
                found.append((stage, case, context, batch, naive, other["us"] / row["us"]))
    return found


def _naive(times: dict[Point, Row]) -> str:
    """Ratios to the naive forms beside the paper's best."""
    ratios = _ratios(times)
    lines = ["Naive torch forms over ours, beside the best that AB-Sparse reports:", ""]
    lines += ["| stage | ours | tokens | batch | per-head loops | vectorised | paper, up to |", "|---" * 7 + "|"]
    for stage, case, context, batch in sorted({ratio[:4] for ratio in ratios}):
        cells = []
        for form in _NAIVE_FORMS:
            own = [ratio[5] for ratio in ratios if ratio[:5] == (stage, case, context, batch, form)]
            cells.append(f"{own[0]:.1f} x" if own else "-")
        paper = f"{PAPER[stage]} x" if stage in PAPER else "-"
        lines.append(f"| {stage} | {case} | {context} | {batch} | " + " | ".join([*cells, paper]) + " |")
    return "\n".join(lines) if ratios else ""


def plots(rows: Sequence[Row], folder: str | Path) -> list[Path]:
    """Latency against context and share of the limit, one PNG each.

    Raises:
        RuntimeError: matplotlib is not installed.
        ValueError: nothing to draw.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("expected matplotlib for --plot, found none; pip install matplotlib") from error
    matplotlib.use("Agg")
    drawn = [r for r in rows if r["bench"] == "attention" and r["green"] and r["groups"] == 1 and r["suffix"]]
    drawn = [row for row in drawn if _title(row) == _title(drawn[-1])]  # one device and one way to measure a plot
    if not drawn:
        raise ValueError("expected green rows of attention with one group, found none; measure some first")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    latency, share = folder / "kernels-latency.png", folder / "kernels-share.png"
    _draw(drawn, latency, "us", ("flashinfer", "flashinfer_cascade", "exact", "sparse", "suffix"))
    _draw(drawn, share, "share", ("flashinfer", "flashinfer_cascade", "exact", "sparse"))
    return [latency, share]


_LOOKS = {
    "flashinfer": ("tab:red", "s", "FlashInfer decode"),
    "flashinfer_cascade": ("tab:orange", "^", "FlashInfer cascade"),
    "exact": ("tab:blue", "o", "exact"),
    "sparse": ("tab:green", "o", "sparse, 5% x sqrt(batch)"),
    "suffix": ("tab:purple", ".", "suffix + merge"),
}


def _draw(rows: Sequence[Row], path: Path, figure_of: str, cases: Sequence[str]) -> None:
    """One panel a batch; `us` is drawn log-log with the floor of reading K and V once."""
    from matplotlib import pyplot

    batches = sorted({row["batch"] for row in rows})
    figure, panels = pyplot.subplots(1, len(batches), figsize=(4.6 * len(batches), 4.4), squeeze=False, sharey=True)
    for panel, batch in zip(panels[0], batches, strict=True):
        for case in cases:
            own = sorted((row["context"], row) for row in rows if (row["batch"], row["case"]) == (batch, case))
            if not own:
                continue
            color, marker, label = _LOOKS[case]
            scale = 100.0 if figure_of == "share" else 1.0
            contexts = [context for context, _ in own]
            panel.plot(contexts, [scale * row[figure_of] for _, row in own], color=color, marker=marker, label=label)
            if figure_of == "us" and case in ("exact", "sparse"):
                floor = [row["bytes"] / MEMORY_RATE * 1e6 for _, row in own]
                panel.plot(contexts, floor, ":", color=color, label=f"floor of {case}: K and V once at 4.3 TB/s")
        panel.set(title=f"batch {batch}", xlabel="tokens of prefix")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda tokens, at: f"{tokens / 1024:g}K" if tokens >= 1024 else f"{tokens:g}")
        panel.grid(True, which="both", alpha=0.25)
    first = panels[0][0]
    if figure_of == "us":
        first.set(yscale="log", ylabel="us a layer, cold L2")
    else:
        first.set(ylim=(0, 105), ylabel="% of 4.3 TB/s, K and V counted once")
    figure.suptitle(f"{rows[0]['device']}, {rows[0]['dtype']}" + ("" if rows[0]["meaningful"] else " (smoke run)"))
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncol=len(labels), loc="lower center")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
