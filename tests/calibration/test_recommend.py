"""The recommended recipe and budget: the rule on made-up tables, the measurement against the method's own words."""

import math
from dataclasses import replace

import msgspec
import pytest
import torch

from prefix_kernels.pooling import Pooling
from prefix_kernels.testing import attention_recall, dense_attention
from sglang_ext.calibration.recommend import (
    RecipeQuality,
    default_recipes,
    measure_quality,
    quality_table,
    quality_tokens,
    recommend,
    served_budget,
)
from sglang_ext.config import SparseAttnConfig
from sglang_ext.indexing.csattention import CSAttentionSpec
from sglang_ext.indexing.registry import make_builder, make_selector
from sglang_ext.indexing.token_index import TokenIndexSpec
from sglang_ext.indexing.traffic import index_read_bytes, kv_bytes
from tests.calibration.captures import make_capture

RECIPES = default_recipes("csattention")


RATIOS = (0.05, 0.1, 0.2)


def table(read=0.02, stored=0.1, **errors):
    """Errors at budgets of 5%, 10% and 20%; the index costs `read` of dense, so those read 7%, 12% and 22%."""
    return [
        RecipeQuality(
            name=name,
            keep_ratio=ratio,
            recall=1 - error,
            oracle_recall=1.0,
            error=error,
            read_share=ratio + read,
            stored_share=stored,
            kept_share=ratio,
        )
        for name, row in errors.items()
        for ratio, error in zip(RATIOS, row, strict=True)
    ]


def test_the_default_stays_unless_another_is_clearly_better_at_equal_bytes():
    others = dict.fromkeys(("token_index", "ab_sparse"), (0.9, 0.8, 0.7))
    near = table(csattention=(0.4, 0.3, 0.2), two_level=(0.39, 0.29, 0.2), **others)
    assert recommend(near, RECIPES).name == "csattention"
    far = table(csattention=(0.4, 0.3, 0.2), two_level=(0.3, 0.2, 0.1), **others)
    choice = recommend(far, RECIPES)
    assert choice.name == "two_level"
    assert choice.spec["method"] == "two_level"
    # Between 7% and 12%, log against log: 0.3 * (2/3) ** (ln(10/7) / ln(12/7)).
    expected = 0.3 * (2 / 3) ** (math.log(10 / 7) / math.log(12 / 7))
    assert f"two_level has an output error of {expected:.3f} where a step reads 10% of dense" in choice.reason


def test_a_large_index_or_one_that_reads_too_much_does_not_win():
    small = table(csattention=(0.4, 0.3, 0.2), token_index=(0.5, 0.4, 0.3), ab_sparse=(0.9, 0.8, 0.7))
    large = table(two_level=(0.1, 0.05, 0.01), stored=0.16)
    assert recommend(small + large, RECIPES).name == "csattention"
    greedy = table(two_level=(0.1, 0.05, 0.01), read=0.06)
    assert recommend(small + greedy, RECIPES).name == "csattention"
    fine = table(two_level=(0.1, 0.05, 0.01), read=0.04)
    assert recommend(small + fine, RECIPES).name == "two_level"


@pytest.mark.parametrize(
    ("errors", "expected"),
    [((0.2, 0.1, 0.0), 0.05), ((0.6, 0.4, 0.1), 0.1), ((0.7, 0.6, 0.4), 0.2), ((0.9, 0.8, 0.7), 0.05)],
    ids=["reads little", "holds half", "holds half late", "never holds half"],
)
def test_the_budget_reads_little_but_holds_half(errors, expected):
    recipes = {"token_index": TokenIndexSpec()}
    choice = recommend(table(token_index=errors), recipes)
    assert choice.keep_ratio == expected
    assert f"with a budget of {expected:.0%} a step reads {expected + 0.02:.1%} of dense" in choice.reason


def test_nothing_measured_is_refused():
    with pytest.raises(ValueError, match="at least one recipe, got none"):
        recommend([], RECIPES)


def only(*names):
    return {name: RECIPES[name] for name in names}


def test_a_default_that_cannot_read_so_little_is_compared_where_it_can():
    """Read shares of 15%, 20% and 30% for the default: at 10% its error would be infinite."""
    slow = table(csattention=(0.4, 0.3, 0.2), read=0.1)
    bad = recommend(slow + table(two_level=(0.9, 0.8, 0.7)), only("csattention", "two_level"))
    assert bad.name == "csattention"
    assert "where a step reads 15.0% of dense (csattention cannot read less with the tried budgets)" in bad.reason
    assert bad.keep_ratio == 0.05
    assert "no tried budget reads as little as 10%" in bad.reason
    good = recommend(slow + table(two_level=(0.3, 0.2, 0.1)), only("csattention", "two_level"))
    assert good.name == "two_level"
    nobody = recommend(slow + table(two_level=(0.3, 0.2, 0.1), read=0.1), only("csattention", "two_level"))
    assert nobody.name == "two_level", "where no recipe can, the better one wins too"
    greedy = recommend(slow + table(two_level=(0.3, 0.2, 0.1), read=0.11), only("csattention", "two_level"))
    assert greedy.name == "csattention", "a rival that reads even more is out"


def test_an_index_that_is_too_large_is_told_in_words():
    large = table(csattention=(0.4, 0.3, 0.2), stored=0.2)
    rival = recommend(large + table(two_level=(0.5, 0.4, 0.3)), only("csattention", "two_level"))
    assert rival.name == "two_level"
    assert "csattention's index takes more than 15% of the KV" in rival.reason
    alone = recommend(large, only("csattention"))
    assert (alone.name, "inf" in alone.reason) == ("csattention", False)
    assert "takes more than 15% of the KV" in alone.reason


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_figures_that_are_no_numbers_are_refused(value):
    rows = table(csattention=(0.4, 0.3, 0.2), two_level=(0.4, value, 0.2))
    with pytest.raises(ValueError, match=rf"expected a finite \w+ of two_level at 10%, got -?{value}"):
        recommend(rows, only("csattention", "two_level"))


@pytest.mark.parametrize("missing", ["csattention", "two_level"])
def test_a_recipe_without_rows_is_refused(missing):
    rows = [row for row in table(csattention=(0.4, 0.3, 0.2), two_level=(0.4, 0.3, 0.2)) if row.name != missing]
    with pytest.raises(ValueError, match=f"expected the quality of {missing}, got none"):
        recommend(rows, only("csattention", "two_level"))


def test_a_budget_without_half_of_the_attention_still_reads_little():
    """7%, 10% and 20% read; a sum of shares may be a rounding above its bound."""
    rows = table(token_index=(0.9, 0.8, 0.7))
    rows[1] = msgspec.structs.replace(rows[1], read_share=0.1 + 1e-12)
    assert recommend(rows, {"token_index": TokenIndexSpec()}).keep_ratio == 0.1
    rows[1] = msgspec.structs.replace(rows[1], read_share=0.1001)
    assert recommend(rows, {"token_index": TokenIndexSpec()}).keep_ratio == 0.05
    choice = recommend(table(token_index=(0.9, 0.8, 0.7), read=0.2), {"token_index": TokenIndexSpec()})
    assert choice.keep_ratio == 0.05, "none reads little: the smallest"


def test_a_half_that_needs_more_bytes_is_told():
    choice = recommend(table(token_index=(0.7, 0.6, 0.4)), {"token_index": TokenIndexSpec()})
    assert choice.reason.endswith("no tried budget that holds half of the attention reads as little as 10%")


def test_budgets_at_the_floor_are_not_recommended():
    recipes = {"token_index": TokenIndexSpec()}
    rows = table(token_index=(0.2, 0.1, 0.0))
    rows[0] = msgspec.structs.replace(rows[0], kept_share=0.061)
    assert recommend(rows, recipes).keep_ratio == 0.1
    rows[0] = msgspec.structs.replace(rows[0], kept_share=0.06)
    assert recommend(rows, recipes).keep_ratio == 0.05
    choice = recommend([msgspec.structs.replace(row, kept_share=0.44) for row in rows], recipes)
    assert choice.keep_ratio == 0.2, "all at the floor: the nearest"
    assert "the smallest budget is 44% of them" in choice.reason


@pytest.mark.parametrize("prefix_len", [1, 100, 1024, 1300, 8191])
@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.2, 1.0])
def test_budgets_are_those_of_serving(prefix_len, ratio):
    config = SparseAttnConfig(keep_ratio=ratio)
    assert served_budget(prefix_len, ratio, config.min_top_k) == config.budget(prefix_len)


def test_quality_is_the_recall_and_error_of_the_selector():
    capture = make_capture(5, num_layers=2, asked=3)
    spec = TokenIndexSpec()
    found = measure_quality(
        capture, {"token_index": spec}, [1], min_top_k=1, keep_ratios=(0.1, 0.5), num_sink=2, num_recent=4, num_tokens=3
    )
    assert found.shape == (1, 2, 6)
    assert found[0, :, 5].tolist() == [25 / 256, 128 / 256]
    stored = (256 * 8 + 16 * 2 + 2 * 16 * 4) / (256 * 2 * 16 * 2)
    assert found[0, :, 4].tolist() == pytest.approx([stored, stored])
    assert found[0, :, 3].tolist() == pytest.approx([stored + 25 / 256, stored + 128 / 256])
    keys, values = capture.keys[1], capture.values[1]
    arrays = make_builder(spec).build_layer(keys, None)
    for column, budget in enumerate((25, 128)):
        recalls, errors = [], []
        for row in capture.queries[1][40:43]:
            q = row[None]
            chosen = make_selector(spec).select(
                arrays,
                q,
                prefix_len=256,
                budget=budget,
                num_sink=2,
                num_recent=4,
                sm_scale=capture.sm_scale,
                pooling=Pooling.MAX,
            )
            recalls.append(float(attention_recall(q, keys, chosen, capture.sm_scale).mean()))
            full = dense_attention(q, keys, values, capture.sm_scale).out
            for head in range(4):
                picked = chosen.positions[head // 2].long()
                part = dense_attention(
                    q[:, head : head + 1], keys[picked, head // 2, None], values[picked, head // 2, None],
                    capture.sm_scale,
                ).out  # fmt: skip
                errors.append(float((part[0, 0] - full[0, head]).norm() / full[0, head].norm()))
        assert float(found[0, column, 0]) == pytest.approx(sum(recalls) / 3, abs=1e-5)
        assert float(found[0, column, 2]) == pytest.approx(sum(errors) / 12, abs=1e-4)


def test_all_layers_count_and_exact_scores_reach_the_oracle():
    capture = make_capture(6, num_layers=3)
    options = {"min_top_k": 1, "keep_ratios": (0.5,), "num_sink": 0, "num_recent": 0}
    recipes = {"int8": TokenIndexSpec(bits=8)}
    parts = [measure_quality(capture, recipes, [layer], **options) for layer in (1, 2)]
    both = measure_quality(capture, recipes, [1, 2], **options)
    torch.testing.assert_close(both, (parts[0] + parts[1]) / 2)
    assert float(both[0, 0, 0]) == pytest.approx(float(both[0, 0, 1]), abs=5e-3)


def test_a_small_budget_is_raised_to_the_floor_of_serving():
    capture = make_capture(7)
    whole = measure_quality(capture, {"int4": TokenIndexSpec()}, [1], keep_ratios=(0.001,), min_top_k=300)
    assert float(whole[0, 0, 0]) == pytest.approx(1.0, abs=1e-5)
    assert float(whole[0, 0, 2]) < 1e-4
    assert float(whole[0, 0, 5]) == 1.0, "never more than the prefix"
    floor = measure_quality(capture, {"int4": TokenIndexSpec()}, [1], keep_ratios=(0.01, 0.3), min_top_k=64)
    assert floor[0, :, 5].tolist() == [64 / 256, 76 / 256]


@pytest.mark.parametrize(("budget", "sink", "recent"), [(8, 8, 0), (20, 16, 4), (90, 16, 64)])
def test_windows_fit_into_the_budget_as_in_serving(budget, sink, recent):
    """A budget that the windows fill selects nothing else: the recall is the windows' own."""
    capture = make_capture(8, asked=1)
    found = measure_quality(capture, {"int8": TokenIndexSpec(bits=8)}, [0], keep_ratios=(0.001,), min_top_k=budget)
    q, keys = capture.queries[0][-1:], capture.keys[0]
    mass = dense_mass(q, keys, capture.sm_scale)
    held = mass[:, :sink].sum(dim=1) + mass[:, 256 - recent :].sum(dim=1)
    assert float(found[0, 0, 5]) == budget / 256
    if sink + recent == budget:
        assert float(found[0, 0, 0]) == pytest.approx(float(held.mean()), abs=1e-5)
    else:
        assert float(found[0, 0, 0]) > float(held.mean())


def dense_mass(q, keys, sm_scale):
    """[num_qo_heads, prefix_len] of one token, two query heads per KV head."""
    scores = torch.stack([q[0, head] @ keys[:, head // 2].T for head in range(4)])
    return (scores * sm_scale).softmax(dim=1)


def test_bytes_read_are_the_mean_over_tokens():
    capture = make_capture(9, asked=6)
    spec = CSAttentionSpec()
    found = measure_quality(capture, {"csattention": spec}, [1], keep_ratios=(0.5,), min_top_k=1)
    arrays = make_builder(spec).build_layer(capture.keys[1], capture.samples()[1])
    each = [index_read_bytes(spec, arrays, row[None], 256, 128) for row in capture.queries[1][40:46]]
    assert len(set(each)) > 1, "tokens read different numbers of lists"
    assert float(found[0, 0, 3]) == pytest.approx(sum(each) / 6 / kv_bytes(256, 16) + 0.5)


def test_tokens_inside_the_prefix_are_not_tried():
    capture = make_capture(3, asked=0)
    assert len(quality_tokens(capture)) == 0
    with pytest.raises(ValueError, match="expected a captured token behind the prefix, got none"):
        measure_quality(capture, {"int4": TokenIndexSpec()}, [1], min_top_k=1)
    # Two tokens of the sample stand behind a shorter prefix, more inside it.
    place = int(capture.positions[-2])
    shorter = replace(capture.behind(place), sampled=torch.ones(40, dtype=torch.bool))
    assert quality_tokens(shorter).tolist() == [38, 39]


def test_the_table_is_the_mean_over_prompts():
    quality = torch.rand(4, 2, 3, 6, dtype=torch.float64)
    rows = quality_table(quality, ["a", "b"], (0.1, 0.2, 0.3))
    assert [(row.name, row.keep_ratio) for row in rows] == [(n, r) for n in "ab" for r in (0.1, 0.2, 0.3)]
    assert rows[4].error == pytest.approx(float(quality[:, 1, 1, 2].mean()))
