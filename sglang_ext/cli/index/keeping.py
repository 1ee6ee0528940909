"""`index rm`, `pin`, `unpin`, `expire`: what stays, and for how long."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from prefix_index import IndexEntry, IndexStore, IndexStoreError, Retention
from sglang_ext.cli.index.listing import count
from sglang_ext.cli.index.targets import Target, fields, find, listing, opened, row
from sglang_ext.cli.index.text import SHORT, complain, emit, size, wrapped


def run_rm(args: argparse.Namespace) -> int:
    """Removes the named indexes, after asking."""
    with opened(args) as store:
        targets = find(store, args.index)
        if not args.yes and not _agreed(targets, args):
            return 2 if not sys.stdin.isatty() else 1
        removals = [_remove(store, target, args) for target in targets]
    return 0 if all(removals) else 1


def _remove(store: IndexStore, target: Target, args: argparse.Namespace) -> bool:
    """Removes one index; whether nothing of it is left. One that cannot be removed does not keep the others."""
    removed, detail = False, None
    try:
        removed = store.delete(target.digest)
    except IndexStoreError as error:
        detail = str(error)
    if detail is None and target.path is not None and os.path.lexists(target.path):
        # The store looks for an index by its name in one folder. This one lies, or is, where it does not look.
        detail = f"expected {target.path} to go, it is still there; remove it by hand: it is no index of this store"
    if args.json:
        emit({"digest": target.digest, "removed": removed, "detail": detail})
    elif detail is None:
        print(f"{'removed' if removed else 'gone already'} {target.digest[:SHORT]}")
    if detail is not None:
        complain("rm", f"{target.digest[:SHORT]}: {detail}")
    return detail is None


def _agreed(targets: Sequence[Target], args: argparse.Namespace) -> bool:
    """Shows what would go and asks. Questions go to standard error: standard output is the report."""
    now = time.time()
    entries = [target.entry for target in targets if target.entry is not None]
    if entries:
        print("\n".join(listing(entries, now)), file=sys.stderr)
    for target in targets:
        if target.error is not None:
            print(wrapped(f"{target.digest[:SHORT]}  damaged: {target.error}", hanging="  "), file=sys.stderr)
    if not sys.stdin.isatty():
        complain("rm", "expected --yes, or a terminal to ask at; nothing was removed")
        return False
    nbytes = sum(entry.nbytes for entry in entries)
    print(f"remove {count(len(targets))}, {size(nbytes)}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def run_pin(args: argparse.Namespace) -> int:
    """Soft pin."""
    return _retain(args, lambda old: replace(old, pinned=True))


def run_unpin(args: argparse.Namespace) -> int:
    """Takes the pin off."""
    return _retain(args, lambda old: replace(old, pinned=False))


def run_expire(args: argparse.Namespace) -> int:
    """Sets when an index becomes a miss; `--never` takes that back."""
    expires = None if args.never else time.time() + args.after
    return _retain(args, lambda old: replace(old, expires=expires))


def _retain(args: argparse.Namespace, change: Callable[[Retention], Retention]) -> int:
    failed = False
    with opened(args) as store:
        for target in find(store, args.index):
            try:
                if target.entry is None:
                    raise target.error or AssertionError("a target is an entry or an error")
                _show(args, store.retain(target.digest, change(target.entry.retention)))
            except IndexStoreError as error:
                failed = True
                what = "is damaged" if target.entry is None else "was left as it is"
                complain(args.subcommand, f"{target.digest[:SHORT]} {what}: {error}")
                if args.json:
                    emit({"digest": target.digest, "error": str(error)})
    return 1 if failed else 0


def _show(args: argparse.Namespace, entry: IndexEntry) -> None:
    if args.json:
        emit(fields(entry))
    else:
        print("  ".join((entry.digest[:SHORT], row(entry, time.time())[-1])))
