"""The recommended recipe and budget: the rule on made-up tables, the measurement against the method's own words."""

import math

import pytest
import torch

from prefix_kernels.pooling import Pooling
from prefix_kernels.testing import attention_recall, dense_attention
from sglang_ext.calibration.recommend import (
    RecipeQuality,
    default_recipes,
    measure_quality,
    quality_table,
    recommend,
)
from sglang_ext.indexing.registry import make_builder, make_selector
from sglang_ext.indexing.token_index import TokenIndexSpec
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
    [((0.2, 0.1, 0.0), 0.05), ((0.6, 0.4, 0.1), 0.1), ((0.7, 0.6, 0.4), 0.2), ((0.9, 0.8, 0.7), 0.2)],
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


def test_quality_is_the_recall_and_error_of_the_selector():
    capture = make_capture(5, num_layers=2, asked=3)
    spec = TokenIndexSpec()
    found = measure_quality(
        capture, {"token_index": spec}, [1], keep_ratios=(0.1, 0.5), num_sink=2, num_recent=4, num_tokens=3
    )
    assert found.shape == (1, 2, 5)
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
    options = {"keep_ratios": (0.5,), "num_sink": 0, "num_recent": 0}
    recipes = {"int8": TokenIndexSpec(bits=8)}
    parts = [measure_quality(capture, recipes, [layer], **options) for layer in (1, 2)]
    both = measure_quality(capture, recipes, [1, 2], **options)
    torch.testing.assert_close(both, (parts[0] + parts[1]) / 2)
    assert float(both[0, 0, 0]) == pytest.approx(float(both[0, 0, 1]), abs=5e-3)


def test_budgets_hold_the_windows():
    capture = make_capture(7)
    whole = measure_quality(capture, {"int4": TokenIndexSpec()}, [1], keep_ratios=(0.001,), num_sink=200, num_recent=56)
    assert float(whole[0, 0, 0]) == pytest.approx(1.0, abs=1e-5)
    assert float(whole[0, 0, 2]) < 1e-4


def test_the_table_is_the_mean_over_prompts():
    quality = torch.rand(4, 2, 3, 5, dtype=torch.float64)
    rows = quality_table(quality, ["a", "b"], (0.1, 0.2, 0.3))
    assert [(row.name, row.keep_ratio) for row in rows] == [(n, r) for n in "ab" for r in (0.1, 0.2, 0.3)]
    assert rows[4].error == pytest.approx(float(quality[:, 1, 1, 2].mean()))
