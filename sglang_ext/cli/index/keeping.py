"""`index rm`, `pin`, `unpin`, `expire`: what stays, and for how long."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from prefix_index import IndexEntry, Retention
from sglang_ext.cli.index.listing import count
from sglang_ext.cli.index.targets import HEADER, RIGHT, Target, fields, find, opened, row
from sglang_ext.cli.index.text import SHORT, complain, emit, size, table, wrapped


def run_rm(args: argparse.Namespace) -> int:
    """Removes the named indexes, after asking."""
    with opened(args) as store:
        targets = find(store, args.index)
        if not args.yes and not _agreed(targets, args):
            return 2 if not sys.stdin.isatty() else 1
        for target in targets:
            removed = store.delete(target.digest)
            if args.json:
                emit({"digest": target.digest, "removed": removed})
            else:
                print(f"{'removed' if removed else 'gone already'} {target.digest[:SHORT]}")
    return 0


def _agreed(targets: Sequence[Target], args: argparse.Namespace) -> bool:
    """Shows what would go and asks. Questions go to standard error: standard output is the report."""
    now = time.time()
    rows = [row(target.entry, now) for target in targets if target.entry is not None]
    if rows:
        print("\n".join(table(HEADER, rows, RIGHT)), file=sys.stderr)
    for target in targets:
        if target.error is not None:
            print(wrapped(f"{target.digest[:SHORT]}  damaged: {target.error}", hanging="  "), file=sys.stderr)
    if not sys.stdin.isatty():
        complain("rm", "expected --yes, or a terminal to ask at; nothing was removed")
        return False
    nbytes = sum(target.entry.nbytes for target in targets if target.entry is not None)
    print(f"remove {count(len(targets))}, {size(nbytes)}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def run_pin(args: argparse.Namespace) -> int:
    """Soft pin."""
    return _retain(args, lambda old: Retention(pinned=True, expires=old.expires))


def run_unpin(args: argparse.Namespace) -> int:
    """Takes the pin off."""
    return _retain(args, lambda old: Retention(pinned=False, expires=old.expires))


def run_expire(args: argparse.Namespace) -> int:
    """Sets when an index becomes a miss; `--never` takes that back."""
    expires = None if args.never else time.time() + args.after
    return _retain(args, lambda old: Retention(pinned=old.pinned, expires=expires))


def _retain(args: argparse.Namespace, change: Callable[[Retention], Retention]) -> int:
    failed = False
    with opened(args) as store:
        for target in find(store, args.index):
            if target.entry is None:
                complain(args.subcommand, f"{target.digest[:SHORT]} is damaged: {target.error}")
                failed = True
                continue
            _show(args, store.retain(target.digest, change(target.entry.retention)))
    return 1 if failed else 0


def _show(args: argparse.Namespace, entry: IndexEntry) -> None:
    if args.json:
        emit(fields(entry))
    else:
        print("  ".join((entry.digest[:SHORT], row(entry, time.time())[-1])))
