"""How long an index should stay, and its name, on disk: ``<digest>.pfxkeep`` beside it, where that is not the default.
And who leaves a full store first.

Replaced whole, never changed in place. One that is damaged, or is none of ours, counts as the default and as a problem:
retention is advice, and never a reason to lose an index or to refuse one. One whose bytes the system does not give us
now is left alone, and what it belongs to stays.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec

from .errors import IndexCorrupt, IndexForeign, IndexStoreError, IndexUnreadable, StoreFolderError
from .folder import SUFFIX, Signature, closing_fd, is_old, open_regular, pread, stat_named
from .format import xxh3_hex
from .store import DEFAULT, IndexEntry, Retention, has_expired
from .writer import PartialFile

KEEP_SUFFIX: Final = ".pfxkeep"
_MAX_NBYTES: Final = 4096
_RETENTION: Final = msgspec.json.Decoder(Retention)


def read_retention(dir_fd: int, digest: str) -> Retention:
    """The default where there is no sidecar. Raises IndexForeign for no file, IndexCorrupt, IndexUnreadable."""
    what, remedy = "retention", "remove it, or set the retention again"
    try:
        status = os.stat(digest + KEEP_SUFFIX, dir_fd=dir_fd, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise IndexForeign(what, "a regular file", "a link, folder, pipe or device", remedy)
        fd = open_regular(digest + KEEP_SUFFIX, os.O_RDONLY, dir_fd=dir_fd)
    except FileNotFoundError:
        return DEFAULT
    except OSError as err:
        raise IndexUnreadable(what, "readable bytes", err.strerror or str(err), "check its permissions") from None
    with closing_fd(fd):
        raw = pread(fd, _MAX_NBYTES, 0)
    kept, _, checksum = raw.rstrip(b"\n").partition(b"\n")
    if checksum.decode("ascii", "replace") != _checksum(digest, kept):
        raise IndexCorrupt(what, f"checksum {_checksum(digest, kept)}", repr(checksum[:32]), remedy)
    try:
        return _RETENTION.decode(kept)
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        raise IndexCorrupt(what, "JSON of Retention", str(err)[:200], remedy) from None


def _checksum(digest: str, kept: bytes) -> str:
    """Of the sidecar's JSON and of the index that it belongs to: 16 hex digits."""
    return xxh3_hex(digest.encode() + b"\n" + kept)


def write_retention(dir_fd: int, digest: str, retention: Retention, *, mode: int) -> None:
    """Writes the sidecar, or removes it for the default. The caller syncs. Raises OSError; then nothing changed."""
    with _prepared(dir_fd, digest, retention, mode=mode) as commit:
        commit()


@contextlib.contextmanager
def _prepared(dir_fd: int, digest: str, retention: Retention, *, mode: int) -> Iterator[Callable[[], object]]:
    """All is done that writing a retention takes; what it gives only changes a name, or raises OSError."""
    if retention == DEFAULT:
        yield partial(remove_retention, dir_fd, digest)
        return
    kept = msgspec.json.encode(retention)
    raw = kept + b"\n" + _checksum(digest, kept).encode() + b"\n"
    with PartialFile(dir_fd, mode=mode) as sidecar:
        sidecar.create(len(raw))
        sidecar.write(raw)
        yield partial(sidecar.publish, digest + KEEP_SUFFIX)


def remove_retention(dir_fd: int, digest: str) -> None:
    """Removes the sidecar, if there is one. Raises OSError, for a folder of that name for instance."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(digest + KEEP_SUFFIX, dir_fd=dir_fd)


def publish(
    dir_fd: int, digest: str, written: PartialFile, retention: Retention | None, *, mode: int, now: float, used: float
) -> tuple[Signature, Retention]:
    """Renames a written index into place, its retention with it. The caller syncs the folder. After an OSError neither
    has changed, unless the last rename of all failed, of a retention that was shortened.

    Two names cannot change at once. Whoever dies in between leaves the old index or the new one with a retention that
    keeps it as long as the longer of the two. ``retention`` None keeps that of the index that is replaced, if there is
    one that has not expired at ``now``. The index counts as used at ``used`` (both seconds). Call it while nobody else
    changes the folder. Raises StoreFolderError, having changed nothing, where the old retention cannot be read.
    """
    try:
        before, damaged = read_retention(dir_fd, digest), False
    except IndexUnreadable as err:
        remedy = "put it again; if that lasts, set the retention anew (index pin, unpin or expire) or remove the index"
        what = f"retention of index {digest[:12]}, which is to be replaced"
        raise StoreFolderError(what, err.expected, err.found, remedy) from err
    except IndexStoreError:
        before, damaged = DEFAULT, True
    there = stat_named(dir_fd, digest + SUFFIX) is not None
    kept = retention
    if kept is None:
        kept = before if there and not has_expired(before, now) else DEFAULT
    # What has expired stays so until the new one has its place: dying must not bring it back.
    first = kept if not there else before if has_expired(before, now) else _longer(before, kept)
    if damaged or first != before:
        try:
            write_retention(dir_fd, digest, first, mode=mode)
        except OSError:
            if kept != DEFAULT or not damaged:
                raise  # else it counts as the default already: a folder by the sidecar's name, say
    try:
        with _prepared(dir_fd, digest, kept, mode=mode) if kept != first else contextlib.nullcontext() as commit:
            signature = written.publish(digest + SUFFIX, used=used)
            if commit is not None:
                commit()
            return signature, kept
    except BaseException:
        if first != before and not written.is_published:
            with contextlib.suppress(OSError):
                write_retention(dir_fd, digest, before, mode=mode)
        raise


def _longer(a: Retention, b: Retention) -> Retention:
    """What keeps an index as long as either does, under the second's name."""
    expires = None if a.expires is None or b.expires is None else max(a.expires, b.expires)
    return Retention(pinned=a.pinned or b.pinned, expires=expires, name=b.name)


def remove_orphans(dir_fd: int, names: Iterable[str], *, grace_s: float) -> None:
    """Removes the sidecars of ``names`` (digests) whose index is not there.

    One changed within ``grace_s`` seconds is left alone: its index may be about to get its name.
    """
    for digest in names:
        with contextlib.suppress(OSError):
            status = os.stat(digest + KEEP_SUFFIX, dir_fd=dir_fd, follow_symlinks=False)
            if is_old(status, grace_s) and stat_named(dir_fd, digest + SUFFIX) is None:
                os.unlink(digest + KEEP_SUFFIX, dir_fd=dir_fd)


class Candidate(NamedTuple):
    """An index that could leave. ``last_used`` is in seconds, by the clock that also gives ``now``."""

    entry: IndexEntry
    last_used: float


def choose_victims(candidates: Iterable[Candidate], nbytes: int, *, now: float) -> Sequence[IndexEntry] | None:
    """The fewest first leavers that hold ``nbytes`` bytes together; None where all of them do not.

    Order: expired, then not pinned, then pinned; within each the least recently used first.
    """

    def rank(candidate: Candidate) -> tuple[int, float]:
        retention = candidate.entry.retention
        group = 0 if has_expired(retention, now) else 2 if retention.pinned else 1
        return group, candidate.last_used

    victims: list[IndexEntry] = []
    for entry, _ in sorted(candidates, key=rank):
        if nbytes <= 0:
            break
        victims.append(entry)
        nbytes -= entry.nbytes
    return victims if nbytes <= 0 else None
