"""Arguments of `kernels.py`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import kernel_bench

#: What --smoke measures where the command line says nothing else: all of the path, in seconds.
_SMOKE = {
    "contexts": [192],
    "batches": [1, 3],
    "groups": [(2, 2)],
    "plain_contexts": [80],
    "plain_batches": [2],
    "naive_contexts": [192],
    "suffix": 21,
    "shape": (4, 2, 32),
    "dtype": "float32",
    "rivals": [],
    "tune_workers": 0,
}


def group_shape(text: str) -> tuple[int, int]:
    """argparse type: GROUPSxREQUESTS."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected GROUPSxREQUESTS such as 8x4, got {text!r}")
    return int(parts[0]), int(parts[1])


def make_parser() -> argparse.ArgumentParser:
    """All arguments; None stands for a default that --smoke changes."""
    parser = argparse.ArgumentParser(
        prog="kernels.py", description=kernel_bench.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=["attention", "selection"], help="what to measure")
    parser.add_argument("--out", default="kernels.jsonl", help="result file; rows are appended (default: %(default)s)")
    _what(parser)
    _how(parser)
    parser.add_argument("--table", nargs="+", metavar="FILE", help="print result files as Markdown, measure nothing")
    parser.add_argument(
        "--table-context", type=int, metavar="TOKENS", help="of the table with targets; default: 131072 or the longest"
    )
    parser.add_argument(
        "--plot", nargs="+", metavar="DIR [FILE]", help="PNGs of result files (default: --out) into a folder"
    )
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; defaults filled in."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if not (args.part or args.table or args.plot):
        parser.error("expected attention, selection, --table or --plot")
    if args.tune and args.part != "attention":
        parser.error("expected --tune with attention")
    args.cpu = args.smoke
    _fill(args)
    args.rivals = [] if args.rivals == ["none"] else args.rivals
    if args.layers < 1:
        parser.error(f"expected --layers of 1 or more, got {args.layers}")
    if args.layers > 1 and (args.part != "attention" or args.tune):
        parser.error("expected --layers with attention, without --tune")
    if "none" in args.rivals:
        parser.error("expected --rivals none alone")
    return args


def _what(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--contexts", nargs="*", type=int, metavar="TOKENS", help="prefix lengths (131072 8192 32768 65536 262144)"
    )
    what.add_argument("--batches", nargs="*", type=int, metavar="N", help="requests on one prefix (1 8 32 64)")
    what.add_argument(
        "--groups", nargs="*", type=group_shape, metavar="GxR", help="distinct prefixes: G groups of R requests (8x4)"
    )
    what.add_argument(
        "--plain-contexts", nargs="*", type=int, metavar="TOKENS", help="of plain decode (1024 8192 32768 131072)"
    )
    what.add_argument("--plain-batches", nargs="*", type=int, metavar="N", help="requests of plain decode (1 8 32)")
    what.add_argument(
        "--naive-contexts", nargs="*", type=int, metavar="TOKENS", help="where torch forms are measured too (131072)"
    )
    what.add_argument(
        "--only", nargs="+", metavar="CASE", help="cases of attention (exact sparse suffix plain ...) or pipelines"
    )
    what.add_argument(
        "--rivals", nargs="+", choices=[*kernel_bench.RIVALS, "none"], help="measured in the same run (both)"
    )
    what.add_argument(
        "--layers", type=int, default=1, metavar="N", help="attended by one graph, KV of their own (%(default)s)"
    )
    what.add_argument("--keep", type=float, default=0.05, help="share of the prefix, times sqrt(group) (%(default)s)")
    what.add_argument("--suffix", type=int, metavar="TOKENS", help="private tokens of a request (64)")
    what.add_argument("--page", type=int, default=16, metavar="TOKENS", help="of the pool (%(default)s)")
    what.add_argument(
        "--shape", nargs=3, type=int, metavar=("QO", "KV", "DIM"), help="query heads, KV heads, head dim (32 8 128)"
    )
    what.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="of queries and KV (bfloat16)")
    what.add_argument("--seed", type=int, default=0, help="of queries, KV and selections (%(default)s)")


def _how(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how")
    how.add_argument("--seconds", type=float, default=1e9, help="start no problem after so many seconds (no limit)")
    how.add_argument("--row-seconds", type=float, default=0.3, help="of replays for one row, roughly (%(default)s)")
    how.add_argument(
        "--flush",
        choices=["read", "write"],
        default="read",
        help="how L2 is cleared: clean or dirty lines (%(default)s)",
    )
    how.add_argument(
        "--in-graph", action="store_true", help="time inside one graph, without the start of a graph, as in a model"
    )
    how.add_argument(
        "--overlapped", action="store_true", help="start each of our kernels while the one before it still runs (sm_90)"
    )
    how.add_argument(
        "--tuned",
        type=Path,
        metavar="JSON",
        help="launch parameters, as --tune writes them (default: those shipped for this GPU)",
    )
    how.add_argument(
        "--tune",
        type=Path,
        metavar="JSON",
        help="sweep launch parameters over the cases of `kernel_tune.TUNED` with these --batches; write the best ones",
    )
    how.add_argument(
        "--tune-workers", type=int, metavar="N", help="processes that compile ahead, for Triton's cache on disk (8)"
    )
    how.add_argument("--commit", help="for the rows, where the tree is no git checkout")
    how.add_argument(
        "--smoke", action="store_true", help="tiny shapes on the CPU in Triton's interpreter: does all of it run?"
    )


def _fill(args: argparse.Namespace) -> None:
    usual = {
        "contexts": [131072, 8192, 32768, 65536, 262144],
        "batches": [1, 8, 32, 64],
        "groups": [(8, 4)],
        "plain_contexts": [1024, 8192, 32768, 131072],
        "plain_batches": [1, 8, 32],
        "naive_contexts": [131072],
        "suffix": 64,
        "shape": (32, 8, 128),
        "dtype": "bfloat16",
        "rivals": list(kernel_bench.RIVALS),
        "tune_workers": 8,
    }
    for name, value in (usual | _SMOKE if args.smoke else usual).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
