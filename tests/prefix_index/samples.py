"""Small made-up identities and payloads, for tests of stores and of what stands on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from prefix_index import (
    ArrayKey,
    BuildInfo,
    IndexIdentity,
    IndexPayload,
    ModelFingerprint,
    canonical_digest,
    namespace_digest,
    page_hashes,
)


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
