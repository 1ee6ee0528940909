"""`benchmarks/replay.py`: what it makes of a trace and for good; `tests/server/test_soak.py` replays a real one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang_ext.decode.trace import Prefill, Selected, SparseStep, Start
from sglang_ext.methods.layer_plan import LayerPlan
from tests.benchmarks.results import RESULTS, prose, rows_of

PREFIX, PROMPT = 128, 150
ROLES: list[Any] = ["dense", "anchor", {"reuse": 1, "head_map": [1, 0]}, "anchor", "anchor", "anchor"]
PLAN = LayerPlan.from_dict({"layers": ROLES}, num_layers=6, num_kv_heads=2)
Masks = dict[int, np.ndarray[Any, Any]]


def test_the_documented_figures_of_the_guard_are_the_rows() -> None:
    text = prose("quality")
    off: dict[int, float] = {}
    for row in rows_of(RESULTS / "guard-h100.jsonl"):
        off[row["tokens"]] = max(off.get(row["tokens"], 0.0), row["off"]["recall"])
    said = "is {:.4f} (shipped model, 4,096 tokens) and {:.4f} (Qwen2.5-Coder-0.5B, 8,192 tokens)"
    assert said.format(off[4096], off[8192]) in text
    rates: dict[bool, list[float]] = {True: [], False: []}
    for row in sorted(rows_of(RESULTS / "guard-h100-cost.jsonl"), key=lambda row: row["start"]):
        rates[row["guard"]].append(row["tokens_per_s"])
    costs = sorted(100 * (1 - guarded / plain) for guarded, plain in zip(rates[True], rates[False], strict=True))
    whole = 100 * (1 - sum(rates[True]) / sum(rates[False]))
    assert f"it costs {whole:.1f}% of the tokens per second ({costs[0]:.1f}% and {costs[1]:.1f}%" in text
    by_fault = {row["fault"]: row for row in rows_of(RESULTS / "guard-h100-faults.jsonl")}
    assert all(row["good"] for row in by_fault.values())
    assert {row["sparse_steps"][0] for name, row in by_fault.items() if name != "none"} == {9}
    for name in ("shuffled positions", "another prompt's index"):
        assert (by_fault[name]["standing"], by_fault[name]["sparse_steps"][1:]) == ("dense", [0] * 5)
        assert all(by_fault[name]["alike_dense"][1:])
    tiny = by_fault["a budget of 0.5%"]
    assert (tiny["standing"], tiny["factor"]) == ("serving", 4)
    assert "served 9 tokens of the shipped model behind 16,384, then every answer was dense" in text


def masks(seed: int) -> Masks:
    """By anchor layer, [num_kv_heads, PREFIX]."""
    rng = np.random.default_rng(seed)
    return {layer: rng.random((2, PREFIX)) < 0.3 for layer in (1, 3, 4, 5)}


def selected(masks: Masks, position: int, rid: str = "trace-0") -> Selected:
    counts = {layer: mask.sum(1).tolist() for layer, mask in masks.items()}
    bits = {layer: [np.packbits(head).tobytes() for head in mask] for layer, mask in masks.items()}
    return Selected([rid], [position + 1], "d", PREFIX, counts, bits)


def test_a_retraction_divides_a_request(bench: Any) -> None:
    """After five tokens it lost its slots, and all were prefilled again; once more, of which no step is known."""
    groups = [selected(masks(i), PROMPT + i) for i in range(4)]  # one step ran ahead of the retraction
    records = [
        Start(PLAN.to_dict(), 2, []),
        Prefill("trace-0", 0, 128),
        Prefill("trace-0", 128, PROMPT),
        *(SparseStep([group]) for group in groups),
        Prefill("trace-0", 64, PROMPT + 5),
        SparseStep([selected(masks(9), 600, "trace-unknown")]),
        Prefill("trace-0", PROMPT + 3, PROMPT + 6),
    ]
    assert [(one.cached, one.end, len(one.steps)) for one in bench.replay.histories(records)["trace-0"]] == [
        (0, PROMPT, 4),
        (64, PROMPT + 5, 0),
        (PROMPT + 3, PROMPT + 6, 0),
    ]


def test_a_damaged_selection_is_refused() -> None:
    mask = masks(0)
    group = selected(mask, 200)
    assert (group.mask(1) == mask[1]).all()
    assert group.mask(2) is None
    group.counts[1][0] += 1
    with pytest.raises(ValueError, match="different positions of layer 1"):
        group.mask(1)


@pytest.mark.parametrize(
    ("verdict", "dtype", "wrong_dense", "sparse", "wanted"),
    [
        ("good", "bfloat16", 3, 9, True),
        ("good", "bfloat16", 3, 0, False),
        ("worse", "bfloat16", 0, 9, False),
        ("too few to tell", "bfloat16", 0, 9, False),
        ("good", "float32", 0, 9, True),
        ("good", "float32", 1, 9, False),
    ],
)
def test_a_replay_is_good_by_its_verdict_and_where_something_was_sparse(
    bench: Any, verdict: str, dtype: str, wrong_dense: int, sparse: int, wanted: bool
) -> None:
    found = {"dense": {"wrong": wrong_dense}, "sparse": {"tokens of sparse steps": sparse}}
    assert bench.replay.replay_good({"verdict": verdict, "dtype": dtype, **found}) is wanted
