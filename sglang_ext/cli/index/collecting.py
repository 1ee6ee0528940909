"""`index gc`: what has expired, what exceeds limits, and what dead writers left behind."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from prefix_index import FileStore, IndexEntry, IndexStoreError
from prefix_index.connect import locate
from prefix_index.eviction import POLICIES, Candidate, choose_victims, policy_of
from prefix_index.folder import PARTIAL, SUFFIX, check_folder, free_bytes, open_index, shard_fd
from prefix_index.lease import LEASE
from prefix_index.reader import read_entry
from prefix_index.retention import KEEP_SUFFIX, read_retention
from prefix_index.store import has_expired
from sglang_ext.cli.arguments import parse_bytes
from sglang_ext.cli.index.listing import count
from sglang_ext.cli.index.targets import HEADER, RIGHT, fields, opened, row, store_address
from sglang_ext.cli.index.text import complain, emit, size, table, wrapped

#: Files of writers and builders that are younger stay (`FileStore`): whoever made them may be about to lock them.
PARTIAL_GRACE_S: Final = 60.0

ARGUMENTS: Final[Sequence[Callable[[argparse.ArgumentParser], object]]] = (
    lambda p: p.add_argument(
        "--max-bytes", type=parse_bytes, metavar="SIZE", help="most bytes of all indexes, for instance 50G"
    ),
    lambda p: p.add_argument(
        "--min-free-bytes", type=parse_bytes, default=0, metavar="SIZE", help="bytes to leave free on the disk"
    ),
    lambda p: p.add_argument(
        "--eviction", choices=sorted(POLICIES), default="lru", help="which index leaves first (default: lru)"
    ),
    lambda p: p.add_argument("--dry-run", action="store_true", help="say what would go, remove nothing"),
)


class Plan(NamedTuple):
    """What a collection of a folder does.

    Attributes:
        victims: who leaves.
        max_bytes, min_free_bytes: the limits that were asked for, or as near to them as the store can come.
        short: bytes to free beside what has expired.
        too_few: those of them that the victims do not hold.
    """

    victims: Sequence[IndexEntry]
    max_bytes: int | None
    min_free_bytes: int
    short: int
    too_few: int


def run_gc(args: argparse.Namespace) -> int:
    """Collects; limits are for folders, a service and a remote store have their own."""
    address = store_address(args)
    kind, value, _ = locate(address)
    if kind == "file":
        return _gc_folder(Path(value), args)
    if args.max_bytes is not None or args.min_free_bytes or args.dry_run:
        complain("gc", f"expected no limits and no --dry-run for {address}: it has limits of its own")
        return 2
    with opened(args) as store:
        removed = store.collect()
        left = store.list()
    _tell(args, removed, set())
    _tell_left(args, left)
    return 0


def _gc_folder(folder: Path, args: argparse.Namespace) -> int:
    check_folder(folder, create=False, write=not args.dry_run)
    plan = _plan(folder, args)
    if args.dry_run:
        # Opening the store would already clear away what dead writers left.
        _tell(args, plan.victims, _leftovers(folder))
        return _complete(plan.too_few)
    before = _leftovers(folder)
    with FileStore(
        folder,
        partial_grace_s=PARTIAL_GRACE_S,
        max_bytes=plan.max_bytes,
        min_free_bytes=plan.min_free_bytes,
        eviction=args.eviction,
    ) as store:
        removed = store.collect()
        left = store.list()
    _tell(args, removed, before - _leftovers(folder))
    _tell_left(args, left)
    # What others wrote to the disk meanwhile is no failure, nor is what they removed.
    missed = plan.too_few + _nbytes(plan.victims) - _nbytes(removed)
    return _complete(min(missed, _plan(folder, args).short))


def _nbytes(entries: Sequence[IndexEntry]) -> int:
    return sum(entry.nbytes for entry in entries)


def _tell_left(args: argparse.Namespace, left: Sequence[IndexEntry]) -> None:
    if not args.json:
        print(f"{count(len(left))} left, {size(_nbytes(left))}")


def _complete(too_few: int) -> int:
    """The exit status."""
    if too_few <= 0:
        return 0
    complain("gc", f"limit not reached: {too_few} bytes too few; give a higher one, or free disk space otherwise")
    return 1


def _tell(args: argparse.Namespace, removed: Sequence[IndexEntry], gone: set[str]) -> None:
    now = time.time()
    if args.json:
        emit(
            {
                "dry_run": args.dry_run,
                "removed": [{**fields(entry), "why": _why(entry, now)} for entry in removed],
                "nbytes": _nbytes(removed),
                "leftovers": sorted(gone),
            }
        )
        return
    verb = "would remove" if args.dry_run else "removed"
    if removed:
        rows = [(*row(entry, now)[:-1], _why(entry, now)) for entry in removed]
        print("\n".join(table((*HEADER[:-1], "WHY"), rows, RIGHT)))
    for name in sorted(gone):
        print(wrapped(f"{verb} {name}", hanging="  "))
    print(f"{verb} {count(len(removed))}, {size(_nbytes(removed))}, and {len(gone)} leftover files")


def _why(entry: IndexEntry, now: float) -> str:
    return "expired" if has_expired(entry.retention, now) else "over limit"


def _leftovers(folder: Path) -> set[str]:
    """Files that a collection removes and no index needs, relative to the folder: of dead writers and builders, and
    retentions of indexes that are gone.
    """
    found = set()
    held = _locked()
    now = time.time()
    for path in folder.glob("[0-9a-f][0-9a-f]/*"):
        try:
            status = path.lstat()
        except OSError:
            continue
        kept = path.name.endswith(KEEP_SUFFIX)
        orphan = kept and not os.path.lexists(str(path).removesuffix(KEEP_SUFFIX) + SUFFIX)
        old = abs(now - status.st_mtime) >= PARTIAL_GRACE_S
        dead = path.name.startswith((PARTIAL, LEASE)) and old and status.st_ino not in held
        if orphan or dead:
            found.add(str(path.relative_to(folder)))
    return found


def _locked() -> set[int]:
    """Inodes that some process has locked: those files are in use. To try the locks would disturb their holders."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return set()
    return {int(field.rpartition(":")[2]) for line in lines for field in line.split() if field.count(":") == 2}


def _plan(folder: Path, args: argparse.Namespace) -> Plan:
    """Who leaves, from the files as they are now: what has expired, then the fewest others that the limits ask for.

    Limits that even an empty store would exceed are no reason to lose what is pinned: all others leave.
    """
    now = time.time()
    candidates: list[Candidate] = []
    used, leftovers = 0, _leftovers(folder)
    for path in sorted(folder.glob("[0-9a-f][0-9a-f]/*")):
        is_index = path.name.endswith(SUFFIX) and not path.name.startswith(".")
        is_partial = path.name.startswith(PARTIAL) and str(path.relative_to(folder)) not in leftovers
        try:
            used += path.lstat().st_size if is_index or is_partial else 0
            if is_index:
                candidates.append(_candidate(folder, path))
        except (IndexStoreError, OSError):
            continue  # damaged, or gone meanwhile
    expired = [c.entry for c in candidates if has_expired(c.entry.retention, now)]
    rest = [c for c in candidates if not has_expired(c.entry.retention, now)]
    freed = _nbytes(expired)
    used, free = used - freed, free_bytes(folder) + freed
    short = max(args.min_free_bytes - free, 0 if args.max_bytes is None else used - args.max_bytes, 0)
    everything = sum(c.entry.nbytes for c in rest)
    if short <= everything:
        victims = choose_victims(rest, short, policy=policy_of(args.eviction), now=now) or ()
        return Plan([*expired, *victims], args.max_bytes, args.min_free_bytes, short, 0)
    loose = [c for c in rest if not c.entry.retention.pinned]
    freeable = sum(c.entry.nbytes for c in loose)
    victims = choose_victims(loose, freeable, policy=policy_of(args.eviction), now=now) or ()
    return Plan([*expired, *victims], used - freeable, 0, short, short - freeable)


def _candidate(folder: Path, path: Path) -> Candidate:
    with shard_fd(folder, path.parent.name) as dir_fd:
        fd = open_index(path.name, dir_fd)
        try:
            header, nbytes = read_entry(fd)
            last_used = os.fstat(fd).st_atime
        finally:
            os.close(fd)
        retention = read_retention(dir_fd, path.name.removesuffix(SUFFIX))
    entry = IndexEntry(
        identity=header.identity,
        nbytes=nbytes,
        created=header.info.created,
        build_seconds=header.info.build_seconds,
        path=str(path),
        retention=retention,
    )
    return Candidate(entry, last_used)
