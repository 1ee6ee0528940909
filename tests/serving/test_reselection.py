"""`benchmarks/replay_selection.py`: a selection that is not the reference's is found, by whichever queries."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_ext.decode.trace import Selected
from sglang_ext.methods.layer_plan import LayerPlan
from tests.serving.admitting import DIM, GQA, KV_HEADS, LAYERS

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"method": "exact", "methods": {"exact": {}}, "min_sparse_prompt_len": 16, "store_min_free_bytes": 0}
CONFIG |= {"keep_ratio": 0.25, "min_top_k": 0, "num_sink_tokens": 1, "num_recent_pages": 0}
TOKENS = 64
PLAN = LayerPlan.from_dict({"layers": ["dense", "anchor", {"reuse": 1}]}, num_layers=LAYERS, num_kv_heads=KV_HEADS)


@dataclass
class Case:
    """Two requests of one group.

    Attributes:
        module: `replay_selection`.
        reselection: by the store that holds the group's index.
        step: what the server selected, at layer 1.
        queries: [rows, num_qo_heads, head_dim] that it selected by.
    """

    module: Any
    reselection: Any
    step: Selected
    queries: Tensor


def selected(digest: str, masks: np.ndarray[Any, Any], queries: Tensor) -> Selected:
    bits = {1: [row.tobytes() for row in np.packbits(masks, axis=1)]}
    counts = {1: masks.sum(1).tolist()}
    return Selected(
        ["trace-1", "trace-2"], [70, 71], digest, TOKENS, counts, bits, {1: queries.float().numpy().tobytes()}
    )


@pytest.fixture
def make(make_bench: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Case]:
    """`make(equal_keys=...)`: with keys of which the second half are the first half again, scores come in pairs."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("replay_selection")

    def made(*, equal_keys: bool = False, **config: Any) -> Case:
        bench = make_bench(**CONFIG)
        if equal_keys:
            keys = bench.keys
            bench.keys = lambda tokens, layer: keys(tokens, layer)[: TOKENS // 2].repeat(2, 1, 1)
        entry = bench.put(list(range(TOKENS)))
        plan = (str(bench.store.folder), {**CONFIG, **config}, tmp_path, PLAN, torch.device("cpu"))
        reselection = module.Reselection(*plan)
        queries = torch.randn(2, KV_HEADS * GQA, DIM, generator=torch.Generator().manual_seed(3))
        found = reselection.select(reselection._index(entry.digest), 1, queries)
        masks = np.zeros((KV_HEADS, TOKENS), dtype=bool)
        np.put_along_axis(masks, found.positions.numpy().astype(np.int64), True, axis=1)
        return Case(module, reselection, selected(entry.digest, masks, queries), queries)

    return made


def moved(step: Selected, head: int, by: Callable[[int], int] | None = None) -> Selected:
    """With one selected position of a head given up for one that was not selected: `by` of it, or any."""
    masks = step.mask(1)
    assert masks is not None
    own = masks[head].nonzero()[0]
    own = own[own > 0]  # the sink stays
    gone = next(int(one) for one in own if by is None or not masks[head][by(int(one))])
    masks[head][gone] = False
    masks[head][by(gone) if by else (~masks[head]).nonzero()[0][-1]] = True
    return selected(step.digest, masks, -step.query(1, DIM))


def test_the_same_queries_give_the_same_positions_and_others_do_not(make: Callable[..., Case]) -> None:
    case = make()
    servers = case.module.servers_queries(case.step, DIM)
    assert torch.equal(servers[1], case.queries)
    assert case.reselection.compare(case.step, servers) == Counter(equal=KV_HEADS)
    assert case.reselection.compare(case.step, {1: case.queries[:1]}) == Counter(other=KV_HEADS), "a smaller group"
    assert case.reselection.compare(case.step, {1: -case.queries})["other"] == KV_HEADS
    assert case.reselection.compare(moved(case.step, 1), {1: case.queries}) == Counter(equal=1, other=1)
    gone = msgspec.structs.replace(case.step, digest="0" * 64)
    assert case.reselection.compare(gone, {1: case.queries}) is None, "its index left the store"


def test_a_position_of_the_same_score_is_told_from_a_wrong_one(make: Callable[..., Case]) -> None:
    case = make(equal_keys=True, keep_ratio=0.27)  # 17: one of a pair is the last
    twin = moved(case.step, 0, lambda one: (one + TOKENS // 2) % TOKENS)
    assert case.reselection.compare(twin, {1: case.queries}) == Counter({"equal scores": 1, "equal": 1})


@pytest.mark.parametrize("other", [{"search_period": 2}, {"select_ahead": True}], ids=str)
def test_what_another_step_selected_is_refused(make: Callable[..., Case], other: dict[str, Any]) -> None:
    case = make()
    case.reselection._config = msgspec.structs.replace(case.reselection._config, **other)
    with pytest.raises(ValueError, match="expected search_period 1 and select_ahead false"):
        case.module.SelectionCheck(case.reselection)
