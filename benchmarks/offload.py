#!/usr/bin/env python3
"""Prefixes in host memory: what swap-in of tokens and exact attention cost, and how many real decode steps change.

    python benchmarks/offload.py swap --out rows.jsonl                # a GPU; minutes
    python benchmarks/offload.py prefill --out rows.jsonl             # the same
    make models                                                       # once
    python benchmarks/offload.py churn --out rows.jsonl               # Qwen on a CPU
    python benchmarks/offload.py trace --out selected.npz             # its selections, for residents to be fed with
    python benchmarks/offload.py --table rows.jsonl
    python benchmarks/offload.py swap --smoke --out tiny.jsonl        # a CPU is enough

`swap` is of one layer, 8 KV heads of 128, bf16, CUDA graph replays, medians; `exact` is what attention waits for,
`reuse` the copy alone, of a layer that reuses a selection. `floor_us` are the same bytes at 51 GB/s. Each configuration
is first compared with the host's bytes, and its counters with set arithmetic; a red one is written and printed as
failed, without a time.

`prefill` is of `--layers` layers, eager: exact attention of `--suffix` new tokens of each of `--requests` behind one
prefix in pinned memory, beside its bytes at 51 GB/s. Its gate is attention in fp32 over a copy of the prefix.

`churn` decodes a document's long answers, and counts by layer.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import numpy as np
import torch
from engines import append, markdown, read
from kernel_bench import attempt, device_of, gated, group_shape, timer_of
from kernel_rows import Row, Run, origin, provenance
from offload_cases import LINK_RATE, Host, PinnedLayers, Prefill, PrefillSizes, Swap, SwapSizes

from prefix_kernels.budget import budget_for_group

PARTS = ("exact", "reuse")
_USUAL: Row = {
    "contexts": [131072],
    "groups": [(1, 1), (8, 1), (1, 8)],
    "churn": [0.0, 0.05, 0.1, 0.2, 0.4, 1.0],
    "shape": (8, 128),
    "dtype": "bfloat16",
    "budget": 2048,
    "suffix": [16, 64, 512],
    "requests": [1, 8],
    "staging": 8192,
    "layers": 4,
}
_SMOKE: Row = {
    "contexts": [1024],
    "groups": [(1, 1), (2, 1)],
    "churn": [0.25],
    "shape": (2, 16),
    "dtype": "float16",
    "budget": 64,
    "suffix": [5],
    "requests": [1, 2],
    "staging": 128,
    "layers": 2,
}


# -- swap, prefill ---------------------------------------------------------------------------------------------

Case = tuple[str, int, Any, Callable[[], Any]]
"""Name, requests, sizes, and what makes it."""


def measure(args: argparse.Namespace) -> int:
    """All rows that the file does not hold; how many failed. A prefill's time is also of the host that queues it."""
    run, timer = Run(Path(args.out), provenance(args)), timer_of(args)
    run.origin["null_us"] = round(timer.null_us(), 2)
    prefills = args.part == "prefill"
    for name, batch, sizes, make in (prefill_cases if prefills else swap_cases)(args, device_of(args)):
        key = {"bench": args.part, "case": name, "batch": batch, "groups": 1}
        key |= dataclasses.asdict(sizes) | {"dtype": args.dtype}
        if not run.has(key):
            row = attempt(timer, lambda make=make: gated(make(), timer, eager=prefills))  # type: ignore[misc]
            run.add({**key, "bytes": sizes.nbytes, "floor_us": round(sizes.nbytes / LINK_RATE * 1e6, 2), **row})
    if run.failed:
        print(f"{run.failed} rows FAILED their correctness gate; they have no times", file=sys.stderr)
    return run.failed


def swap_cases(args: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """Prefixes are made with the first case that is measured."""
    heads, dim = args.shape
    for context in args.contexts:
        for groups, requests in args.groups:
            host: Host | None = None
            for churn in args.churn:
                budget = budget_for_group(args.budget, requests)
                dtype = getattr(torch, args.dtype)
                sizes = SwapSizes(context, groups, budget, churn, args.room, heads, dim, dtype, args.steps)
                for part in args.only or PARTS:

                    def make(sizes: SwapSizes = sizes, part: str = part) -> Swap:
                        nonlocal host
                        host = host or Host(sizes, device, args.seed)
                        return Swap(sizes, part, host, device, args.seed)

                    yield f"{part} {churn:.0%}", groups * requests, sizes, make


def prefill_cases(args: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """The same."""
    heads, dim = args.shape
    for context in args.contexts:
        host: PinnedLayers | None = None
        for requests in args.requests:
            for suffix in args.suffix:
                fields = (context, suffix, requests, args.staging, args.layers, 4 * heads, heads, dim)
                sizes = PrefillSizes(*fields, getattr(torch, args.dtype))

                def make(sizes: PrefillSizes = sizes) -> Prefill:
                    nonlocal host
                    host = host or PinnedLayers(sizes, device, args.seed)
                    return Prefill(sizes, host, device, args.seed, "triton" if args.smoke else None)

                yield f"suffix {suffix}", requests, sizes, make


# -- churn -----------------------------------------------------------------------------------------------------


def captures(args: argparse.Namespace) -> Iterator[tuple[int, Any]]:
    """(tokens of the prefix, capture) of each document, captured if it is not there."""
    from answers_data import Chat
    from offload_churn import TEMPERATURE, Captured, Capturing, asked
    from transformers import AutoTokenizer

    cpu, folder = torch.device("cpu"), args.work / Path(args.model_path).name
    folder /= f"seed-{args.seed}-{args.new_tokens}"
    folder.mkdir(parents=True, exist_ok=True)
    chat = Chat(AutoTokenizer.from_pretrained(args.model_path))
    for length in args.contexts:
        for document in asked(args.packages, chat, length, args.seed).values():
            path = folder / f"{document.name}.pt"
            if not path.exists():
                capturing = Capturing(args.model_path, chat, cpu)
                capturing.capture(document, args.new_tokens, TEMPERATURE).save(path)
            yield length, Captured.load(path, cpu)


def churn(args: argparse.Namespace) -> None:
    """Count and judge what the result file does not hold."""
    from offload_churn import churn_rows, lagged_rows

    known = {"model": Path(args.model_path).name, "seed": args.seed, **origin(args)}
    known["device"] = platform.processor() or "CPU"
    held = read([args.out]) if Path(args.out).exists() else []
    done = {(row["bench"], row["document"]) for row in held if row.get("model") == known["model"]}
    for length, captured in captures(args):
        if ("churn", captured.name) not in done:
            for row in churn_rows(captured, length, args.keep):
                append(args.out, {**row, **known})
        for answer in captured.answers[: args.lagged] if ("lagged", captured.name) not in done else ():
            for row in lagged_rows(captured, answer, length, args.keep, args.every):
                append(args.out, {**row, **known})


def trace(args: argparse.Namespace) -> None:
    """Write what the first answer selects, for a server's residents to be fed with."""
    from offload_churn import traced

    length, captured = next(captures(args))
    positions = traced(captured, captured.answers[0], length, 64, args.budget).numpy().astype(np.uint16)
    np.savez_compressed(args.out, positions=positions, prefix_len=length)


# -- tables and command line -----------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Markdown of all parts."""
    parts = ("swap", swap_table), ("prefill", prefill_table), ("churn", churn_table), ("lagged", lagged_table)
    found = ((make, [row for row in rows if row["bench"] == name]) for name, make in parts)
    return "\n\n".join(make(of) for make, of in found if of)


def swap_table(rows: Sequence[Row]) -> str:
    """Microseconds by churn."""

    def column(row: Row) -> str:
        return f"{row['groups']} groups, batch {row['batch']}, {row['context']:,} tokens"

    return link_table(rows, "us", column, lambda row: str(row["case"]), 1, 1)


def prefill_table(rows: Sequence[Row]) -> str:
    """Milliseconds of all layers."""
    layers = ", ".join(str(one) for one in dict.fromkeys(row["layers"] for row in rows if row["green"]))

    def column(row: Row) -> str:
        return f"{row['requests']} requests behind {row['context']:,}"

    return link_table(rows, f"ms of {layers} layers", column, lambda row: f"{row['suffix']} new tokens each", 1e3, 2)


def link_table(
    rows: Sequence[Row], corner: str, column: Callable[[Row], str], name: Callable[[Row], str], unit: float, digits: int
) -> str:
    """A line per name; each cell with the time of the same bytes at 51 GB/s. `unit` is in microseconds."""
    green = [row for row in rows if row["green"]]
    found = {(name(row), column(row)): (row["us"] / unit, row["floor_us"] / unit) for row in green}
    columns = dict.fromkeys(map(column, green))
    texts = {key: f"{us:,.{digits}f} (link {floor:,.{digits}f})" for key, (us, floor) in found.items()}
    lines = [[one, *(texts.get((one, of), "-") for of in columns)] for one in dict.fromkeys(map(name, green))]
    return markdown([corner, *columns], lines)


def churn_table(rows: Sequence[Row]) -> str:
    """By document, requests, budget and unit: means over layers and answers, of 8 KV heads of 128 channels in bf16."""
    columns = list(rows[0]["residents"])
    heads = [f"{float(one):g} budgets" if float(one) >= 1 else f"{float(one):.0%} of it" for one in columns]
    lines = []
    names = ("model", "document", "requests", "kept", "budget", "unit")
    for key, of in grouped(rows, names):
        cells = [f"{mean_of(of, figure):.1%}" for figure in ("wanted", "churn")]
        for n in range(len(columns)):
            tokens = [
                wanted * moved[n] * row["prefix_len"] if moved[n] is not None else None
                for row in of
                for wanted, moved in zip(row["wanted"], row["moved"], strict=True)
            ]
            known = [one for one in tokens if one is not None]
            nbytes = fmean(known) * 8 * 512 if len(known) == len(tokens) else None
            cells.append("-" if nbytes is None else f"{nbytes / 1e3:,.0f} ({nbytes / 51e3:.1f})")
        asking = "1 request" if key[2] == 1 else f"{key[2]} requests"
        lines.append([f"{key[0]}, {key[1]}, {asking}, {key[4]:,} tokens, units of {key[5]}", *cells])
    return markdown(["KB a step and layer (us at 51 GB/s), residents of", "wanted", "churn", *heads], lines)


def lagged_table(rows: Sequence[Row]) -> str:
    """By way: error (against exact's), lost and fetched shares of the budget; means over layers and answers."""
    columns = grouped(rows, ("model", "document", "kept", "budget"))
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        cells = []
        for _, of in columns:
            exact, found = ([row for row in of if row["way"] == one] for one in ("exact", way))
            more = mean_of(found, "error") / mean_of(exact, "error") - 1 if found else 0.0
            figures = [mean_of(found, figure) for figure in ("error", "lost", "moved")] if found else []
            cells.append("{:.4f} ({:+.1%}), {:.1%}, {:.1%}".format(figures[0], more, *figures[1:]) if found else "-")
        lines.append([way, *cells])
    return markdown(["error, lost, moved", *(f"{key[0]}, {key[1]}, {key[3]:,} tokens" for key, _ in columns)], lines)


def grouped(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Rows by the values of these fields, in the order of their first."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(found.items())


def mean_of(rows: Sequence[Row], figure: str) -> float:
    """Over rows and layers."""
    return fmean(value for row in rows for value in row[figure])


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; defaults filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("part", nargs="?", choices=["swap", "prefill", "churn", "trace"], help="what to measure")
    add("--out", default="offload.jsonl", help="result file; rows are appended (default: %(default)s)")
    add("--contexts", nargs="+", type=int, metavar="TOKENS", help="swap 131072, prefill 32768 98304, else 8192")
    add("--groups", nargs="+", type=group_shape, metavar="GxR", help="G prefixes of R requests (1x1 8x1 1x8)")
    add("--churn", nargs="+", type=float, metavar="SHARE", help="of the wanted tokens (0 0.05 0.1 0.2 0.4 1)")
    add("--only", nargs="+", choices=PARTS, help="parts of swap (all)")
    add("--budget", type=int, metavar="TOKENS", help="of one request, times sqrt(requests) (2048; trace: 512)")
    add("--room", type=float, default=1.0, metavar="N", help="cells for a wanted token (%(default)s)")
    add("--steps", type=int, default=8, metavar="N", help="in one graph (%(default)s)")
    add("--shape", nargs=2, type=int, metavar=("KV", "DIM"), help="KV heads, head dim (8 128)")
    add("--dtype", choices=["bfloat16", "float16", "float32"], help="of KV (bfloat16)")
    add("--suffix", nargs="+", type=int, metavar="TOKENS", help="prefill: new tokens of a request (16 64 512)")
    add("--requests", nargs="+", type=int, metavar="N", help="prefill: behind the prefix (1 8)")
    add("--staging", type=int, metavar="TOKENS", help="prefill: of a piece (8192)")
    add("--layers", type=int, metavar="N", help="prefill: of a forward (4)")
    add("--model-path", default=".models/qwen2.5-coder-0.5b-instruct", help="churn: of transformers")
    add("--packages", type=Path, default=Path(".models/packages"), help="churn: folder of `make models`")
    add("--work", type=Path, default=Path(".models/queries"), help="churn: folder of captures")
    add("--new-tokens", type=int, default=128, help="churn: decode steps of an answer (%(default)s)")
    add("--keep", nargs="+", type=float, default=[1 / 64, 1 / 20, 512, 2048], help="churn: budgets; below 1: shares")
    add("--lagged", type=int, default=2, metavar="N", help="churn: answers whose error is measured (%(default)s)")
    add("--every", type=int, default=4, metavar="N", help="churn: one of so many steps has an error (%(default)s)")
    add("--seed", type=int, default=0, help="of KV and lists, or of documents (%(default)s)")
    add("--commit", help="for the rows, where the tree is no git checkout")
    add("--smoke", action="store_true", help="not churn: tiny shapes on the CPU in Triton's interpreter")
    add("--table", nargs="+", metavar="FILE", help="print result files as Markdown, measure nothing")
    args = parser.parse_args(argv)
    if not (args.part or args.table):
        parser.error("expected swap, prefill, churn, trace or --table")
    if args.part in ("churn", "trace"):
        args.contexts, args.budget = args.contexts or [8192], args.budget or 512
    if args.part == "prefill" and not args.smoke:
        args.contexts = args.contexts or [32768, 98304]
    for name, value in (_SMOKE if args.smoke else _USUAL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or print the tables; returns the exit status."""
    args = parse(argv)
    if args.table:
        print(table(read(args.table)))
        return 0
    if args.part in ("churn", "trace"):
        with torch.no_grad():
            (churn if args.part == "churn" else trace)(args)
        return 0
    if not args.smoke and not torch.cuda.is_available():
        raise SystemExit("expected a CUDA device, got none; run on a GPU, or try --smoke for the same path on a CPU")
    return 1 if measure(args) else 0


if __name__ == "__main__":
    sys.exit(main())
