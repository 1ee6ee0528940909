"""Which candidate a calibration recommends."""

from __future__ import annotations

import math
import random
import re

import pytest

from sglang_ext.calibration.judge import Candidate, Judged, choose, proposals
from sglang_ext.calibration.report import _judged

DEFAULT = Candidate(anchors=None, keep_ratio=0.05)


def judged(anchors: int | None, kl: list[float], ms: list[float], tokens: int = 8192, share: float = 1.0) -> Judged:
    candidate = Candidate(anchors=anchors, keep_ratio=0.05)
    fixed = {"profile": "", "steps": 100, "top1": 0.99, "least_tokens": 1024}
    return Judged(candidate=candidate, kl=kl, ms=ms, most_tokens=tokens, sparse_share=share, **fixed)


def test_proposals_begin_with_the_default_and_repeat_none() -> None:
    found = proposals(18, 23, (0.05, 0.02))
    assert found[0] == DEFAULT
    assert [(one.anchors, one.keep_ratio) for one in found] == [
        (count, ratio) for count in (None, 18, 12, 9, 6) for ratio in (0.05, 0.02)
    ]
    assert {one.anchors for one in proposals(23, 23, (0.1, 0.05))} == {None, 15, 12, 8}, (
        "all layers: that is the default"
    )
    assert [one.keep_ratio for one in proposals(1, 1, (0.1, 0.05, 0.02))] == [0.1, 0.05, 0.02]
    assert {one.anchors for one in proposals(8, 23, (0.05,), given=True)} == {None, 8}


def test_budgets_are_told_apart() -> None:
    names = [one.name for one in proposals(1, 1, (0.025, 0.05, 0.02, 0.004, 0.07))]
    assert names == [f"every layer selects, {ratio}" for ratio in ("2.5%", "5%", "2%", "0.4%", "7%")]


def test_the_fastest_surely_within_the_bound_is_chosen() -> None:
    default = judged(None, [0.01, 0.03, 0.02], [2.0, 2.1, 2.2])
    near = judged(12, [0.0149, 0.0349, 0.0249], [1.8, 1.8, 1.8])
    far = judged(4, [0.0151, 0.0351, 0.0251], [1.0, 1.0, 1.0])
    # On the mean within the bound, but not surely: it is nearer on one prompt and farther on the other.
    unsure = judged(6, [0.0, 0.04, 0.02], [0.9, 0.9, 0.9])
    verdict = choose([default, near, far, unsure])
    assert verdict.chosen == near.candidate
    assert verdict.max_kl == pytest.approx(1.25 * 0.02)
    assert verdict.judged == [unsure, far, near, default], "fastest first"
    assert verdict.within == [near.candidate, DEFAULT]
    row = "".join(_judged(verdict, {"judged": b""}))
    marks = re.findall(r"<td>([a-z ]*)</td></tr>", row)
    assert marks == ["not surely within", "too far", "recommended", ""]
    assert "KL 0.0249 (bound 0.0250), 1.80 ms a step, where the default takes 2.10" in verdict.reason
    assert choose([default, near, far], max_kl=0.1).chosen == far.candidate


def test_where_none_is_faster_the_default_stays_and_the_reason_says_so() -> None:
    default = judged(None, [0.02, 0.02], [2.0, 2.1, 2.2])
    by_chance, unused = judged(12, [0.02, 0.02], [2.0, 2.0, 2.0]), judged(9, [0.0, 0.0], [1.0, 1.0, 1.0], share=0.1)
    assert choose([default, by_chance, unused]).chosen == DEFAULT
    assert "no candidate within the bound is faster" in choose([default, by_chance]).reason


def test_a_default_beyond_the_bound_gives_way_to_what_is_within() -> None:
    default, slower = judged(None, [0.03, 0.03], [2.0]), judged(18, [0.01, 0.01], [3.0])
    verdict = choose([default, slower], max_kl=0.02)
    assert verdict.chosen == slower.candidate
    assert verdict.reason.endswith("; the default is not within the bound")
    none = choose([default, slower], max_kl=0.001)
    assert none.chosen == DEFAULT
    assert "and no candidate is: raise --max-kl or the budget" in none.reason


def test_nothing_is_compared_with_a_default_that_was_not_served() -> None:
    with pytest.raises(ValueError, match=r"expected the index to serve 95% of the rows of .*, got 10%; see the log"):
        choose([judged(None, [0.02], [2.0], share=0.1)])


def test_short_prompts_are_said() -> None:
    assert "says nothing about prefixes of 4096 and more" in choose([judged(None, [0.1], [1.0], 4095)]).reason
    assert "says nothing" not in choose([judged(None, [0.1], [1.0], 4096)]).reason


def test_the_interval_is_over_prompts() -> None:
    low, high = judged(None, [0.01, 0.02, 0.06], [1.0]).interval
    half = 4.3027 * math.sqrt(0.0007) / math.sqrt(3)
    assert (low, high) == pytest.approx((max(0.03 - half, 0.0), 0.03 + half))
    assert judged(None, [0.01], [1.0]).interval == (0.0, math.inf)


@pytest.mark.parametrize("prompts", [2, 3, 8])
def test_few_prompts_make_a_wide_interval(prompts: int) -> None:
    """That of the normal distribution covers 70% of the means of two prompts, 90% of eight."""
    draw = random.Random(1)
    found = [judged(None, [draw.gauss(1.0, 0.1) for _ in range(prompts)], [1.0]).interval for _ in range(2000)]
    assert sum(low <= 1.0 <= high for low, high in found) / 2000 == pytest.approx(0.95, abs=0.015)


def test_nothing_is_sure_behind_one_prompt() -> None:
    default, nearer = judged(None, [0.02], [2.0]), judged(12, [0.01], [1.0])
    for bound in (None, 1.0):
        verdict = choose([default, nearer], bound)
        assert verdict.chosen == DEFAULT
        assert "judged behind one held-out prompt, of which nothing is sure" in verdict.reason
