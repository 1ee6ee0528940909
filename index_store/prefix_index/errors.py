"""Everything that this package raises, and text from outside made printable where it leaves for a log or a terminal.

Every message has the form "what: expected E, found F; remedy". ``reason`` is the word under which a serving
process counts the dense fallback that the error leads to (docs/operating.md, "Why a request decoded dense").
"""

# ruff: noqa: N818 (a name says what is the matter; that it is an error, the base class says)

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar


class IndexStoreError(Exception):
    """Base of all errors, whose message its attributes make up. ``path`` is the file or folder, if there is one."""

    reason: ClassVar[str] = "no_index"

    def __init__(
        self, what: str, expected: str, found: str, remedy: str, path: str | os.PathLike[str] | None = None
    ) -> None:
        self.what, self.expected, self.found, self.remedy = what, expected, found, remedy
        self.path = None if path is None else os.fspath(path)
        where = "" if self.path is None else f"{self.path}: "
        super().__init__(f"{where}{what}: expected {expected}, found {found}; {remedy}")

    def at(self, path: str | os.PathLike[str] | None) -> IndexStoreError:
        """The same error, saying which file it is about."""
        error = type(self)(self.what, self.expected, self.found, self.remedy, path)
        return error.with_traceback(self.__traceback__)

    def bare(self) -> IndexStoreError:
        """The same error for who keeps it: a traceback keeps alive what its frames hold, whole indexes among it."""
        return self.at(self.path).with_traceback(None)


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


def printable(text: str) -> str:
    r"""The same on one line, with every character that does not print, a space excepted, as Python would write it.

    ``\n``, ``\x1b``, ``\u2028``; lone surrogates as ``\ud800``, those that stand for a byte of a file name as ``\xe9``.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(char: str) -> str:
    if char.isprintable():
        return char
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # os.fsdecode
        return f"\\x{code - 0xDC00:02x}"
    return char.encode("unicode_escape").decode()


def printable_values(value: Any) -> Any:
    """Plain values with every text in them printable; whatever else is there, keys too, as it is."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable_values(key): printable_values(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [printable_values(part) for part in value]
    return value
