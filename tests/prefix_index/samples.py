"""Small made-up identities, payloads and questions, for tests of stores and of what stands on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np

from prefix_index import (
    ArrayKey,
    Ask,
    BuildInfo,
    IndexEntry,
    IndexFile,
    IndexIdentity,
    IndexPayload,
    IndexStore,
    ModelFingerprint,
    Retention,
    canonical_digest,
    namespace_digest,
    page_hashes,
)
from prefix_index.store import IndexSource

PROMPT = tuple(range(500, 628))  # 8 pages
PINNED = Retention(pinned=True, name="tools")
SMALL = 1 << 12
MEDIUM = 1 << 20


def sample_model(**changes: Any) -> ModelFingerprint:
    """A made-up model of 2 layers and 2 KV heads; ``changes`` replace fields."""
    model = ModelFingerprint(
        config_digest=canonical_digest({"hidden_size": 64}),
        weights_digest=canonical_digest("weights"),
        rope_digest=canonical_digest({"base": 10000}),
        kv_dtype="bfloat16",
        num_layers=2,
        num_kv_heads=2,
        head_dim=16,
        v_head_dim=16,
    )
    return msgspec.structs.replace(model, **changes)


def sample_identity(
    tokens: Sequence[int] = tuple(range(32)),
    *,
    extra_key: str | None = None,
    model: ModelFingerprint | None = None,
    profile_digest: str = "profile-1",
) -> IndexIdentity:
    """The identity of the full pages of ``tokens``."""
    return IndexIdentity.for_prefix(
        namespace=namespace_digest({"extra_key": extra_key}),
        page_hashes=page_hashes(tokens),
        model=model or sample_model(),
        profile_digest=profile_digest,
    )


def sample_payload(identity: IndexIdentity | None = None, *, fill: int = 0, values_per_array: int = 16) -> IndexPayload:
    """2 layers x 2 KV heads (int32 ids, bfloat16 scores) and one array of no layer, all shifted by ``fill``."""
    arrays: dict[ArrayKey, Any] = {ArrayKey("channels"): np.full(4, fill % 256, np.uint8)}
    dtypes: dict[ArrayKey, str] = {}
    for layer in range(2):
        for kv_head in range(2):
            base = fill + 1000 * layer + 100 * kv_head
            ids = np.arange(values_per_array, dtype=np.int32) + base
            arrays[ArrayKey("csa.ids", layer, kv_head)] = ids.reshape(2, -1)
            arrays[ArrayKey("csa.scores", layer, kv_head)] = (ids % 65536).astype(np.uint16)
            dtypes[ArrayKey("csa.scores", layer, kv_head)] = "bfloat16"
    return IndexPayload(
        identity=identity or sample_identity(),
        arrays=arrays,
        dtypes=dtypes,
        spec={"method": "csattention", "top_k": 64, "layers": ["dense", "anchor"]},
        stats={"fill": fill},
        info=BuildInfo(created=1_700_000_000.0, build_seconds=1.5),
    )


def miss(store: IndexStore, extra_key: str | None = None, **changes: Any) -> str | None:
    return store.near_miss(ask(PROMPT, extra_key, **changes))


@cache
def identity_of(number: int) -> IndexIdentity:
    """One of many, of 32 tokens each: no two have a page in common."""
    return sample_identity(range(1000 * number, 1000 * number + 32))


IDS = [identity_of(number) for number in range(8)]


def payload_of(number: int, fill: int, nbytes: int = SMALL) -> IndexPayload:
    """Of about so many bytes."""
    return sample_payload(identity_of(number), fill=fill, values_per_array=nbytes // 48 * 2)


def fill_of(index: IndexFile) -> int:
    """The ``fill`` of a sample, all of whose arrays are compared with it; closes the index."""
    with index:
        index.verify()
        fill, values = int(index.stats["fill"]), 2 * index.record(ArrayKey("csa.ids", 0, 0)).shape[1]
        arrays: Any = sample_payload(fill=fill, values_per_array=values).arrays
        assert set(index.keys) == set(arrays)
        for key, array in arrays.items():
            assert np.array_equal(index.array(*key), array), f"bytes of {tuple(key)}"
    return fill


def read_fill(store: IndexSource, key: IndexIdentity | str | int = 0) -> int:
    """Reads all of an index: a number is that of ``identity_of``."""
    return fill_of(store.get(identity_of(key) if isinstance(key, int) else key))


def ask(prompt: Any = PROMPT, extra_key: str | None = None, **changes: Any) -> Ask:
    where = {"model": sample_model(), "profile_digest": "profile-1", **changes}
    return Ask(namespace_digest({"extra_key": extra_key}), page_hashes(prompt), **where)


def find(store: IndexStore, prompt: Any = PROMPT, extra_key: str | None = None, **changes: Any) -> IndexEntry | None:
    return store.longest(ask(prompt, extra_key, **changes))
