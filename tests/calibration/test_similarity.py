"""Similarity of layers against plain loops in fp64, its accumulator, and what it refuses."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.calibration import LayerCapture, SimilarityAccumulator, capture, layer_similarity, prompt_similarity
from tests.examples import examples


def make_prompt(
    num_layers, *, num_tokens=5, prefix_len=40, kv_heads=2, gqa=2, dim=8, seed=0, positions=None, scale=2.0
):
    gen = torch.Generator().manual_seed(seed)
    if positions is None:
        positions = torch.randint(0, prefix_len + 5, (num_tokens,), generator=gen)
    return [
        LayerCapture(
            scale * torch.randn(num_tokens, kv_heads * gqa, dim, generator=gen),
            torch.randn(prefix_len, kv_heads, dim, generator=gen),
            positions,
        )
        for _ in range(num_layers)
    ]


def pooled_attention(layer, sm_scale):
    """[token][kv_head] -> probabilities over visible keys, by loops in numpy fp64."""
    q, k = layer.queries.double().numpy(), layer.keys.double().numpy()
    gqa = q.shape[1] // k.shape[1]
    result = []
    for token, position in enumerate(layer.positions.tolist()):
        visible = min(position + 1, len(k))
        heads = []
        for head in range(k.shape[1]):
            rows = []
            for member in range(gqa):
                score = np.array([q[token, head * gqa + member] @ k[n, head] for n in range(visible)]) * sm_scale
                weight = np.exp(score - score.max())
                rows.append(weight / weight.sum())
            heads.append(np.mean(rows, axis=0))
        result.append(heads)
    return result


def brute_force(layers, sm_scale, top_k):
    mass = [pooled_attention(layer, sm_scale) for layer in layers]
    num_layers, heads = len(layers), layers[0].num_kv_heads
    out = np.zeros((num_layers, num_layers, heads, heads))
    for a in range(num_layers):
        for b in range(a, num_layers):
            for h in range(heads):
                for g in range(heads):
                    ratios = []
                    for token in range(layers[0].num_tokens):
                        chosen = np.argsort(-mass[a][token][g])[:top_k]
                        own = np.argsort(-mass[b][token][h])[:top_k]
                        p = mass[b][token][h]
                        ratios.append(p[chosen].sum() / p[own].sum())
                    out[a, b, h, g] = min(ratios)
    return out


@settings(max_examples=examples(30))
@given(
    num_layers=st.integers(1, 4),
    num_tokens=st.integers(1, 6),
    prefix_len=st.integers(1, 40),
    kv_heads=st.integers(1, 3),
    gqa=st.integers(1, 3),
    top_k=st.integers(1, 20),
    seed=st.integers(0, 1 << 20),
)
def test_against_plain_loops(num_layers, num_tokens, prefix_len, kv_heads, gqa, top_k, seed):
    layers = make_prompt(
        num_layers, num_tokens=num_tokens, prefix_len=prefix_len, kv_heads=kv_heads, gqa=gqa, seed=seed
    )
    ours = prompt_similarity(iter(layers), 0.4, top_k)
    np.testing.assert_allclose(ours.numpy(), brute_force(layers, 0.4, top_k), rtol=2e-5, atol=1e-7)


def test_equation_3_by_hand():
    """One head, attention known: layer 0 prefers keys 0 and 1, layer 1 keys 1 and 2."""
    first, second = [0.5, 0.3, 0.15, 0.05], [0.1, 0.4, 0.3, 0.2]
    one = torch.ones(1, 1, 1)

    def layer(probabilities):
        keys = torch.tensor([math.log(p) for p in probabilities]).view(4, 1, 1)
        return LayerCapture(one, keys, torch.tensor([3]))

    sim = prompt_similarity([layer(first), layer(second)], 1.0, top_k=2)[..., 0, 0]
    assert sim[0, 1].item() == pytest.approx((0.1 + 0.4) / (0.4 + 0.3))
    assert sim[0, 0].item() == sim[1, 1].item() == pytest.approx(1.0)
    assert sim[1, 0].item() == 0.0


def test_the_worst_token_decides():
    """Token 1 of layer 1 looks where layer 0 does not; the mean would hide it."""
    keys = torch.eye(4)[:, None]
    looks = 20 * torch.eye(4)[:, None]
    positions = torch.tensor([9, 9])
    layers = [LayerCapture(looks[[0, 1]], keys, positions), LayerCapture(looks[[0, 2]], keys, positions)]
    sim = prompt_similarity(layers, 1.0, top_k=1)
    assert sim[0, 1].item() < 1e-6


def test_future_keys_are_not_seen():
    layers = make_prompt(2, num_tokens=3, prefix_len=30, positions=torch.tensor([4, 11, 20]))
    changed = [layer._replace(keys=layer.keys.clone()) for layer in layers]
    for layer in changed:
        layer.keys[21:] = 1e4
    assert torch.equal(prompt_similarity(layers, 0.4, 3), prompt_similarity(changed, 0.4, 3))


def test_chunks_change_nothing(monkeypatch):
    layers = make_prompt(3, num_tokens=7)
    whole = prompt_similarity(layers, 0.4, 5)
    monkeypatch.setattr(capture, "ELEMENTS_PER_CHUNK", 1)
    # A product's last bit may depend on how many rows are multiplied at once.
    torch.testing.assert_close(prompt_similarity(layers, 0.4, 5), whole, rtol=1e-6, atol=1e-6)


def test_short_prefix_and_constant_keys():
    lone = prompt_similarity(make_prompt(2, prefix_len=1), 0.4)
    torch.testing.assert_close(lone[0, 1], torch.ones(2, 2, dtype=torch.float64))
    flat = [layer._replace(keys=torch.ones_like(layer.keys)) for layer in make_prompt(2)]
    sim = prompt_similarity(flat, 0.4, 4)
    torch.testing.assert_close(sim[0, 1], torch.ones(2, 2, dtype=torch.float64))


def test_vanishing_probabilities_still_rank():
    """All mass on key 0; the ranks behind it come from the log, so equal layers stay alike."""
    layer = make_prompt(1, scale=300.0, positions=torch.full((5,), 99))[0]
    sim = prompt_similarity([layer, layer], 1.0, 10)
    torch.testing.assert_close(sim[0, 1].diagonal(), torch.ones(2, dtype=torch.float64))


def test_accumulator_is_the_mean_over_prompts_and_reads_each_layer_once():
    prompts = [make_prompt(3, seed=seed, prefix_len=30 + seed) for seed in range(3)]
    acc = SimilarityAccumulator(3, 2, top_k=4)
    for prompt in prompts:
        acc.add_prompt((layer for layer in prompt), 0.4)
    expected = torch.stack([prompt_similarity(prompt, 0.4, 4) for prompt in prompts]).mean(dim=0)
    torch.testing.assert_close(acc.head_similarity(), expected)


def test_resumed_equals_straight():
    prompts = [make_prompt(2, seed=seed) for seed in range(4)]
    straight, first, second = (SimilarityAccumulator(2, 2, top_k=4) for _ in range(3))
    for prompt in prompts:
        straight.add_prompt(prompt, 0.4)
    for prompt in prompts[:2]:
        first.add_prompt(prompt, 0.4)
    state = first.state_dict()
    first.add_prompt(prompts[3], 0.4)  # must not reach into the saved state
    second.load_state_dict(state)
    for prompt in prompts[2:]:
        second.add_prompt(prompt, 0.4)
    assert second.num_prompts == 4
    assert torch.equal(second.head_similarity(), straight.head_similarity())


def test_a_failed_prompt_adds_nothing():
    acc = SimilarityAccumulator(3, 2, top_k=4)
    acc.add_prompt(make_prompt(3), 0.4)
    before = acc.state_dict()
    bad = make_prompt(3, seed=1)
    bad[2].keys[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="expected finite keys"):
        acc.add_prompt(bad, 0.4)
    assert acc.num_prompts == 1
    assert torch.equal(acc.total, before["total"])


def test_layer_similarity_takes_the_best_head_or_the_same():
    sim = torch.tensor([[0.2, 0.9], [0.3, 0.8]]).expand(1, 1, 2, 2)
    assert layer_similarity(sim).item() == pytest.approx(0.85)
    assert layer_similarity(sim, remap=False).item() == pytest.approx(0.5)


def drop(layers):
    return layers[:-1]


def add(layers):
    return [*layers, layers[0]]


def edit(name, change, layer=1):
    def apply(layers):
        layers[layer] = layers[layer]._replace(**{name: change(getattr(layers[layer], name))})
        return layers

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop, "expected 3 layers of a prompt, got 2"),
        (add, "expected 3 layers of a prompt, got more"),
        (edit("keys", lambda k: k[:, :1]), "layer 1: expected keys of 2 KV heads, got 1"),
        (edit("keys", lambda k: k[:-1]), "layer 1: expected the tokens of layer 0"),
        (edit("positions", lambda p: p + 1), "at other positions"),
        (edit("positions", lambda p: p[:-1]), r"expected positions \[num_tokens=5\]"),
        (edit("positions", lambda p: p.float()), "of an integer dtype"),
        (edit("positions", lambda p: p - 100), "expected positions >= 0"),
        (edit("queries", lambda q: q[..., :4]), "head_dim=8"),
        (edit("queries", lambda q: q[:, :3]), "a multiple of num_kv_heads=2"),
        (edit("queries", lambda q: q.long()), "in a floating dtype"),
        (edit("queries", lambda q: q / 0.0), "expected finite queries"),
        (edit("keys", lambda k: k * torch.inf), "expected finite keys"),
        (edit("keys", lambda k: k[0]), r"expected keys \[prefix_len >= 1"),
    ],
)
def test_what_is_refused(damage, message):
    acc = SimilarityAccumulator(3, 2, top_k=4)
    with pytest.raises(ValueError, match=message):
        acc.add_prompt(damage(make_prompt(3)), 0.4)
    assert acc.num_prompts == 0


def change_state(**values):
    return lambda state: {**state, **values}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change_state(top_k=8), "expected top_k=4 in the saved state, got 8"),
        (change_state(extra=1), "a difference in 'extra'"),
        (lambda state: {key: value for key, value in state.items() if key != "total"}, "a difference in 'total'"),
        (change_state(total=torch.zeros(2, 2, 1, 1)), "expected total of the saved state as"),
        (change_state(total=None), "got None"),
        (change_state(num_prompts=-1), "expected num_prompts >= 0"),
        (change_state(num_prompts=True), "expected num_prompts >= 0"),
    ],
)
def test_states_of_others_are_refused(damage, message):
    acc = SimilarityAccumulator(2, 2, top_k=4)
    with pytest.raises(ValueError, match=message):
        acc.load_state_dict(damage(acc.state_dict()))


def test_empty_results_and_sizes():
    with pytest.raises(ValueError, match="expected at least one prompt, got none"):
        SimilarityAccumulator(2, 2).head_similarity()
    with pytest.raises(ValueError, match="top_k >= 1"):
        SimilarityAccumulator(2, 2, top_k=0)
    with pytest.raises(ValueError, match="expected at least one layer"):
        prompt_similarity([], 1.0)
    with pytest.raises(ValueError, match=r"expected head_similarity \[num_layers a"):
        layer_similarity(torch.zeros(2, 3, 1, 1))
    with pytest.raises(ValueError, match="expected finite similarities"):
        layer_similarity(torch.full((1, 1, 1, 1), torch.nan))
