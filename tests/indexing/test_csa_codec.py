"""CSAttention's codec in the index: bytes, recall beside the paper's layout, streaming insert, weights."""

import pytest
import torch

from prefix_kernels.csa_scores import decode_lists
from prefix_kernels.ops import Pooling
from prefix_kernels.testing import PlantedConfig, attention_recall, planted_prefix
from sglang_ext.indexing import make_builder, make_selector
from sglang_ext.indexing.csa_codec import compact_lists, paper_table_ratio
from sglang_ext.indexing.csattention import CSAttentionSpec, bytes_per_token, insert_keys, subspace_channels


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def build(spec, keys, samples):
    return make_builder(spec).build_layer(keys, samples)


@pytest.mark.parametrize("ratio", [0.01, 0.05, 0.2, 1.0])
@pytest.mark.parametrize("codec", ["paper", "compact"])
@pytest.mark.parametrize("prefix_len", [1, 255, 1000, 4096])
def test_bytes_are_those_of_the_arrays(prefix_len, codec, ratio):
    for bits in (4, 8):
        spec = CSAttentionSpec(num_subspaces=4, num_centroids=5, list_ratio=ratio, codec=codec, score_bits=bits)
        arrays = build(spec, randn(prefix_len, 2, 16), randn(2, 40, 16, seed=1))
        arrays.pop("baseline", None)  # of the streaming insert, 4 bytes a list
        expected = sum(array.nbytes for array in arrays.values()) / 2
        assert spec.index_bytes(16, prefix_len) == expected
        assert bytes_per_token(spec, 16, prefix_len) == expected / prefix_len


def test_the_limit_of_long_prefixes():
    for codec in ("paper", "compact"):
        spec = CSAttentionSpec(codec=codec)
        assert bytes_per_token(spec, 64, 1 << 22) == pytest.approx(bytes_per_token(spec, 64), rel=1e-3)


def test_paper_ratio():
    """Eq. B.1: 3 m C alpha / (2 d) at two bytes, half of it at four; m=8, C=64, alpha=0.2, d=128 is 1.2."""
    assert paper_table_ratio(8, 64, 0.2, 128) == pytest.approx(3 * 8 * 64 * 0.2 / (2 * 128)) == pytest.approx(1.2)
    assert paper_table_ratio(8, 64, 0.2, 128, element_bytes=4) == pytest.approx(0.6)
    spec = CSAttentionSpec(num_subspaces=8, num_centroids=64, list_ratio=0.2, codec="paper")
    assert bytes_per_token(spec, 128) / (2 * 128 * 2) == pytest.approx(1.2)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("prefix_len", [8192, 131072])
def test_default_is_small(head_dim, prefix_len):
    spec = CSAttentionSpec()
    assert spec.codec == "compact"
    assert bytes_per_token(spec, head_dim, prefix_len) <= 0.13 * 2 * head_dim * 2


def test_compact_tables_hold_the_paper_tables():
    """The same positions; scores at most half a step of a list's span away."""
    keys, samples = randn(3000, 2, 16), randn(2, 300, 16, seed=1)
    paper = build(CSAttentionSpec(codec="paper"), keys, samples)
    for bits in (4, 8):
        compact = build(CSAttentionSpec(score_bits=bits), keys, samples)
        assert torch.equal(compact["centroids"], paper["centroids"])
        list_len = paper["positions"].shape[3]
        positions, scores = decode_lists(compact_lists(compact, "csattention"), list_len, bits)
        assert torch.equal(positions.int(), paper["positions"])
        span = paper["scores"].float().amax(-1) - paper["scores"].float().amin(-1)
        error = (scores - paper["scores"].float()).abs().amax(-1)
        assert bool((error <= 0.503 * span / (2**bits - 1)).all())


def recall_of(spec, planted, keep):
    arrays = build(spec, planted.keys, planted.samples)
    found = []
    for q in planted.queries.split(1):
        chosen = make_selector(spec).select(
            arrays,
            q,
            prefix_len=planted.keys.shape[0],
            budget=int(keep * planted.keys.shape[0]),
            num_sink=4,
            num_recent=64,
            sm_scale=planted.sm_scale,
            pooling=Pooling.MAX,
        )
        found.append(attention_recall(q, planted.keys, chosen, planted.sm_scale).mean())
    return float(torch.stack(found).mean())


@pytest.mark.parametrize("rope_base", [0.0, 1e6], ids=["shift", "rope"])
@pytest.mark.parametrize("parameters", [{}, {"num_subspaces": 8, "list_ratio": 0.2}], ids=["default", "bitmap"])
def test_recall_is_that_of_the_paper_layout(parameters, rope_base):
    planted = planted_prefix(PlantedConfig(prefix_len=4096, num_topics=16, rope_base=rope_base))
    recall = {c: recall_of(CSAttentionSpec(codec=c, **parameters), planted, 0.05) for c in ("paper", "compact")}
    assert recall["paper"] > 0.7
    assert recall["compact"] > recall["paper"] - 0.01


def test_contribution_weights_are_the_mean_shares():
    """One subspace holds nearly all of the queries' length: it gets nearly all of the weight."""
    samples = randn(2, 200, 16) * torch.tensor([1.0, 0.01, 0.01, 0.01]).repeat_interleave(4)
    spec = CSAttentionSpec(num_subspaces=4, num_centroids=8, weighting="contribution")
    weights = build(spec, randn(100, 2, 16, seed=1), samples)["weights"]
    for head in range(2):
        for b in range(4):
            part = samples[head, :, 4 * b : 4 * b + 4].norm(dim=1) / samples[head].norm(dim=1)
            torch.testing.assert_close(weights[head, b], part.mean())
    assert bool((weights[:, 0] > 0.99).all())


def test_weighting_changes_the_ranking_as_it_should():
    """A key that is good in the subspace that carries the query wins with contribution weights only."""
    scale = torch.tensor([10.0, 0.1]).repeat_interleave(2)
    samples = randn(1, 400, 4) * scale
    keys = 0.1 * randn(64, 1, 4, seed=1)
    q = torch.tensor([[[10.0, 0.0, 0.1, 0.0]]])
    keys[20, 0] = torch.tensor([2.0, 0.0, 0.0, 0.0])
    keys[40, 0] = torch.tensor([0.0, 0.0, 5.0, 0.0])
    top = {}
    for weighting in ("uniform", "contribution", "projection"):
        spec = CSAttentionSpec(num_subspaces=2, num_centroids=32, list_ratio=1.0, weighting=weighting)
        arrays = build(spec, keys, samples)
        scores = make_selector(spec).token_scores(arrays, q, prefix_len=64, sm_scale=0.5, pooling=Pooling.MAX)
        top[weighting] = int(scores.argmax())
    assert top == {"uniform": 40, "contribution": 20, "projection": 20}


@pytest.mark.parametrize("pieces", [[30], [1, 9, 20]])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_insert_equals_rebuilding(layout, pieces):
    """The lists that a build over old and new keys would make, at the old length: nothing ties in fp32, and keys on
    a grid of distinct scores stay apart in fp16."""
    spec = CSAttentionSpec(
        num_subspaces=4, num_centroids=6, list_ratio=0.1, layout=layout, baseline="none", codec="paper"
    )
    keys, samples = randn(230, 2, 16), randn(2, 60, 16, seed=1)
    arrays = build(spec, keys[:200], samples)
    before = {name: array.clone() for name, array in arrays.items()}
    at, grown = 200, arrays
    for count in pieces:
        grown = insert_keys(spec, grown, keys[at : at + count], at)
        at += count
    assert all(torch.equal(arrays[name], array) for name, array in before.items())
    channels = subspace_channels(16, 4, layout)
    for head in range(2):
        for b in range(4):
            partial = (arrays["centroids"][head, b].float() @ keys[:, head, channels[b]].T).half()
            order = partial.argsort(dim=1, descending=True, stable=True)[:, :20].sort(dim=1).values
            assert torch.equal(grown["positions"][head, b], order.int())
            assert torch.equal(grown["scores"][head, b], partial.gather(1, order))
    assert bool((grown["positions"] >= 200).any())
    assert not torch.equal(grown["positions"], before["positions"])


def test_insert_keeps_the_baseline():
    """With tail_mean a new key is compared, and stored, less the list's own baseline."""
    spec = CSAttentionSpec(num_subspaces=4, num_centroids=6, codec="paper")
    keys, samples = randn(200, 2, 16) - 2.0, randn(2, 60, 16, seed=1) + 1.0
    arrays = build(spec, keys, samples)
    best = keys.new_tensor(arrays["centroids"][:, :, 0].flatten(1).tolist())[None] * 9
    grown = insert_keys(spec, arrays, best, 200)
    assert bool((grown["positions"][:, :, 0, -1] == 200).all())
    expected = 9.0 - arrays["baseline"][:, :, 0]
    torch.testing.assert_close(grown["scores"][:, :, 0, -1].float(), expected, atol=2e-2, rtol=2e-3)


def test_insert_errors():
    keys, samples = randn(50, 2, 16), randn(2, 60, 16, seed=1)
    compact = CSAttentionSpec(num_subspaces=4)
    with pytest.raises(ValueError, match="codec paper for streaming insert, got compact"):
        insert_keys(compact, build(compact, keys, samples), keys, 50)
    paper = CSAttentionSpec(num_subspaces=4, codec="paper")
    arrays = build(paper, keys, samples)
    with pytest.raises(ValueError, match=r"new keys .*head_dim=16"):
        insert_keys(paper, arrays, keys[:, :1], 50)
    with pytest.raises(ValueError, match="build it again"):
        insert_keys(paper, {}, keys, 50)
