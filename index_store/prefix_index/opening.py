"""One index of a folder, opened by its name: the client's side of a get, and whatever is no use of the index."""

from __future__ import annotations

from pathlib import Path

from .errors import IndexMismatch, IndexNotFound, IndexStoreError
from .folder import SUFFIX, open_index, shard_fd, shard_of
from .keys import IndexIdentity
from .reader import IndexFile
from .source import unreadable


def path_in(folder: Path, digest: str) -> Path:
    """Where an index lies, or would lie."""
    return folder / shard_of(digest) / (digest + SUFFIX)


def open_in(folder: Path, digest: str, expected: IndexIdentity | None) -> IndexFile:
    """Opens an index by its name in one tier's folder, without making it look used. Raises as ``IndexStore.get``.

    Only a name that is not there is IndexNotFound. What else the system says no to (no descriptors left, an I/O
    error) is IndexUnreadable: it says nothing about the index.
    """
    path = path_in(folder, digest)
    try:
        with shard_fd(folder, shard_of(digest)) as dir_fd:
            fd = open_index(path.name, dir_fd)
    except IndexStoreError as err:
        raise err.at(path) from None
    except (FileNotFoundError, NotADirectoryError) as err:
        found = err.strerror or str(err)
        raise IndexNotFound("index", expected="a file", found=found, remedy="build it", path=path) from None
    except OSError as err:
        raise unreadable(err).at(path) from err
    index = IndexFile.from_fd(fd, path=path, expected=expected)
    if expected is None and index.identity.digest != digest:
        index.close()
        remedy = "delete the file: it was renamed or misplaced"
        found = index.identity.digest
        raise IndexMismatch("identity digest", expected=digest, found=found, remedy=remedy, path=path)
    return index
