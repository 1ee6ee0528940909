"""The compact form of CSA lists: exact positions, scores within half a step, token scores by their definition."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_kernels.csa_scores import CompactLists, check_lists, csa_scores_compact, decode_lists, encode_lists
from tests.examples import examples
from tests.planted import randn


def lists_of(shape, list_len, prefix_len, seed=0):
    positions = randn(*shape, prefix_len, seed=seed).topk(list_len).indices.sort(dim=-1).values.int()
    return positions, randn(*shape, list_len, seed=seed + 1)


def by_hand(lists, list_len, bits):
    """One list, decoded entry by entry with Python integers."""
    places = lists.places.tolist()
    positions, at = [], 0
    for block, count in enumerate(lists.counts.tolist()):
        positions += [256 * block + place for place in places[at : at + count]]
        at += count
    codes = lists.codes.tolist()
    per_byte = 8 // bits
    code = [codes[i // per_byte] >> (i % per_byte * bits) & (2**bits - 1) for i in range(list_len)]
    return positions, [c * float(lists.scale) + float(lists.zero) for c in code]


@settings(max_examples=examples(80))
@given(st.integers(1, 1500), st.floats(0, 1), st.sampled_from([4, 8]), st.floats(-3, 3), st.integers(0, 2**31))
def test_round_trip(prefix_len, ratio, bits, log_size, seed):
    list_len = max(1, int(ratio * prefix_len))
    positions, scores = lists_of((2, 3), list_len, prefix_len, seed)
    scores = (scores + 2) * 10**log_size
    lists = encode_lists(positions, scores, prefix_len, bits)
    got_positions, got_scores = decode_lists(lists, list_len, bits)
    assert torch.equal(got_positions.int(), positions)
    rounding = 1e-6 * scores.abs().amax()
    assert bool(((got_scores - scores).abs() <= lists.scale.float()[..., None] / 2 + rounding).all())
    one = CompactLists(*(part[1, 2] for part in lists))
    hand_positions, hand_scores = by_hand(one, list_len, bits)
    assert hand_positions == positions[1, 2].tolist()
    torch.testing.assert_close(got_scores[1, 2], torch.tensor(hand_scores))
    check_lists(lists, (2, 3), list_len, prefix_len, bits)


def test_steps_are_those_of_the_span():
    """fp16 of scale and zero costs little: a step is at most 0.3% wider than the span asks for."""
    positions, scores = lists_of((5,), 40, 400)
    lists = encode_lists(positions, scores, 400, 4)
    span = scores.amax(-1) - scores.amin(-1)
    assert bool((lists.scale.float() * 15 <= 1.003 * span).all())


def test_constant_scores_and_full_lists():
    """256 entries of one block: a count that a byte could not hold."""
    positions, scores = torch.arange(300).expand(2, 300), torch.full((2, 300), 0.5)
    lists = encode_lists(positions, scores, 300, 4)
    assert lists.counts.tolist() == [[256, 44]] * 2
    assert all(torch.equal(*both) for both in zip(decode_lists(lists, 300, 4), (positions, scores), strict=True))


def by_loop(q, centroids, positions, scores, prefix_len):
    """3.3 (1)-(3) of CSAttention: nearest centroid per subspace by the cosine, its list, the weighted sum."""
    heads, m, _, dim = centroids.shape
    gqa = q.shape[1] // heads
    found = torch.full((heads, len(q), gqa, prefix_len), -torch.inf).double()
    for head, row, part, b in itertools.product(range(heads), range(len(q)), range(gqa), range(m)):
        query = q[row, head * gqa + part, b * dim : (b + 1) * dim].double()
        cosine = centroids[head, b].double() @ query / query.norm()
        nearest = int(cosine.argmax())
        of_row = found[head, row, part]
        for position, score in zip(
            positions[head, b, nearest].tolist(), scores[head, b, nearest].tolist(), strict=True
        ):
            before = 0.0 if of_row[position] == -torch.inf else of_row[position]
            of_row[position] = before + cosine[nearest] * query.norm() * score
    return found


@pytest.mark.parametrize("chunk", [1 << 24, 1])
@pytest.mark.parametrize(("list_len", "prefix_len", "bits"), [(5, 600, 4), (7, 23, 4), (50, 600, 8), (300, 300, 4)])
def test_scores_by_loop(list_len, prefix_len, bits, chunk, monkeypatch):
    monkeypatch.setattr("prefix_kernels.csa_scores.ELEMENTS_PER_CHUNK", chunk)
    q = randn(3, 4, 16)
    centroids = torch.nn.functional.normalize(randn(2, 4, 5, 4, seed=1), dim=-1)
    lists = encode_lists(*lists_of((2, 4, 5), list_len, prefix_len, seed=2), prefix_len, bits)
    got = csa_scores_compact(q, centroids, lists, list_len, bits, prefix_len)
    assert bool(got.isinf().any()) == (list_len < prefix_len)
    wanted = by_loop(q, centroids, *decode_lists(lists, list_len, bits), prefix_len)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


def test_errors():
    positions, scores = lists_of((2, 4, 5), 5, 600)
    with pytest.raises(ValueError, match=r"list_len in 1\.\.4"):
        encode_lists(positions, scores, 4, 4)
    with pytest.raises(ValueError, match="4 or 8 bits, got 2"):
        encode_lists(positions, scores, 600, 2)
    lists = encode_lists(positions, scores, 600, 4)
    for lead, list_len, prefix_len, bits, name in [
        ((2, 4, 5), 6, 600, 4, "places"),
        ((2, 5, 4), 5, 600, 4, "places"),
        ((2, 4, 5), 5, 900, 4, "counts"),
        ((2, 4, 5), 5, 600, 8, "codes"),
    ]:
        with pytest.raises(ValueError, match=f"expected {name} of compact lists .* another prefix or spec"):
            check_lists(lists, lead, list_len, prefix_len, bits)
    with pytest.raises(ValueError, match="expected scale of compact lists"):
        check_lists(lists._replace(scale=lists.scale[0]), (2, 4, 5), 5, 600, 4)
    q, centroids = randn(3, 8, 16), randn(2, 4, 5, 4)
    for one, table, bits, message in (
        (q, centroids, 8, "expected codes of compact lists"),
        (q, centroids[0], 4, "num_centroids, subspace_dim"),
        (q[..., :8], centroids, 4, "head_dim=16"),
    ):
        with pytest.raises(ValueError, match=message):
            csa_scores_compact(one, table, lists, 5, bits, 600)
