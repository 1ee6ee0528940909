"""`sglang-ext index`: look at the indexes of a store, check them, keep or remove them, carry them elsewhere."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from prefix_index import IndexStoreError
from sglang_ext.cli.arguments import parse_bytes, parse_count, parse_seconds
from sglang_ext.cli.index import containers, keeping, listing
from sglang_ext.cli.index.targets import UnknownIndex
from sglang_ext.cli.index.text import complain

_DESCRIPTION = """\
Indexes are named by the id that their prompt had in prebuild, by their digest,
or by enough of its first digits (4 or more).

--store takes a folder, file:///FOLDER or ipc://SOCKET (a running service).
Without it the store is $SGLANG_SPARSE_ATTN_STORE, else the default folder of
the server.

--json prints JSON, one document on a line: one per index, or one in all
(show: one per index; du and gc: one). Exit status: 0 good, 1 something
failed or is damaged, 2 wrong usage, 130 interrupted.
"""

_Run = Callable[[argparse.Namespace], int]
_Adder = Callable[[argparse.ArgumentParser], object]


def add_parser(commands: Any) -> None:
    """Add the subcommand and its own subcommands."""
    parser = commands.add_parser(
        "index",
        help="list, check, remove and carry indexes",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    for name, (run, summary, examples, *arguments) in _SUBCOMMANDS.items():
        one = subcommands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog="examples:\n" + "".join(f"  sglang-ext index {name} {example}\n" for example in examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        one.add_argument("--store", metavar="URL", help="folder or URL of the store")
        one.add_argument("--json", action="store_true", help="print JSON")
        for argument in arguments:
            argument(one)
        one.set_defaults(run=_guarded(run))


def _argument(*words: str, **options: Any) -> _Adder:
    return lambda parser: parser.add_argument(*words, **options)


def _digits(text: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{4,64}", text):
        raise argparse.ArgumentTypeError(f"expected 4 or more digits of a model's digest; found {text!r}")
    return text


def _flag(word: str, text: str) -> _Adder:
    return _argument(word, action="store_true", help=text)


def _indexes(nargs: str) -> _Adder:
    return _argument("index", nargs=nargs, metavar="INDEX", help="name, digest, or its first digits (4 or more)")


def _when(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--after", type=parse_seconds, metavar="TIME", help="from now: seconds, or 90m, 12h, 30d")
    group.add_argument("--never", action="store_true", help="take an expiry back")


def _guarded(run: _Run) -> _Run:
    """A store's error is one message and status 1."""

    def guarded(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except (IndexStoreError, UnknownIndex) as error:
            complain(args.subcommand, str(error))
            return 1

    return guarded


_SUBCOMMANDS: dict[str, tuple[Any, ...]] = {
    "ls": (
        listing.run_ls,
        "list the usable indexes",
        ["--store ./store", "tools", "--json | jq .digest"],
        _indexes("*"),
    ),
    "show": (listing.run_show, "show all that is known of an index", ["5ad40721", "tools"], _indexes("+")),
    "du": (listing.run_du, "sum bytes by model, profile and namespace", ["--store ./store"]),
    "verify": (
        containers.run_verify,
        "compare stored bytes with their checksums; status 1 if any index cannot be used",
        ["--store ./store", "--sample 5%"],
        _indexes("*"),
        _argument("--sample", type=containers.sample_text, metavar="N|SHARE%", help="a random part: 20, or 5%%"),
        _argument("--jobs", type=parse_count, metavar="N", help="threads (default: cores, at most 4)"),
    ),
    "rm": (
        keeping.run_rm,
        "remove indexes, damaged ones too",
        ["5ad40721", "--yes 5ad40721 1e3e0d07"],
        _indexes("+"),
        _flag("--yes", "do not ask"),
    ),
    "gc": (
        keeping.run_gc,
        "remove what expired, exceeds limits, is of old models, unused or damaged",
        ["--dry-run --max-bytes 50G", "--min-free-bytes 10G", "--dry-run --model 9d2c41aa", "--yes --unused-for 30d"],
        _argument(
            "--model",
            nargs="+",
            type=_digits,
            metavar="MODEL",
            help="also the indexes of these models: digests as `du` prints them, or their first digits",
        ),
        _argument("--unused-for", type=parse_seconds, metavar="TIME", help="also what no server used for so long: 30d"),
        _flag("--unusable", "also damaged indexes; those of a newer format stay"),
        _argument("--max-bytes", type=parse_bytes, metavar="SIZE", help="most bytes of all indexes, for instance 50G"),
        _argument(
            "--min-free-bytes", type=parse_bytes, default=0, metavar="SIZE", help="bytes to leave free on the disk"
        ),
        _flag("--dry-run", "say what would go, remove nothing"),
        _flag("--yes", "do not ask before what --model, --unused-for or --unusable name goes"),
    ),
    "pin": (keeping.run_pin, "keep indexes until nothing else can leave", ["5ad40721"], _indexes("+")),
    "unpin": (keeping.run_unpin, "take the pin off", ["5ad40721"], _indexes("+")),
    "expire": (
        keeping.run_expire,
        "set when indexes become a miss",
        ["--after 30d 5ad40721", "--never 5ad40721"],
        _indexes("+"),
        _when,
    ),
    "export": (
        containers.run_export,
        "write containers to a file or a folder",
        ["5ad40721 --to tools.pfxindex", "--all --to backup/"],
        _indexes("*"),
        _flag("--all", "every usable index"),
        _argument("--to", required=True, metavar="FILE|FOLDER", help="where to"),
        _flag("--replace", "overwrite files that are there"),
    ),
    "import": (
        containers.run_import,
        "take containers in, each checked before it is stored",
        ["tools.pfxindex --store ./store", "backup/ other-store/"],
        _argument("file", nargs="+", metavar="FILE|FOLDER", help="containers, or folders of them"),
        _flag("--replace", "also those that the store has"),
    ),
}
"""By name: what runs, a summary in one line, examples, and what adds its arguments."""
