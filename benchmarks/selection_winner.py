"""Which recipe of the selection benchmark wins, by the rule of `sglang_ext.calibration.winner`: time at a stated error.

Rows of captured data give each recipe's error by keep ratio, that of its worst prompt, and
`sglang_ext.calibration.step_time` what its selection and attention of what it chose take on a GPU. Whether that error
tells recipes that lose answers from others is another table, of those whose answers were compared with dense:

    python benchmarks/selection_winner.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
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
from sglang_ext.indexing import parse_spec

ANCHOR_SHARES = (ANCHOR_SHARE, 1.0)
"""Where the table shows the time: the rule's own, and every layer selects. The first one decides."""

RESULTS = Path(__file__).parent / "results"

ANSWERED: tuple[tuple[str, float, str, dict[str, Any]], ...] = (
    ("csa > tokens48 .25", 0.05, "accuracy-h200-default.jsonl", {"method": "two_level"}),
    ("csa > tokens48 .25", 0.1, "accuracy-h200-default.jsonl", {"method": "two_level"}),
    ("tokens int4 48ch", 0.05, "accuracy-h200-token_index.jsonl", {"method": "token_index"}),
    ("tokens int4 48ch", 0.1, "accuracy-h200-token_index.jsonl", {"method": "token_index"}),
    ("ab minmax int4", 0.3, "accuracy-h200-ab_sparse.jsonl", {"method": "ab_sparse"}),
    ("ab minmax int4", 0.2, "accuracy-h200-ab_sparse.jsonl", {"method": "ab_sparse"}),
    ("ab minmax int4", 0.1, "methods-h200-ab_sparse.jsonl", {"method": "ab_sparse"}),
)
"""Recipes whose answers were compared with dense in all layers: method of the rows, keep ratio, file, settings."""

Row = dict[str, Any]


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


def agreement(rows: Sequence[Row]) -> str:
    """The table of `ANSWERED`: errors of the captured rows, and of their cells the one that lost most answers."""
    lines = [
        "| recipe | kept | mean error | worst prompt's error | worst loss of answers [95%] | task, tokens |",
        "|---|---|---|---|---|---|",
    ]
    for name, keep, file, config in ANSWERED:
        errors = [
            row["points"][f"{keep:g}"]["error"]
            for row in rows
            if row["source"] == "captured" and row["method"] == name and f"{keep:g}" in row["points"]
        ]
        asked = [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]
        asked = [row for row in asked if {**row["config"], **config, "keep_ratio": keep} == row["config"]]
        worst = min(asked, key=lambda row: (row["difference"], row["low"]))
        known = f"{_mean(errors):.3f} | {max(errors):.3f}" if errors else "- | -"
        lines.append(
            f"| {name} | {keep:.0%} | {known} | {100 * worst['difference']:+.1f} "
            f"[{100 * worst['low']:+.1f}, {100 * worst['high']:+.1f}] | {worst['task']}, {worst['num_tokens']:,} |"
        )
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


def main() -> None:
    """Print the table of times and the recipes whose answers are known, from the committed results."""
    from selection import read_rows

    rows = read_rows(RESULTS / "selection-h200.jsonl.xz")
    print(f"{verdict(candidates(rows))}\n\n{agreement(rows)}")


if __name__ == "__main__":
    main()
