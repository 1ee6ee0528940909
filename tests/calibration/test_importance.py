"""Layer importance: the cosine by hand, degenerate vectors, the accumulator, what is refused."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.calibration import ImportanceAccumulator, attention_importance


@given(st.lists(st.tuples(*[st.floats(-5, 5, width=32)] * 6), min_size=1, max_size=4))
def test_against_the_cosine_of_the_standard_library(rows):
    x, y = torch.tensor([row[:3] for row in rows]), torch.tensor([row[3:] for row in rows])
    for row, ours in zip(rows, attention_importance(x, y).tolist(), strict=True):
        one, two = row[:3], row[3:]
        lengths = math.hypot(*one) * math.hypot(*two)
        if lengths < 1e-12:
            continue
        cosine = sum(a * b for a, b in zip(one, two, strict=True)) / lengths
        assert ours == pytest.approx(1 - cosine, abs=1e-9)


def test_by_hand():
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [3.0, 4.0]])
    y = torch.tensor([[2.0, 0.0], [0.0, 5.0], [-1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [3.0, 4.0]])
    assert attention_importance(x, y).tolist() == pytest.approx([0, 1, 2, 0, 1, 0], abs=1e-12)


def test_a_small_change_is_not_lost_in_rounding():
    x = torch.tensor([[1.0, 0.0]]).half()
    y = torch.tensor([[1.0, 1e-3]]).half()
    assert attention_importance(x, y).item() == pytest.approx(float(y[0, 1]) ** 2 / 2, rel=1e-3)


def pairs(seed, num_tokens):
    gen = torch.Generator().manual_seed(seed)
    return [(torch.randn(num_tokens, 4, generator=gen), torch.randn(num_tokens, 4, generator=gen)) for _ in range(3)]


def test_mean_over_tokens_then_over_prompts_and_resumed():
    prompts = [pairs(0, 2), pairs(1, 50), pairs(2, 7)]
    acc = ImportanceAccumulator(3)
    acc.add_prompt(iter(prompts[0]))
    resumed = ImportanceAccumulator(3)
    resumed.load_state_dict(acc.state_dict())
    acc.add_prompt(prompts[1])
    for prompt in prompts[1:]:
        resumed.add_prompt(prompt)
    assert (acc.num_prompts, resumed.num_prompts) == (2, 3)
    expected = torch.tensor([[attention_importance(x, y).mean() for x, y in prompt] for prompt in prompts]).mean(0)
    torch.testing.assert_close(resumed.weights(), expected.double(), rtol=1e-6, atol=0)


def test_what_is_refused():
    good = torch.ones(2, 3)
    for x, y in ((good, good[:1]), (good[0], good[0]), (good[:0], good[:0])):
        with pytest.raises(ValueError, match=r"expected x and y \[num_tokens >= 1, hidden_size\]"):
            attention_importance(x, y)
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="expected finite hidden states"):
            attention_importance(good, good * bad)
    acc = ImportanceAccumulator(3)
    with pytest.raises(ValueError, match="expected at least one prompt"):
        acc.weights()
    with pytest.raises(ValueError, match="expected hidden states of 3 layers, got 2"):
        acc.add_prompt([(good, good)] * 2)
    assert acc.num_prompts == 0
    with pytest.raises(ValueError, match="expected num_layers=3 in the saved state, got 4"):
        acc.load_state_dict(ImportanceAccumulator(4).state_dict())
    with pytest.raises(ValueError, match="expected num_layers >= 1"):
        ImportanceAccumulator(0)
