"""Everything that this package raises.

    IndexStoreError
    ├── InvalidPayload         the caller's arrays, spec or keys cannot be stored (nothing was written)
    ├── IndexNotFound          no index under that identity (any more)
    ├── IndexUnreadable        bytes that the operating system does not give us (permission, I/O error)
    │   └── OutOfMemory        this process has no memory, or no descriptor, for an index that is there
    ├── IndexFormatError       a file or buffer that cannot be read as an index
    │   ├── IndexForeign       not one of our files
    │   ├── IndexTooNew        ours, whole, written by a newer version
    │   └── IndexCorrupt       ours, but damaged or cut short
    ├── IndexMismatch          a good index of something else (model, dtype, prefix, ...)
    ├── StoreFolderError       folder missing, not a folder, not writable
    ├── StoreFull              byte budget or disk exhausted
    ├── StoreUnavailable       the service or the remote tier did not answer in time
    ├── StoreClosed            used before open() or after close()
    └── StoreInconsistent      check_integrity() found the two sides of an equation apart

Every message has the form "what: expected E, found F; remedy". ``reason`` is the word under which a serving
process counts the dense fallback that the error leads to (docs/architecture.md, "Fallback reasons").
"""

# ruff: noqa: N818 (a name says what is the matter; that it is an error, the base class says)

from __future__ import annotations

import os
from typing import ClassVar


class IndexStoreError(Exception):
    """Base of all errors. Owns the parts of its message as attributes: what, expected, found, remedy, path.

    ``expected``, ``found`` and ``remedy`` are short phrases; ``path`` is the file or folder, if there is one.
    """

    reason: ClassVar[str] = "no_index"

    def __init__(
        self, what: str, expected: str, found: str, remedy: str, path: str | os.PathLike[str] | None = None
    ) -> None:
        self.what, self.expected, self.found, self.remedy = what, expected, found, remedy
        self.path = None if path is None else os.fspath(path)
        where = "" if self.path is None else f"{self.path}: "
        super().__init__(f"{where}{what}: expected {expected}, found {found}; {remedy}")

    def at(self, path: str | os.PathLike[str]) -> IndexStoreError:
        """The same error, saying which file it is about."""
        error = type(self)(self.what, self.expected, self.found, self.remedy, path)
        return error.with_traceback(self.__traceback__)


class InvalidPayload(IndexStoreError, ValueError):
    """What the caller wants to store, or asks for, is not representable."""


class IndexNotFound(IndexStoreError):
    """No index under that identity, or it was deleted meanwhile."""


class IndexUnreadable(IndexStoreError):
    """The file is there; reading it failed in the operating system."""

    reason = "index_corrupt"


class OutOfMemory(IndexUnreadable):
    """This process or machine lacks what reading takes; the store that has the index may be well."""

    reason = "index_memory"


def out_of_memory(error: BaseException, expected: str) -> OutOfMemory:
    """For what the operating system says of this process."""
    found = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return OutOfMemory("this process", expected, found, "free memory or descriptors on this machine")


class IndexFormatError(IndexStoreError):
    """Bytes that cannot be used as an index; the subclass says why."""

    reason = "index_corrupt"


class IndexForeign(IndexFormatError):
    """Not a file of this format at all."""


class IndexTooNew(IndexFormatError):
    """An intact file of a newer format version."""


class IndexCorrupt(IndexFormatError):
    """A file of this format whose bytes contradict themselves."""


class IndexMismatch(IndexStoreError):
    """An intact index whose identity is another one than was asked for."""

    reason = "index_mismatch"


class StoreFolderError(IndexStoreError):
    """The store's folder cannot be used."""


class StoreFull(IndexStoreError):
    """No room: the byte budget, or the disk."""


class StoreUnavailable(IndexStoreError):
    """The process or machine behind this store does not answer, or not in time. Asking again later may help."""

    reason = "store_unavailable"


class StoreClosed(IndexStoreError):
    """The store or index file is not open."""


class StoreInconsistent(IndexStoreError):
    """A store's own books do not balance: a defect in this package, never the user's fault."""
