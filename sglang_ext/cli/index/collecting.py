"""`index gc`: what has expired, what exceeds limits, and what dead writers left behind."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from prefix_index import IndexEntry, IndexStoreError
from prefix_index.connect import locate, open_store
from prefix_index.eviction import POLICIES, Candidate, choose_victims, has_expired, policy_of
from prefix_index.folder import PARTIAL, SUFFIX, check_folder, free_bytes, open_index, shard_fd
from prefix_index.lease import LEASE
from prefix_index.reader import read_entry
from prefix_index.retention import KEEP_SUFFIX, read_retention
from sglang_ext.cli.arguments import parse_bytes
from sglang_ext.cli.index.listing import count
from sglang_ext.cli.index.targets import HEADER, RIGHT, fields, row, store_address
from sglang_ext.cli.index.text import complain, emit, size, table, wrapped

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


def run_gc(args: argparse.Namespace) -> int:
    """Collects; limits are for folders, a service and a remote store have their own."""
    address = store_address(args)
    kind, value, _ = locate(address)
    limits = args.max_bytes is not None or args.min_free_bytes
    if kind != "file" and (limits or args.dry_run):
        complain("gc", f"expected no limits and no --dry-run for {address}: it has limits of its own")
        return 2
    if kind == "file" and args.dry_run:
        # Opening the store would already clear away what dead writers left.
        folder = Path(value)
        check_folder(folder, create=False)
        _tell(args, _would_go(folder, args), _leftovers(folder))
        return 0
    before = _leftovers(Path(value)) if kind == "file" else set()
    store = open_store(address, max_bytes=args.max_bytes, min_free_bytes=args.min_free_bytes, eviction=args.eviction)
    store.open()
    try:
        removed = store.collect()
        left = store.list()
    finally:
        store.close()
    _tell(args, removed, before - _leftovers(Path(value)) if before else before)
    if not args.json:
        print(f"{count(len(left))} left, {size(sum(entry.nbytes for entry in left))}")
    return 0


def _tell(args: argparse.Namespace, removed: Sequence[IndexEntry], gone: set[str]) -> None:
    now = time.time()
    if args.json:
        emit(
            {
                "dry_run": args.dry_run,
                "removed": [{**fields(entry), "why": _why(entry, now)} for entry in removed],
                "nbytes": sum(entry.nbytes for entry in removed),
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
    print(f"{verb} {count(len(removed))}, {size(sum(e.nbytes for e in removed))}, and {len(gone)} leftover files")


def _why(entry: IndexEntry, now: float) -> str:
    return "expired" if has_expired(entry.retention, now) else "over limit"


def _leftovers(folder: Path) -> set[str]:
    """Files that no index needs, relative to the folder: of dead writers and builders, and retentions of indexes
    that are gone.
    """
    found = set()
    held = _locked()
    for path in folder.glob("[0-9a-f][0-9a-f]/*"):
        kept = path.name.endswith(KEEP_SUFFIX)
        orphan = kept and not os.path.lexists(str(path).removesuffix(KEEP_SUFFIX) + SUFFIX)
        if orphan or (path.name.startswith((PARTIAL, LEASE)) and _inode(path) not in held):
            found.add(str(path.relative_to(folder)))
    return found


def _locked() -> set[int]:
    """Inodes that some process has locked: those files are in use. To try the locks would disturb their holders."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return set()
    return {int(field.rpartition(":")[2]) for line in lines for field in line.split() if field.count(":") == 2}


def _inode(path: Path) -> int:
    try:
        return path.lstat().st_ino
    except FileNotFoundError:
        return 0


def _would_go(folder: Path, args: argparse.Namespace) -> list[IndexEntry]:
    """What `collect` would remove, from the files as they are now."""
    now = time.time()
    candidates: list[Candidate] = []
    used = 0
    for path in sorted(folder.glob(f"[0-9a-f][0-9a-f]/[!.]*{SUFFIX}")):
        used += path.lstat().st_size
        try:
            candidates.append(_candidate(folder, path))
        except (IndexStoreError, OSError):
            continue
    expired = [c for c in candidates if has_expired(c.entry.retention, now)]
    freed = sum(c.entry.nbytes for c in expired)
    short = args.min_free_bytes - (free_bytes(folder) + freed)
    if args.max_bytes is not None:
        short = max(short, used - freed - args.max_bytes)
    rest = [c for c in candidates if c not in expired]
    everything = sum(c.entry.nbytes for c in rest)
    victims = (
        choose_victims(rest, min(short, everything), policy=policy_of(args.eviction), now=now) if short > 0 else ()
    )
    return [c.entry for c in expired] + list(victims or ())


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
