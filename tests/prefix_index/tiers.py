"""Every store that the conformance suite runs against: name -> (tmp_path) -> context of a store, not yet open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

from prefix_index import FileStore, IndexStore, MemoryStore

Tier: TypeAlias = Callable[[Path], AbstractContextManager[IndexStore]]


@contextlib.contextmanager
def memory(tmp_path: Path) -> Iterator[IndexStore]:
    yield MemoryStore(64 << 20)


@contextlib.contextmanager
def file(tmp_path: Path) -> Iterator[IndexStore]:
    yield FileStore(tmp_path / "store", create=True)


TIERS: dict[str, Tier] = {"memory": memory, "file": file}
