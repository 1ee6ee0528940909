"""`sglang-ext index`: look at the indexes of a store, check them, keep or remove them, carry them elsewhere."""

from __future__ import annotations

import argparse
import re
from functools import partial
from typing import Any

from prefix_index import IndexStoreError
from sglang_ext.cli.arguments import (
    add_subcommands,
    argument,
    flag,
    named_indexes,
    parse_bytes,
    parse_count,
    parse_seconds,
)
from sglang_ext.cli.index import containers, keeping, listing
from sglang_ext.cli.index.targets import UnknownIndex
from sglang_ext.cli.index.text import complain
from sglang_ext.storage import ENV_STORE, LEAST_TO_REMOVE

_DESCRIPTION = """\
Indexes are named by the id that their prompt had in prebuild, by their digest,
or by enough of its first digits (4 or more; rm: 8).

--store takes a folder, file:///FOLDER or ipc://SOCKET (a running service).
Without it the store is $SGLANG_SPARSE_ATTN_STORE, else the default folder of
the server.

--json prints JSON, one document on a line: one per index, or one in all
(show: one per index; du and gc: one). Exit status: 0 good, 1 something
failed or is damaged, 2 wrong usage, 130 interrupted.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand and its own subcommands."""
    parser = commands.add_parser("index", help="list, check, remove and carry indexes", description=_DESCRIPTION)
    text = f"folder or URL of the store (default: ${ENV_STORE}, else the server's default)"
    common = argument("--store", metavar="URL", help=text), flag("--json", "print JSON")
    add_subcommands(parser, _SUBCOMMANDS, common, (IndexStoreError, UnknownIndex), complain)


def _digits(text: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{4,64}", text):
        raise argparse.ArgumentTypeError(f"expected 4 or more digits of a model's digest; found {text!r}")
    return text


def _when(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--after", type=parse_seconds, metavar="TIME", help="from now: seconds, or 90m, 12h, 30d")
    group.add_argument("--never", action="store_true", help="take an expiry back")


_SUBCOMMANDS: dict[str, tuple[Any, ...]] = {
    "ls": (
        listing.run_ls,
        "list the usable indexes",
        ["--store ./store", "tools", "--json | jq .digest"],
        named_indexes("*"),
    ),
    "show": (listing.run_show, "show all that is known of an index", ["5ad40721", "tools"], named_indexes("+")),
    "du": (listing.run_du, "sum bytes by model, profile and namespace", ["--store ./store"]),
    "verify": (
        containers.run_verify,
        "compare stored bytes with their checksums; status 1 if any index cannot be used",
        ["--store ./store", "--sample 20"],
        named_indexes("*"),
        argument("--sample", type=parse_count, metavar="N", help="so many at random"),
        argument("--jobs", type=parse_count, metavar="N", help="threads (default: cores, at most 4)"),
    ),
    "rm": (
        keeping.run_rm,
        "remove indexes, damaged ones too",
        ["5ad40721", "--yes 5ad40721 1e3e0d07"],
        named_indexes("+", LEAST_TO_REMOVE),
        flag("--yes", "do not ask"),
    ),
    "gc": (
        keeping.run_gc,
        "remove what expired, exceeds limits, is of old models, unused or damaged",
        ["--dry-run --max-bytes 50G", "--min-free-bytes 10G", "--dry-run --model 9d2c41aa", "--yes --unused-for 30d"],
        argument(
            "--model",
            nargs="+",
            type=_digits,
            metavar="MODEL",
            help="also the indexes of these models: digests as `du` prints them, or their first digits",
        ),
        argument("--unused-for", type=parse_seconds, metavar="TIME", help="also what no server used for so long: 30d"),
        flag("--unusable", "also damaged indexes; those of a newer format stay"),
        argument("--max-bytes", type=parse_bytes, metavar="SIZE", help="most bytes of all indexes, for instance 50G"),
        argument(
            "--min-free-bytes", type=parse_bytes, default=0, metavar="SIZE", help="bytes to leave free on the disk"
        ),
        flag("--dry-run", "say what would go, remove nothing"),
        flag("--yes", "do not ask before what --model, --unused-for or --unusable name goes"),
    ),
    "pin": (
        partial(keeping.run_retain, pinned=True),
        "keep indexes until nothing else can leave",
        ["5ad40721"],
        named_indexes("+"),
    ),
    "unpin": (partial(keeping.run_retain, pinned=False), "take the pin off", ["5ad40721"], named_indexes("+")),
    "expire": (
        keeping.run_expire,
        "set when indexes become a miss",
        ["--after 30d 5ad40721", "--never 5ad40721"],
        named_indexes("+"),
        _when,
    ),
    "export": (
        containers.run_export,
        "write containers to a file or a folder",
        ["5ad40721 --to tools.pfxindex", "--all --to backup/"],
        named_indexes("*"),
        flag("--all", "every usable index"),
        argument("--to", required=True, metavar="FILE|FOLDER", help="where to"),
        flag("--replace", "overwrite files that are there"),
    ),
    "import": (
        containers.run_import,
        "take containers in, each checked before it is stored",
        ["tools.pfxindex --store ./store", "backup/ other-store/"],
        argument("file", nargs="+", metavar="FILE|FOLDER", help="containers, or folders of them"),
        flag("--replace", "also those that the store has"),
    ),
}
