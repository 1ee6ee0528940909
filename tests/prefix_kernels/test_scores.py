"""Block scores and pooling, against loops and bounds."""

import math

import pytest
import torch

from prefix_kernels.block_scores import block_scores_ball, block_scores_mean, block_scores_minmax
from prefix_kernels.pooling import FIRST_SUMMED, HEADROOM, Pooling, pool_scores, sampled, sum_step
from tests.planted import randn


@pytest.mark.parametrize("block_size", [1, 7])
def test_bounds_of_blocks_by_their_definitions_are_upper_bounds_and_tight_for_single_keys(block_size):
    q, keys = randn(3, 8, 16), randn(2, 6, block_size, 16, seed=1)
    rows = q.view(3, 2, 4, 1, 16).transpose(0, 1)
    true = torch.einsum("rhgd,hbnd->hrgbn", q.view(3, 2, 4, 16), keys).amax(-1)
    low, high = keys.aminmax(dim=2)
    by_channel = torch.maximum(rows * low[:, None, None], rows * high[:, None, None]).sum(-1)
    centers = keys.mean(dim=2)
    radii = (keys - centers[:, :, None]).norm(dim=3).amax(dim=2)
    by_mean = (rows * centers[:, None, None]).sum(-1)
    torch.testing.assert_close(block_scores_mean(q, centers), by_mean)
    by_ball = by_mean + rows.norm(dim=-1) * radii[:, None, None]
    for bound, wanted in (
        (block_scores_minmax(q, low, high), by_channel),
        (block_scores_ball(q, centers, radii), by_ball),
    ):
        torch.testing.assert_close(bound, wanted, atol=1e-5, rtol=1e-5)
        assert bool((bound >= true - 1e-4).all())
        if block_size == 1:
            torch.testing.assert_close(bound, true, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_pooling_is_after_the_softmax(pooling):
    scores = randn(2, 3, 4, 9)
    scores[0, 0, 0, 2:] = -torch.inf
    prob = (scores * 0.7).softmax(-1).flatten(1, 2)
    expected = prob.amax(1) if pooling is Pooling.MAX else prob.mean(1)
    torch.testing.assert_close(pool_scores(scores, 0.7, pooling).exp(), expected)


def test_pooling_ranks_far_tails_and_rows_without_scores():
    scores = torch.tensor([[[[0.0, -500.0, -400.0]]]])
    assert pool_scores(scores, 1.0).argsort(descending=True).tolist() == [[0, 2, 1]]
    silent = torch.full((1, 1, 1, 3), -torch.inf)
    both = torch.cat([scores, silent], dim=1)
    assert torch.equal(pool_scores(both, 1.0), pool_scores(scores, 1.0))
    assert bool((pool_scores(silent, 1.0) == -torch.inf).all())
    assert bool((pool_scores(silent, 1.0, Pooling.MEAN) == -torch.inf).all())


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize(("count", "sum_every", "step"), [(1023, 16, 1), (1024, 16, 2), (9000, 3, 3), (9000, 16, 16)])
def test_sums_of_a_sample_by_loop(count, sum_every, step, pooling):
    scores = randn(1, 2, 2, count) * 3
    scores[0, 0, 1] = -torch.inf
    assert sum_step(count, sum_every) == step
    shares = []
    for row in scores.flatten(1, 2)[0].double():
        weighed = [math.exp(0.7 * float(row[i])) for i in range(FIRST_SUMMED)]
        for stretch in range((count - FIRST_SUMMED) // step):
            at = FIRST_SUMMED + stretch * step + (stretch * 40503 % 65536) * step // 65536
            weighed.append(step * math.exp(0.7 * float(row[at])))
        total = math.fsum(weighed)
        shares.append((row * 0.7).exp() / total if total else torch.zeros(count).double())
    shares = torch.stack(shares)
    expected = shares.amax(0) if pooling is Pooling.MAX else shares.mean(0)
    found = pool_scores(scores, 0.7, pooling, sum_every=sum_every) + HEADROOM
    torch.testing.assert_close(found[0].exp().double(), expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("step", [1, 2, 5, 16, 48, 64])
def test_a_sample_has_one_of_each_stretch_and_no_favourite_place(step):
    count = FIRST_SUMMED + 1000 * step + step // 2
    found = sampled(count, step)
    assert torch.equal((found - FIRST_SUMMED) // step, torch.arange(1000))
    places = torch.bincount((found - FIRST_SUMMED) % step, minlength=step)
    assert int(places.max() - places.min()) <= 6


def test_shares_above_one_still_rank():
    """Hundreds of strong tokens, of which the sample has none: keys of selections end at a share of 1."""
    scores = torch.zeros(1, 1, 1, 8192)
    left_out = sorted(set(range(FIRST_SUMMED, 8192)) - set(sampled(8192, 16).tolist()))
    strong = left_out[::16]
    scores[..., strong] = torch.linspace(9.0, 14.0, len(strong))
    found = pool_scores(scores, 1.0, sum_every=16)[0]
    assert float(found[strong[-1]] + HEADROOM) > 4.0, "a share of e^4"
    keys = (found.clamp(-44.0, 0.0) * (2045 / 44.0)).floor()
    assert bool((keys[strong].diff() >= 0).all())
    assert keys[strong].unique().numel() > 200
    assert int(keys[strong].min()) > int(keys[0])


def test_a_row_without_a_score_in_the_sample_says_nothing():
    scores = torch.full((1, 2, 1, 4096), -torch.inf)
    scores[0, 0] = 1.0
    left_out = sorted(set(range(FIRST_SUMMED, 4096)) - set(sampled(4096, 2).tolist()))
    scores[0, 1, 0, left_out] = 9.0
    alone = pool_scores(scores[:, :1], 1.0, sum_every=2)
    assert torch.equal(pool_scores(scores, 1.0, sum_every=2), alone)


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("sum_every", [1, 16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_of_no_numbers_leaves_the_word_to_others(value, sum_every, pooling):
    scores = torch.randn(2, 3, 2, 1100, generator=torch.Generator().manual_seed(0))
    alone = pool_scores(scores[:, :2], 0.5, pooling, sum_every=sum_every)
    scores[:, 2, :, 7 if value == torch.inf else slice(None)] = value
    found = pool_scores(scores, 0.5, pooling, sum_every=sum_every)
    of_rows = math.log(2 / 3) if pooling is Pooling.MEAN else 0.0
    torch.testing.assert_close(found, alone + of_rows)


def test_errors():
    q = randn(3, 8, 16)
    for call, arguments, message in (
        (block_scores_mean, (q, torch.zeros(2, 5, 16, dtype=torch.uint8)), "dequantized"),
        (block_scores_mean, (q, randn(2, 5, 8)), "head_dim=8"),
        (block_scores_mean, (q[:, :3], randn(2, 5, 16)), "multiple of num_kv_heads=2"),
        (block_scores_minmax, (q, randn(2, 5, 16), randn(2, 4, 16)), "block_max"),
        (block_scores_ball, (q, randn(2, 5, 16), randn(2, 4)), "expected radii"),
        (pool_scores, (torch.zeros(2, 0, 4, 5), 1.0), "num_rows >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call(*arguments)
