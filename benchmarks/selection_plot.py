"""What the selection benchmark's rows say: tables, error at equal bytes read, the Pareto frontier, the plot.

Which recipe wins is another module's: `selection_winner` ranks by time. The error where a step reads a share of what
dense attention reads (index and selected keys and values together) decides nothing; it says which recipe would be best
if reading were all. It is interpolated between two measured keep ratios, log against log; a method that cannot go down
to that many bytes has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import selection_winner

from sglang_ext.calibration.winner import MAX_STORED_SHARE, TOLERANCE

READ_SHARES = (0.05, 0.075, 0.10, 0.15, 0.20)
"""Where the table shows the error."""

READ_SHARE = 0.10
"""Bytes that a step reads over those that dense attention reads, by which that table is sorted."""

AREA_FROM, AREA_TO = 0.05, 0.2

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

    def error_at(self, share: float) -> float:
        """Output error when a step reads that share of dense; infinite below what the method can do."""
        if share < self.points[0][0] - TOLERANCE:
            return math.inf
        best = self.points[0][1]
        for (x0, y0), (x1, y1) in pairwise(self.points):
            if share >= x1:
                best = min(best, y1)
            elif share >= x0:
                part = math.log(share / x0) / math.log(x1 / x0)
                best = min(best, math.exp((1 - part) * math.log(max(y0, 1e-9)) + part * math.log(max(y1, 1e-9))))
        return best

    def area(self) -> float:
        """Mean error over log(bytes read) from 5% to 20% of dense; 1 (nothing read) where it cannot go so low."""
        steps = 200
        ratio = math.log(AREA_TO / AREA_FROM)
        shares = [AREA_FROM * math.exp(ratio * (i + 0.5) / steps) for i in range(steps)]
        return sum(min(1.0, self.error_at(share)) for share in shares) / steps


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


def eligible(found: Iterable[Curve]) -> list[Curve]:
    """Those that can be served and are small enough."""
    return [c for c in found if c.kind in ("method", "combined") and c.stored_share <= MAX_STORED_SHARE]


def ranking(found: Iterable[Curve], share: float = READ_SHARE) -> list[Curve]:
    """The eligible methods, least error at equal bytes first; those that cannot read so little are left out."""
    able = [curve for curve in eligible(found) if math.isfinite(curve.error_at(share))]
    return sorted(able, key=lambda curve: (curve.error_at(share), curve.stored_share, curve.method))


def frontier(found: Iterable[Curve]) -> list[tuple[float, float, str]]:
    """(read_share, error, method) of the points that no other point of an eligible method beats in both."""
    points = sorted((x, y, curve.method) for curve in eligible(found) for x, y in curve.points)
    kept: list[tuple[float, float, str]] = []
    for point in points:
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def tables(rows: Sequence[Row], keep_ratios: Sequence[float]) -> str:
    """Everything as Markdown: generators, tables by source, length and keep ratio, the winner, error by bytes."""
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
        parts.append(by_bytes(curves(rows)))
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


def by_bytes(found: Sequence[Curve]) -> str:
    """Error at several shares of dense and the area for each method, least first."""
    order = ranking(found)
    small = {curve.method for curve in eligible(found)}
    lines = [
        f"**Output error by bytes read** (captured; at most {MAX_STORED_SHARE:.0%} of the KV stored, sorted at "
        f"{READ_SHARE:.0%} of dense read; `-`: cannot read so little)",
        "",
        f"| method | stored | {' | '.join(f'{share:.3g}' for share in READ_SHARES)} | area |",
        "|---" * (len(READ_SHARES) + 3) + "|",
    ]
    rest = sorted((curve for curve in found if curve not in order), key=Curve.area)
    for curve in [*order, *rest]:
        errors = [curve.error_at(share) for share in READ_SHARES]
        cells = " | ".join(f"{error:.3f}" if math.isfinite(error) else "-" for error in errors)
        note = (
            "" if curve.method in small else f" ({curve.kind})" if curve.kind in ("rival", "oracle") else " (too large)"
        )
        lines.append(f"| {curve.method}{note} | {curve.stored_share:.1%} | {cells} | {curve.area():.4f} |")
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
