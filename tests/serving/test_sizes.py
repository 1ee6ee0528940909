"""What an index will take is computed before it is built: byte for byte what a built one has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from prefix_index import IndexEntry
from prefix_index.format import ALIGN
from sglang_ext.config import config_from_dict
from sglang_ext.methods.arrays import ROW_INDPTR
from sglang_ext.methods.profile import Profile
from sglang_ext.prefill.builder import IndexFactory, profile_digest
from sglang_ext.prefill.sizes import index_sizes
from sglang_ext.prefix.residency import Residency, State
from tests.serving.admitting import DIM, KV_HEADS, LAYERS
from tests.serving.test_profiles import _model, _profile

TOKENS = list(range(1008))

#: Keys of a configuration by name. Blocks of 1,008 tokens: the last of 64 is not full.
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in ("token_index", "ab_sparse", "csattention", "two_level", "union", "exact")},
    "ball": {"method": "ab_sparse", "methods": {"ab_sparse": {"representation": "ball", "quantization": "none"}}},
    "profile's blocks": {"method": "ab_sparse", "methods": {"ab_sparse": {"sizes": "profile"}}},
    "profile's blocks, first of two": {
        "method": "two_level",
        "methods": {"two_level": {"first": {"method": "ab_sparse", "sizes": "profile"}}},
    },
    "blocks on some channels": {"method": "ab_sparse", "methods": {"ab_sparse": {"channel_ratio": 0.5}}},
    "two methods": {"method": "ab_sparse", "methods": {"ab_sparse": {}, "token_index": {"channel_ratio": 1.0}}},
}


@pytest.mark.parametrize("keys", CONFIGS.values(), ids=CONFIGS)
def test_an_index_has_the_bytes_that_were_computed(bench: Any, keys: dict[str, Any]) -> None:
    profile: Profile | None = _profile() if "profile" in str(keys) else None
    config, model = config_from_dict(keys), _model()
    factory = IndexFactory(bench.store, config, profile)
    identity = bench.identity(TOKENS, model=model, profile=profile_digest(config, profile))
    queries = torch.randn(LAYERS, KV_HEADS, 64, DIM, generator=torch.Generator().manual_seed(0))
    built = factory.assemble(identity, lambda layer: bench.keys(TOKENS, layer), queries, DIM**-0.5)
    entry, _ = factory.keep(*built, TOKENS)

    sizes = index_sizes(config, profile, model, len(TOKENS))
    assert sizes.file - entry.nbytes in (0, ALIGN), "numbers in the header have less digits than any can have"
    by_rank = [
        _resident(factory, config.method, entry, heads) for heads in (range(KV_HEADS), range(1), range(1, KV_HEADS))
    ]
    assert sizes.device == by_rank[0]
    assert index_sizes(config, profile, model, len(TOKENS), tp_size=2).device == max(by_rank[1:])


def test_queries_are_recorded_for_blocks_of_wide_keys_alone(bench: Any) -> None:
    factory, model = IndexFactory(bench.store, config_from_dict({"method": "ab_sparse"})), _model()
    assert not factory.needs_queries(model)
    assert factory.needs_queries(replace(model, head_dim=576))


def _resident(factory: IndexFactory, method: str, entry: IndexEntry, heads: range) -> int:
    """Bytes of what residency holds of an index for these KV heads."""
    spec = factory.specs[method]
    residency = Residency(factory.store, spec, LAYERS, len(heads), torch.device("cpu"), 1 << 30, heads.start)
    index = residency.acquire(entry)
    assert index.loaded is not None
    index.loaded.result(60)
    residency.close()
    assert index.state is State.READY, index.detail
    assert any(ROW_INDPTR in name for name in index.layers[0]) == ("profile" in str(spec.to_dict()))
    return index.nbytes


def test_blocks_of_a_profile_that_is_missing_are_an_error() -> None:
    config = config_from_dict(CONFIGS["profile's blocks"])
    with pytest.raises(ValueError, match=r"expected a profile for ab_sparse.sizes=profile, got none"):
        index_sizes(config, None, _model(), 1008)
