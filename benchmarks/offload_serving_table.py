"""Figures of `offload_serving.py`: of requests' pieces, and a table of result files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from engines import Streamed

Row = dict[str, Any]


def within(found: Sequence[Streamed], begin: float, end: float) -> Row:
    """Figures of what came between two times. Of a request that was still running it counts what came of it."""
    tokens, gaps, firsts = 0, [], []
    for one in found:
        pieces = [(0, one.begun), *one.arrivals]
        for (so_far, before), (count, now) in pairwise(pieces):
            if begin <= now < end:
                tokens += count - so_far
                if so_far and count > so_far:
                    gaps.append((now - before) / (count - so_far))
        if one.arrivals and one.arrivals[0][0] and begin <= one.arrivals[0][1] < end:
            firsts.append(one.arrivals[0][1] - one.begun)
    row: Row = {"tokens_per_s": tokens / (end - begin), "begun": len(firsts), "requests": len(found)}
    for name, times in (("ttft_ms", firsts), ("itl_ms", gaps)):
        row[name] = 1e3 * median(times) if times else None
    return row


def held_bytes(row: Row) -> dict[str, int]:
    """Device bytes of a row of ours, by what they are for."""
    return {name: size for name, size in row["bytes"].items() if name != "indexes_at_most"}


def table(rows: Sequence[Row]) -> str:
    """Figures beside what they are compared with; ratios: ours over stock's, step over the other's, or the link's."""
    found = {(row["measure"], row["engine"], row["answer"]): row for row in rows}
    lines = ["| | ours | against | ratio |", "|---|---|---|---|"]

    def line(name: str, ours: float | None, other: float | None, digits: int, unit: str) -> None:
        if ours is not None and other:
            texts = (f"{ours:,.{digits}f} {unit}", f"{other:,.{digits}f} {unit}", f"{ours / other:.2f}")
            lines.append(f"| {name} | " + " | ".join(texts) + " |")

    def of(measure: str, engine: str, figure: str, answer: int | None = None) -> float | None:
        return found.get((measure, engine, answer), {}).get(figure)

    for answer in sorted({row["answer"] for row in rows if row["answer"]}):
        for figure, unit in (("tokens_per_s", "tokens/s"), ("ttft_ms", "ms"), ("itl_ms", "ms")):
            ours, stock = (of("throughput", engine, figure, answer) for engine in ("ours", "stock"))
            line(f"throughput, answers of {answer}: {figure}", ours, stock, 1, unit)
    line("distinct", of("distinct", "ours", "tokens_per_s"), of("distinct", "hbm", "tokens_per_s"), 1, "tokens/s")
    line("step", of("step", "host", "ms"), of("step", "hbm", "ms"), 2, "ms")
    line("step, and its link", of("step", "host", "ms"), of("step", "host", "link_ms"), 2, "ms")
    for engine in ("host", "disk"):
        seconds, prefill = (of("first_token", one, "seconds") for one in (engine, "prefill"))
        line(f"first token from {engine}, prefill", seconds, prefill, 2, "s")
    for row in rows:
        if row.get("bytes"):
            held = held_bytes(row)
            parts = ", ".join(f"{name} {size:,}" for name, size in held.items())
            lines.append(f"\n{row['measure']} {row['engine']}: {sum(held.values()):,} bytes: {parts}")
    return "\n".join(lines)
