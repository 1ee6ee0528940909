"""`index verify`, `export` and `import`: whole containers, every stored byte against its checksum."""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from prefix_index import (
    IndexCorrupt,
    IndexEntry,
    IndexFile,
    IndexForeign,
    IndexMismatch,
    IndexNotFound,
    IndexStore,
    IndexStoreError,
    IndexTooNew,
    IndexUnreadable,
    OutOfMemory,
    Problem,
    Retention,
)
from prefix_index.copies import digest_in
from prefix_index.folder import SUFFIX, folder_fd, os_errors
from prefix_index.retention import KEEP_SUFFIX, read_retention, write_retention
from prefix_index.store import has_expired
from prefix_index.writer import replace_file
from sglang_ext.cli.index.targets import find, length, open_unused, opened
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


class Verdict(NamedTuple):
    """What was found, or done, of one index or file; in JSON, too."""

    digest: str | None
    path: str | None
    nbytes: int
    status: str
    detail: str | None = None


def status_of(error: IndexStoreError) -> str:
    """The word for an error that kept an index from being read (or, while it was imported, stored: `failed`)."""
    return _STATUSES.get(type(error), "failed")


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
            entries = random.sample(entries, min(known, args.sample))
        statuses: Counter[str] = Counter()
        checked = 0
        for verdict in chain(bad, _verify_all(entries, args.jobs or min(4, os.cpu_count() or 1))):
            statuses[verdict.status] += 1
            checked += verdict.nbytes if verdict.status == "good" else 0
            if args.json or verdict.status not in _FINE:
                _say(args, verdict)
    if not args.json:
        seconds = time.perf_counter() - begun
        of = f" of {known}" if len(entries) < known else ""
        found = _counted(statuses) or "nothing to check"
        print(wrapped(f"{len(entries)}{of} read, {size(checked)} good in {seconds:.1f} s: {found}"))
    return 1 if any(status not in _FINE for status in statuses) else 0


def _verify_all(entries: Sequence[IndexEntry], jobs: int) -> Iterator[Verdict]:
    inner = max(1, jobs // max(1, len(entries)))
    with progress(sum(entry.nbytes for entry in entries), "verify") as bar, ThreadPoolExecutor(jobs) as pool:
        try:
            for task in as_completed([pool.submit(_verify_one, entry, inner) for entry in entries]):
                bar.update(task.result().nbytes)
                yield task.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # on Ctrl-C too: the others do not begin


def _verify_one(entry: IndexEntry, threads: int) -> Verdict:
    """By reads, not by a mapping: a disk that fails, or somebody who cuts the file, is then an error and no signal."""
    try:
        with open_unused(entry) as index:
            index.verify(threads=threads)
    except IndexStoreError as error:
        return Verdict(entry.digest, entry.path, entry.nbytes, status_of(error), str(error))
    return Verdict(entry.digest, entry.path, entry.nbytes, "good")


# -- export and import -------------------------------------------------------------------------------------------------


def run_export(args: argparse.Namespace) -> int:
    """Writes containers; 1 when one of them could not be written."""
    if bool(args.index) == args.all:
        complain("export", "expected indexes, or --all; found both or neither")
        return 2
    if args.to == "-":
        complain("export", "expected --to as a file or a folder, found - for standard output; name a file")
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
        if not into_folder and to.exists() and not to.is_file():
            complain("export", f"expected a file or folder at {to}, found a pipe, socket or device; name another")
            return 1
        if not into_folder and os.path.lexists(to) and not args.replace:
            complain("export", f"expected no file at {to}, found one; name another, or give --replace")
            return 1
        statuses = Counter(damaged=len(damaged))
        for path, error in damaged:
            _say(args, Verdict(digest_in(path), path, 0, "damaged", str(error)))
        with progress(sum(entry.nbytes for entry in entries), "export") as bar:
            for entry in entries:
                file = to / f"{entry.digest}{SUFFIX}" if into_folder else to
                verdict = _export_one(entry, file, replace_it=args.replace)
                bar.update(entry.nbytes)
                statuses[verdict.status] += 1
                _say(args, verdict)
    return _summary(args, statuses, ("exported", "exists"))


def _export_one(entry: IndexEntry, path: Path, *, replace_it: bool) -> Verdict:
    verdict = Verdict(entry.digest, str(path), entry.nbytes, "exported")
    if os.path.lexists(path) and not replace_it:
        return verdict._replace(status="exists", detail="give --replace to write it anew")
    try:
        with open_unused(entry) as index, os_errors(path.parent), folder_fd(path.parent) as fd:
            if path.name == entry.digest + SUFFIX:  # as `_retention_beside` reads it
                write_retention(fd, entry.digest, entry.retention, mode=0o600)
            replace_file(fd, path.name, index.payload(), mode=0o600)
    except IndexStoreError as error:
        return verdict._replace(status="failed", detail=str(error))
    return verdict


def run_import(args: argparse.Namespace) -> int:
    """Takes containers in, each checked as a whole before it is stored; 1 when one of them was refused."""
    statuses: Counter[str] = Counter()
    with opened(args, create=True) as store:
        files = list(_files(args.file))
        with progress(sum(map(length, files)), "import") as bar:
            for path in files:
                verdict = _import_one(store, path, replace_it=args.replace)
                bar.update(length(path))
                statuses[verdict.status] += 1
                _say(args, verdict)
    return _summary(args, statuses, ("imported", "exists", "expired"))


def _files(paths: Sequence[str]) -> Iterator[Path]:
    """The files named; of a folder (a store's too) all containers in it, and the folders in it that cannot be listed,
    which pathlib passes over; or the folder itself if there are none.
    """
    for text in paths:
        path = Path(text)
        inside: list[Path] = []
        with suppress(OSError):  # said of the path itself, when its turn comes
            inside = [*path.glob(f"[!.]*{SUFFIX}"), *path.glob(f"[0-9a-f][0-9a-f]/[!.]*{SUFFIX}")]
            inside += [folder for folder in path.glob("[0-9a-f][0-9a-f]/") if not os.access(folder, os.R_OK)]
        yield from sorted(inside) or [path]


def _import_one(store: IndexStore, path: Path, *, replace_it: bool) -> Verdict:
    verdict = Verdict(None, str(path), 0, "missing")
    try:
        if path.is_dir():
            os.listdir(path)
            return verdict._replace(detail=f"expected files named *{SUFFIX} in this folder, found none")
        with IndexFile.open(path) as index:
            verdict = Verdict(index.identity.digest, str(path), index.nbytes, "exists")
            if not replace_it and store.contains(index.identity.digest):
                return verdict._replace(detail="give --replace to take this one")
            kept = _retention_beside(path, index.identity.digest)
            if kept is not None and has_expired(kept, time.time()):
                why = f"remove the {KEEP_SUFFIX} file beside it to take it all the same"
                return verdict._replace(status="expired", detail=why)
            index.verify()  # first: no index leaves a full store for a damaged one
            return verdict._replace(status="imported", nbytes=store.put(index.payload(), retention=kept).nbytes)
    except IndexNotFound as error:
        return verdict._replace(detail=str(error))
    except IndexStoreError as error:
        return verdict._replace(nbytes=0, status=status_of(error), detail=str(error))
    except OSError as error:
        detail = f"{path}: expected a file or folder that can be read, found {error.strerror or error}"
        return verdict._replace(nbytes=0, status="failed", detail=detail)


def _retention_beside(path: Path, digest: str) -> Retention | None:
    """What a store's folder, or an export, says beside its file; None, which changes nothing, where it says nothing.
    Raises IndexUnreadable where the system does not give it: importing without it would lose it.
    """
    if path.name != digest + SUFFIX:
        return None
    try:
        with folder_fd(path.parent) as fd:
            kept = read_retention(fd, digest)
    except IndexUnreadable as error:
        raise error.at(path.with_suffix(KEEP_SUFFIX)) from None
    except IndexStoreError:  # counts as the default in its own store, too
        return None
    return None if kept == Retention() else kept


# -- what is said ------------------------------------------------------------------------------------------------------


def _say(args: argparse.Namespace, verdict: Verdict) -> None:
    if args.json:
        emit(verdict._asdict())
        return
    name = verdict.digest[:SHORT] if verdict.digest else os.path.basename(verdict.path or "")
    nbytes = size(verdict.nbytes) if verdict.nbytes else ""
    print(wrapped(f"{verdict.status:<10} {name}  {nbytes}".rstrip(), hanging=" " * 11))
    if verdict.detail:
        print(wrapped(verdict.detail.removeprefix(f"{verdict.path}: "), " " * 11))


def _counted(statuses: Counter[str]) -> str:
    return ", ".join(f"{number} {status}" for status, number in sorted(statuses.items()) if number)


def _summary(args: argparse.Namespace, statuses: Counter[str], fine: Sequence[str]) -> int:
    if not args.json:
        print(_counted(statuses) or "nothing to do")
    return 1 if any(number and status not in fine for status, number in statuses.items()) else 0
