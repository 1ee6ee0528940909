"""One reading of a folder of indexes: the names in it, and when it must be read again."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Final

from .folder import PARTIAL, SUFFIX, Signature, shard_of
from .keys import is_digest
from .retention import KEEP_SUFFIX

_SETTLES_S: Final = 2.0
MAX_FOREIGN: Final = 100
"""Names of one folder that mean nothing here and are told one by one."""


@dataclass
class Listing:
    """One reading of a shard folder. ``used_ns`` are access times; ``foreign`` are names that mean nothing here, some
    of them, and ``more`` how many others there are.
    """

    indexes: dict[str, Signature] = field(default_factory=dict)
    keeps: dict[str, Signature] = field(default_factory=dict)
    used_ns: dict[str, int] = field(default_factory=dict)
    partials: dict[str, int] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)
    more: int = 0

    def take_foreign(self, name: str) -> None:
        if len(self.foreign) < MAX_FOREIGN:
            self.foreign.add(name)
        else:
            self.more += 1


class Look:
    """Whether a folder was listed since its last change, by its modification time.

    That must have stood for a while before, since a second change in the same tick of the file system's clock leaves
    it as it is. For how long is told by this machine's clock; for a time that lies in its future, by watching it stand.
    """

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        self._since = 0.0
        self._settled = False

    def is_current(self, status: os.stat_result) -> bool:
        return self._settled and self._seen == (status.st_ino, status.st_mtime_ns)

    def begin(self, status: os.stat_result) -> bool:
        """The folder is about to be listed. Whether that listing holds until its time changes, for ``end()``."""
        seen, now = (status.st_ino, status.st_mtime_ns), time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        age_s = (time.time_ns() - status.st_mtime_ns) / 1e9
        self._settled = False
        return max(age_s, now - self._since) > _SETTLES_S

    def end(self, *, settled: bool) -> None:
        self._settled = settled

    def doubt(self) -> None:
        """The next scan lists it, whatever its time says."""
        self._settled = False


def list_shard(dir_fd: int, shard: str, known: Listing) -> Listing:
    """What is in a shard folder. ``known`` is its last listing. Raises OSError."""
    seen = Listing()
    with os.scandir(dir_fd) as items:
        for item in items:
            name = item.name
            try:
                if name.startswith("."):
                    if name.startswith(PARTIAL):
                        seen.partials[name] = item.stat(follow_symlinks=False).st_size
                    continue
                digest, suffix = name[:64], name[64:]
                ours = suffix in (SUFFIX, KEEP_SUFFIX) and (
                    digest in known.indexes or (is_digest(digest) and shard_of(digest) == shard)
                )
                if not ours:
                    seen.take_foreign(name)
                    continue
                status = item.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if suffix == KEEP_SUFFIX:
                seen.keeps[digest] = Signature.of(status)
            else:
                seen.indexes[digest] = Signature.of(status)
                seen.used_ns[digest] = status.st_atime_ns
    return seen
