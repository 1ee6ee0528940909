"""What the state of a process says: which indexes of the store serve it, what of the store fails, who is a hit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_ext.config import Settings
from sglang_ext.runtime import SparseRuntime
from tests.serving.admitting import Runtime
from tests.serving.test_runtime import LAYERS, NAMESPACE, PROMPT, Model, Request, _decode_batch, _step


@pytest.fixture
def start(make_bench: Callable[..., Any]) -> Iterator[Callable[..., SparseRuntime]]:
    """Runtimes on a store that holds an index of `PROMPT`."""
    started: list[SparseRuntime] = []

    def make(**fields: Any) -> SparseRuntime:
        bench = make_bench(layer_plan=["anchor"] * LAYERS, prefetch_policy="wait_complete", **fields)
        bench.put(PROMPT)
        started.append(Runtime(Settings(config=bench.config, store=str(bench.store.folder)), Model(bench.model)))
        return started[-1]

    yield make
    for runtime in started:
        runtime.close()


def test_indexes_that_serve_nobody_here_are_counted_apart(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(layer_plan=["anchor"] * LAYERS)
    other = msgspec.structs.replace(bench.model, kv_dtype="bfloat16")
    for tokens, parts in ((PROMPT, {}), (PROMPT[:32], {"model": other}), (PROMPT[:16], {"profile": "other"})):
        bench.put(tokens, **parts)
    settings = Settings(config=bench.config, store=str(bench.store.folder))
    for model, line in ((bench.model, "1 of 3"), (msgspec.structs.replace(bench.model, kv_dtype="float16"), "0 of 3")):
        runtime = SparseRuntime(settings, Model(model))
        assert f"usable {line} indexes (" in runtime.watch.summary()
        state = runtime.snapshot()
        runtime.close()
        assert (state["indexes_usable"], state["indexes_in_store"]) == (int(line[0]), 3)
        assert state["store_problems"] == []
    assert state["indexes_unusable"] == {"of another model": 3}


def test_a_store_folder_that_is_removed_is_a_problem_until_it_is_back(start: Any) -> None:
    runtime = start()
    folder = Path(runtime.store.folder)
    away = folder.rename(folder.with_name("away"))
    assert any(str(folder) in problem for problem in runtime.snapshot()["store_problems"])
    away.rename(folder)
    assert runtime.snapshot()["store_problems"] == []


def test_a_request_that_generates_nothing_is_no_hit_and_a_probe_no_short_prompt(start: Any) -> None:
    """The first, which prefills the prompt of several answers, still begins to load the index."""
    runtime, requests = start(min_sparse_prompt_len=64), [Request() for _ in range(4)]
    runtime.admit(requests[0], "n", [*PROMPT, 7], NAMESPACE, counted=False)
    assert (runtime.snapshot()["hits"], runtime.snapshot()["index_users"]) == (0, 1)
    prompts = {"a": [*PROMPT, 7], "probe": [0], "short": PROMPT[:16]}
    for request, (rid, tokens) in zip(requests[1:], prompts.items(), strict=True):
        runtime.admit(request, rid, tokens, NAMESPACE)
    _step(runtime, _decode_batch(runtime, [*prompts], [66, 3, 18]))
    state = runtime.snapshot()
    assert (state["hits"], state["fallbacks"]) == (1, {"short_prefix": 1})
