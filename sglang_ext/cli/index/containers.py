"""`index verify`, `export` and `import`: whole containers, every stored byte against its checksum."""

from __future__ import annotations

import argparse
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from prefix_index import (
    ArrayKey,
    IndexCorrupt,
    IndexEntry,
    IndexFile,
    IndexForeign,
    IndexMismatch,
    IndexNotFound,
    IndexPayload,
    IndexStore,
    IndexStoreError,
    IndexTooNew,
    IndexUnreadable,
    LazyArray,
    OutOfMemory,
    Problem,
    Retention,
)
from prefix_index.folder import SUFFIX, os_errors
from prefix_index.retention import KEEP_SUFFIX, read_retention
from prefix_index.store import has_expired
from prefix_index.writer import replace_file
from sglang_ext.cli.index.targets import digest_in, find, open_unused, opened
from sglang_ext.cli.index.text import SHORT, complain, emit, progress, size, wrapped

#: Statuses of one index, in the report and in JSON. `gone`: it left the store while it waited to be read.
_STATUSES: dict[type[IndexStoreError], str] = {
    IndexCorrupt: "corrupt",
    IndexTooNew: "too_new",
    IndexForeign: "foreign",
    IndexMismatch: "mismatch",
    IndexUnreadable: "unreadable",
    OutOfMemory: "unreadable",
    IndexNotFound: "gone",
}
_FINE = ("good", "gone")
_BATCH_NBYTES = 32 << 20


class Verdict(NamedTuple):
    """What was found of one index or file."""

    digest: str | None
    path: str | None
    nbytes: int
    status: str
    detail: str | None


def status_of(error: IndexStoreError) -> str:
    """The word for an error that kept an index from being read (or, while it was imported, stored: `failed`)."""
    return _STATUSES.get(type(error), "failed")


def check_arrays(index: IndexFile, add: Callable[[int], None], stop: threading.Event, threads: int = 1) -> None:
    """Compares every array of an open index, and the padding behind it, with its checksum; ends early on `stop`.

    By reads, not by a mapping: a disk that fails, or somebody who cuts the file, is then an error and no signal.
    Raises what is wrong with the first bad array.
    """
    batches: list[list[ArrayKey]] = [[]]
    nbytes = 0
    for key in index.keys:
        batches[-1].append(key)
        nbytes += index.record(key).nbytes
        if nbytes >= _BATCH_NBYTES:
            batches.append([])
            nbytes = 0
    for batch in batches:
        if not stop.is_set():
            index.read_many(batch, threads=threads)
            add(index.read_nbytes(batch))


def sample_size(text: str, entries: int) -> int:
    """How many of so many indexes `--sample` asks for: `20`, or `5%`; at least one of any."""
    if text.endswith("%"):
        return min(entries, math.ceil(float(text[:-1]) / 100 * entries))
    return min(entries, int(text))


def sample_text(text: str) -> str:
    """argparse type of --sample."""
    number = text.removesuffix("%")
    try:
        good = 0 < float(number) <= 100 if text.endswith("%") else int(number) >= 1
    except ValueError:
        good = False
    if not good:
        raise argparse.ArgumentTypeError(f"expected a number of indexes, or a share such as 5%; found {text!r}")
    return text


def run_verify(args: argparse.Namespace) -> int:
    """Checks the chosen indexes; 1 when any cannot be used."""
    begun = time.perf_counter()
    with opened(args) as store:
        entries = list(store.list())
        bad = [Verdict(digest_in(path), path, 0, status_of(error), str(error)) for path, error in store.problems()]
        if args.index:
            targets = find(store, args.index)
            entries = [target.entry for target in targets if target.entry is not None]
            named = {target.digest for target in targets}
            bad = [verdict for verdict in bad if verdict.digest in named]
        known = len(entries)
        if args.sample:
            entries = random.sample(entries, sample_size(args.sample, known))
        statuses = Counter(verdict.status for verdict in bad)
        for verdict in bad:
            _report(verdict, as_json=args.json)
        checked = 0
        for verdict in _verify_all(entries, args.jobs or min(4, os.cpu_count() or 1)):
            statuses[verdict.status] += 1
            checked += verdict.nbytes if verdict.status == "good" else 0
            if args.json or verdict.status not in _FINE:
                _report(verdict, as_json=args.json)
    if not args.json:
        seconds = time.perf_counter() - begun
        of = f" of {known}" if len(entries) < known else ""
        found = ", ".join(f"{number} {status}" for status, number in sorted(statuses.items())) or "nothing to check"
        print(wrapped(f"{len(entries)}{of} read, {size(checked)} good in {seconds:.1f} s: {found}"))
    return 1 if any(status not in _FINE for status in statuses) else 0


def _report(verdict: Verdict, *, as_json: bool) -> None:
    if as_json:
        emit(verdict._asdict())
        return
    print(f"{verdict.status:<10}  {verdict.digest[:SHORT] if verdict.digest else 'a file'}")
    detail = verdict.detail or ""
    print(wrapped(detail.removeprefix(f"{verdict.path}: ") if verdict.digest else detail, "  "))


def _verify_all(entries: Sequence[IndexEntry], jobs: int) -> Iterator[Verdict]:
    stop = threading.Event()
    inner = max(1, jobs // max(1, len(entries)))
    with progress(sum(entry.nbytes for entry in entries), "verify") as add, ThreadPoolExecutor(jobs) as pool:
        try:
            tasks = [pool.submit(_verify_one, entry, add, stop, inner) for entry in entries]
            for task in as_completed(tasks):
                yield task.result()
        finally:
            stop.set()  # on Ctrl-C too: those that run end at their next array, the others do not begin
            pool.shutdown(wait=True, cancel_futures=True)


def _verify_one(entry: IndexEntry, add: Callable[[int], None], stop: threading.Event, threads: int) -> Verdict:
    try:
        with open_unused(entry) as index:
            check_arrays(index, add, stop, threads)
    except IndexStoreError as error:
        return Verdict(entry.digest, entry.path, entry.nbytes, status_of(error), str(error))
    return Verdict(entry.digest, entry.path, entry.nbytes, "good", None)


# -- export and import -------------------------------------------------------------------------------------------------


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
        with open_unused(entry) as index:
            payload = _counted(index.payload(), add)
            with os_errors(path.parent):
                fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    replace_file(fd, path.name, payload, mode=0o600)
                finally:
                    os.close(fd)
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
