"""`index verify`: every stored byte against its checksum."""

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
from typing import NamedTuple

from prefix_index import (
    ArrayKey,
    IndexCorrupt,
    IndexEntry,
    IndexFile,
    IndexForeign,
    IndexFormatError,
    IndexMismatch,
    IndexNotFound,
    IndexStore,
    IndexStoreError,
    IndexTooNew,
    IndexUnreadable,
    OutOfMemory,
    StoreUnavailable,
)
from sglang_ext.cli.index.targets import digest_in, find, open_unused, opened
from sglang_ext.cli.index.text import SHORT, emit, progress, size, wrapped

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
        for verdict in _verify_all(store, entries, args.jobs or min(4, os.cpu_count() or 1)):
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


def _verify_all(store: IndexStore, entries: Sequence[IndexEntry], jobs: int) -> Iterator[Verdict]:
    stop = threading.Event()
    inner = max(1, jobs // max(1, len(entries)))
    with progress(sum(entry.nbytes for entry in entries), "verify") as add, ThreadPoolExecutor(jobs) as pool:
        try:
            tasks = [pool.submit(_verify_one, store, entry, add, stop, inner) for entry in entries]
            for task in as_completed(tasks):
                yield task.result()
        finally:
            stop.set()  # on Ctrl-C too: those that run end at their next array, the others do not begin
            pool.shutdown(wait=True, cancel_futures=True)


def _verify_one(
    store: IndexStore, entry: IndexEntry, add: Callable[[int], None], stop: threading.Event, threads: int
) -> Verdict:
    try:
        with open_unused(store, entry) as index:
            check_arrays(index, add, stop, threads)
    except StoreUnavailable:
        raise
    except IndexStoreError as error:
        if isinstance(error, IndexFormatError | IndexMismatch):  # not what the disk may yet give: it stays offered
            with suppress(IndexStoreError):
                store.report(entry.digest, error)
        return Verdict(entry.digest, entry.path, entry.nbytes, status_of(error), str(error))
    return Verdict(entry.digest, entry.path, entry.nbytes, "good", None)
