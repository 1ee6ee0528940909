"""Faults in a store's token indexes that no check can see, for the quality guard to find: checksums and forms are
right. Each changes the order or the origin of the keys in every layer and KV head.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefix_index import FileStore, IndexEntry, IndexPayload

Array = NDArray[Any]
_OF_METHOD = "token_index."


def _entry(store: FileStore, digest: str) -> IndexEntry:
    return next(one for one in store.list() if one.digest == digest)


def _change(store: FileStore, digest: str, changed: Callable[[Any, Array], Array]) -> None:
    """Replace an index by one whose arrays of the token index are changed: (key, array) -> array."""
    entry = _entry(store, digest)
    with store.get(entry.identity) as index:
        payload = index.payload()
        arrays = {key: np.array(index.array(*key)) for key in index.keys}
    for key, array in arrays.items():
        if key.name.startswith(_OF_METHOD):
            arrays[key] = np.ascontiguousarray(changed(key, array))
    store.put(IndexPayload(entry.identity, arrays, spec=payload.spec, stats=payload.stats, info=payload.info))


def shuffle(folder: Path, digest: str, seed: int = 0) -> None:
    """Give each key another position.

    Args:
        folder: the store's.
        digest: of the index.
        seed: of the order.
    """
    store = FileStore(folder)
    store.open()
    length, random = _entry(store, digest).identity.num_tokens, np.random.default_rng(seed)
    _change(store, digest, lambda _, a: a[random.permutation(length)] if a.shape[:1] == (length,) else a)
    store.close()


def exchange(folder: Path, digest: str, other: str) -> None:
    """Give an index the keys of another one's first tokens.

    Raises:
        ValueError: the other one is shorter.
    """
    store = FileStore(folder)
    store.open()
    length, longer = (_entry(store, name).identity.num_tokens for name in (digest, other))
    if longer < length:
        raise ValueError(f"expected the index of a prompt of {length} tokens or more, got one of {longer}")
    with store.get(_entry(store, other).identity) as index:
        theirs = {key: np.array(index.array(*key)) for key in index.keys}
    _change(store, digest, lambda key, _: theirs[key][:length] if theirs[key].shape[:1] == (longer,) else theirs[key])
    store.close()
