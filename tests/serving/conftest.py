"""Real stores with real indexes, and runtimes on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from prefix_index import FileStore, IndexEntry, IndexIdentity, ModelFingerprint, namespace_digest, page_hashes
from sglang_ext.config import PAGE_TOKENS, Settings, SparseAttnConfig, config_from_dict
from sglang_ext.prefill.builder import IndexFactory, profile_digest
from tests.prefix_index.samples import sample_model
from tests.serving.admitting import DIM, KV_HEADS, LAYERS, Model, Runtime


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
        return torch.randn(len(tokens), KV_HEADS, DIM, generator=gen)

    def put(self, tokens: Sequence[int], **parts: Any) -> IndexEntry:
        identity = self.identity(tokens, **parts)
        queries = None
        if any(name != "exact" and name != "ab_sparse" for name in self.config.methods):
            gen = torch.Generator().manual_seed(1)
            queries = torch.randn(LAYERS, KV_HEADS, 64, DIM, generator=gen)
        factory = IndexFactory(self.store, self.config)
        keys_of = partial(self.keys, tokens[: identity.num_tokens])
        entry, _ = factory.keep(*factory.assemble(identity, keys_of, queries, DIM**-0.5), tokens)
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
def start(make_bench: Callable[..., Bench], tmp_path: Path) -> Iterator[Callable[..., Runtime]]:
    """`start(prompts, store=..., **config)`: runtimes, each on a store of its own that holds indexes of the prompts, or
    on the one that is named. All positions are selected, unless the configuration says otherwise.
    """
    started: list[Runtime] = []

    def make(prompts: Sequence[Sequence[int]] = (), *, store: object = None, **fields: Any) -> Runtime:
        every = {"keep_ratio": 1.0, "layer_plan": ["anchor"] * LAYERS, "prefetch_policy": "wait_complete"}
        report = {"build_align": 16, "build_report": str(tmp_path / f"report-{len(started)}.jsonl")}
        bench = make_bench(**{**every, **report, **fields})
        for prompt in prompts:
            bench.put(prompt)
        settings = Settings(config=bench.config, store=str(store or bench.store.folder))
        started.append(Runtime(settings, Model(bench.model)))
        return started[-1]

    yield make
    for runtime in started:
        runtime.close()
