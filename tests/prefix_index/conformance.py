"""What the modules of the conformance suite share, beside the ``store`` in conftest.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefix_index import Ask, IndexEntry, IndexPayload, IndexStore, Retention, namespace_digest, page_hashes
from tests.prefix_index.samples import sample_model

PROMPT = tuple(range(500, 628))  # 8 pages
PINNED = Retention(pinned=True, name="tools")


def same_arrays(store: IndexStore, payload: IndexPayload) -> bool:
    index = store.get(payload.identity)
    try:
        arrays: Any = payload.arrays
        return all(np.array_equal(index.array(*key), array) for key, array in arrays.items())
    finally:
        index.close()


def ask(prompt: Any = PROMPT, extra_key: str | None = None, **changes: Any) -> Ask:
    where = {"model": sample_model(), "profile_digest": "profile-1", **changes}
    return Ask(namespace_digest({"extra_key": extra_key}), page_hashes(prompt), **where)


def find(store: IndexStore, prompt: Any = PROMPT, extra_key: str | None = None, **changes: Any) -> IndexEntry | None:
    return store.longest(ask(prompt, extra_key, **changes))


def miss(store: IndexStore, extra_key: str | None = None, **changes: Any) -> str | None:
    return store.near_miss(ask(PROMPT, extra_key, **changes))
