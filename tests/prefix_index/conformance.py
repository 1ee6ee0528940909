"""What the modules of the conformance suite share, beside the ``store`` in conftest.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefix_index import IndexEntry, IndexPayload, IndexStore, Retention, namespace_digest, page_hashes
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


def find(store: IndexStore, prompt: Any = PROMPT, extra_key: str | None = None, **changes: Any) -> IndexEntry | None:
    return store.longest(
        namespace_digest({"extra_key": extra_key}),
        page_hashes(prompt),
        changes.get("model", sample_model()),
        changes.get("profile", "profile-1"),
        page_tokens=changes.get("page_tokens", 16),
    )


def miss(store: IndexStore, extra_key: str | None = None, **changes: Any) -> str | None:
    return store.near_miss(
        namespace_digest({"extra_key": extra_key}),
        page_hashes(PROMPT),
        changes.get("model", sample_model()),
        changes.get("profile", "profile-1"),
    )
