"""Channel sets: both statistics against plain loops, the choice by hand, what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.calibration import ChannelAccumulator, ChannelStatistic, LayerCapture, top_channels
from tests.examples import examples


def make_prompt(num_layers, *, num_tokens=4, prefix_len=9, kv_heads=2, gqa=3, dim=6, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [
        LayerCapture(
            torch.randn(num_tokens, kv_heads * gqa, dim, generator=gen),
            torch.randn(prefix_len, kv_heads, dim, generator=gen),
            torch.arange(num_tokens),
        )
        for _ in range(num_layers)
    ]


def over_pairs(prompt, statistic):
    """|q_i k_i| of every pair of a query and a key, aggregated, mean over the group: [layer, head, channel]."""
    out = []
    for queries, keys, _ in prompt:
        q, k = queries.double().numpy(), keys.double().numpy()
        gqa = q.shape[1] // k.shape[1]
        heads = []
        for head in range(k.shape[1]):
            members = []
            for member in range(gqa):
                pairs = np.array([[np.abs(a * b) for b in k[:, head]] for a in q[:, head * gqa + member]])
                members.append(getattr(pairs, statistic)(axis=(0, 1)))
            heads.append(np.mean(members, axis=0))
        out.append(heads)
    return np.array(out)


@settings(max_examples=examples(25))
@given(
    tokens=st.integers(1, 5),
    prefix=st.integers(1, 7),
    heads=st.integers(1, 3),
    gqa=st.integers(1, 3),
    seed=st.integers(0),
)
@pytest.mark.parametrize("statistic", ChannelStatistic)
def test_one_prompt_against_all_pairs(statistic, tokens, prefix, heads, gqa, seed):
    prompt = make_prompt(2, num_tokens=tokens, prefix_len=prefix, kv_heads=heads, gqa=gqa, seed=seed % (1 << 30))
    acc = ChannelAccumulator(2, heads * gqa, heads, 6)
    acc.add_prompt(iter(prompt))
    np.testing.assert_allclose(acc.contribution(statistic).numpy(), over_pairs(prompt, statistic.value), rtol=1e-6)


def test_prompts_weigh_the_same_and_resume():
    prompts = [make_prompt(2, seed=seed, num_tokens=3 + 10 * seed) for seed in range(3)]
    straight, first, second = (ChannelAccumulator(2, 6, 2, 6) for _ in range(3))
    for prompt in prompts:
        straight.add_prompt(prompt)
    first.add_prompt(prompts[0])
    state = first.state_dict()
    first.add_prompt(prompts[0])
    second.load_state_dict(state)
    for prompt in prompts[1:]:
        second.add_prompt(prompt)
    q = torch.stack([torch.stack([layer.queries.abs().mean(0) for layer in prompt]) for prompt in prompts]).mean(0)
    k = torch.stack([torch.stack([layer.keys.abs().mean(0) for layer in prompt]) for prompt in prompts]).mean(0)
    expected = q.view(2, 2, 3, 6).mean(2) * k
    torch.testing.assert_close(straight.contribution(ChannelStatistic.MEAN).float(), expected)
    top_q = torch.stack([torch.stack([layer.queries.abs().amax(0) for layer in prompt]) for prompt in prompts]).amax(0)
    top_k = torch.stack([torch.stack([layer.keys.abs().amax(0) for layer in prompt]) for prompt in prompts]).amax(0)
    torch.testing.assert_close(straight.contribution().float(), top_q.view(2, 2, 3, 6).mean(2) * top_k)
    for statistic in ChannelStatistic:
        assert torch.equal(second.contribution(statistic), straight.contribution(statistic))


def test_top_channels_by_hand():
    chosen = top_channels(torch.tensor([[3.0, 1.0, 9.0, 3.0], [0.0, 0.0, 0.0, 1.0]]), 2)
    assert chosen.dtype == torch.int16
    assert chosen.tolist() == [[0, 2], [0, 3]]


def test_only_the_channels_that_carry_the_scores_are_chosen():
    gen = torch.Generator().manual_seed(0)
    carrying = torch.tensor([3, 17, 40, 63])
    q, k = 0.1 * torch.randn(50, 4, 64, generator=gen), 0.1 * torch.randn(200, 2, 64, generator=gen)
    q[..., carrying] *= 30
    k[..., carrying] *= 30
    k[..., 5] *= 40  # large keys that no query reads
    acc = ChannelAccumulator(1, 4, 2, 64)
    acc.add_prompt([LayerCapture(q, k, torch.arange(50))])
    for statistic in ChannelStatistic:
        assert top_channels(acc.contribution(statistic), 4).tolist() == [[carrying.tolist()] * 2]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: top_channels(torch.ones(2, 6), 7), r"expected num_channels in 1\.\.6 \(head_dim\), got 7"),
        (lambda: top_channels(torch.ones(2, 6), 0), "got 0"),
        (lambda: top_channels(torch.full((2, 6), torch.nan), 2), "expected finite contributions"),
        (lambda: ChannelAccumulator(1, 5, 2, 6), "a multiple of num_kv_heads"),
        (lambda: ChannelAccumulator(0, 6, 2, 6), "expected num_layers"),
        (lambda: ChannelAccumulator(2, 6, 2, 6).contribution(), "expected at least one prompt"),
        (lambda: ChannelAccumulator(2, 4, 2, 6).add_prompt(make_prompt(2)), r"got \(6, 6, 2, 6\)"),
        (lambda: ChannelAccumulator(3, 6, 2, 6).add_prompt(make_prompt(2)), "expected 3 layers of a prompt, got 2"),
        (
            lambda: ChannelAccumulator(2, 6, 2, 6).load_state_dict(ChannelAccumulator(3, 6, 2, 6).state_dict()),
            "expected q_sum of the saved state",
        ),
    ],
)
def test_what_is_refused(run, message):
    with pytest.raises(ValueError, match=message):
        run()
