"""`sglang-ext doctor`: whether a server with these settings would start and select here; and how much it would need."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import msgspec

from sglang_ext.cli.arguments import add_sglang_flags, parse_count, refuse
from sglang_ext.cli.index.text import emit, size, table, wrapped

_DESCRIPTION = """\
Look at versions, GPU, start, memory, profile, store and kernels, and say of each
whether it is good and what to do. Nothing is started, and nothing is written.
Give the flags of the server behind --. Without --model-path only the machine is
looked at. Exit status: 0, or 1 where something fails.

--size MODEL says instead how much memory and disk indexes of N prompts of T
tokens take, by the model's configuration alone; no weights are read.

examples:
  sglang-ext doctor
  sglang-ext doctor --model-path MODEL --store ./store -- --attention-backend flashinfer
  sglang-ext doctor --size MODEL --prompts 100 --tokens 32768 --tp 2
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="check a machine, a model and a store before a start, or compute sizes",
        description=_DESCRIPTION,
    )
    parser.add_argument("--model-path", metavar="MODEL", help="the model that will be served")
    parser.add_argument("--store", metavar="DIR|ipc://SOCKET", help="index store, as --sparse-attn-store of the server")
    parser.add_argument("--sparse-attn-config", metavar="JSON|@FILE", help="as for the server")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--size", metavar="MODEL", help="compute sizes for this model instead")
    parser.add_argument("--prompts", type=parse_count, metavar="N", help="with --size: number of shared prompts")
    parser.add_argument("--tokens", type=parse_count, metavar="T", help="with --size: tokens of each")
    parser.add_argument("--tp", type=parse_count, default=1, metavar="N", help="with --size: TP ranks (default: 1)")
    add_sglang_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Entry of the subcommand; returns the exit status."""
    warnings.simplefilter("ignore")  # SGLang's imports have many
    if args.size is not None:
        return _run_size(args)
    if args.tp != 1 or args.prompts is not None or args.tokens is not None:
        return refuse("doctor", "expected --size with --prompts, --tokens or --tp; name the model")
    if args.model_path is None and (args.store or args.sparse_attn_config or args.sglang_flags):
        return refuse("doctor", "expected --model-path with --store, settings or flags; name the model")
    from sglang_ext.cli.doctor.findings import FAIL, examine

    found = examine(args)
    failed = any(one.verdict == FAIL for one in found)
    if args.json:
        emit({"ok": not failed, "findings": [one._asdict() for one in found]})
    else:
        for one in found:
            print(wrapped(one.found, f"{one.verdict:<5} {one.what:<18} ", " " * 25))
            if one.todo:
                print(wrapped(one.todo, " " * 25 + "-> ", " " * 28))
    return 1 if failed else 0


def _run_size(args: argparse.Namespace) -> int:
    if args.prompts is None or args.tokens is None:
        return refuse("doctor", "expected --prompts and --tokens with --size, got one or none; give both")
    from sglang_ext.compat import versions

    message = versions.unsupported_message(versions.installed())
    if message is not None:
        return refuse("doctor", message)
    from sglang_ext.cli.doctor.sizing import compute_sizes

    args.model_path = args.size
    try:
        sizes = compute_sizes(args)
    except (OSError, ValueError) as error:
        return refuse("doctor", error)
    if args.json:
        emit(msgspec.to_builtins(sizes))
        return 0
    print(f"{args.size}, {sizes.kv_dtype} KV, {sizes.method}: {args.prompts} x {args.tokens} tokens, TP {args.tp}")
    rows = [(one.what, size(one.one), size(one.all), one.where) for one in sizes.rows]
    print("\n".join(table(("", "ONE PROMPT", "ALL", "WHERE"), rows, (1, 2))))
    for note in sizes.notes:
        print(wrapped(note))
    return 0
