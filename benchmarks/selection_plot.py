"""What the selection benchmark's rows say: tables, and error against bytes read as a plot.

Which recipe wins is another module's: `selection_winner` ranks by time. Bytes that a step reads decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import selection_winner

from sglang_ext.calibration.winner import MAX_STORED_SHARE

Row = dict[str, Any]


class Curve(NamedTuple):
    """A method's means over prompts, by keep ratio ascending.

    Attributes:
        method, kind: of the row.
        stored_share: bytes stored over those of the bf16 KV.
        points: (read_share, error) per keep ratio.
    """

    method: str
    kind: str
    stored_share: float
    points: tuple[tuple[float, float], ...]


def curves(rows: Iterable[Row], source: str = "captured") -> list[Curve]:
    """One curve per method over all prompts of a source.

    Raises:
        ValueError: rows of different settings, or a method without a prompt that another one has.
    """
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        if row["source"] == source:
            grouped.setdefault(row["method"], []).append(row)
    check_comparable(grouped)
    found = []
    for name, own in grouped.items():
        keeps = sorted(own[0]["points"], key=float)
        points = tuple(
            (_mean(row["points"][k]["read_share"] for row in own), _mean(row["points"][k]["error"] for row in own))
            for k in keeps
        )
        found.append(Curve(name, own[0]["kind"], _mean(row["stored_share"] for row in own), points))
    return found


def check_comparable(grouped: Mapping[str, Sequence[Row]]) -> None:
    """Raise unless all methods were measured on the same prompts with the same settings.

    Raises:
        ValueError: naming the setting or the method.
    """
    rows = [row for own in grouped.values() for row in own]
    for name in ("pooling", "num_sink", "num_recent", "steps", "keep_ratios"):
        values = {str(row[name]) for row in rows}
        if len(values) > 1:
            raise ValueError(
                f"expected rows of one {name}, got {' and '.join(sorted(values))}; keep them in files of their own"
            )
    prompts = {
        method: {(row["data"], row["num_tokens"], row["item"], str(row["generator"])) for row in own}
        for method, own in grouped.items()
    }
    most = max(prompts.values(), key=len, default=set())
    for method, own in prompts.items():
        if own != most:
            raise ValueError(
                f"expected every method on the same {len(most)} prompts, got {method} on {len(own)}; run the benchmark "
                "again with the same file, it measures what is missing"
            )


def frontier(found: Iterable[Curve]) -> list[tuple[float, float, str]]:
    """(read_share, error, method) of the points that no other beats in both, of what can be served and is small."""
    served = [one for one in found if one.kind in ("method", "combined") and one.stored_share <= MAX_STORED_SHARE]
    points = sorted((x, y, curve.method) for curve in served for x, y in curve.points)
    kept: list[tuple[float, float, str]] = []
    for point in points:
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def tables(rows: Sequence[Row], keep_ratios: Sequence[float]) -> str:
    """Everything as Markdown: generators, tables by source, length and keep ratio, the winner."""
    parts = []
    for source in sorted({row["source"] for row in rows}):
        own = [row for row in rows if row["source"] == source]
        if source == "planted":
            parts.append(_generators(own))
        for length in sorted({row["num_tokens"] for row in own}):
            here = [row for row in own if row["num_tokens"] == length]
            parts += [_table(here, keep, f"{source}, {length} tokens") for keep in keep_ratios]
    if any(row["source"] == "captured" for row in rows):
        parts.append(selection_winner.verdict(selection_winner.candidates(rows)))
    return "\n\n".join(parts)


def _table(rows: Sequence[Row], keep: float, title: str) -> str:
    names = list(dict.fromkeys(row["method"] for row in rows))
    prompts = len({(row["data"], row["item"]) for row in rows})
    lines = [
        f"**{title}, {keep:.0%} kept** ({prompts} prompts)",
        "",
        "| method | kind | recall | layer 0 | / oracle | overlap | error | stored B/token | % of KV | read % of dense "
        "| build s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        own = [row for row in rows if row["method"] == name and f"{keep:g}" in row["points"]]
        if not own:
            continue
        points = [row["points"][f"{keep:g}"] for row in own]
        means = {key: _mean(p[key] for p in points) for key in ("recall", "oracle_ratio", "overlap", "error")}
        lines.append(
            f"| {name} | {own[0]['kind']} | {means['recall']:.3f} | {_mean(p['layer0']['recall'] for p in points):.3f} "
            f"| {means['oracle_ratio']:.3f} | {means['overlap']:.3f} | {means['error']:.3f} "
            f"| {_mean(row['stored_bytes_per_token'] for row in own):.1f} "
            f"| {_mean(row['stored_share'] for row in own):.1%} | {_mean(p['read_share'] for p in points):.1%} "
            f"| {_mean(row['build_seconds'] for row in own):.2f} |"
        )
    return "\n".join(lines)


def _generators(rows: Sequence[Row]) -> str:
    seen: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        seen.setdefault((row["data"], row["num_tokens"]), row["generator"])
    names = ["num_topics", "hits_per_topic", "span", "strength", "shift", "noise", "rope_base", "margin", "seed"]
    lines = [
        "**planted data** (`prefix_kernels.testing.PlantedConfig`)",
        "",
        f"| kind | tokens | {' | '.join(names)} |",
        "|---" * (len(names) + 2) + "|",
    ]
    for (kind, tokens), config in sorted(seen.items(), key=lambda entry: (entry[0][1], entry[0][0])):
        lines.append(f"| {kind} | {tokens} | {' | '.join(f'{config[name]:.4g}' for name in names)} |")
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Output error against bytes read, one panel per source, one line per method; the frontier is marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sources = sorted({row["source"] for row in rows})
    figure, panels = pyplot.subplots(1, len(sources), figsize=(9 * len(sources), 10), squeeze=False)
    styles = {"oracle": ("k", "-"), "method": (None, "-"), "combined": (None, "--"), "rival": (None, ":")}
    for panel, source in zip(panels[0], sources, strict=True):
        found = curves(rows, source)
        colors = pyplot.get_cmap("tab20")
        for i, curve in enumerate(found):
            color, style = styles[curve.kind]
            shares = [100 * x for x, _ in curve.points]
            errors = [max(y, 1e-4) for _, y in curve.points]
            panel.plot(shares, errors, style, color=color or colors(i % 20), marker=".", lw=1, label=curve.method)
        best = frontier(found)
        panel.plot([100 * x for x, _, _ in best], [max(y, 1e-4) for _, y, _ in best], "o", mfc="none", mec="red", ms=9)
        panel.set(xscale="log", yscale="log", title=f"{source}: red circles are the Pareto frontier of the product")
        panel.set(xlabel="bytes read in a step, % of dense (index + KV)", ylabel="relative output error")
        panel.grid(True, which="both", alpha=0.25)
        panel.legend(fontsize=7, ncol=5, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
