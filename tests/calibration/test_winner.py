"""The rule that chooses the default recipe, and the times behind it: by hand, and against the committed rows."""

from __future__ import annotations

import json
import lzma
import math
from pathlib import Path
from typing import Any

import pytest

from prefix_kernels.budget import budget_for_group
from sglang_ext.calibration.step_time import (
    ATTENTION_US,
    EXACT_US,
    PREFIX_LEN,
    TIMED_BUDGET,
    TIMES,
    SelectionTime,
    attention_us,
    selection_time,
)
from sglang_ext.calibration.winner import TARGET_ERROR, Timed, keep_for_error, timed
from sglang_ext.methods.ab_sparse import ABSparseSpec
from sglang_ext.methods.csattention import CSAttentionSpec
from sglang_ext.methods.token_index import TokenIndexSpec
from sglang_ext.methods.two_level import TwoLevelSpec
from sglang_ext.methods.union import UnionSpec

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def kernel_rows(name: str, **wanted: Any) -> list[dict[str, Any]]:
    """Rows at the reference point's batch and heads that passed their gate."""
    rows = [json.loads(line) for line in (RESULTS / f"kernels-h200-{name}.jsonl").read_text().splitlines()]
    wanted = {"batch": 8, "groups": 1, "shape": [32, 8, 128], "layers": 1, "green": True, **wanted}
    wanted["device"] = "NVIDIA H200"
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def test_a_keep_ratio_is_interpolated_log_against_log_and_never_beyond() -> None:
    points = ((0.05, 0.5), (0.2, 0.125), (0.4, 0.1))
    assert keep_for_error(points, 0.25) == pytest.approx(0.1)
    assert keep_for_error(points, 0.5) == 0.05
    assert keep_for_error(points, 0.9) == 0.05, "less than the least measured budget is not known"
    assert keep_for_error(points, 0.1) == pytest.approx(0.4)
    assert keep_for_error(points, 0.09) == math.inf
    assert keep_for_error((), 0.25) == math.inf
    rising = ((0.05, 0.5), (0.1, 0.2), (0.2, 0.6), (0.4, 0.1))
    assert keep_for_error(rising, 0.25) < 0.1, "the least one"
    assert keep_for_error(((0.1, 0.5), (0.2, 0.0)), 0.25) < 0.2


def test_the_time_is_the_selections_share_and_attention() -> None:
    points = ((0.05, 0.64), (0.2, 0.16))
    own = SelectionTime(80.0, 80.0, ())
    assert timed(points, own, 0.125) == Timed(pytest.approx(0.1), *[pytest.approx(10.0 + attention_us(0.1))] * 2)
    assert timed(points, own, 1.0).most_us == pytest.approx(80.0 + attention_us(0.1))
    assert timed(points, own, 1.0, error=0.1) == Timed(math.inf, math.inf, math.inf)
    bounds = SelectionTime(40.0, 80.0, (), most_keep=0.05)
    beyond = timed(points, bounds, 1.0)
    assert (beyond.least_us, beyond.most_us) == (pytest.approx(40.0 + attention_us(0.1)), math.inf)
    for share in (0.0, 1.1):
        with pytest.raises(ValueError, match=f"expected an anchor share above 0 and at most 1, got {share}"):
            timed(points, own, share)


def test_attention_is_a_line_between_measured_points() -> None:
    for tokens, us in ATTENTION_US:
        assert attention_us(tokens / PREFIX_LEN) == pytest.approx(us)
    assert attention_us(1e-4) == ATTENTION_US[0][1]
    assert attention_us(1.0) == EXACT_US
    (low, low_us), (high, high_us) = ATTENTION_US[-2:]
    assert attention_us((low + high) / 2 / PREFIX_LEN) == pytest.approx((low_us + high_us) / 2)
    for ratio in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"expected a keep ratio above 0 and at most 1, got {ratio}"):
            attention_us(ratio)


def test_attention_times_are_the_committed_rows() -> None:
    for tokens, us in ATTENTION_US[:-1]:
        contexts = [row for row in kernel_rows("attention", case="sparse") if row["us"] == us]
        assert [budget_for_group(round(0.05 * row["context"]), 8) for row in contexts] == [tokens]
    assert ATTENTION_US[-1] == (PREFIX_LEN, EXACT_US)
    assert [row["us"] for row in kernel_rows("attention", case="exact", context=PREFIX_LEN)] == [EXACT_US]


def test_selection_times_are_the_committed_rows() -> None:
    rows = {row["case"]: row for row in kernel_rows("selection", context=PREFIX_LEN)}
    assert {row["config"]["budget"] for row in rows.values() if row["case"].startswith("anchor/")} == {TIMED_BUDGET}

    def us(*cases: str) -> float:
        return sum(rows[case]["us"] for case in cases)

    for spec, time in TIMES:
        assert time.measured == (time.how == ""), spec
        assert all(case in rows for case in time.cases), spec
        if time.measured:
            assert time.least_us == pytest.approx(us(*time.cases)), spec
    for form in ("tokens_index", "blocks"):
        assert us(f"anchor/{form}_joined") <= us(f"anchor/{form}"), "the fastest form is taken"
    by_blocks = selection_time(TwoLevelSpec(first=ABSparseSpec(representation="minmax")))
    assert by_blocks is not None
    assert by_blocks.least_us == us("anchor/blocks_joined")
    assert by_blocks.most_us == min(us("anchor/two_level_joined"), us("anchor/two_level_blocks"))
    blocks = selection_time(ABSparseSpec(representation="minmax"))
    assert blocks is not None
    assert blocks.measured
    assert us("anchor/blocks_joined") < blocks.least_us, "larger blocks on some of the KV heads are fewer"
    lists, both = selection_time(CSAttentionSpec()), selection_time(TwoLevelSpec())
    assert lists is not None
    assert both is not None
    assert (lists.least_us, lists.most_us) == (pytest.approx(us("csa/ours", "top_k/ours")), math.inf)
    assert (both.least_us, both.most_us) == (us("csa/ours"), us("anchor/two_level_csa"))
    assert rows["anchor/two_level_csa"]["config"]["list_len"] == math.ceil(0.02 * PREFIX_LEN)
    assert rows["anchor/two_level_csa"]["config"]["candidates"] == 4 * TIMED_BUDGET


@pytest.mark.parametrize(
    "spec",
    [
        UnionSpec(),
        ABSparseSpec(),
        ABSparseSpec(representation="minmax", block_size=32),
        ABSparseSpec(representation="minmax", sizes="profile"),
        TokenIndexSpec(channel_ratio=0.5),
        TokenIndexSpec(num_channels=48),
        TokenIndexSpec(bits=2),
        TwoLevelSpec(candidate_ratio=0.5),
        CSAttentionSpec(list_ratio=0.05),
    ],
    ids=str,
)
def test_what_was_not_timed_has_no_time(spec: Any) -> None:
    assert selection_time(spec) is None


def test_channels_are_a_share_of_the_head() -> None:
    assert selection_time(TokenIndexSpec(num_channels=96)) == selection_time(TokenIndexSpec())
    assert selection_time(TokenIndexSpec(num_channels=48), head_dim=64) == selection_time(TokenIndexSpec())
    assert selection_time(TokenIndexSpec(num_channels=48, bits=2), head_dim=64) is None


def answers(name: str, **wanted: Any) -> list[dict[str, Any]]:
    """Rows of a committed accuracy file whose configuration has these settings."""
    rows = [json.loads(line) for line in (RESULTS / f"accuracy-h200-{name}.jsonl").read_text().splitlines()]
    return [row for row in rows if all(row["config"][key] == value for key, value in wanted.items())]


def test_the_error_is_one_that_the_first_default_was_harmless_with() -> None:
    """5% kept: 12 of 14 cells equal dense, the others' intervals hold zero."""
    own = answers("default", method="two_level", keep_ratio=0.05)
    assert len(own) == 14
    assert sorted(round(100 * row["difference"], 1) for row in own) == [-0.4, -0.2, *[0.0] * 12]
    assert all(row["low"] < 0 < row["high"] for row in own)
    packed = lzma.decompress((RESULTS / "selection-h200.jsonl.xz").read_bytes())
    rows = [row for row in map(json.loads, packed.splitlines()) if row["source"] == "captured"]
    worst = max(row["points"]["0.05"]["error"] for row in rows if row["method"] == "csa > tokens48 .25")
    assert round(worst, 2) == TARGET_ERROR
