"""`sglang-ext index`: look at the indexes of a store, check them, keep or remove them, carry them elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from prefix_index import IndexStoreError
from sglang_ext.cli.arguments import parse_seconds
from sglang_ext.cli.index import checking, collecting, keeping, listing, moving
from sglang_ext.cli.index.targets import UnknownIndex
from sglang_ext.cli.index.text import complain

_DESCRIPTION = """\
Indexes are named by the id that their prompt had in prebuild, by their digest,
or by enough of its first digits (4 or more).

--store takes a folder, file:///FOLDER, ipc://SOCKET (a running service),
s3://BUCKET/PREFIX, gs://, az:// or mooncake://HOST:PORT. Without it the store
is $SGLANG_SPARSE_ATTN_STORE, else the default folder of the server.

--json prints JSON, one document on a line: one per index, or one in all
(show: one per index; du and gc: one). Exit status: 0 good, 1 something
failed or is damaged, 2 wrong usage, 130 interrupted.
"""

_Adder = Callable[[argparse.ArgumentParser], object]
_Run = Callable[[argparse.Namespace], int]
_Add = Callable[..., None]
"""(name, run, one-line summary, examples, what adds its arguments...) of one subcommand."""


def add_parser(commands: Any) -> None:
    """Add the subcommand and its own subcommands."""
    parser = commands.add_parser(
        "index",
        help="list, check, remove and carry indexes",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], int], summary: str, examples: str, *arguments: _Adder
    ) -> None:
        one = subcommands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog="examples:\n" + "".join(f"  {line}\n" for line in examples.strip().splitlines()),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        one.add_argument("--store", metavar="URL", help="folder or URL of the store")
        one.add_argument("--json", action="store_true", help="print JSON")
        for argument in arguments:
            argument(one)
        one.set_defaults(run=_guarded(run))

    _add_looking(add)
    _add_keeping(add)
    _add_moving(add)


def _add_looking(add: _Add) -> None:
    add(
        "ls",
        listing.run_ls,
        "list the usable indexes",
        "sglang-ext index ls --store ./store\nsglang-ext index ls tools\nsglang-ext index ls --json | jq .digest",
        _indexes("*"),
    )
    add(
        "show",
        listing.run_show,
        "show all that is known of an index",
        "sglang-ext index show 5ad40721\nsglang-ext index show tools",
        _indexes("+"),
    )
    add(
        "du",
        listing.run_du,
        "sum bytes by model, profile and namespace",
        "sglang-ext index du --store ./store",
    )
    add(
        "verify",
        checking.run_verify,
        "compare stored bytes with their checksums; status 1 if any index cannot be used",
        "sglang-ext index verify --store ./store\nsglang-ext index verify --sample 5%",
        _indexes("*"),
        lambda p: p.add_argument(
            "--sample", type=checking.sample_text, metavar="N|SHARE%", help="a random part: 20, or 5%%"
        ),
        lambda p: p.add_argument("--jobs", type=_positive, metavar="N", help="threads (default: cores, at most 4)"),
    )


def _add_keeping(add: _Add) -> None:
    add(
        "rm",
        keeping.run_rm,
        "remove indexes, damaged ones too",
        "sglang-ext index rm 5ad40721\nsglang-ext index rm --yes 5ad40721 1e3e0d07",
        _indexes("+"),
        lambda p: p.add_argument("--yes", action="store_true", help="do not ask"),
    )
    add(
        "gc",
        collecting.run_gc,
        "remove what has expired, what exceeds limits, and what dead writers left",
        "sglang-ext index gc --dry-run --max-bytes 50G\nsglang-ext index gc --min-free-bytes 10G --eviction cost_aware",
        *collecting.ARGUMENTS,
    )
    add(
        "pin",
        keeping.run_pin,
        "keep indexes until nothing else can leave",
        "sglang-ext index pin 5ad40721",
        _indexes("+"),
    )
    add("unpin", keeping.run_unpin, "take the pin off", "sglang-ext index unpin 5ad40721", _indexes("+"))
    add(
        "expire",
        keeping.run_expire,
        "set when indexes become a miss",
        "sglang-ext index expire --after 30d 5ad40721\nsglang-ext index expire --never 5ad40721",
        _indexes("+"),
        _when,
    )


def _add_moving(add: _Add) -> None:
    add(
        "export",
        moving.run_export,
        "write containers to a file or a folder",
        "sglang-ext index export 5ad40721 --to tools.pfxindex\nsglang-ext index export --all --to backup/",
        _indexes("*"),
        lambda p: p.add_argument("--all", action="store_true", help="every usable index"),
        lambda p: p.add_argument("--to", required=True, metavar="FILE|FOLDER", help="where to"),
        lambda p: p.add_argument("--replace", action="store_true", help="overwrite files that are there"),
    )
    add(
        "import",
        moving.run_import,
        "take containers in, each checked before it is stored",
        "sglang-ext index import tools.pfxindex --store ./store\nsglang-ext index import backup/ other-store/",
        lambda p: p.add_argument("file", nargs="+", metavar="FILE|FOLDER", help="containers, or folders of them"),
        lambda p: p.add_argument("--replace", action="store_true", help="also those that the store has"),
    )


def _indexes(nargs: str) -> _Adder:
    return lambda parser: parser.add_argument(
        "index", nargs=nargs, metavar="INDEX", help="name, digest, or its first digits (4 or more)"
    )


def _when(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--after", type=parse_seconds, metavar="TIME", help="from now: seconds, or 90m, 12h, 30d")
    group.add_argument("--never", action="store_true", help="take an expiry back")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {text!r}")
    return int(text)


def _guarded(run: _Run) -> _Run:
    """A store's error is one message and status 1."""

    def guarded(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except (IndexStoreError, UnknownIndex) as error:
            complain(args.subcommand, str(error))
            return 1

    return guarded
