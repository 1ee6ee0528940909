"""What the rows of `answers.py` say: differences with intervals, agreement, and a picture of both against time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engines import Row, markdown

from sglang_ext.calibration.judge import Z95

COUNTS_FROM = 0.2
"""Share of right dense answers below which a cell says nothing."""


@dataclass(frozen=True)
class Difference:
    """Answers of one configuration less those of dense, or of another one. Shares of right answers, 0 to 1.

    Attributes:
        questions: in counting cells.
        dense, other: shares of right answers; dense stands for what is compared with.
        difference: other - dense.
        low, high: its 95% interval; questions of one document are one cluster.
        lost, won: questions whose score is lower, higher than dense's.
        worst: the cell that loses most: (difference, task, length).
        cells: that count, and all.
    """

    questions: int
    dense: float
    other: float
    difference: float
    low: float
    high: float
    lost: int
    won: int
    worst: tuple[float, str, int]
    cells: tuple[int, int]

    @property
    def points(self) -> str:
        """The difference with its interval."""
        return "{:+.2f} [{:+.2f}, {:+.2f}]".format(*(100 * move for move in (self.difference, self.low, self.high)))


def compare(pairs: Sequence[tuple[Row, Row]]) -> Difference | None:
    """(dense, other) rows of the same cells -> None where no cell counts.

    Raises:
        ValueError: rows of different questions.
    """
    clusters: dict[tuple[str, int, int], list[float]] = {}
    dense, other, worst = list[float](), list[float](), list[tuple[float, str, int]]()
    for first, second in pairs:
        if first["documents"] != second["documents"]:
            raise ValueError(
                f"expected the same questions in both rows of {first['task']}, got different ones; measure both "
                "with one --seed and --documents"
            )
        if statistics.fmean(first["scores"]) < COUNTS_FROM:
            continue
        moves = [b - a for a, b in zip(first["scores"], second["scores"], strict=True)]
        # RULER's samples have a prefix each; other documents are asked by several tasks.
        cell = f"{first['seed']} {first['cell']}"
        for number, move in zip(first["documents"], moves, strict=True):
            clusters.setdefault((cell, first["length"], number), []).append(move)
        dense += first["scores"]
        other += second["scores"]
        worst.append((statistics.fmean(moves), first["task"], first["length"]))
    if not dense:
        return None
    count, mean = len(dense), (sum(other) - sum(dense)) / len(dense)
    spread = sum((sum(moves) - mean * len(moves)) ** 2 for moves in clusters.values())
    half = Z95 * math.sqrt(spread * len(clusters) / max(len(clusters) - 1, 1)) / count
    moves = [b - a for a, b in zip(dense, other, strict=True)]
    return Difference(
        questions=count,
        dense=sum(dense) / count,
        other=sum(other) / count,
        difference=mean,
        low=mean - half,
        high=mean + half,
        lost=sum(move < 0 for move in moves),
        won=sum(move > 0 for move in moves),
        worst=min(worst),
        cells=(len(worst), len(pairs)),
    )


def differences(
    rows: Sequence[Row], against: str = "dense"
) -> dict[tuple[str, str, int], tuple[Difference, list[Row]]]:
    """(suite, configuration, requests in flight) -> its difference from dense or `against`, and its rows.

    What is compared with is of the same commit, where it was measured then.
    """
    asked = [row for row in rows if "scores" in row]
    key = ("suite", "cell", "task", "length", "in_flight", "seed", "model")
    dense: dict[tuple[Any, ...], Row] = {}
    for row in asked:
        if row["config"] == against:
            own = tuple(row[name] for name in key)
            dense.setdefault(own, row)
            dense.setdefault((*own, row.get("commit")), row)
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in asked:
        if row["config"] not in ("dense", against) and tuple(row[name] for name in key) in dense:
            groups.setdefault((row["suite"], row["config"], row["in_flight"]), []).append(row)

    def wanted(row: Row) -> Row:
        cell = tuple(row[name] for name in key)
        return dense.get((*cell, row.get("commit")), dense[cell])

    said = {group: compare([(wanted(row), row) for row in own]) for group, own in groups.items()}
    return {group: (one, groups[group]) for group, one in said.items() if one}


def answers_table(rows: Sequence[Row], against: str) -> str:
    """A line for each suite, configuration and number of requests in flight, with KL and time where they are known."""
    lengths = {tuple(row["length"] for row in own) for own, _ in forced(rows).values()}
    one_head = len(lengths) == 1
    kl = {
        key: ", ".join(
            f"{one['kl']:.4f}" + ("" if one_head else f" ({row['length']})") for row, one in zip(own, full, strict=True)
        )
        for key, (own, full) in forced(rows).items()
    }
    at = f"at {', '.join(map(str, min(lengths)))}" if one_head else "(tokens)"
    longest = max((length for _, length, _ in times(rows)), default=0)
    head = ["suite", "configuration", "in flight", "questions", against, "right", "points [95%]", "lost, won"]
    head += ["worst cell", "kept", "sparse steps", f"KL {at}", f"ms a step, {longest} tokens"]
    lines = []
    for (suite, config, in_flight), (said, own) in differences(rows, against).items():
        counts = {(row["cell"], row["length"]): row for row in own}.values()
        sparse = sum(row["sparse_rows"] for row in counts)
        steps = sparse + sum(row["dense_rows"] for row in counts)  # cascade's are among these
        kept = [row["keep_ratio"] for row in counts if row["keep_ratio"] is not None]
        move, task, length = said.worst
        took = next((span(row) for row in rows if times([row]).keys() == {(config, longest, in_flight)}), "")
        cells = [suite, config, str(in_flight), str(said.questions), f"{said.dense:.1%}", f"{said.other:.1%}"]
        cells += [said.points, f"{said.lost}, {said.won}", f"{100 * move:+.2f} {task} {length}"]
        cells += [f"{statistics.fmean(kept):.1%}" if kept else "", f"{sparse / steps:.1%}" if steps else ""]
        lines.append([*cells, kl.get((config, in_flight), ""), took])
    return table_of(head, lines)


def table_of(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """As Markdown; nothing where there are no lines."""
    return markdown(head, lines) if lines else ""


def forced(rows: Sequence[Row]) -> dict[tuple[str, int], tuple[list[Row], list[Row]]]:
    """(configuration, requests in flight) -> rows of its lengths, ascending, and their figures of full groups.

    Of a length that was measured twice, the first row.
    """
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row["suite"] == "forced":
            own = found.setdefault((row["config"], row["in_flight"]), [])
            own += [] if any(one["length"] == row["length"] for one in own) else [row]
    for own in found.values():
        own.sort(key=lambda row: row["length"])
    return {key: (own, [row.get("full") or row["all"] for row in own]) for key, own in found.items()}


def forced_table(rows: Sequence[Row]) -> str:
    """A line for each configuration and number of requests in flight; figures of its lengths stand side by side."""
    head = ["configuration", "in flight", "tokens", "steps", "KL", "top-1", "the token's log-probability moves"]
    lines = []
    for (config, in_flight), (own, full) in forced(rows).items():
        lengths, steps = (str(row["length"]) for row in own), str(sum(one["steps"] for one in full))
        kl, top1 = (f"{one['kl']:.4f}" for one in full), (f"{one['top1']:.1%}" for one in full)
        figures = map(" / ".join, (kl, top1, (f"{one['delta']:.3f}" for one in full)))
        lines.append([config, str(in_flight), " / ".join(lengths), steps, *figures])
    return table_of(head, lines)


def drafts_table(rows: Sequence[Row]) -> str:
    """A line for each configuration of lossless decode and kind of question: drafts, and the part that was kept."""
    lines = []
    for row in rows:
        drafted, accepted = row.get("drafts", (0, 0))
        if drafted:
            cells = row["config"], row["length"], row["in_flight"], row["task"], drafted, f"{accepted / drafted:.1%}"
            lines.append(list(map(str, cells)))
    return table_of(["configuration", "tokens", "in flight", "task", "drafted", "kept"], lines)


def times(rows: Sequence[Row]) -> dict[tuple[str, int, int], float]:
    """(configuration, length, requests in flight) -> median ms of a step; of what was measured twice, the first."""
    found: dict[tuple[str, int, int], float] = {}
    for row in rows:
        if row["suite"] == "times":
            found.setdefault((row["config"], row["length"], row["in_flight"]), statistics.median(row["ms"]))
    return found


def span(row: Row) -> str:
    """Median of a row's repetitions, least and most."""
    return f"{statistics.median(row['ms']):.2f} ({min(row['ms']):.2f}-{max(row['ms']):.2f})"


def times_table(rows: Sequence[Row]) -> str:
    timed = [row for row in rows if row["suite"] == "times"]
    lines = [[row["config"], str(row["length"]), str(row["in_flight"]), span(row)] for row in timed]
    return table_of(["configuration", "tokens", "in flight", "ms a step (least, most of five)"], lines)


def table(rows: Sequence[Row], against: str = "dense") -> str:
    """All tables that the rows have something for, as Markdown; answers are compared with those of `against`.

    Raises:
        ValueError: rows of several models, or of several settings under one name.
    """
    known: dict[str, tuple[Any, ...]] = {}
    for row in rows:
        own = (row["model"], row["settings"], row.get("profile"), row["device"])
        if known.setdefault(row["config"], own) != own or len({one[0] for one in known.values()}) > 1:
            raise ValueError(
                f"expected rows of one model, device and settings by name, got several of {row['config']}; print "
                "them apart"
            )
    tables = [answers_table(rows, against), forced_table(rows), drafts_table(rows), times_table(rows)]
    return "\n\n".join(filter(None, tables))


def plot(rows: Sequence[Row], path: str) -> None:
    """Answers lost, and KL, against milliseconds a step at the greatest length, of configurations that were timed."""
    from matplotlib.figure import Figure

    found = times(rows)
    longest = max((length for _, length, _ in found), default=0)
    figure = Figure(figsize=(11, 4.5))
    left, right = figure.subplots(1, 2)
    for (suite, config, in_flight), (said, _) in differences(rows).items():
        ms = found.get((config, longest, in_flight))
        if suite == "documents" and ms is not None:
            spread = [[100 * (said.difference - said.low)], [100 * (said.high - said.difference)]]
            left.errorbar(ms, 100 * said.difference, yerr=spread, marker="o", capsize=3)
            left.annotate(f"{config}, {in_flight}", (ms, 100 * said.difference), fontsize=7)
    for row in [row for own, _ in forced(rows).values() for row in own]:
        ms = found.get((row["config"], row["length"], row["in_flight"]))
        if ms is not None and row["length"] == longest:
            right.plot(ms, row["all"]["kl"], "o")
            right.annotate(f"{row['config']}, {row['in_flight']}", (ms, row["all"]["kl"]), fontsize=7)
    left.axhline(0.0, color="grey", linewidth=0.5)
    left.set(xlabel="ms a step", ylabel="right answers less dense's, points", title="Answers, all lengths")
    right.set(xlabel="ms a step", ylabel="KL from dense, nats", yscale="log", title=f"Forced, {longest} tokens")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
