#!/usr/bin/env python3
"""Where a decode step spends its time on the GPU, kernel by kernel, and what runs beside what.

    python benchmarks/offload_serving.py --engines hbm host --out rows.jsonl --profile traces    # records, on a GPU
    python benchmarks/offload_profile.py traces/h*.json.gz --out profile.jsonl --picture profile.svg
    python benchmarks/offload_profile.py --table profile.jsonl

A trace is SGLang's own profile of some decode steps, with the row of the step that was measured before it. All kernels
of a graph's replay have the number of its launch, so a step lasts from a replay's first kernel to that of the next
replay. Two replays are left out: the first ones are slow while they are profiled.

No time is counted twice. Kernels overlap: on one stream, as the next one comes before the one before it has ended
(programmatic dependent launch), and on several. A kernel's `us` are those from its begin, or from the end of all that
began before it, to its end. With the time in which nothing ran they add up to the step. `ran_us` are those from its
begin to its end, `beside_us` those in which kernels of two kinds ran on two streams.

Profiling costs time: the table shows the step as it was measured without it, too.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from engines import SHAPES, append, read

Row = dict[str, Any]

SKIPPED = 2
"""First replays of a trace that are left out."""
KINDS: dict[str, tuple[str, str]] = {
    "fetch": (r"fetch", "C3"),
    "residents": (r"look_up|^count_kernel|^place_kernel", "C1"),
    "replay": (r"^replay_kernel", "0.6"),
    "selection": (r"score_|^list_kernel|^pick_kernel|^depth_kernel|^merge_kernel", "C0"),
    "attention": (r"attend_|^merge_items|^_fwd_|Batch(Decode|Prefill)|MergeState", "C2"),
    "products": (r"nvjet|gemm|gemv|cutlass|xmma|splitK", "C4"),
    "others": (r"", "C7"),
}
"""By kind what names of its kernels contain, the first that fits, and a colour. `fetch` reads host memory over the
link; `replay` is the benchmark's own (`offload_serving_replay.py`); `products` are of matrices."""
_LEAST_SHARE = 0.004
"""Of a step; kernels with less share a line of the table."""
_LAYERS = 2
"""Of a picture."""


class Kernel(NamedTuple):
    """A kernel, copy or memset that ran: `begin` and `end` in us; `launch` is the number of what launched it."""

    name: str
    begin: float
    end: float
    stream: int
    launch: int

    @property
    def kind(self) -> str:
        """See `KINDS`."""
        return next(kind for kind, (pattern, _) in KINDS.items() if re.search(pattern, self.name))


def short(name: str) -> str:
    """A kernel's name without types, and with the last of its namespaces."""
    if name.startswith("Mem"):
        return name  # Memcpy HtoD (Pinned -> Device)
    name = re.sub(r"^void |^std::enable_if<.*?>::type |\(anonymous namespace\)::", "", name)
    return "::".join(re.split(r"[<(]", name, maxsplit=1)[0].split("::")[-2:])


def kernels_of(trace: Row) -> list[Kernel]:
    """What ran on the device, by its begin, of a Chrome trace as torch's profiler writes it."""
    found = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            args, begin = event["args"], float(event["ts"])
            end = begin + float(event["dur"])
            found.append(Kernel(short(event["name"]), begin, end, args["stream"], args["correlation"]))
    return sorted(found, key=lambda one: one.begin)


def replays(kernels: Sequence[Kernel]) -> list[tuple[float, int]]:
    """(begin, launch) of a decode graph's replays, without the first ones. Smaller graphs belong to a step.

    Raises:
        ValueError: there are too few for a step.
    """
    counts = Counter(one.launch for one in kernels)
    most = max(counts.values(), default=0)
    begins: dict[int, float] = {}
    for one in kernels:
        if most > 1 and 2 * counts[one.launch] >= most:
            begins.setdefault(one.launch, one.begin)
    if len(begins) < SKIPPED + 2:
        raise ValueError(
            f"expected {SKIPPED + 2} replays of a decode graph or more, got {len(begins)} among {len(kernels)} "
            "kernels; record on a GPU, with SGLang's decode graphs"
        )
    return sorted((begin, launch) for launch, begin in begins.items())[SKIPPED:]


def profile(trace: Row) -> Row:
    """Figures of a step, means over those of a trace, us.

    Returns:
        `step_us` and `steps`; `kernels`: name, kind, launches, us, ran_us of each; `kinds`: us; `idle_us`, of nothing
        that ran between two kernels of a replay, and `between_us`, of nothing that ran elsewhere; `beside_us`: by two
        kinds; `overlapped_us`: of kernels of one stream that ran at once.

    Raises:
        ValueError: see `replays`.
    """
    kernels = kernels_of(trace)
    begins = replays(kernels)
    begin, end, steps = begins[0][0], begins[-1][0], len(begins) - 1
    kernels = [*takewhile(lambda one: one.begin < end, kernels)]
    launches, idle = Counter[str](), {True: 0.0, False: 0.0}
    own, ran = defaultdict[str, float](float), defaultdict[str, float](float)
    reached, last, kind_of = begin, begins[0][1], {one.name: one.kind for one in kernels}
    for one in kernels:
        launches[one.name] += one.begin >= begin
        ran[one.name] += max(0.0, min(one.end, end) - max(one.begin, begin))
        own[one.name] += max(0.0, min(one.end, end) - max(one.begin, reached))
        idle[one.launch == last] += max(0.0, one.begin - reached)
        if one.end > reached:
            reached, last = one.end, one.launch
    idle[False] += max(0.0, end - reached)
    beside, overlapped = _beside([one for one in kernels if one.begin >= begin])
    kinds = {kind: sum(us for name, us in own.items() if kind_of[name] == kind) / steps for kind in KINDS}
    names = sorted((name for name in own if launches[name]), key=lambda name: -own[name])
    return {
        "step_us": (end - begin) / steps,
        "steps": steps,
        "kernels": [
            [name, kind_of[name], launches[name] / steps, own[name] / steps, ran[name] / steps] for name in names
        ],
        "kinds": kinds,
        "idle_us": idle[True] / steps,
        "between_us": idle[False] / steps,
        "beside_us": {pair: us / steps for pair, us in beside.items()},
        "overlapped_us": overlapped / steps,
    }


def _beside(kernels: Sequence[Kernel]) -> tuple[dict[str, float], float]:
    """Of each two kernels that ran at once: us by their kinds, on two streams; us on one stream."""
    beside, overlapped = defaultdict[str, float](float), 0.0
    for number, one in enumerate(kernels):
        for other in takewhile(lambda it, end=one.end: it.begin < end, kernels[number + 1 :]):  # type: ignore[misc]
            both = min(one.end, other.end) - other.begin
            if one.stream == other.stream:
                overlapped += both
            else:
                beside[" + ".join(sorted((one.kind, other.kind)))] += both
    return beside, overlapped


def table(rows: Sequence[Row]) -> str:
    """Kernels, sums by kind, and what ran beside what, of result files, as Markdown."""
    parts = []
    for row in rows:
        step = row["step_us"]
        head = f"{row['measure']} {row['engine']}: {step:,.0f} us a step of {row['steps']}, {1e3 * row['ms']:,.0f} us "
        lines = [head + f"without the profiler; {row['device']}, commit {row['commit']}", ""]
        lines += ["| kernel | kind | launches | us | share | begin to end, us |", "|---|---|---|---|---|---|"]
        small = [one for one in row["kernels"] if one[3] < _LEAST_SHARE * step]
        rest = [f"{len(small)} more", "", *(sum(one[n] for one in small) for n in (2, 3, 4))]
        for name, kind, launches, us, ran in [*(one for one in row["kernels"] if one not in small), rest]:
            lines.append(f"| {name} | {kind} | {launches:.1f} | {us:,.1f} | {us / step:.1%} | {ran:,.1f} |")
        idle = {"idle within the graph": row["idle_us"], "idle between graphs": row["between_us"]}
        lines += ["", "| kind | us | share |", "|---|---|---|"]
        lines += [f"| {kind} | {us:,.1f} | {us / step:.1%} |" for kind, us in (row["kinds"] | idle).items()]
        beside = [f"{pair} {us:,.1f} us" for pair, us in row["beside_us"].items()] or ["nothing"]
        lines += ["", f"beside each other on two streams: {', '.join(beside)}"]
        lines.append(f"two kernels of one stream at once: {row['overlapped_us']:,.1f} us")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def shown(trace: Row, layers: int) -> tuple[float, float, list[Kernel]]:
    """Begin, end and kernels of some of so many layers, in the middle of the last step, from where one selects."""
    kernels = kernels_of(trace)
    launch = replays(kernels)[-2][1]
    inside = [one for one in kernels if one.launch == launch]
    first, last = inside[0].begin, inside[-1].end
    selects = [after.begin for one, after in pairwise(inside) if "selection" in {after.kind} - {one.kind}]
    begin = min((at for at in selects if at >= (first + last) / 2), default=(first + last) / 2)
    end = begin + (last - first) * _LAYERS / layers
    return begin, end, [one for one in kernels if one.begin < end and one.end > begin]


def picture(drawn: Sequence[tuple[Row, Row]], path: Path) -> None:
    """A timeline, a panel for each (trace, row): streams as lanes, kernels coloured by kind, the axis in us.

    A kernel that begins before the one before it on its stream has ended is drawn in the lower half of the lane.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    found = [(row, *shown(trace, int(SHAPES[row["shape"]]["num_hidden_layers"]))) for trace, row in drawn]
    longest = max(end - begin for _, begin, end, _ in found)
    heights = [1 + 0.7 * len({one.stream for one in kernels}) for *_, kernels in found]
    sizes: Row = {"figsize": (11, 0.9 + sum(heights)), "height_ratios": heights, "squeeze": False}
    figure, panels = pyplot.subplots(len(found), 1, sharex=True, layout="constrained", **sizes)
    for panel, (row, begin, end, kernels) in zip(panels[:, 0], found, strict=True):
        streams = sorted({one.stream for one in kernels})
        reached = dict.fromkeys(streams, 0.0)
        for one in kernels:
            at, until = max(one.begin, begin) - begin, min(one.end, end) - begin
            bottom = -streams.index(one.stream) - 0.4 * (one.begin < reached[one.stream])
            reached[one.stream] = max(reached[one.stream], one.end)
            panel.broken_barh([(at, until - at)], (bottom, 0.38), fc=KINDS[one.kind][1], ec="white", lw=0.3)
            if until - at > 0.0055 * len(one.name) * longest:
                place = ((at + until) / 2, bottom + 0.19)
                panel.text(*place, one.name, ha="center", va="center", fontsize=6, color="white")
        panel.set_yticks([-lane for lane in range(len(streams))], [f"stream {one}" for one in streams])
        panel.set(ylim=(-len(streams) + 0.5, 0.5), xlim=(0, longest))
        step = f"{_LAYERS} layers of a step of {1e3 * row['ms']:,.0f} us"
        panel.set_title(f"{row['measure']} {row['engine']}, {row['device']}: {step}", fontsize=9)
    panels[-1, 0].set_xlabel("us")
    used = {one.kind for *_, kernels in found for one in kernels}
    legend = [Patch(color=color, label=kind) for kind, (_, color) in KINDS.items() if kind in used]
    figure.legend(handles=legend, ncols=len(legend), fontsize=8, loc="outside lower center", frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Print tables of traces, or of rows; write rows and a picture of traces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="that offload_serving.py recorded")
    parser.add_argument("--out", help="result file; a row of each trace is appended")
    parser.add_argument("--picture", type=Path, help="timeline of the traces, as SVG")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="print result files as Markdown")
    args = parser.parse_args(argv)
    if bool(args.traces) == bool(args.table):
        parser.error("expected traces, or result files behind --table")
    if args.table:
        print(table(read(args.table)))
        return 0
    traces = [json.loads(gzip.decompress(path.read_bytes())) for path in args.traces]
    rows = [trace["row"] | profile(trace) for trace in traces]
    for row in rows if args.out else ():
        append(args.out, row)
    if args.picture:
        picture([*zip(traces, rows, strict=True)], args.picture)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
