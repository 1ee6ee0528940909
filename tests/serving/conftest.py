"""Real stores with real indexes, and a pool of KV that stands in for SGLang's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from prefix_index import FileStore, IndexEntry, IndexIdentity, ModelFingerprint, namespace_digest, page_hashes
from prefix_index.testing import sample_model
from sglang_ext.config import PAGE_TOKENS, SparseAttnConfig, config_from_dict
from sglang_ext.prefill.builder import IndexFactory, profile_digest

LAYERS, KV_HEADS, GQA, HEAD_DIM = 3, 2, 2, 16


class Bench:
    """A store on disk and the means to put indexes of made-up prompts into it."""

    def __init__(self, folder: Path, config: SparseAttnConfig) -> None:
        self.config = config
        self.model = sample_model(num_layers=LAYERS, num_kv_heads=KV_HEADS, kv_dtype="float32")
        self.profile = profile_digest(config)
        self.store = FileStore(folder, create=True)
        self.store.open()

    def identity(
        self,
        tokens: Sequence[int],
        namespace: dict[str, str | None] | None = None,
        model: ModelFingerprint | None = None,
        profile: str | None = None,
    ) -> IndexIdentity:
        return IndexIdentity.for_prefix(
            namespace=namespace_digest(namespace or {"extra_key": None}),
            page_hashes=page_hashes(tokens, PAGE_TOKENS),
            model=model or self.model,
            profile_digest=profile or self.profile,
        )

    def keys(self, tokens: Sequence[int], layer: int) -> torch.Tensor:
        gen = torch.Generator().manual_seed(len(tokens) * 100 + layer)
        return torch.randn(len(tokens), KV_HEADS, HEAD_DIM, generator=gen)

    def put(self, tokens: Sequence[int], **parts: Any) -> IndexEntry:
        identity = self.identity(tokens, **parts)
        queries = None
        if any(name != "exact" and name != "ab_sparse" for name in self.config.methods):
            gen = torch.Generator().manual_seed(1)
            queries = torch.randn(LAYERS, KV_HEADS, 64, HEAD_DIM, generator=gen)
        factory = IndexFactory(self.store, self.config)
        keys_of = partial(self.keys, tokens[: identity.num_tokens])
        entry, _ = factory.build(identity, keys_of, queries, HEAD_DIM**-0.5)
        return entry


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**fields: Any) -> Bench:
        fields.setdefault("method", "exact")
        fields.setdefault("methods", {fields["method"]: {}})
        fields.setdefault("min_sparse_prompt_len", 16)
        fields.setdefault("store_min_free_bytes", 0)
        bench = Bench(tmp_path / f"store-{len(made)}", config_from_dict(fields))
        made.append(bench)
        return bench

    yield make
    for bench in made:
        bench.store.close()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()


@pytest.fixture
def sizes() -> tuple[int, int, int, int]:
    """num_layers, num_kv_heads, query heads per KV head, head_dim."""
    return LAYERS, KV_HEADS, GQA, HEAD_DIM
