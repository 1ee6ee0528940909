"""Parts of one index, each built by a tensor-parallel rank of its own KV heads, as files that rank 0 collects.

KV heads are independent, so a part needs nothing of the others. Beside serving no rank ever waits for another: a rank
leaves its part when it has it, and rank 0 looks now and then whether all are there. So parts of one index may be of
different requests, minutes apart. Where a rank builds no more, rank 0's builds come to nothing one by one.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefix_index import ArrayKey
from sglang_ext.files import partial_file
from sglang_ext.ranks import Ranks

KEPT_S = 1200.0
"""A part that rank 0 does not take for so long is removed when its rank leaves another one."""
MAX_KEPT = 32
"""Parts of a rank that lie there at a time; the oldest ones go."""
_PREFIX = "sglang-ext-ranks-"
_BEGINNING_S = 60.0
"""A folder is made before its lock is taken."""


class Parts:
    """Parts as one rank sees them, in a folder of this server alone that all ranks write to. Used by its builder's
    thread.
    """

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self._folder = rank, size, folder

    @classmethod
    def of_server(cls, ranks: Ranks) -> Parts | None:
        """In a new folder for temporary files; None for a process without others. A collective: rank 0 makes it, and
        RuntimeError is raised on all ranks where it cannot. It is removed where the process ends in order, else (SGLang
        kills its processes) when the next server of several ranks starts.
        """
        if ranks.size == 1:
            return None
        made, why = "", ""
        if ranks.rank == 0:
            try:
                _remove_left_behind()
                folder = tempfile.mkdtemp(prefix=_PREFIX)
                atexit.register(shutil.rmtree, folder, ignore_errors=True)
                _locked(Path(folder))
                made = folder
            except Exception as error:  # the others wait
                why = f"{type(error).__name__}: {error}"
        made, why = ranks.gathered((made, why))[0]
        if not made:
            raise RuntimeError(
                "--sparse-attn: expected a folder for temporary files, in which tensor-parallel ranks put indexes "
                f"together; got: {why}. Free disk space, or name another folder with TMPDIR"
            )
        return cls(ranks.rank, ranks.size, Path(made))

    def leave(self, digest: str, arrays: Mapping[ArrayKey, NDArray[Any]]) -> None:
        """Hand over this rank's KV heads of all layers; replaces a part of the same index. Raises OSError where
        that cannot be written; nothing is left then.
        """
        path = self._path(digest, self.rank)
        self._folder.mkdir(mode=0o700, exist_ok=True)  # cleaners of temporary files
        with partial_file(path, private=True) as partial, partial.open("wb") as file:
            named = {f"{key.layer}/{key.kv_head}/{key.name}": array for key, array in arrays.items()}
            np.savez(file, **named)  # type: ignore[arg-type]
        mine = sorted((_left_at(one), one) for one in self._folder.glob(f"*.{self.rank}.npz"))
        _remove(one for at, one in mine[:-MAX_KEPT])
        _remove(one for at, one in mine if at < time.time() - KEPT_S)

    def has_left(self, digest: str) -> bool:
        """Whether this rank's part is still there."""
        return self._path(digest, self.rank).exists()

    def taken(self, digest: str) -> dict[ArrayKey, NDArray[Any]] | None:
        """On rank 0: the arrays of all other ranks, whose files are removed; None while some have not left theirs.
        Raises OSError or ValueError where a part cannot be read.
        """
        paths = [self._path(digest, rank) for rank in range(self.size) if rank != self.rank]
        if not all(path.exists() for path in paths):
            return None
        found: dict[ArrayKey, NDArray[Any]] = {}
        try:
            for path in paths:
                with np.load(path, allow_pickle=False) as part:
                    for name in part.files:
                        layer, head, array = name.split("/", 2)
                        found[ArrayKey(array, int(layer), int(head))] = part[name]
        except FileNotFoundError:  # its rank has left newer ones meanwhile
            return None
        except (zipfile.BadZipFile, ValueError, EOFError, KeyError) as error:
            _remove(paths)
            raise ValueError(
                f"expected a rank's part of an index in {path}, got: {error}; a later attempt makes it anew"
            ) from error
        _remove(paths)
        return found

    def _path(self, digest: str, rank: int) -> Path:
        return self._folder / f"{digest}.{rank}.npz"


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _left_at(path: Path) -> float:
    """Seconds since the epoch; 0 where rank 0 took it a moment ago."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _locked(folder: Path) -> int:
    """Take a folder's lock, until this process ends or closes it. Raises OSError where somebody has it."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove_left_behind() -> None:
    """Folders of this user's servers that do not run any more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > _BEGINNING_S:
                lock = _locked(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
