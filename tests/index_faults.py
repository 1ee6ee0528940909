"""Faults in a store's token indexes that no check can see, for the quality guard to find: checksums and forms are
right. Each changes the order or the origin of the keys in every layer and KV head.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prefix_index import ArrayKey, FileStore, IndexEntry, IndexPayload

Arrays = dict[ArrayKey, Any]


def replaced(store: FileStore, digest: str, change: Callable[[Arrays], None], **info: Any) -> IndexEntry:
    """The index with arrays that `change` has changed, and other fields of its `info`, as if it were built anew."""
    with store.get(digest) as index:
        arrays = {key: array.copy() for key, array in index.read_many().items()}
        whole = index.payload()
    change(arrays)
    changed = msgspec.structs.replace(whole.info, **info)
    return store.put(IndexPayload(whole.identity, arrays, spec=whole.spec, stats=whole.stats, info=changed))


def shuffle(folder: Path, digest: str) -> None:
    """Give each key of an index in this store another position."""
    random = np.random.default_rng(0)

    def shuffled(arrays: Arrays) -> None:
        for key in arrays:
            if key.name == "token_index.keys_packed":
                arrays[key] = random.permutation(arrays[key])

    with FileStore(folder) as store:
        replaced(store, digest, shuffled)


def exchange(folder: Path, digest: str, other: str) -> None:
    """Give an index in this store the keys of the first tokens of another one, which is as long or longer."""
    with FileStore(folder) as store, store.get(other) as index:
        theirs = {key: array.copy() for key, array in index.read_many().items()}

        def exchanged(arrays: Arrays) -> None:
            for key in arrays:
                if key.name.startswith("token_index."):
                    arrays[key] = theirs[key][: len(arrays[key])]

        replaced(store, digest, exchanged)
