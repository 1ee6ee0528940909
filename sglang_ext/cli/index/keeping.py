"""`index rm`, `pin`, `unpin`, `expire`, `gc`: what stays, for how long, and what leaves."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from prefix_index import (
    FileStore,
    IndexCorrupt,
    IndexEntry,
    IndexStore,
    IndexStoreError,
    StoreFolderError,
    canonical_digest,
)
from prefix_index.books import FolderBooks
from prefix_index.connect import locate
from prefix_index.copies import digest_in
from prefix_index.folder import PARTIAL, SUFFIX, check_folder, free_bytes, locked_inodes, os_errors, shard_fd, shard_of
from prefix_index.lease import LEASE
from prefix_index.removals import PARTIAL as REMOVED
from prefix_index.retention import KEEP_SUFFIX, Candidate, choose_victims, read_retention
from prefix_index.store import has_expired
from sglang_ext.cli.index.targets import (
    HEADER,
    RIGHT,
    Target,
    UnknownIndex,
    fields,
    find,
    listing,
    opened,
    row,
    store_address,
)
from sglang_ext.cli.index.text import SHORT, complain, count, emit, size, table, wrapped
from sglang_ext.storage import LEAST_TO_REMOVE

#: Files of writers and builders that are younger stay (`FileStore`): whoever made them may be about to lock them.
PARTIAL_GRACE_S: Final = 60.0


def run_rm(args: argparse.Namespace) -> int:
    """Removes the named indexes, after asking."""
    with opened(args) as store:
        targets = find(store, args.index, least=LEAST_TO_REMOVE)
        if not args.yes and not _agreed(targets, args):
            return _refused()
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
        complain(args.subcommand, "expected --yes, or a terminal to ask at; nothing was removed")
        return False
    nbytes = sum(entry.nbytes for entry in entries)
    print(f"remove {count(len(targets))}, {size(nbytes)}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _refused() -> int:
    return 1 if sys.stdin.isatty() else 2


def run_expire(args: argparse.Namespace) -> int:
    """Sets when an index becomes a miss; `--never` takes that back."""
    expires = None if args.never else time.time() + args.after
    return run_retain(args, expires=expires)


def run_retain(args: argparse.Namespace, **changes: Any) -> int:
    """Changes the retention of the named indexes; 1 when one of them cannot be used."""
    failed = False
    with opened(args) as store:
        for target in find(store, args.index):
            try:
                if target.entry is None:
                    raise target.error or AssertionError("a target is an entry or an error")
                entry = store.retain(target.digest, replace(target.entry.retention, **changes))
                if args.json:
                    emit(fields(entry))
                else:
                    print("  ".join((entry.digest[:SHORT], row(entry, time.time())[-1])))
            except IndexStoreError as error:
                failed = True
                what = "is damaged" if target.entry is None else "was left as it is"
                complain(args.subcommand, f"{target.digest[:SHORT]} {what}: {error}")
                if args.json:
                    emit({"digest": target.digest, "error": str(error)})
    return 1 if failed else 0


# -- gc ----------------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """Who leaves a folder, under the limits that were asked for, or as near to them as the store can come.

    `short`: bytes to free beside what has expired; `too_few`: those of them that the victims do not hold.
    """

    victims: Sequence[IndexEntry]
    max_bytes: int | None
    min_free_bytes: int
    short: int
    too_few: int


def run_gc(args: argparse.Namespace) -> int:
    """Removes what was chosen by its model, its last use, or as damaged; then what has expired, what exceeds limits,
    and what dead writers left. Limits are for folders: a service has its own.
    """
    address = store_address(args)
    kind, value, _ = locate(address)
    if kind == "file":
        return _gc_folder(Path(value), args)
    if args.max_bytes is not None or args.min_free_bytes or args.dry_run:
        complain("gc", f"expected no limits and no --dry-run for {address}: it has limits of its own")
        return 2
    with opened(args) as store:
        targets = _chosen(store.folder, args)
        if targets and not args.yes and not _agreed(targets, args):
            return _refused()
        removed, names, failed = _remove_chosen(store, targets)
        _tell(args, [*removed, *store.collect()], names, store.list(), chosen=targets)
        failed |= _complain_of(store)
    return 1 if failed else 0


def _chosen(folder: Path, args: argparse.Namespace) -> list[Target]:
    """Indexes of the models that were named, unused for the time that was given (where both are: both), and damaged
    ones. What is pinned stays, also where nobody can tell; so does what a newer version wrote, which can use it.

    Raises:
        UnknownIndex: a word fits several models.
    """
    books, targets, now = _books(folder), [], time.time()
    if args.model or args.unused_for is not None:
        uses = [(canonical_digest(entry.identity.model), entry, used) for _, entry, used in books.uses()]
        models = {_model(word, {model for model, *_ in uses}) for word in args.model or ()}
        targets = [
            Target(entry.digest, entry, None, entry.path, (version, entry.retention))
            for model, entry, used in uses
            if (version := books.signature(entry.digest)) is not None
            and not entry.retention.pinned
            and (not args.model or model in models)
            and now - used >= (args.unused_for or 0.0)
        ]
    for path, error in sorted(books.problems.items()) if args.unusable else ():
        digest = digest_in(path)
        version = None if digest is None else books.signature(digest)
        if digest is not None and version is not None and isinstance(error, IndexCorrupt):
            with suppress(OSError, IndexStoreError), shard_fd(folder, shard_of(digest)) as fd:
                retention = read_retention(fd, digest)
                if not retention.pinned:
                    targets.append(Target(digest, None, error, path, (version, retention)))
    return targets


def _books(folder: Path) -> FolderBooks:
    books = FolderBooks(folder, time.time)
    with os_errors(folder):
        books.rescan()
    return books


def _model(word: str, known: Collection[str]) -> str | None:
    """The digest that a word begins; None, which is said, where no index is of such a model (any more)."""
    fits = sorted(digest for digest in known if digest.startswith(word.lower()))
    if len(fits) > 1:
        raise UnknownIndex(f"expected one model that {word[:80]!r} fits, found {len(fits)}; give more digits")
    if not fits:
        complain("gc", f"no index is of a model {word[:80]!r}; `sglang-ext index du` lists those that there are")
    return fits[0] if fits else None


def _remove_chosen(store: FileStore, targets: Sequence[Target]) -> tuple[list[IndexEntry], list[str], bool]:
    """(usable indexes that are gone, names of damaged ones, whether some could not be removed, which is said). What was
    built again or pinned while a person was asked stays.
    """
    removed, names, failed = [], [], False
    for target in targets:
        try:
            if store.delete(target.digest, seen=target.seen):
                removed += [] if target.entry is None else [target.entry]
                names += [] if target.entry is not None else [_name(target)]
            elif os.path.lexists(store.path_of(target.digest)):
                complain("gc", f"{target.digest[:SHORT]} stays: it has changed since it was chosen")
        except IndexStoreError as error:
            failed = True
            complain("gc", f"{target.digest[:SHORT]}: {error}")
    return removed, names, failed


def _complain_of(store: FileStore) -> bool:
    """Whether a collection left an index that must leave, or a folder that it could not look through; says which."""
    errors = [error for _, error in store.problems() if isinstance(error, StoreFolderError)]
    for error in errors:
        complain("gc", str(error))
    return bool(errors)


def _name(target: Target) -> str:
    assert target.path is not None, "an unusable index is a file"
    return str(Path(target.path).relative_to(Path(target.path).parents[1]))


def _gc_folder(folder: Path, args: argparse.Namespace) -> int:
    check_folder(folder, create=False, write=not args.dry_run)
    targets, failed = _chosen(folder, args), False
    if targets and not args.dry_run and not args.yes and not _agreed(targets, args):
        return _refused()
    plan = _plan(folder, args, targets)
    if args.dry_run:
        # Opening the store would already clear away what dead writers left.
        entries = [target.entry for target in targets if target.entry is not None]
        names = {_name(target) for target in targets if target.entry is None}
        _tell(args, [*entries, *plan.victims], _leftovers(folder).keys() | names, chosen=targets)
        too_few = plan.too_few
    else:
        before = _leftovers(folder)
        with FileStore(
            folder,
            partial_grace_s=PARTIAL_GRACE_S,
            max_bytes=plan.max_bytes,
            min_free_bytes=plan.min_free_bytes,
        ) as store:
            freed, names_gone, failed = _remove_chosen(store, targets)
            removed, left = store.collect(), store.list()
            failed |= _complain_of(store)
        _tell(args, [*freed, *removed], before.keys() - _leftovers(folder).keys() | {*names_gone}, left, chosen=targets)
        # What others wrote to the disk meanwhile is no failure, nor is what they removed.
        too_few = min(plan.too_few + _nbytes(plan.victims) - _nbytes(removed), _plan(folder, args).short)
    if too_few <= 0:
        return 1 if failed else 0
    complain("gc", f"limit not reached: {too_few} bytes too few; give a higher one, or free disk space otherwise")
    return 1


def _nbytes(entries: Sequence[IndexEntry]) -> int:
    return sum(entry.nbytes for entry in entries)


def _tell(
    args: argparse.Namespace,
    removed: Sequence[IndexEntry],
    gone: Collection[str],
    left: Sequence[IndexEntry] | None = None,
    *,
    chosen: Sequence[Target] = (),
) -> None:
    now = time.time()
    asked = {target.digest for target in chosen}
    if args.json:
        why = [{**fields(entry), "why": _why(entry, now, asked)} for entry in removed]
        emit({"dry_run": args.dry_run, "removed": why, "nbytes": _nbytes(removed), "leftovers": sorted(gone)})
        return
    verb = "would remove" if args.dry_run else "removed"
    if removed:
        rows = [(*row(entry, now)[:-1], _why(entry, now, asked)) for entry in removed]
        print("\n".join(table((*HEADER[:-1], "WHY"), rows, RIGHT)))
    for name in sorted(gone):
        print(wrapped(f"{verb} {name}", hanging="  "))
    print(f"{verb} {count(len(removed))}, {size(_nbytes(removed))}, and {len(gone)} leftover files")
    if left is not None:
        print(f"{count(len(left))} left, {size(_nbytes(left))}")


def _why(entry: IndexEntry, now: float, asked: Collection[str]) -> str:
    if entry.digest in asked:
        return "asked for"
    return "expired" if has_expired(entry.retention, now) else "over limit"


def _leftovers(folder: Path) -> dict[str, int]:
    """Files that a collection removes and no index needs, relative to the folder, with their bytes: of dead writers
    and builders, and retentions of indexes that are gone.
    """
    found = {}
    held = locked_inodes(folder)
    now = time.time()
    for path in (*folder.glob("[0-9a-f][0-9a-f]/*"), *folder.glob(f"{REMOVED}*")):
        try:
            status = path.lstat()
        except OSError:
            continue
        kept = path.name.endswith(KEEP_SUFFIX)
        orphan = kept and not os.path.lexists(str(path).removesuffix(KEEP_SUFFIX) + SUFFIX)
        old = abs(now - status.st_mtime) >= PARTIAL_GRACE_S
        dead = path.name.startswith((PARTIAL, LEASE, REMOVED)) and status.st_ino not in held
        if old and (orphan or dead):
            found[str(path.relative_to(folder))] = status.st_size
    return found


def _plan(folder: Path, args: argparse.Namespace, chosen: Sequence[Target] = ()) -> Plan:
    """Who leaves beside what was chosen, from the files as they are now: what has expired, then the fewest others that
    the limits ask for.

    Limits that even an empty store would exceed are no reason to lose what is pinned: all others leave.
    """
    books, now = _books(folder), time.time()
    asked = {target.digest for target in chosen}
    candidates = [Candidate(entry, used) for _, entry, used in books.uses() if entry.digest not in asked]
    dead = sum(nbytes for name, nbytes in _leftovers(folder).items() if Path(name).name.startswith(PARTIAL))
    expired = [c.entry for c in candidates if has_expired(c.entry.retention, now)]
    rest = [c for c in candidates if not has_expired(c.entry.retention, now)]
    freed = _nbytes(expired) + sum(target.seen[0].nbytes for target in chosen if target.seen is not None)
    used, free = books.used_bytes - dead - freed, free_bytes(folder) + freed
    short = max(args.min_free_bytes - free, 0 if args.max_bytes is None else used - args.max_bytes, 0)
    out_of_reach = short > sum(c.entry.nbytes for c in rest)
    leaving = [c for c in rest if not c.entry.retention.pinned] if out_of_reach else rest
    wanted = sum(c.entry.nbytes for c in leaving) if out_of_reach else short
    victims = [*expired, *(choose_victims(leaving, wanted, now=now) or ())]
    if out_of_reach:
        return Plan(victims, used - wanted, 0, short, short - wanted)
    return Plan(victims, args.max_bytes, args.min_free_bytes, short, 0)
