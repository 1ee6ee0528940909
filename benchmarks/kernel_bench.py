"""Command line of `kernels.py`: measures decode attention and selection, correctness first.

Attention of one layer: 32 query heads, 8 KV heads of 128, bf16, prefixes and 64 private tokens a request, pages of 16
in random order, CUDA graph replays with a cold L2 cache, medians. Per context and batch: FlashInfer's tensor-core
decode and cascade, exact and sparse grouped attention (5% of the prefix, times the square root of the group), the
suffix pass with its merge apart; `--groups 8x4` adds distinct prefixes; `plain` is the suffix pass from position 0
against FlashInfer on distinct sequences. Naive torch forms at `--naive-contexts`.

Each configuration's output, filled with NaN before, is first compared with an fp64 oracle; a red one is written and
printed as failed, without a time, and the exit status is 1. A row is one JSON line with its provenance. Green rows that
the file holds already are not measured again; --seconds ends a run between two problems, so that the next one goes on.

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
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_rows import MEMORY_RATE, Row, Run, provenance

if TYPE_CHECKING:
    from kernel_cases import Case, Launching
    from kernel_problem import Gate, Problem, Sizes

    from prefix_kernels.grouped_attention import AttentionShape

GROUPED = ("exact", "sparse", "suffix")
#: And up to which batch: the naive forms of exact attention take a millisecond and more per request.
NAIVE = {"exact_loops": 8, "exact_vector": 8, "sparse_loops": 32, "sparse_vector": 32}
RIVALS = ("flashinfer", "flashinfer_cascade")


# -- attention -------------------------------------------------------------------------------------------------


def attention(args: argparse.Namespace, run: Run) -> None:
    """All problems that are asked for."""
    import torch
    from kernel_cases import ATTENTION

    known(args, [*RIVALS, *ATTENTION])
    shape, timer, configs = shape_of(args), timer_of(args), launching_of(args)
    run.origin["null_us"] = round(timer.null_us(), 2)
    for sizes, names in problems(args):
        keys = {name: attention_key(args, name, sizes) for name in names}
        missing = [name for name in names if not run.has(keys[name])]
        if any(name not in RIVALS for name in missing):  # a ratio is of one run
            missing = [name for name in names if name in missing or name in RIVALS]
        if not missing or out_of_time(args) or not fits(args, sizes, shape):
            continue
        measure_problem(args, run, timer, shape, sizes, {name: keys[name] for name in missing}, configs)
        gc.collect()
        if not args.cpu:
            torch.cuda.empty_cache()


def problems(args: argparse.Namespace) -> Iterable[tuple[Sizes, list[str]]]:
    """Sizes and the cases measured at them, in the order of the arguments."""
    from kernel_problem import Sizes

    for context in args.contexts:
        shared = [(batch, 1) for batch in args.batches] + [(groups * rows, groups) for groups, rows in args.groups]
        for batch, groups in shared:
            names = [*args.rivals, *GROUPED]
            if groups == 1 and context in args.naive_contexts:
                names += [name for name, most in NAIVE.items() if batch <= most]
            yield Sizes(context, batch, groups, args.suffix, args.page), chosen(args, names)
    for context in args.plain_contexts:
        for batch in args.plain_batches:
            names = [*(name for name in args.rivals if name == "flashinfer"), "plain"]
            yield Sizes(context, batch, batch, 0, args.page), chosen(args, names)


def chosen(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Those of --only; rivals stay, for the ratios."""
    wanted = [name for name in names if args.only is None or name in args.only]
    ours = [name for name in wanted if name not in RIVALS]
    return [name for name in names if name in wanted or (ours and name in RIVALS)]


def attention_key(args: argparse.Namespace, name: str, sizes: Sizes) -> Row:
    """What identifies a row."""
    return {
        "bench": "attention",
        "case": name,
        **dataclasses.asdict(sizes),
        "keep": args.keep,
        **conditions(args),
    }


def launching_of(args: argparse.Namespace) -> Launching:
    """Launch parameters: of --tuned, else the package's own. `main` sets --tuned to what is shipped for this GPU."""
    from prefix_kernels.grouped_attention import TunedConfigs

    return TunedConfigs.read(args.tuned) if args.tuned else TunedConfigs("none")


def conditions(args: argparse.Namespace) -> Row:
    """The part of a key that all rows of a command share."""
    return {
        "shape": list(args.shape),
        "dtype": args.dtype,
        "flush": args.flush,
        "in_graph": args.in_graph,
        "layers": args.layers,
        "overlapped": args.overlapped,
        "tuned": args.tuned.name if args.tuned else None,
        "tuned_sha256": hashlib.sha256(args.tuned.read_bytes()).hexdigest() if args.tuned else None,
    }


def measure_problem(
    args: argparse.Namespace,
    run: Run,
    timer: Any,
    shape: AttentionShape,
    sizes: Sizes,
    keys: dict[str, Row],
    configs: Launching,
) -> None:
    """One pool, all of its cases."""
    import torch
    from kernel_problem import make_problem

    problem = make_problem(shape, sizes, args.keep, torch.device("cpu" if args.cpu else "cuda"), args.seed, args.layers)
    rivals: dict[str, float] = {}
    for name, key in keys.items():
        row = attempt(timer, lambda name=name: measure(problem, build(problem, name, configs), timer))
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
        if is_fatal(error):
            raise
        text = f"{type(error).__name__}: {str(error)[:300]}"
        return {"green": False, "error": text, "meaningful": timer.meaningful}


def build(problem: Problem, name: str, configs: Launching) -> Case:
    """A case by its name."""
    if name in RIVALS:
        import kernel_rivals

        return kernel_rivals.RIVALS[name](problem)
    from kernel_cases import ATTENTION

    return ATTENTION[name](problem, configs)


def measure(problem: Problem, case: Case, timer: Any) -> Row:
    """The gate first; a time only when it is green."""
    replay = timer.prepare(case.run, eager_too=case.eager_too)
    case.poison()
    replay()
    row = gate_row(problem.gate(case.out, case.lse, case.reads), timer)
    row |= {"config": case.config, "graph": replay is not case.run}
    if not row["green"]:
        return row
    return {**row, **time_row(timer, replay, case.run, problem.kv_bytes(case.reads), len(problem.layers))}


def gate_row(gate: Gate, timer: Any) -> Row:
    figures = {name: float(f"{value:.3g}") for name, value in gate.figures.items()}
    return {"green": gate.green, "gate": figures, "gate_share": round(gate.error, 4), "meaningful": timer.meaningful}


def time_row(timer: Any, replay: Any, work: Any, nbytes: int | None, layers: int = 1) -> Row:
    """Times of one layer; `nbytes` are those of one, too."""
    times = timer.time(replay, work).over(layers)
    row: Row = {name: round(value, 3) for name, value in dataclasses.asdict(times).items()}
    if nbytes is not None:
        rate = nbytes / (times.us * 1e-6)
        row |= {"bytes": nbytes, "bytes_per_s": round(rate), "share": round(rate / MEMORY_RATE, 4)}
    return row


def fits(args: argparse.Namespace, sizes: Sizes, shape: AttentionShape) -> bool:
    """Whether the pool leaves room for the oracle and the naive forms."""
    if args.cpu:
        return True
    import torch

    tokens = 1.25 * (sizes.groups * sizes.context + sizes.batch * (sizes.suffix + sizes.page))
    tokens *= args.layers
    needed = tokens * shape.num_kv_heads * (shape.head_dim + shape.v_head_dim) * shape.kv_dtype.itemsize + (8 << 30)
    free = torch.cuda.mem_get_info()[0]
    if needed > free:
        print(f"not measured: {sizes} needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free", file=sys.stderr)
    return bool(needed <= free)


def is_fatal(error: BaseException) -> bool:
    """Whether the CUDA context is lost, or a rival cannot be had: then nothing after it can be measured."""
    text = str(error).lower()
    words = ("illegal memory access", "illegal instruction", "misaligned address", "unspecified launch failure")
    lost = any(word in text for word in (*words, "device-side assert", "invalid program counter"))
    return lost or type(error).__name__ == "RivalMissingError"


# -- selection -------------------------------------------------------------------------------------------------


def selection(args: argparse.Namespace, run: Run) -> None:
    """All pipelines of the registry, or those of --only."""
    import torch
    from kernel_cases import SELECTION

    known(args, SELECTION)
    shape, timer = shape_of(args), timer_of(args)
    run.origin["null_us"] = round(timer.null_us(), 2)
    device = torch.device("cpu" if args.cpu else "cuda")
    for context in args.contexts:
        for batch in args.batches:
            for name in args.only or SELECTION:
                key = {"bench": "selection", "case": name, "context": context, "batch": batch, "groups": 1}
                key |= conditions(args)
                if run.has(key) or out_of_time(args):
                    continue
                made = functools.partial(SELECTION[name], shape, batch, context, device)
                run.add({**key, **attempt(timer, lambda made=made: pipeline_row(made(), timer))})
                gc.collect()
            if not args.cpu:
                torch.cuda.empty_cache()


def pipeline_row(pipeline: Any, timer: Any) -> Row:
    """As `measure`, for an object with run() and check()."""
    run = pipeline.run  # once: every access makes another bound method, and it is compared below
    replay = timer.prepare(run, eager_too=getattr(pipeline, "eager_too", False))
    if hasattr(pipeline, "poison"):
        pipeline.poison()
    replay()
    row = gate_row(pipeline.check(), timer)
    row |= {"config": getattr(pipeline, "config", {}), "graph": replay is not run}
    if not row["green"]:
        return row
    return {**row, **time_row(timer, replay, run, getattr(pipeline, "nbytes", None))}


# -- command line ----------------------------------------------------------------------------------------------


def shape_of(args: argparse.Namespace) -> AttentionShape:
    import torch

    from prefix_kernels.grouped_attention import AttentionShape

    dtype = getattr(torch, args.dtype)
    num_qo_heads, num_kv_heads, head_dim = args.shape
    return AttentionShape(num_qo_heads, num_kv_heads, head_dim, head_dim, dtype, dtype)


def timer_of(args: argparse.Namespace) -> Any:
    import torch
    from kernel_timing import CpuTimer, GpuTimer

    if args.cpu:
        return CpuTimer()
    return GpuTimer(torch.device("cuda"), seconds=args.row_seconds, flush=args.flush, in_graph=args.in_graph)


def known(args: argparse.Namespace, names: Iterable[str]) -> None:
    """Stop unless --only names some of these."""
    unknown = set(args.only or ()) - set(names)
    if unknown:
        raise SystemExit(f"expected --only among {', '.join(names)}, got {', '.join(sorted(unknown))}")


def out_of_time(args: argparse.Namespace) -> bool:
    """Whether --seconds are over; says so once."""
    over = bool(time.monotonic() > args.deadline)
    if over and not args.stopped:
        args.stopped = True
        print("stopped: --seconds are over; the same command goes on from here", file=sys.stderr, flush=True)
    return over


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the result file does not hold yet, or print or plot rows; returns the exit status."""
    from kernel_arguments import parse

    args = parse(argv)
    if args.table or args.plot:
        import kernel_plots

        if args.table:
            print(kernel_plots.tables(kernel_plots.read(args.table), args.table_context))
        if args.plot:
            print("\n".join(map(str, kernel_plots.plots(kernel_plots.read(args.plot[1:] or [args.out]), args.plot[0]))))
        return 0
    if args.cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, which is below
    import torch

    if not args.cpu and not torch.cuda.is_available():
        raise SystemExit("expected a CUDA device, got none; run on a GPU, or try --smoke for the same path on a CPU")
    if args.overlapped and not args.cpu and torch.cuda.get_device_capability() < (9, 0):
        # They would be launched one after the other, and the rows would say otherwise.
        raise SystemExit(f"expected sm_90 or later for --overlapped, got {torch.cuda.get_device_name()}; leave it out")
    args.deadline, args.stopped = time.monotonic() + args.seconds, False
    run = Run(Path(args.out), provenance(args))
    from prefix_kernels.grouped_attention.tuned import shipped_file
    from prefix_kernels.launching import overlapped_launches

    if not args.tune and not args.tuned:
        args.tuned = shipped_file(torch.device("cpu" if args.cpu else "cuda"))
    try:
        with overlapped_launches(args.overlapped):
            if args.part == "selection":
                selection(args, run)
            elif args.tune:
                import kernel_tune

                kernel_tune.tune(args, run)
            else:
                attention(args, run)
    except RuntimeError as error:
        if type(error).__name__ != "RivalMissingError":
            raise
        raise SystemExit(str(error)) from error
    if run.failed:
        print(f"{run.failed} rows FAILED their correctness gate; they have no times", file=sys.stderr)
    return 1 if run.failed else 0
