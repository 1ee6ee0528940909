"""`index export` and `import`: containers out of a store and into one."""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefix_index import (
    IndexEntry,
    IndexFile,
    IndexNotFound,
    IndexPayload,
    IndexStore,
    IndexStoreError,
    IndexUnreadable,
    LazyArray,
    Problem,
    Retention,
    StoreUnavailable,
)
from prefix_index.eviction import has_expired
from prefix_index.folder import SUFFIX, os_errors, replace_file
from prefix_index.retention import KEEP_SUFFIX, read_retention
from prefix_index.writer import IndexWriter
from sglang_ext.cli.index.checking import check_arrays, status_of
from sglang_ext.cli.index.targets import digest_in, find, open_unused, opened
from sglang_ext.cli.index.text import SHORT, complain, emit, progress, size, wrapped


def run_export(args: argparse.Namespace) -> int:
    """Writes containers; 1 when one of them could not be written."""
    if bool(args.index) == args.all:
        complain("export", "expected indexes, or --all; found both or neither")
        return 2
    to = Path(args.to)
    with opened(args) as store:
        targets = find(store, args.index)
        entries = list(store.list()) if args.all else [t.entry for t in targets if t.entry is not None]
        damaged = store.problems() if args.all else [Problem(t.path or t.digest, t.error) for t in targets if t.error]
        with os_errors(to):
            into_folder = args.all or len(targets) > 1 or to.is_dir() or args.to.endswith("/")
            if into_folder:
                to.mkdir(parents=True, exist_ok=True)
        if not into_folder and os.path.lexists(to) and not args.replace:
            complain("export", f"expected no file at {to}, found one; name another, or give --replace")
            return 1
        statuses: Counter[str] = Counter({"damaged": len(damaged)})
        for path, error in damaged:
            _say(args, digest_in(path), path, "damaged", str(error), 0)
        with progress(sum(entry.nbytes for entry in entries), "export") as add:
            for entry in entries:
                file = to / f"{entry.digest}{SUFFIX}" if into_folder else to
                status, detail = _export_one(store, entry, file, add, replace_it=args.replace)
                statuses[status] += 1
                _say(args, entry.digest, str(file), status, detail, entry.nbytes)
    return _summary(args, statuses, ("exported", "exists"))


def _export_one(
    store: IndexStore, entry: IndexEntry, path: Path, add: Callable[[int], None], *, replace_it: bool
) -> tuple[str, str | None]:
    if os.path.lexists(path) and not replace_it:
        return "exists", "give --replace to write it anew"
    try:
        with open_unused(store, entry) as index:
            payload = _counted(index.payload(), add)
            with os_errors(path.parent):
                fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    replace_file(fd, path.name, IndexWriter.of(payload), payload, mode=0o600)
                finally:
                    os.close(fd)
    except StoreUnavailable:
        raise
    except IndexStoreError as error:
        return "failed", str(error)
    return "exported", None


def _counted(payload: IndexPayload, add: Callable[[int], None]) -> IndexPayload:
    """The same payload; each array's bytes are counted when it is read."""

    def counted(array: Any) -> LazyArray:
        def load() -> Any:
            loaded = array.load()
            add(loaded.nbytes)
            return loaded

        return LazyArray(array.dtype, array.shape, load)

    return replace(payload, arrays={key: counted(array) for key, array in payload.arrays.items()})


def run_import(args: argparse.Namespace) -> int:
    """Takes containers in, each checked as a whole before it is stored; 1 when one of them was refused."""
    statuses: Counter[str] = Counter()
    with opened(args, create=True) as store:
        files = list(_files(args.file))
        with progress(sum(_length(path) for path in files), "import") as add:
            for path in files:
                digest, status, detail, nbytes = _import_one(store, path, add, replace_it=args.replace)
                statuses[status] += 1
                _say(args, digest, str(path), status, detail, nbytes)
    return _summary(args, statuses, ("imported", "exists", "expired"))


def _files(paths: Sequence[str]) -> Iterator[Path]:
    """The files named; of a folder (a store's too) all containers in it, or the folder itself if there are none."""
    for text in paths:
        path = Path(text)
        inside: list[Path] = []
        with suppress(OSError):  # said of the path itself, when its turn comes
            inside = [*path.glob(f"[!.]*{SUFFIX}"), *path.glob(f"[0-9a-f][0-9a-f]/[!.]*{SUFFIX}")]
        yield from sorted(inside) or [path]


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _import_one(
    store: IndexStore, path: Path, add: Callable[[int], None], *, replace_it: bool
) -> tuple[str | None, str, str | None, int]:
    """(digest, status, detail, bytes) of one file."""
    digest = None
    try:
        if path.is_dir():
            return None, "missing", f"expected files named *{SUFFIX} in this folder, found none", 0
        with IndexFile.open(path) as index:
            digest = index.identity.digest
            if not replace_it and store.contains(digest):
                return digest, "exists", "give --replace to take this one", index.nbytes
            kept = _retention_beside(path, digest)
            if kept is not None and has_expired(kept, time.time()):
                why = f"remove the {KEEP_SUFFIX} file beside it to take it all the same"
                return digest, "expired", why, index.nbytes
            check_arrays(index, add, threading.Event())
            return digest, "imported", None, store.put(index.payload(), retention=kept).nbytes
    except StoreUnavailable:
        raise
    except IndexNotFound as error:
        return None, "missing", str(error), 0
    except IndexStoreError as error:
        return digest, status_of(error), str(error), 0
    except OSError as error:
        return digest, "failed", f"{path}: expected a readable file, found {error.strerror or error}", 0


def _retention_beside(path: Path, digest: str) -> Retention | None:
    """What a store's folder says beside its file; None, which changes nothing, where it says nothing. Raises
    IndexUnreadable where the system does not give it: importing without it would lose it.
    """
    if path.name != digest + SUFFIX:
        return None
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        kept = read_retention(fd, digest)
    except IndexUnreadable as error:
        raise error.at(path.with_suffix(KEEP_SUFFIX)) from None
    except IndexStoreError:  # counts as the default in its own store, too
        return None
    finally:
        os.close(fd)
    return None if kept == Retention() else kept


def _say(args: argparse.Namespace, digest: str | None, path: str, status: str, detail: str | None, nbytes: int) -> None:
    if args.json:
        emit({"digest": digest, "path": path, "status": status, "detail": detail, "nbytes": nbytes})
        return
    name = digest[:SHORT] if digest else os.path.basename(path)
    print(wrapped(f"{status:<9} {name}  {size(nbytes) if nbytes else ''}".rstrip(), hanging=" " * 10))
    if detail:
        print(wrapped(detail.removeprefix(f"{path}: "), " " * 10))


def _summary(args: argparse.Namespace, statuses: Counter[str], fine: Sequence[str]) -> int:
    bad = {status: number for status, number in statuses.items() if number and status not in fine}
    if not args.json:
        found = ", ".join(f"{number} {status}" for status, number in sorted(statuses.items()) if number)
        print(found or "nothing to do")
    return 1 if bad else 0
