#!/usr/bin/env python3
"""Decode kernels, correctness first: exact and sparse attention of prefix groups, and selection, beside rivals.

    python benchmarks/kernel_bench.py attention --out rows.jsonl            # a GPU with FlashInfer; minutes
    python benchmarks/kernel_bench.py selection --out rows.jsonl
    python benchmarks/kernel_bench.py operators --out rows.jsonl            # both, beside FlashInfer's dense decode
    python benchmarks/kernel_bench.py --table rows.jsonl
    python benchmarks/kernel_bench.py attention --smoke --out tiny.jsonl    # a CPU is enough

Attention of one layer: 32 query heads, 8 KV heads of 128, bf16, prefixes and 64 suffix tokens a request, pages of 16
in random order, CUDA graph replays with a cold L2 cache, medians. Per context and batch: FlashInfer's tensor-core
decode and cascade, exact and sparse grouped attention (5% of the prefix, times the square root of the group), the
suffix pass with its merge apart; `--groups 8x4` adds distinct prefixes.

Operators are a layer's selection and sparse attention, suffix and merge included, of the methods that decode graphs
hold, in graphs of 31 layers: requests that share nothing, and 8 behind one prefix. `floor_us` are the bytes of index
and listed KV at 3.0 TB/s. `two_level_ahead` has all launches of `select_ahead`, `two_level_behind` all but those that
name the next step's candidates. `--rivals quest --batches --groups 8x1 --contexts 32768 --keep 0.0625
--budgets 2048` adds a control that attends as many tokens: pages of 16, chosen by bounds of their keys in bf16 (Quest,
arXiv 2406.10774), with cuBLAS, torch and FlashInfer.

Each configuration's output, filled with NaN before, is first compared with an oracle; a red one is written and printed
as failed, without a time, and the exit status is 1. A row is one JSON line with its provenance. Green rows that the
file holds already are not measured again, so an interrupted run goes on.

`bytes` are K and V that must be read, each once; `share` is of 4.3 TB/s. `ratio` is a rival's time over ours, both from
this run.

A time holds the start of a graph, and tables that no cache holds. With `--layers N` one graph attends N layers, each
with a KV of its own as far as 36 GiB reach, and a time is an Nth of the graph's: what a layer costs within a decode
step. The gate then sees the last layer's output.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import kernel_cases
import kernel_tables
import torch
from kernel_problem import Sizes
from kernel_rows import MEMORY_RATE, Row, Run, provenance
from kernel_selection import FLOOR_RATE, PARTS, Cell, NoRoomError
from kernel_timing import CpuTimer, GpuTimer

from prefix_kernels.grouped_attention import AttentionShape

RIVALS = tuple(kernel_cases.RIVALS)

_USUAL: Row = {
    "contexts": [131072, 8192, 32768, 65536, 262144],
    "batches": [1, 8, 32, 64],
    "groups": [(8, 4)],
    "suffix": 64,
    "shape": (32, 8, 128),
    "dtype": "bfloat16",
    "rivals": ["flashinfer", "flashinfer_cascade"],
    "layers": 1,
    "budgets": [None],
}
#: What is usual of operators, where it differs.
_OPERATORS: Row = {
    "contexts": [131072, 98304, 65536, 32768],
    "batches": [8],
    "groups": [(1, 1), (4, 1), (8, 1)],
    "layers": 31,
    "only": ["token_index", "two_level", "two_level_ahead", "two_level_behind"],
    "rivals": ["flashinfer"],
    "budgets": [2048, 1024],
}
#: What --smoke measures where the command line says nothing else: all of the path, in seconds.
_SMOKE: Row = {
    "contexts": [192],
    "batches": [1, 3],
    "groups": [(2, 2)],
    "suffix": 21,
    "shape": (4, 2, 32),
    "dtype": "float32",
    "rivals": [],
    "layers": 1,
    "budgets": [None],
}


def measure(args: argparse.Namespace, run: Run, timer: Any) -> None:
    """What the result file does not hold yet."""
    run.origin["null_us"] = round(timer.null_us(), 2)
    device = torch.device("cpu" if args.smoke else "cuda")
    for context in args.contexts:
        for batch, groups in [*((batch, 1) for batch in args.batches), *((g * rows, g) for g, rows in args.groups)]:
            sizes = Sizes(context, batch, groups, args.suffix, args.page)
            keys = [key_of(args, sizes, name, budget) for budget in args.budgets for name in args.only]
            missing = [key for key in keys if not run.has(key)]
            if missing:
                try:
                    cell = Cell(shape_of(args), sizes, args.keep, args.layers, device, args.seed)
                    measure_cell(args, run, timer, cell, missing)
                except torch.OutOfMemoryError as error:
                    print(f"not measured: {context} tokens, batch {batch}: {error}", file=sys.stderr)
            gc.collect()
            if not args.smoke:
                torch.cuda.empty_cache()


def key_of(args: argparse.Namespace, sizes: Sizes, name: str, budget: int | None) -> Row:
    """What identifies a row."""
    same = {"shape": list(args.shape), "dtype": args.dtype, "layers": args.layers}
    keep = args.keep if budget is None else None
    return {"bench": args.part, "case": name, "budget": budget, "keep": keep, **dataclasses.asdict(sizes), **same}


def measure_cell(args: argparse.Namespace, run: Run, timer: Any, cell: Cell, keys: Sequence[Row]) -> None:
    """The rivals, as a ratio is of one run, and these rows."""
    rivals: dict[str, float] = {}
    for key in [*({**keys[0], "case": name, "budget": None} for name in args.rivals), *keys]:
        name = key["case"]
        try:
            row = attempt(args.part, cell, timer, name, key["budget"])
        except NoRoomError as error:
            where = f"{name}, {key['context']} tokens, batch {key['batch']}"
            print(f"not measured: {where}: {error}", file=sys.stderr)
            continue
        if row["green"] and args.part == "operators":
            row["floor_us"] = round(row["bytes"] / FLOOR_RATE * 1e6, 2)
        if row["green"] and name in RIVALS:
            rivals[name] = row["us"]
        elif row["green"] and name != "suffix":
            row["ratio"] = {rival: round(us / row["us"], 4) for rival, us in rivals.items()}
        run.add({**key, **row})
        gc.collect()


def attempt(part: str, cell: Cell, timer: Any, name: str, budget: int | None) -> Row:
    """A row, red with its error where the case raised one; what would break all later rows is raised."""
    try:
        return gated(cell.case(part, name, budget), timer)
    except Exception as error:
        # Triton's errors, for what does not compile or does not fit the device, have no common class.
        if is_fatal(error) or isinstance(error, NoRoomError):
            raise
        text = f"{type(error).__name__}: {str(error)[:300]}"
        return {"green": False, "error": text, "meaningful": timer.meaningful}


def gated(case: Any, timer: Any) -> Row:
    """The gate first; a time only when it is green. Times and bytes are those of one layer.

    Args:
        case: with `run`, `poison` and `check`, `layers` of a run, `nbytes` of a layer, and `config` for the row.
        timer: of the device.
    """
    replay = timer.prepare(case.run)
    case.poison()
    replay()
    found = case.check()
    figures = {name: float(f"{value:.3g}") for name, value in found.figures.items()}
    row: Row = {"green": found.green, "gate": figures, "gate_share": round(found.error, 4)}
    row |= {"meaningful": timer.meaningful, "config": case.config}
    if row["green"]:
        times = timer.time(replay, case.layers)
        rate = case.nbytes / (times["us"] * 1e-6)
        row |= times | {"bytes": case.nbytes, "bytes_per_s": round(rate), "share": round(rate / MEMORY_RATE, 4)}
    return row


def is_fatal(error: BaseException) -> bool:
    """Whether the CUDA context is lost, or a rival cannot be had: then nothing after it can be measured."""
    text = str(error).lower()
    words = ("illegal memory access", "illegal instruction", "misaligned address", "unspecified launch failure")
    lost = any(word in text for word in (*words, "device-side assert", "invalid program counter"))
    return lost or isinstance(error, kernel_cases.RivalMissingError)


# -- command line ----------------------------------------------------------------------------------------------


def shape_of(args: argparse.Namespace) -> AttentionShape:
    """Of the layer."""
    dtype = getattr(torch, args.dtype)
    heads_and_dim, v_head_dim = args.shape[:3], args.shape[-1]
    return AttentionShape(*heads_and_dim, v_head_dim, dtype, dtype)


def group_shape(text: str) -> tuple[int, int]:
    """argparse type: GROUPSxREQUESTS."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected GROUPSxREQUESTS such as 8x4, got {text!r}")
    return int(parts[0]), int(parts[1])


def make_parser() -> argparse.ArgumentParser:
    """All arguments; None stands for a default that --smoke changes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("part", nargs="?", choices=list(PARTS), help="what to measure")
    add("--out", default="kernels.jsonl", help="result file; rows are appended (default: %(default)s)")
    numbers: Row = {"nargs": "*", "type": int}
    add("--contexts", **numbers, metavar="TOKENS", help="prefix lengths (131072 8192 32768 65536 262144)")
    add("--budgets", **numbers, metavar="TOKENS", help="operators: of a group (2048 1024)")
    add("--batches", **numbers, metavar="N", help="requests on one prefix (1 8 32 64)")
    add("--groups", nargs="*", type=group_shape, metavar="GxR", help="distinct prefixes: G groups of R requests (8x4)")
    add("--only", nargs="+", metavar="CASE", help="cases of attention, selection or operators")
    add(
        "--rivals",
        nargs="+",
        choices=[*RIVALS, "none"],
        help="measured in the same run (FlashInfer's; latent: SGLang's)",
    )
    add("--layers", type=int, metavar="N", help="of one graph, KV of their own (1; operators: 31)")
    add("--keep", type=float, default=0.05, help="share of the prefix, times sqrt(group) (%(default)s)")
    add("--suffix", type=int, metavar="TOKENS", help="suffix tokens of a request (64)")
    add("--page", type=int, default=16, metavar="TOKENS", help="of the pool (%(default)s)")
    add("--shape", **numbers, help="query heads, KV heads, channels; of values, if latent (32 8 128; 16 1 576 512)")
    add("--dtype", choices=["bfloat16", "float16", "float32"], help="of queries and KV (bfloat16)")
    add("--seed", type=int, default=0, help="of queries, KV and selections (%(default)s)")
    add("--commit", help="for the rows, where the tree is no git checkout")
    add("--smoke", action="store_true", help="tiny shapes on the CPU in Triton's interpreter: does all of it run?")
    add("--table", nargs="+", metavar="FILE", help="print result files as Markdown, measure nothing")
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; defaults filled in."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if not (args.part or args.table):
        parser.error("expected attention, selection, operators or --table")
    usual = _SMOKE if args.smoke else _USUAL
    if args.part == "operators":
        usual = usual | ({"layers": 2, "budgets": [100]} if args.smoke else _OPERATORS)
    numbers = 3 if args.shape is None else len(args.shape)
    if numbers not in (3, 4):
        parser.error(f"expected --shape of 3 numbers, or 4 where values are latent, got {numbers}")
    if numbers == 4 and not args.smoke:
        usual = usual | {"rivals": ["sglang_triton"]}
    for name, value in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.rivals = [] if args.rivals == ["none"] or args.part == "selection" else args.rivals
    args.only = args.only or PARTS.get(args.part)
    unknown = set(args.only or ()) - set(PARTS.get(args.part, ()))
    if unknown:
        parser.error(f"expected --only among {', '.join(PARTS[args.part])}, got {', '.join(sorted(unknown))}")
    if args.budgets != [None] and args.part != "operators":
        parser.error("expected --budgets with operators")
    if args.layers < 1:
        parser.error(f"expected --layers of 1 or more, got {args.layers}")
    if args.layers > 1 and args.part == "selection":
        parser.error("expected --layers with attention or operators")
    if "none" in args.rivals:
        parser.error("expected --rivals none alone")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the result file does not hold yet, or print or plot rows; returns the exit status."""
    args = parse(argv)
    if args.table:
        print(kernel_tables.tables(kernel_tables.last_rows(args.table)))
        return 0
    if not args.smoke and not torch.cuda.is_available():
        raise SystemExit("expected a CUDA device, got none; run on a GPU, or try --smoke for the same path on a CPU")
    run = Run(Path(args.out), provenance(args))
    try:
        measure(args, run, CpuTimer() if args.smoke else GpuTimer(torch.device("cuda")))
    except kernel_cases.RivalMissingError as error:
        raise SystemExit(str(error)) from error
    if run.failed:
        print(f"{run.failed} rows FAILED their correctness gate; they have no times", file=sys.stderr)
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
