"""Quality of selections against plain loops over tokens and heads, the oracle's bound, what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_kernels.pooling import Pooling
from prefix_kernels.top_k_selection import top_k_selection
from prefix_kernels.types import Selection
from sglang_ext.calibration.selection_quality import (
    full_attention,
    joined_selections,
    oracle_at,
    selection_quality,
)
from sglang_ext.methods import SelectArgs, make_builder, make_selector, parse_spec
from tests.examples import examples

TOKENS, KV_HEADS, GQA, DIM, SCALE = 3, 2, 2, 8, 0.7


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(prefix_len, seed=0):
    q = randn(TOKENS, KV_HEADS * GQA, DIM, seed=seed)
    return q, randn(prefix_len, KV_HEADS, DIM, seed=seed + 1), randn(prefix_len, KV_HEADS, DIM, seed=seed + 2)


def chosen_at_random(prefix_len, budget, seed):
    return [
        top_k_selection(randn(KV_HEADS, prefix_len, seed=seed + t), budget, 1, 2, 1, prefix_len) for t in range(TOKENS)
    ]


def by_loops(q, keys, values, selections, budget, pooling):
    """Recall, oracle recall, overlap and error of each token, one head after the other, in fp64."""
    q, keys, values = (x.double().numpy() for x in (q, keys, values))
    prefix_len = keys.shape[0]
    windows = {0, prefix_len - 2, prefix_len - 1}
    rows = []
    for token, selection in enumerate(selections):
        figures = []
        for head in range(KV_HEADS):
            taken = selection.positions[head].tolist()
            masses = []
            for member in range(GQA):
                scores = keys[:, head] @ q[token, head * GQA + member] * SCALE
                masses.append(np.exp(scores) / np.exp(scores).sum())
            pooled = np.max(masses, axis=0) if pooling is Pooling.MAX else np.mean(masses, axis=0)
            free = sorted((p for p in range(prefix_len) if p not in windows), key=lambda p: -pooled[p])
            best = set(free[: budget - 3])
            overlap = len(best & set(taken)) / len(best) if best else 1.0
            for mass in masses:
                dense = mass @ values[:, head]
                sparse = mass[taken] @ values[taken, head] / mass[taken].sum()
                error = np.linalg.norm(sparse - dense) / np.linalg.norm(dense)
                figures.append((mass[taken].sum(), mass[[*windows, *best]].sum(), overlap, error))
        rows.append(np.mean(figures, axis=0))
    return np.array(rows).T


@settings(max_examples=examples(25))
@given(
    prefix_len=st.integers(4, 40),
    budget=st.integers(3, 39),
    seed=st.integers(0, 1000),
    pooling=st.sampled_from(list(Pooling)),
)
def test_against_loops(prefix_len, budget, seed, pooling):
    budget = min(budget, prefix_len - 1)
    q, keys, values = inputs(prefix_len, seed)
    selections = chosen_at_random(prefix_len, budget, seed)
    attention = full_attention(q, keys, values, SCALE, pooling)
    quality = selection_quality(attention, joined_selections(selections), oracle_at(attention, budget, 1, 2))
    expected = by_loops(q, keys, values, selections, budget, pooling)
    for came, row in zip(quality, expected, strict=True):
        np.testing.assert_allclose(came.numpy(), row, rtol=2e-4, atol=2e-5)
    ratio = quality.means()["oracle_ratio"]
    assert ratio == pytest.approx(float((quality.recall / quality.oracle_recall).mean()))


def test_one_token_is_its_own_selection_and_everything_selected_is_exact():
    q, keys, values = inputs(30)
    attention = full_attention(q[:1], keys, values, SCALE)
    means = selection_quality(attention, Selection.all(30, KV_HEADS), oracle_at(attention, 30, 1, 2)).means()
    assert means["recall"] == pytest.approx(1.0, abs=1e-5)
    assert means["overlap"] == 1.0
    assert means["error"] < 1e-5


def test_the_oracle_is_the_exact_method_and_nothing_beats_it_with_mean_pooling():
    q, keys, values = inputs(200)
    attention = full_attention(q, keys, values, SCALE, Pooling.MEAN)
    oracle = oracle_at(attention, 30, 4, 8)
    spec = parse_spec({"method": "exact"})
    arrays = make_builder(spec).build_layer(keys, None)
    exact = [
        make_selector(spec).select(
            arrays,
            q[t : t + 1],
            SelectArgs(prefix_len=200, budget=30, num_sink=4, num_recent=8, sm_scale=SCALE, pooling=Pooling.MEAN),
        )
        for t in range(TOKENS)
    ]
    best = selection_quality(attention, joined_selections(exact), oracle)
    assert torch.equal(best.overlap, torch.ones(TOKENS))
    torch.testing.assert_close(best.recall, oracle.recall)
    for seed in range(20):
        scores = randn(TOKENS * KV_HEADS, 200, seed=seed)
        quality = selection_quality(attention, top_k_selection(scores, 30, 4, 8, 1, 200), oracle)
        assert (quality.recall <= oracle.recall + 1e-6).all()
        assert float(quality.overlap.mean()) < 0.5


def test_padding_is_not_read_and_windows_that_fill_the_budget_overlap_fully():
    q, keys, values = inputs(20)
    attention = full_attention(q[:1], keys, values, SCALE)
    plain = Selection(torch.tensor([[0, 18, 19]] * 2, dtype=torch.int32), torch.tensor([3, 3], dtype=torch.int32))
    padded = Selection(torch.tensor([[0, 18, 19, -1]] * 2, dtype=torch.int32), plain.counts)
    oracle = oracle_at(attention, 3, 1, 2)
    assert selection_quality(attention, plain, oracle).means() == selection_quality(attention, padded, oracle).means()
    assert selection_quality(attention, plain, oracle).means()["overlap"] == 1.0


def test_what_does_not_fit_is_refused():
    q, keys, values = inputs(20)
    attention = full_attention(q, keys, values, SCALE)
    oracle = oracle_at(attention, 5, 1, 2)
    with pytest.raises(ValueError, match="expected selections of 3 tokens x 2 KV heads = 6 rows, got 2"):
        selection_quality(attention, Selection.all(20, 2), oracle)
    with pytest.raises(ValueError, match=r"expected positions in 0\.\.19, got 20"):
        selection_quality(attention, Selection.all(21, 6), oracle)
    with pytest.raises(ValueError, match="expected selections of one"):
        joined_selections([Selection.all(20, 2), Selection.all(19, 2)])
    with pytest.raises(ValueError, match="got none"):
        joined_selections([])
    with pytest.raises(ValueError, match="expected finite values"):
        full_attention(q, keys, values[:19], SCALE)
    with pytest.raises(ValueError, match="expected finite keys"):
        full_attention(q, keys.fill_(torch.nan), values, SCALE)
