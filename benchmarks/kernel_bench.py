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
name the next step's candidates.

Each configuration's output, filled with NaN before, is first compared with an oracle; a red one is written and printed
as failed, without a time, and the exit status is 1. A row is one JSON line with its provenance. Green rows that the
file holds already are not measured again, so an interrupted run goes on.

`bytes` are K and V that must be read, each once; `share` is of 4.3 TB/s. `ratio` is a rival's time over ours, both from
this run.

A time holds the start of a graph, and tables that no cache holds. With `--layers N` one graph attends N layers, each
with a KV of its own, and a time is an Nth of the graph's: what a layer costs within a decode step. The gate then sees
the last layer's output.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import kernel_rivals
import kernel_tables
import torch
from kernel_cases import ATTENTION, Case
from kernel_operators import FLOOR_RATE, OPERATORS, Cell
from kernel_problem import Gate, Problem, Sizes, make_problem, slot_bytes
from kernel_rows import MEMORY_RATE, Row, Run, provenance
from kernel_selection import SPECS, NoRoomError, Ours, random_prefixes
from kernel_timing import CpuTimer, GpuTimer

from prefix_kernels.grouped_attention import AttentionShape

GROUPED = ("exact", "sparse", "suffix")
RIVALS = tuple(kernel_rivals.RIVALS)

_USUAL: Row = {
    "contexts": [131072, 8192, 32768, 65536, 262144],
    "batches": [1, 8, 32, 64],
    "groups": [(8, 4)],
    "suffix": 64,
    "shape": (32, 8, 128),
    "dtype": "bfloat16",
    "rivals": ["flashinfer", "flashinfer_cascade"],
    "layers": 1,
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
    "budgets": [100],
}


# -- attention -------------------------------------------------------------------------------------------------


def attention(args: argparse.Namespace, run: Run) -> None:
    """All problems that are asked for."""
    known(args, [*RIVALS, *ATTENTION])
    shape, timer = shape_of(args), timer_of(args)
    run.origin["null_us"] = round(timer.null_us(), 2)
    for sizes, names in problems(args):
        keys = {name: attention_key(args, name, sizes) for name in names}
        missing = [name for name in names if not run.has(keys[name])]
        if any(name not in RIVALS for name in missing):  # a ratio is of one run
            missing = [name for name in names if name in missing or name in RIVALS]
        if not missing or not fits(args, sizes, shape):
            continue
        measure_problem(args, run, timer, shape, sizes, {name: keys[name] for name in missing})
        gc.collect()
        if not args.smoke:
            torch.cuda.empty_cache()


def problems(args: argparse.Namespace) -> Iterable[tuple[Sizes, list[str]]]:
    """Sizes and the cases measured at them, in the order of the arguments."""
    for context in args.contexts:
        for batch, groups in batches(args):
            yield Sizes(context, batch, groups, args.suffix, args.page), chosen(args, [*args.rivals, *GROUPED])


def batches(args: argparse.Namespace) -> list[tuple[int, int]]:
    """(requests, prefixes)."""
    return [(batch, 1) for batch in args.batches] + [(groups * rows, groups) for groups, rows in args.groups]


def chosen(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Those of --only; rivals stay, for the ratios."""
    wanted = [name for name in names if args.only is None or name in args.only]
    ours = [name for name in wanted if name not in RIVALS]
    return [name for name in names if name in wanted or (ours and name in RIVALS)]


def attention_key(args: argparse.Namespace, name: str, sizes: Sizes) -> Row:
    """What identifies a row."""
    return {"bench": "attention", "case": name, **dataclasses.asdict(sizes), **conditions(args)}


def conditions(args: argparse.Namespace) -> Row:
    """The part of a key that all rows of a command share."""
    return {
        "shape": list(args.shape),
        "dtype": args.dtype,
        "keep": args.keep,
        "layers": args.layers,
    }


def measure_problem(
    args: argparse.Namespace,
    run: Run,
    timer: Any,
    shape: AttentionShape,
    sizes: Sizes,
    keys: dict[str, Row],
) -> None:
    """One pool, all of its cases."""
    problem = make_problem(shape, sizes, args.keep, device_of(args), args.seed, args.layers)
    rivals: dict[str, float] = {}
    for name, key in keys.items():
        row = attempt(timer, lambda name=name: measure(problem, build(problem, name), timer))
        if row["green"] and name in RIVALS:
            rivals[name] = row["us"]
        elif row["green"] and name != "suffix":
            row["ratio"] = {rival: round(us / row["us"], 4) for rival, us in rivals.items()}
        run.add({**key, **row})


def attempt(timer: Any, work: Callable[[], Row]) -> Row:
    """A row, red with its error where the work raised one; what would break all later rows is raised."""
    try:
        return work()
    except Exception as error:
        # Triton's errors, for what does not compile or does not fit the device, have no common class.
        if is_fatal(error) or isinstance(error, NoRoomError):
            raise
        text = f"{type(error).__name__}: {str(error)[:300]}"
        return {"green": False, "error": text, "meaningful": timer.meaningful}


def build(problem: Problem, name: str) -> Case:
    """A case by its name."""
    return kernel_rivals.RIVALS[name](problem) if name in RIVALS else ATTENTION[name](problem)


def measure(problem: Problem, case: Case, timer: Any) -> Row:
    """The gate first; a time only when it is green."""
    gate = functools.partial(problem.gate, case.out, case.lse, case.reads)
    return gated(case, case.run, gate, timer, problem.kv_bytes(case.reads), len(problem.layers))


def gated(case: Any, work: Callable[[], Any], gate: Callable[[], Gate], timer: Any, nbytes: int, layers: int) -> Row:
    """The row of what was poisoned, run once and found right; times and bytes are those of one layer."""
    replay = timer.prepare(work)
    case.poison()
    replay()
    found = gate()
    figures = {name: float(f"{value:.3g}") for name, value in found.figures.items()}
    row: Row = {"green": found.green, "gate": figures, "gate_share": round(found.error, 4)}
    row |= {"meaningful": timer.meaningful, "config": case.config}
    if row["green"]:
        times = timer.time(replay).over(layers)
        rate = nbytes / (times.us * 1e-6)
        row |= {name: round(value, 3) for name, value in dataclasses.asdict(times).items()}
        row |= {"bytes": nbytes, "bytes_per_s": round(rate), "share": round(rate / MEMORY_RATE, 4)}
    return row


def fits(args: argparse.Namespace, sizes: Sizes, shape: AttentionShape) -> bool:
    """Whether the pool leaves room for the oracle."""
    if args.smoke:
        return True
    tokens = 1.25 * (sizes.groups * sizes.context + sizes.batch * (sizes.suffix + sizes.page)) * args.layers
    needed = tokens * slot_bytes(shape) + (8 << 30)
    free = torch.cuda.mem_get_info()[0]
    if needed > free:
        print(f"not measured: {sizes} needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free", file=sys.stderr)
    return bool(needed <= free)


def is_fatal(error: BaseException) -> bool:
    """Whether the CUDA context is lost, or a rival cannot be had: then nothing after it can be measured."""
    text = str(error).lower()
    words = ("illegal memory access", "illegal instruction", "misaligned address", "unspecified launch failure")
    lost = any(word in text for word in (*words, "device-side assert", "invalid program counter"))
    return lost or isinstance(error, kernel_rivals.RivalMissingError)


# -- selection -------------------------------------------------------------------------------------------------


def selection(args: argparse.Namespace, run: Run) -> None:
    """All methods, or those of --only."""
    known(args, SPECS)
    shape, timer = shape_of(args), timer_of(args)
    run.origin["null_us"] = round(timer.null_us(), 2)
    for context in args.contexts:
        for batch, groups in batches(args):
            for name in args.only or SPECS:
                key = {"bench": "selection", "case": name, "context": context, "batch": batch, "groups": groups}
                key |= conditions(args)
                if run.has(key):
                    continue

                def row(name: str = name, batch: int = batch, groups: int = groups, context: int = context) -> Row:
                    one = Ours(random_prefixes(SPECS[name], shape, batch, groups, context, device_of(args), args.keep))
                    return gated(one, one.run, one.check, timer, one.nbytes, one.layers)

                run.add({**key, **attempt(timer, row)})
                gc.collect()
            if not args.smoke:
                torch.cuda.empty_cache()


# -- operators -------------------------------------------------------------------------------------------------


def operators(args: argparse.Namespace, run: Run) -> None:
    """All cells; each method and budget beside the rival of the same run."""
    known(args, OPERATORS)
    shape, timer = shape_of(args), timer_of(args)
    run.origin["null_us"] = round(timer.null_us(), 2)
    wanted = [(name, budget) for budget in args.budgets for name in args.only or OPERATORS]
    for context in args.contexts:
        for batch, groups in batches(args):
            sizes = Sizes(context, batch, groups, args.suffix, args.page)
            same = {"bench": "operators", **dataclasses.asdict(sizes), **conditions(args), "keep": None}
            keys = [{**same, "case": name, "budget": budget} for name, budget in wanted]
            missing = [key for key in keys if not run.has(key)]
            if missing:
                measure_cell(args, run, timer, Cell(shape, sizes, args.layers, device_of(args), args.seed), missing)
            gc.collect()
            if not args.smoke:
                torch.cuda.empty_cache()


def measure_cell(args: argparse.Namespace, run: Run, timer: Any, cell: Cell, keys: Sequence[Row]) -> None:
    """The rivals, and these rows."""
    rivals: dict[str, float] = {}
    for name in args.rivals:
        row = attempt(timer, lambda name=name: measure(cell.problem, build(cell.problem, name), timer))
        floor = round(cell.problem.kv_bytes("all") / FLOOR_RATE * 1e6, 2)
        run.add({**keys[0], "case": name, "budget": None, "floor_us": floor, **row})
        if row["green"]:
            rivals[name] = row["us"]
    for key in keys:

        def work(name: str = key["case"], budget: int = key["budget"]) -> Row:
            one = cell.operator(name, budget)
            floor = round(one.nbytes / FLOOR_RATE * 1e6, 2)
            return {"floor_us": floor} | gated(one, one.run, one.check, timer, one.nbytes, one.layers)

        try:
            row = attempt(timer, work)
        except NoRoomError as error:
            print(
                f"not measured: {key['case']}, {key['context']} tokens, batch {key['batch']}: {error}", file=sys.stderr
            )
            continue
        if row["green"]:
            row["ratio"] = {rival: round(us / row["us"], 4) for rival, us in rivals.items()}
        run.add({**key, **row})
        gc.collect()


# -- command line ----------------------------------------------------------------------------------------------


def device_of(args: argparse.Namespace) -> torch.device:
    """A GPU, but for --smoke."""
    return torch.device("cpu" if args.smoke else "cuda")


def shape_of(args: argparse.Namespace) -> AttentionShape:
    """Of the layer."""
    dtype = getattr(torch, args.dtype)
    num_qo_heads, num_kv_heads, head_dim, *v_head_dim = args.shape
    return AttentionShape(num_qo_heads, num_kv_heads, head_dim, *(v_head_dim or [head_dim]), dtype, dtype)


def timer_of(args: argparse.Namespace) -> Any:
    """Of the device."""
    return CpuTimer() if args.smoke else GpuTimer(torch.device("cuda"))


def known(args: argparse.Namespace, names: Iterable[str]) -> None:
    """Stop unless --only names some of these."""
    unknown = set(args.only or ()) - set(names)
    if unknown:
        raise SystemExit(f"expected --only among {', '.join(names)}, got {', '.join(sorted(unknown))}")


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
    add("part", nargs="?", choices=["attention", "selection", "operators"], help="what to measure")
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
        usual = usual | ({"layers": 2} if args.smoke else _OPERATORS)
    if args.shape is not None and len(args.shape) not in (3, 4):
        parser.error(f"expected --shape of 3 numbers, or 4 where values are latent, got {len(args.shape)}")
    if args.shape is not None and len(args.shape) == 4 and not args.smoke:
        usual = usual | {"rivals": ["sglang_triton"]}
    for name, value in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.rivals = [] if args.rivals == ["none"] else args.rivals
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
        print(kernel_tables.tables(kernel_tables.read(args.table)))
        return 0
    if not args.smoke and not torch.cuda.is_available():
        raise SystemExit("expected a CUDA device, got none; run on a GPU, or try --smoke for the same path on a CPU")
    run = Run(Path(args.out), provenance(args))
    try:
        {"attention": attention, "selection": selection, "operators": operators}[args.part](args, run)
    except kernel_rivals.RivalMissingError as error:
        raise SystemExit(str(error)) from error
    if run.failed:
        print(f"{run.failed} rows FAILED their correctness gate; they have no times", file=sys.stderr)
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
