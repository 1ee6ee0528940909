"""CSAttention's codec in the index: bytes, recall beside the paper's layout, streaming insert, weights."""

import itertools

import pytest
import torch

from prefix_kernels.csa_scores import bitmap_is_smaller, check_lists, decode_lists
from prefix_kernels.testing import PlantedConfig, planted_prefix
from sglang_ext.methods import make_builder
from sglang_ext.methods.arrays import IndexSize, nbytes
from sglang_ext.methods.csattention import CSAttentionSpec, insert_keys, subspace_channels
from sglang_ext.methods.csattention.lists import compact_lists
from tests.methods.common import randn, recall, scores, select


def build(spec, keys, samples):
    return make_builder(spec).build_layer(keys, samples)


@pytest.mark.parametrize(("m", "c", "alpha"), [(8, 64, 0.2), (4, 16, 0.02), (16, 32, 0.4)])
def test_bytes_of_the_papers_tables(m, c, alpha):
    """Eq. B.1, 3 m C alpha / (2 d): bytes that 500 more tokens add to tables and to fp16 keys and values."""
    spec = CSAttentionSpec(num_subspaces=m, num_centroids=c, list_ratio=alpha, codec="paper", iterations=0)
    tables = [nbytes(build(spec, randn(n, 1, 32), randn(1, 20, 32, seed=1))) for n in (500, 1000)]
    assert (tables[1] - tables[0]) / (500 * 32 * 2 * 2) == pytest.approx(3 * m * c * alpha / (2 * 32))


def test_the_default_is_small():
    """At most 13% of the keys and values from 4,096 tokens on."""
    keys = randn(4096, 1, 64)
    assert nbytes(build(CSAttentionSpec(), keys, randn(1, 40, 64, seed=1))) <= 0.13 * 2 * keys.half().nbytes


def test_compact_tables_hold_the_paper_tables():
    """The same positions; scores at most half a step of a list's span away."""
    keys, samples = randn(3000, 2, 16), randn(2, 300, 16, seed=1)
    paper = build(CSAttentionSpec(codec="paper"), keys, samples)
    for bits in (4, 8):
        compact = build(CSAttentionSpec(score_bits=bits), keys, samples)
        assert torch.equal(compact["centroids"], paper["centroids"])
        list_len = paper["positions"].shape[3]
        positions, scores = decode_lists(compact_lists(compact), list_len, bits)
        assert torch.equal(positions.int(), paper["positions"])
        span = paper["scores"].float().amax(-1) - paper["scores"].float().amin(-1)
        error = (scores - paper["scores"].float()).abs().amax(-1)
        rounding = 0.001 * paper["scores"].float().abs().amax(-1)  # of the paper's fp16
        assert bool((error <= 0.503 * span / (2**bits - 1) + rounding).all())


@pytest.mark.parametrize("rope_base", [0.0, 1e6], ids=["shift", "rope"])
@pytest.mark.parametrize(
    "parameters",
    [{}, {"num_subspaces": 8, "list_ratio": 0.2}, {"num_subspaces": 8, "num_centroids": 64, "list_ratio": 0.035}],
    ids=["default", "bitmap", "many-centroids"],
)
def test_recall_is_that_of_the_paper_layout(parameters, rope_base):
    planted = planted_prefix(PlantedConfig(prefix_len=4096, num_topics=16, rope_base=rope_base))
    paper, compact = (recall(CSAttentionSpec(codec=c, **parameters), planted, 204) for c in ("paper", "compact"))
    assert paper > 0.7
    assert abs(compact - paper) <= 0.01


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
        top[weighting] = int(scores(spec, arrays, q, 64).argmax())
    assert top == {"uniform": 40, "contribution": 20, "projection": 20}


def tried_one_by_one(positions, scores, fresh, first_position):
    """One list, key by key: a key above the minimum replaces it; of equal minima the latest position leaves."""
    entries = list(zip(positions, scores, strict=True))
    for number, score in enumerate(fresh):
        least = min(entries, key=lambda entry: (entry[1], -entry[0]))
        if score > least[1]:
            entries.remove(least)
            entries.append((first_position + number, score))
    return sorted(entries)


def whole(*shape, seed=0):
    """Whole numbers: with fp16 centroids their scores are exact in fp32, whatever the order of summation."""
    return (8 * randn(*shape, seed=seed)).round()


@pytest.mark.parametrize("pieces", [[30], [1, 9, 20]])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("baseline", ["none", "tail_mean"])
def test_insert_is_trying_one_by_one(baseline, layout, pieces):
    spec = CSAttentionSpec(
        num_subspaces=4, num_centroids=6, list_ratio=0.1, layout=layout, baseline=baseline, codec="paper"
    ).fixed(200)
    keys, samples = whole(230, 2, 16), randn(2, 60, 16, seed=1)
    arrays = build(spec, keys[:200], samples)
    before = {name: array.clone() for name, array in arrays.items()}
    at, grown = 200, arrays
    for count in pieces:
        grown = insert_keys(spec, grown, keys[at : at + count], at)
        at += count
    assert all(torch.equal(arrays[name], array) for name, array in before.items())
    channels = subspace_channels(16, 4, layout)
    for head, b, j in itertools.product(range(2), range(4), range(6)):
        fresh = keys[200:, head, channels[b]] @ arrays["centroids"][head, b, j].float()
        fresh = (fresh - arrays["baseline"][head, b, j]).half().tolist()
        old = (arrays["positions"][head, b, j].tolist(), arrays["scores"][head, b, j].tolist())
        positions, scores = zip(*tried_one_by_one(*old, fresh, 200), strict=True)
        assert grown["positions"][head, b, j].tolist() == list(positions)
        assert grown["scores"][head, b, j].tolist() == list(scores)
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


@pytest.mark.parametrize("pieces", [[300], [1, 9, 290]])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("ratio", "built_len"), [(0.05, 500), (0.05, 255), (0.2, 500), (0.2, 200), (0.6, 123)])
def test_insert_into_compact_lists(ratio, built_len, bits, pieces):
    """Offsets, bitmaps, and a bitmap that grows into offsets (0.2 of 200): each call against the list one by one."""
    plain = CSAttentionSpec(num_subspaces=4, num_centroids=3, list_ratio=ratio, score_bits=bits)
    spec, list_len = plain.fixed(built_len), plain.list_len(built_len)
    keys, samples = whole(built_len + 300, 1, 16), randn(1, 60, 16, seed=1)
    arrays, at = build(plain, keys[:built_len], samples), built_len
    for count in pieces:
        before = {name: array.clone() for name, array in arrays.items()}
        old_positions, old_scores = decode_lists(compact_lists(arrays), list_len, bits)
        grown = insert_keys(spec, arrays, keys[at : at + count], at)
        assert all(torch.equal(arrays[name], array) for name, array in before.items())
        lists = compact_lists(grown)
        check_lists(lists, (1, 4, 3), list_len, at + count, bits)
        positions, scores = decode_lists(lists, list_len, bits)
        changed = 0
        for b in range(4):
            fresh = grown["centroids"][0, b].float() @ keys[at : at + count, 0, 4 * b : 4 * b + 4].T
            fresh = (fresh - grown["baseline"][0, b, :, None]).half().float()
            for j in range(3):
                entries = tried_one_by_one(
                    old_positions[0, b, j].tolist(), old_scores[0, b, j].tolist(), fresh[j].tolist(), at
                )
                assert positions[0, b, j].tolist() == [position for position, _ in entries]
                wanted = torch.tensor([score for _, score in entries])
                half_step = 0.5 * float(grown["scale"][0, b, j]) + 1e-5
                assert bool(((scores[0, b, j] - wanted).abs() <= half_step).all())
                if entries[-1][0] < at:
                    for name in ("codes", "scale", "zero"):
                        assert torch.equal(grown[name][0, b, j], arrays[name][0, b, j])
                else:
                    changed += 1
        assert count == 1 or changed
        arrays, at = grown, at + count
    assert ("counts" in arrays) == (not bitmap_is_smaller(list_len, at))
    assert set(build(spec, keys, samples)) == set(arrays)


@pytest.mark.parametrize("codec", ["paper", "compact"])
def test_a_grown_index_is_searched(codec):
    """Keys that answer the queries come after the build: the selection finds them once they are inserted."""
    plain = CSAttentionSpec(num_subspaces=4, codec=codec)
    samples = randn(2, 200, 16, seed=1) * 0.3 + 1.0
    keys = torch.cat([0.3 * randn(400, 2, 16), samples[:, :8].transpose(0, 1)])
    spec = plain.fixed(400)
    arrays = insert_keys(spec, build(plain, keys[:400], samples), keys[400:], 400)
    assert {name: tuple(array.shape[1:]) for name, array in arrays.items()} == {
        name: form.shape for name, form in spec.forms(IndexSize(408, 16)).items()
    }
    q = samples[:, 100:101].transpose(0, 1).contiguous()
    chosen = select(spec, arrays, q, 408, 12, 0, 0)
    for row in chosen.positions.tolist():
        assert set(range(400, 408)) <= set(row)


def test_insert_errors():
    keys, samples = randn(50, 2, 16), randn(2, 60, 16, seed=1)
    for codec in ("paper", "compact"):
        plain = CSAttentionSpec(num_subspaces=4, codec=codec)
        arrays = build(plain, keys, samples)
        with pytest.raises(ValueError, match=r"new keys .*head_dim=16"):
            insert_keys(plain, arrays, keys[:, :1], 50)
        with pytest.raises(ValueError, match="build it again"):
            insert_keys(plain, {}, keys, 50)
        with pytest.raises(ValueError, match="finite keys"):
            insert_keys(plain, arrays, keys.log(), 50)
        with pytest.raises(ValueError, match="more than fp16 holds"):
            insert_keys(plain, arrays, 1e6 * keys, 50)
        with pytest.raises(ValueError, match="another prefix or spec"):
            insert_keys(plain, arrays, keys, 500)
        grown = insert_keys(plain, arrays, keys, 50)
        with pytest.raises(ValueError, match="another prefix or spec"):
            insert_keys(plain, grown, keys, 100)
        insert_keys(plain.fixed(50), grown, keys, 100)
    paper = CSAttentionSpec(num_subspaces=4, codec="paper")
    with pytest.raises(ValueError, match=r"After a streaming insert use CSAttentionSpec\.fixed"):
        insert_keys(paper, build(paper, keys, samples), keys, 500)


def test_fixed_lists():
    spec = CSAttentionSpec(list_ratio=0.1)
    assert spec.fixed(205).list_len(205) == spec.list_len(205) == 21
    assert spec.fixed(205).list_len(5000) == 21
    assert spec.fixed(205).list_len(7) == 7
    assert spec.fixed(205).fixed(999) == spec.fixed(205)
