"""The recommended recipe and budget: the rule on made-up tables, the measurement against the method's own words."""

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


def table(**recalls):
    """Recalls at budgets of 5%, 10% and 20%; the best tokens hold 0.8, 0.9 and 1.0."""
    return [
        RecipeQuality(name=name, keep_ratio=ratio, recall=recall, oracle_recall=oracle, error=1 - recall)
        for name, row in recalls.items()
        for ratio, recall, oracle in zip((0.05, 0.1, 0.2), row, (0.8, 0.9, 1.0), strict=True)
    ]


def test_the_default_stays_unless_another_is_clearly_better():
    others = dict.fromkeys(("token_index", "ab_sparse"), (0.1, 0.2, 0.3))
    near = table(csattention=(0.78, 0.89, 0.95), two_level=(0.79, 0.9, 0.99), **others)
    assert recommend(near, RECIPES, 0.05).name == "csattention"
    far = table(csattention=(0.7, 0.89, 0.95), two_level=(0.79, 0.9, 0.99), **others)
    choice = recommend(far, RECIPES, 0.05)
    assert (choice.name, choice.keep_ratio) == ("two_level", 0.1)
    assert "two_level holds 0.790 of the attention at 5%, csattention 0.700" in choice.reason
    assert choice.spec["method"] == "two_level"
    assert recommend(far, RECIPES, 0.1).name == "csattention", "the budget of the calibration decides"


def test_the_budget_is_the_smallest_that_is_enough_or_the_largest():
    recipes = default_recipes("token_index")
    rows = dict.fromkeys(recipes, (0.0, 0.0, 0.0))
    for recall, expected in (((0.9, 0.95, 1.0), 0.05), ((0.7, 0.9, 1.0), 0.1), ((0.5, 0.6, 0.95), 0.2)):
        assert recommend(table(**{**rows, "token_index": recall}), recipes, 0.05).keep_ratio == expected
    choice = recommend(table(**{**rows, "token_index": (0.1, 0.2, 0.5)}), recipes, 0.05)
    assert choice.keep_ratio == 0.2
    assert "is the largest that was tried" in choice.reason


def test_nothing_measured_is_refused():
    with pytest.raises(ValueError, match="at least one recipe, got none"):
        recommend([], RECIPES, 0.05)


def test_quality_is_the_recall_and_error_of_the_selector():
    capture = make_capture(5, num_layers=2, asked=3)
    spec = TokenIndexSpec()
    found = measure_quality(
        capture, {"token_index": spec}, [1], keep_ratios=(0.1, 0.5), num_sink=2, num_recent=4, num_tokens=3
    )
    assert found.shape == (1, 2, 3)
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
    quality = torch.rand(4, 2, 3, 3, dtype=torch.float64)
    rows = quality_table(quality, ["a", "b"], (0.1, 0.2, 0.3))
    assert [(row.name, row.keep_ratio) for row in rows] == [(n, r) for n in "ab" for r in (0.1, 0.2, 0.3)]
    assert rows[4].error == pytest.approx(float(quality[:, 1, 1, 2].mean()))
