"""How long an index should stay, on disk: a small file beside it, ``<digest>.pfxkeep``, where it is not the default.

Two lines: the retention as JSON, and the xxh3 (16 hex digits) of the digest, a newline and that JSON.

Replaced whole (partial, fsync, rename), never changed in place. One that cannot be read, or is none of ours, counts
as the default and as a problem: retention is advice, and never a reason to lose an index or to refuse one.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable
from typing import Final

import msgspec

from .errors import IndexCorrupt, IndexForeign, IndexStoreError, IndexUnreadable
from .eviction import has_expired
from .folder import SUFFIX, PartialFile, Signature, create_partial
from .format import xxh3_hex
from .keys import is_digest
from .store import Retention

KEEP_SUFFIX: Final = ".pfxkeep"
DEFAULT: Final = Retention()
_MAX_NBYTES: Final = 4096


def read_retention(dir_fd: int, digest: str) -> Retention:
    """What the sidecar says; the default where there is none. Raises IndexForeign for what is not a file,
    IndexCorrupt for one that does not parse, IndexUnreadable.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    what, remedy = "retention", "remove it, or set the retention again"
    try:
        status = os.stat(digest + KEEP_SUFFIX, dir_fd=dir_fd, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise IndexForeign(what, expected="a regular file", found="a link, folder, pipe or device", remedy=remedy)
        fd = os.open(digest + KEEP_SUFFIX, flags, dir_fd=dir_fd)
    except FileNotFoundError:
        return DEFAULT
    except OSError as err:
        found = err.strerror or str(err)
        raise IndexUnreadable(what, expected="readable bytes", found=found, remedy="check its permissions") from None
    try:
        raw = os.read(fd, _MAX_NBYTES + 1)
        if len(raw) > _MAX_NBYTES:
            raise IndexCorrupt(what, expected=f"at most {_MAX_NBYTES} bytes", found="more", remedy=remedy)
        kept, _, checksum = raw.rstrip(b"\n").partition(b"\n")
        if checksum.decode("ascii", "replace") != _checksum(digest, kept):
            found = repr(checksum[:32])
            raise IndexCorrupt(what, expected=f"checksum {_checksum(digest, kept)}", found=found, remedy=remedy)
        return msgspec.json.decode(kept, type=Retention)
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        raise IndexCorrupt(what, expected="JSON of Retention", found=str(err)[:200], remedy=remedy) from None
    except OSError as err:
        found = err.strerror or str(err)
        raise IndexUnreadable(what, expected="readable bytes", found=found, remedy="check the disk") from None
    finally:
        os.close(fd)


def _checksum(digest: str, kept: bytes) -> str:
    """Of the sidecar's JSON and of the index that it belongs to: 16 hex digits."""
    return xxh3_hex(digest.encode() + b"\n" + kept)


def write_retention(dir_fd: int, digest: str, retention: Retention, *, mode: int) -> None:
    """Writes the sidecar, or removes it where the default says the same. Raises OSError; then nothing changed.

    The caller syncs the folder.
    """
    if retention == DEFAULT:
        remove_retention(dir_fd, digest)
        return
    partial, fd = create_partial(dir_fd, mode=mode)
    try:
        try:
            kept = msgspec.json.encode(retention)
            os.write(fd, kept + b"\n" + _checksum(digest, kept).encode() + b"\n")
            os.fsync(fd)
            os.rename(partial, digest + KEEP_SUFFIX, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        finally:
            os.close(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial, dir_fd=dir_fd)
        raise


def remove_retention(dir_fd: int, digest: str) -> None:
    """Removes the sidecar, if there is one. Raises OSError, for a folder of that name for instance."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(digest + KEEP_SUFFIX, dir_fd=dir_fd)


def publish(
    dir_fd: int, digest: str, partial: PartialFile, retention: Retention | None, *, mode: int, now: float, used: float
) -> tuple[Signature, Retention]:
    """Renames a written index into place, its retention with it; after an OSError neither has changed.

    ``retention`` None keeps that of the index that is replaced, if there is one that has not expired. Call it while
    nobody else changes the folder (``folder.exclusive``). The index counts as used at ``used``; ``now`` is what
    expiry is compared with (both seconds). The caller syncs the folder.
    """
    try:
        before, damaged = read_retention(dir_fd, digest), False
    except IndexStoreError:
        before, damaged = DEFAULT, True
    kept = retention
    if kept is None:
        kept = before if _exists(dir_fd, digest + SUFFIX) and not has_expired(before, now) else DEFAULT
    if damaged or kept != before:
        try:
            write_retention(dir_fd, digest, kept, mode=mode)
        except OSError:
            if kept != DEFAULT:  # else it is a folder by the sidecar's name: that counts as the default already
                raise
    try:
        return partial.publish(digest + SUFFIX, used=used), kept
    except BaseException:
        if kept != before:
            with contextlib.suppress(OSError):
                write_retention(dir_fd, digest, before, mode=mode)
        raise


def _exists(dir_fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except OSError:
        return False
    return True


def remove_orphans(dir_fd: int, names: Iterable[str], indexes: Iterable[str], *, grace_s: float) -> int:
    """Removes the sidecars among ``names`` (digests) whose index is not among ``indexes``. Returns how many.

    One changed within ``grace_s`` seconds is left alone: its index may be about to get its name.
    """
    removed = 0
    for digest in set(names) - set(indexes):
        with contextlib.suppress(OSError):
            status = os.stat(digest + KEEP_SUFFIX, dir_fd=dir_fd, follow_symlinks=False)
            if is_digest(digest) and time.time() - status.st_mtime >= grace_s:
                os.unlink(digest + KEEP_SUFFIX, dir_fd=dir_fd)
                removed += 1
    return removed
