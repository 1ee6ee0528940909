"""Tables of the selection benchmark's rows. Which recipe wins is another module's: `selection_winner` ranks by time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import selection_winner

Row = dict[str, Any]


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


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
