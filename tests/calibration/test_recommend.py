"""The recommended recipe and budget: the rule on made-up tables, the measurement against the method's own words."""

import math
from dataclasses import replace

import msgspec
import pytest
import torch

from prefix_kernels.testing import attention_recall, dense_attention
from sglang_ext.calibration.layer_statistics import KEEP_RATIOS, MeasureSetting
from sglang_ext.calibration.recommend import (
    RecipeQuality,
    default_recipes,
    measure_quality,
    quality_table,
    quality_tokens,
    recommend,
)
from sglang_ext.calibration.step_time import EXACT_US, attention_us, selection_time
from sglang_ext.config import SparseAttnConfig
from sglang_ext.methods.ab_sparse import ABSparseSpec
from sglang_ext.methods.arrays import kv_bytes
from sglang_ext.methods.base import SelectArgs
from sglang_ext.methods.csattention import CSAttentionSpec
from sglang_ext.methods.registry import make_builder, make_selector
from sglang_ext.methods.token_index import TokenIndexSpec
from sglang_ext.methods.two_level import TwoLevelSpec
from sglang_ext.methods.union import UnionSpec
from tests.calibration.captures import make_capture

RECIPES = {
    "two_level": TwoLevelSpec(),
    "token_index": TokenIndexSpec(),
    "ab_sparse": ABSparseSpec(representation="minmax"),
    "csattention": CSAttentionSpec(),
    "union": UnionSpec(),
}
RATIOS = (0.05, 0.1, 0.2)
TOKENS, TWO_LEVEL = selection_time(TokenIndexSpec()), selection_time(TwoLevelSpec())
assert TOKENS is not None
assert TWO_LEVEL is not None


def table(stored=0.1, **errors):
    """Errors of the worst prompt at budgets of 5%, 10% and 20%; the mean over prompts is half of them.

    The index costs 2% of dense, so those read 7%, 12% and 22%.
    """
    return [
        RecipeQuality(
            name=name,
            keep_ratio=ratio,
            recall=1 - error,
            oracle_recall=1.0,
            error=error / 2,
            worst_error=error,
            read_share=ratio + 0.02,
            stored_share=stored,
            kept_share=ratio,
        )
        for name, row in errors.items()
        for ratio, error in zip(RATIOS, row, strict=True)
    ]


def only(*names):
    return {name: RECIPES[name] for name in names}


def chosen(rows, *names, anchor_share=0.125):
    """The choice among these recipes, the default first."""
    return recommend(rows, only(*names), anchor_share=anchor_share)


def test_the_default_recipes_are_those_that_were_timed():
    tried = default_recipes(SparseAttnConfig().method)
    assert list(tried) == ["token_index", "ab_sparse", "two_level"]
    assert tried["token_index"].channel_ratio == 0.75
    assert tried["ab_sparse"].representation == "minmax"
    assert all(selection_time(spec) is not None for spec in tried.values())
    named = default_recipes("ab_sparse")
    assert list(named) == ["ab_sparse", "token_index", "two_level"]
    assert named["ab_sparse"] == ABSparseSpec(), "as the server builds it, if it is named"
    with pytest.raises(KeyError):
        default_recipes("quest")


def test_the_default_stays_unless_another_takes_clearly_less_time():
    """An eighth of the layers selects: about 7 us for the token index, 5 for blocks, 60 to 70 for two levels."""
    rows = table(two_level=(0.4, 0.32, 0.2), token_index=(0.4, 0.32, 0.2), ab_sparse=(0.4, 0.36, 0.2))
    stays = chosen(rows, "token_index", "ab_sparse", "two_level")
    assert stays.name == "token_index"
    attention = attention_us(0.1)
    said = (
        "no recipe surely takes clearly less; token_index reaches an output error of 0.32 in the worst prompt with "
        f"10.0% kept and takes "
        f"{TOKENS.most_us / 8 + attention:.1f} us per layer of a step then (12.5% of the layers select; 131,072 tokens"
    )
    assert said in stays.reason
    assert "8 requests" in stays.reason
    assert "NVIDIA H200" in stays.reason
    slow = chosen(rows, "two_level", "token_index")
    assert slow.name == "token_index"
    assert slow.spec["channel_ratio"] == 0.75
    bounds = f"two_level {TWO_LEVEL.least_us / 8 + attention:.1f} to {TWO_LEVEL.most_us / 8 + attention:.1f} us"
    assert bounds in slow.reason


def test_where_every_layer_selects_blocks_win_with_a_larger_budget():
    rows = table(token_index=(0.2, 0.1, 0.0), ab_sparse=(0.9, 0.325, 0.2))
    assert chosen(rows, "token_index", "ab_sparse").name == "token_index"
    blocks = chosen(rows, "token_index", "ab_sparse", anchor_share=1.0)
    assert (blocks.name, blocks.keep_ratio) == ("ab_sparse", 0.2)
    assert blocks.spec["representation"] == "minmax"
    assert "100.0% of the layers select" in blocks.reason


def test_the_time_is_that_of_the_least_keep_ratio_that_reaches_the_error():
    choice = chosen(table(token_index=(0.64, 0.16, 0.1)), "token_index")
    # Half of the way between 5% and 10% on log axes.
    keep = math.sqrt(0.05 * 0.1)
    assert f"with {keep:.1%} kept and takes {TOKENS.most_us / 8 + attention_us(keep):.1f} us" in choice.reason
    assert choice.keep_ratio == 0.1, "a budget that was measured"


def test_a_recipe_that_was_not_timed_neither_wins_nor_loses():
    rows = table(token_index=(0.4, 0.3, 0.2), union=(0.1, 0.05, 0.01))
    assert chosen(rows, "token_index", "union").name == "token_index"
    stays = chosen(rows, "union", "token_index")
    assert stays.name == "union"
    assert "union stays: its selection has no measured time, so it cannot be compared" in stays.reason
    # CSAttention's own lists take at least what shorter ones took: enough to lose, never enough to win.
    lists = table(token_index=(0.4, 0.32, 0.2), csattention=(0.1, 0.05, 0.01))
    assert chosen(lists, "token_index", "csattention").name == "token_index"
    replaced = chosen(lists, "csattention", "token_index")
    assert replaced.name == "token_index"
    assert "csattention at least" in replaced.reason


def test_an_index_that_is_too_large_does_not_win_and_is_told_in_words():
    large = table(two_level=(0.4, 0.3, 0.2), stored=0.2)
    rival = chosen(large + table(token_index=(0.5, 0.4, 0.2)), "two_level", "token_index")
    assert rival.name == "token_index"
    assert "two_level's index takes more than 15% of the KV" in rival.reason
    alone = chosen(large, "two_level")
    assert (alone.name, "inf" in alone.reason) == ("two_level", False)
    assert "takes more than 15% of the KV, but no other recipe of a measured time reaches" in alone.reason
    far = chosen(large + table(token_index=(0.5, 0.4, 0.35)), "two_level", "token_index")
    assert far.name == "two_level"
    huge = table(two_level=(0.4, 0.32, 0.2)) + table(token_index=(0.1, 0.05, 0.01), stored=0.16)
    assert chosen(huge, "two_level", "token_index").name == "two_level"


def test_a_default_that_does_not_reach_the_error_is_replaced():
    rows = table(token_index=(0.6, 0.5, 0.35), ab_sparse=(0.4, 0.3, 0.2))
    choice = chosen(rows, "token_index", "ab_sparse")
    assert choice.name == "ab_sparse"
    assert "token_index does not reach it" in choice.reason


def test_where_no_recipe_reaches_the_error_the_least_at_the_largest_budget_counts():
    near = chosen(table(token_index=(0.6, 0.5, 0.4), ab_sparse=(0.6, 0.5, 0.37)), "token_index", "ab_sparse")
    assert (near.name, near.keep_ratio) == ("token_index", 0.2)
    said = "reaches an output error of 0.32 in the worst prompt with the tried budgets; at 20% token_index has 0.400"
    assert said in near.reason
    assert "its error is 0.400 in the worst prompt and 0.200 in the mean" in near.reason
    assert near.reason.endswith("no tried budget of it reaches an output error of 0.32 in the worst prompt")
    far = chosen(table(token_index=(0.6, 0.5, 0.4), ab_sparse=(0.7, 0.6, 0.35)), "token_index", "ab_sparse")
    assert far.name == "ab_sparse"
    assert "at 20% ab_sparse has 0.350, token_index 0.400" in far.reason


def test_a_step_that_takes_longer_than_exact_attention_is_told():
    choice = chosen(table(two_level=(0.4, 0.32, 0.2)), "two_level", anchor_share=1.0)
    assert f"no less than exact attention's {EXACT_US:.1f}" in choice.reason


@pytest.mark.parametrize(
    ("errors", "expected"),
    [((0.2, 0.1, 0.0), 0.05), ((0.6, 0.32, 0.1), 0.1), ((0.7, 0.6, 0.2), 0.2), ((0.9, 0.8, 0.7), 0.2)],
    ids=["at once", "just reached", "late", "never"],
)
def test_the_budget_is_the_least_tried_one_that_reaches_the_error(errors, expected):
    choice = chosen(table(token_index=errors), "token_index")
    assert choice.keep_ratio == expected
    worst = errors[RATIOS.index(expected)]
    said = f"a budget of {expected:.0%} its error is {worst:.3f} in the worst prompt and {worst / 2:.3f} in the mean"
    assert f"{said}, a step reads {expected + 0.02:.1%} of dense" in choice.reason


def test_channels_count_as_a_part_of_the_models_heads():
    rows = table(half=(0.4, 0.25, 0.2))
    recipes = {"half": TokenIndexSpec(num_channels=48)}
    assert "takes" in recommend(rows, recipes, anchor_share=1.0, head_dim=64).reason
    assert "no measured time" in recommend(rows, recipes, anchor_share=1.0, head_dim=128).reason


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_figures_that_are_no_numbers_are_refused(value):
    rows = table(token_index=(0.4, 0.3, 0.2), two_level=(0.4, value, 0.2))
    with pytest.raises(ValueError, match=rf"expected a finite \w+ of two_level at 10%, got -?{value}"):
        chosen(rows, "token_index", "two_level")
    rows = [msgspec.structs.replace(row, read_share=value) for row in table(token_index=(0.4, 0.3, 0.2))]
    with pytest.raises(ValueError, match=f"expected a finite read_share of token_index at 5%, got {value}"):
        chosen(rows, "token_index")


def test_budgets_at_the_floor_are_not_recommended():
    rows = table(token_index=(0.2, 0.1, 0.0))
    rows[0] = msgspec.structs.replace(rows[0], kept_share=0.061)
    assert chosen(rows, "token_index").keep_ratio == 0.1
    rows[0] = msgspec.structs.replace(rows[0], kept_share=0.06)
    assert chosen(rows, "token_index").keep_ratio == 0.05
    choice = chosen([msgspec.structs.replace(row, kept_share=0.44) for row in rows], "token_index")
    assert choice.keep_ratio == 0.2, "all at the floor: the nearest"
    assert "the smallest budget is 44% of them" in choice.reason


def measured(capture, spec, layers, keep_ratios, min_top_k=1, num_sink=16, num_recent=64):
    """[num_keep_ratios, 6] of one recipe."""
    setting = MeasureSetting(keep_ratios=keep_ratios, min_top_k=min_top_k, num_sink=num_sink, num_recent=num_recent)
    (found,) = measure_quality(capture, {"it": spec}, layers, setting)
    assert found.shape == (len(keep_ratios), 6)
    return found


INT8 = TokenIndexSpec(bits=8, channel_ratio=1.0)


def test_quality_is_the_recall_and_error_of_the_selector():
    capture = make_capture(5, num_layers=2, asked=3)
    spec = TokenIndexSpec(channel_ratio=1.0)
    found = measured(capture, spec, [1], (0.1, 0.5), num_sink=2, num_recent=4)
    assert found[:, 5].tolist() == [25 / 256, 128 / 256]
    stored = (256 * 8 + 16 * 2 + 2 * 16 * 4) / (256 * 2 * 16 * 2)
    assert found[:, 4].tolist() == pytest.approx([stored, stored])
    assert found[:, 3].tolist() == pytest.approx([stored + 25 / 256, stored + 128 / 256])
    keys, values = capture.keys[1], capture.values[1]
    arrays = make_builder(spec).build_layer(keys, None)
    for column, budget in enumerate((25, 128)):
        recalls, errors = [], []
        for row in capture.queries[1][40:43]:
            q = row[None]
            args = SelectArgs(prefix_len=256, budget=budget, num_sink=2, num_recent=4, sm_scale=capture.sm_scale)
            chosen = make_selector(spec).select(arrays, q, args)
            recalls.append(float(attention_recall(q, keys, chosen, capture.sm_scale).mean()))
            full = dense_attention(q, keys, values, capture.sm_scale).out
            for head in range(4):
                picked = chosen.positions[head // 2].long()
                part = dense_attention(
                    q[:, head : head + 1], keys[picked, head // 2, None], values[picked, head // 2, None],
                    capture.sm_scale,
                ).out  # fmt: skip
                errors.append(float((part[0, 0] - full[0, head]).norm() / full[0, head].norm()))
        assert float(found[column, 0]) == pytest.approx(sum(recalls) / 3, abs=1e-5)
        assert float(found[column, 2]) == pytest.approx(sum(errors) / 12, abs=1e-4)


def test_all_layers_count_and_exact_scores_reach_the_oracle():
    capture = make_capture(6, num_layers=3)
    parts = [measured(capture, INT8, [layer], (0.5,), num_sink=0, num_recent=0) for layer in (1, 2)]
    both = measured(capture, INT8, [1, 2], (0.5,), num_sink=0, num_recent=0)
    torch.testing.assert_close(both, (parts[0] + parts[1]) / 2)
    assert float(both[0, 0]) == pytest.approx(float(both[0, 1]), abs=5e-3)


def test_a_small_budget_is_raised_to_the_floor_of_serving():
    capture = make_capture(7)
    recall, _, error, _, _, kept = measured(capture, TokenIndexSpec(), [1], (0.001,), min_top_k=300)[0].tolist()
    assert recall == pytest.approx(1.0, abs=1e-5)
    assert error < 1e-4
    assert kept == 1.0, "never more than the prefix"
    floor = measured(capture, TokenIndexSpec(), [1], (0.01, 0.3), min_top_k=64)
    assert floor[:, 5].tolist() == [64 / 256, 76 / 256]


@pytest.mark.parametrize(("budget", "sink", "recent"), [(8, 8, 0), (20, 16, 4), (90, 16, 64)])
def test_windows_fit_into_the_budget_as_in_serving(budget, sink, recent):
    """A budget that the windows fill selects nothing else: the recall is the windows' own."""
    capture = make_capture(8, asked=1)
    found = measured(capture, INT8, [0], (0.001,), min_top_k=budget)
    q, keys = capture.queries[0][-1:], capture.keys[0]
    mass = dense_mass(q, keys, capture.sm_scale)
    held = mass[:, :sink].sum(dim=1) + mass[:, 256 - recent :].sum(dim=1)
    assert float(found[0, 5]) == budget / 256
    if sink + recent == budget:
        assert float(found[0, 0]) == pytest.approx(float(held.mean()), abs=1e-5)
    else:
        assert float(found[0, 0]) > float(held.mean())


def dense_mass(q, keys, sm_scale):
    """[num_qo_heads, prefix_len] of one token, two query heads per KV head."""
    scores = torch.stack([q[0, head] @ keys[:, head // 2].T for head in range(4)])
    return (scores * sm_scale).softmax(dim=1)


def test_bytes_read_are_the_mean_over_tokens():
    capture = make_capture(9, asked=6)
    spec = CSAttentionSpec()
    found = measured(capture, spec, [1], (0.5,))
    arrays = make_builder(spec).build_layer(capture.keys[1], capture.samples()[1])
    each = [spec.read_bytes(arrays, row[None], 256, 128) for row in capture.queries[1][40:46]]
    assert len(set(each)) > 1, "tokens read different numbers of lists"
    assert float(found[0, 3]) == pytest.approx(sum(each) / 6 / kv_bytes(256, 16) + 0.5)


def test_tokens_inside_the_prefix_are_not_tried():
    capture = make_capture(3, asked=0)
    assert len(quality_tokens(capture)) == 0
    with pytest.raises(ValueError, match="expected a captured token behind the prefix, got none"):
        measured(capture, TokenIndexSpec(), [1], KEEP_RATIOS)
    # Two tokens of the sample stand behind a shorter prefix, more inside it.
    place = int(capture.positions[-2])
    shorter = replace(capture.behind(place), sampled=torch.ones(40, dtype=torch.bool))
    assert quality_tokens(shorter).tolist() == [38, 39]


def test_the_table_is_the_mean_over_prompts_and_the_worst_ones_error():
    quality = torch.rand(4, 2, 3, 6, dtype=torch.float64)
    rows = quality_table(quality, ["a", "b"], (0.1, 0.2, 0.3))
    assert [(row.name, row.keep_ratio) for row in rows] == [(n, r) for n in "ab" for r in (0.1, 0.2, 0.3)]
    assert rows[4].error == pytest.approx(float(quality[:, 1, 1, 2].mean()))
    assert rows[4].worst_error == float(quality[:, 1, 1, 2].max())
    assert rows[4].recall == pytest.approx(float(quality[:, 1, 1, 0].mean()))


def test_one_prompt_that_a_recipe_fails_at_decides():
    """Blocks have less error in the mean, but not where it counts."""
    quality = torch.full((10, 2, 1, 6), 0.1, dtype=torch.float64)
    quality[:, 0, 0, 2] = 0.3
    quality[:, 1, 0, 2] = 0.2
    quality[3, 1, 0, 2] = 0.5
    rows = quality_table(quality, ["token_index", "ab_sparse"], (0.1,))
    assert rows[0].error > rows[1].error
    assert recommend(rows, only("ab_sparse", "token_index"), anchor_share=1.0).name == "token_index"
    quality[3, 1, 0, 2] = 0.3
    rows = quality_table(quality, ["token_index", "ab_sparse"], (0.1,))
    assert recommend(rows, only("token_index", "ab_sparse"), anchor_share=1.0).name == "ab_sparse"
