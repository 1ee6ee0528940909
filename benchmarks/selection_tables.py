"""Tables of the selection benchmark's rows, and which recipe wins by the rule of `sglang_ext.calibration.winner`.

The rule is time at a stated error: rows of captured data give each recipe's error by keep ratio, that of its worst
prompt, and `sglang_ext.calibration.step_time` what its selection and attention of what it chose take on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sglang_ext.calibration.step_time import EXACT_US, REFERENCE, SelectionTime, attention_us, selection_time
from sglang_ext.calibration.winner import (
    ANCHOR_SHARE,
    MAX_STORED_SHARE,
    TARGET_ERROR,
    TOLERANCE,
    Timed,
    keep_for_error,
    timed,
)
from sglang_ext.methods import parse_spec

ANCHOR_SHARES = (ANCHOR_SHARE, 1.0)
"""Where the table shows the time: the rule's own, and every layer selects. The first one decides."""

Row = dict[str, Any]


def tables(rows: Sequence[Row], keep_ratios: Sequence[float]) -> str:
    """Everything as Markdown: tables by source, length and keep ratio, the winner."""
    parts = []
    for source in sorted({row["source"] for row in rows}):
        own = [row for row in rows if row["source"] == source]
        for length in sorted({row["num_tokens"] for row in own}):
            here = [row for row in own if row["num_tokens"] == length]
            parts += [_table(here, keep, f"{source}, {length} tokens") for keep in keep_ratios]
    if any(row["source"] == "captured" for row in rows):
        parts.append(verdict(candidates(rows)))
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


class Candidate(NamedTuple):
    """A recipe over all prompts.

    Attributes:
        method: of the row.
        stored_share: bytes stored over those of the bf16 KV, mean over prompts.
        points: (keep ratio, error of the worst prompt), keep ratio ascending; the ratio is that of the budgets as
            measured, mean over prompts.
        selection: what its selection takes; None: not timed.
    """

    method: str
    stored_share: float
    points: tuple[tuple[float, float], ...]
    selection: SelectionTime | None

    def at(self, anchor_share: float) -> Timed | None:
        """What it takes at the target error; None: not timed."""
        return None if self.selection is None else timed(self.points, self.selection, anchor_share)


def candidates(rows: Iterable[Row]) -> list[Candidate]:
    """The recipes that can be served, measured on captured data with every layer selecting, and are small enough."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        if row["source"] == "captured" and row["kind"] in ("method", "combined") and row["layer_plan"] is None:
            grouped.setdefault(row["method"], []).append(row)
    found = []
    for name, own in grouped.items():
        keeps = sorted(own[0]["points"], key=float)
        kept = [_mean(row["points"][k]["budget"] / row["prefix_len"] for row in own) for k in keeps]
        points = tuple(zip(kept, (max(row["points"][k]["error"] for row in own) for k in keeps), strict=True))
        sampled = own[0].get("sum_every", 1) > 1  # the times are of sums over all tokens
        time = None if sampled else selection_time(parse_spec(own[0]["spec"]), _head_dim(own[0]))
        found.append(Candidate(name, _mean(row["stored_share"] for row in own), points, time))
    return [one for one in found if one.stored_share <= MAX_STORED_SHARE + TOLERANCE]


def ranking(found: Iterable[Candidate], anchor_share: float = ANCHOR_SHARE) -> list[Candidate]:
    """Those that reach the error in a known time, least first; by the upper bound where one was not timed itself."""
    times = [(one, one.at(anchor_share)) for one in found]
    able = [(time.most_us, one.method, one) for one, time in times if time is not None and math.isfinite(time.most_us)]
    return [one for *_, one in sorted(able, key=lambda entry: entry[:2])]


def verdict(found: Sequence[Candidate]) -> str:
    """The table of times, the winner at each anchor share, and who was left out and why."""
    shares = " | ".join(f"step, {_share(share)} of the layers select" for share in ANCHOR_SHARES)
    lines = [
        f"**Time per layer of a step at an output error of {TARGET_ERROR:g} in the worst prompt** (captured; at most "
        f"{MAX_STORED_SHARE:.0%} of the KV stored; us, {REFERENCE}; exact attention of the whole prefix "
        f"{EXACT_US:.1f})",
        "",
        f"| recipe | stored | kept | selection | attention | {shares} |",
        "|---" * (5 + len(ANCHOR_SHARES)) + "|",
    ]
    order = ranking(found)
    known = [one for one in found if one.selection is not None and one not in order]
    for one in [*order, *known]:
        keep = keep_for_error(one.points)
        times = [time for share in ANCHOR_SHARES if (time := one.at(share)) is not None]
        bounds = (one.selection.least_us, one.selection.most_us) if one.selection else (math.inf, math.inf)
        cells = [_bounds(*bounds), "-" if math.isinf(keep) else f"{attention_us(keep):.1f}"]
        cells += [_bounds(time.least_us, time.most_us) for time in times]
        kept = "-" if math.isinf(keep) else f"{keep:.1%}"
        lines.append(f"| {one.method} | {one.stored_share:.1%} | {kept} | {' | '.join(cells)} |")
    lines.append("")
    for share in ANCHOR_SHARES:
        best = next(iter(ranking(found, share)), None)
        won = f"**{best.method}**" if best else "none"
        lines.append(f"Least time where {_share(share)} of the layers select: {won}.  ")
    for one in order + known:
        if one.selection is not None and one.selection.how:
            lines.append(f"{one.method}: {one.selection.how}.  ")
    untimed = [(keep_for_error(one.points), one.method) for one in found if one.selection is None]
    named = ", ".join(f"{name} ({'-' if math.isinf(keep) else f'{keep:.1%}'})" for keep, name in sorted(untimed))
    if named:
        lines.append(f"Left out, as their selection was not timed (kept at that error): {named}.")
    return "\n".join(lines)


def _head_dim(row: Row) -> int:
    """From the bytes of a selection's bf16 keys and values."""
    point = next(iter(row["points"].values()))
    return round(point["kv_bytes"] / point["budget"] / 4)


def _bounds(least: float, most: float) -> str:
    if math.isinf(least):
        return "-"
    if math.isinf(most):
        return f"at least {least:.1f}"
    return f"{least:.1f}" if least == most else f"{least:.1f} to {most:.1f}"


def _share(share: float) -> str:
    return "all" if share == 1.0 else f"1/{1 / share:.0f}"


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
