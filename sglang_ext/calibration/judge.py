"""Layer plans and budgets judged by how far the model's next tokens are from dense's, and by the time of a decode step.

Attention mass proposes candidates; it does not say what they cost. Each candidate serves the held-out prompts, and
dense's tokens are forced through its decode steps (`agreement`). Of those whose KL divergence from dense is
surely within a bound the fastest is recommended. KL is nearer to answers than mass is; it is no proof of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev

import msgspec

Z95 = 1.959964
"""z of a two-sided 95% interval."""

T95 = (math.inf, 12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646)
"""Student's t of a two-sided 95% interval over 1, 2, ... prompts; over more the last one, which is wider."""

SLACK = 1.25
"""The bound, unless another is given: the KL of the default candidate on the same prompts, and a quarter."""

GAIN = 0.95
"""A candidate is faster where its step takes at most this part of the default's: less is what starts differ by."""

USED = 0.95
"""Share of the rows that a candidate's plan has to have served; what dense decode served says nothing of it."""

LONG_PREFIX = 4096
"""Tokens; a plan judged behind shorter prefixes says nothing about long ones."""

ANCHOR_SHARES = (1.0, 2 / 3, 1 / 2, 1 / 3)
"""Of the anchors that keep the attention mass: how many the proposed plans have."""


def percent(ratio: float) -> str:
    """A budget as text, unrounded: 2.5% is neither 2% nor 3%."""
    return f"{100 * ratio:g}%"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One layer plan and budget.

    Attributes:
        anchors: layers that select; None: all but the dense ones, the plan of a model without a profile.
        keep_ratio: budget as a fraction of the prefix.
    """

    anchors: int | None
    keep_ratio: float

    @property
    def name(self) -> str:
        layers = "every layer selects" if self.anchors is None else f"{self.anchors} layers select"
        return f"{layers}, {percent(self.keep_ratio)}"


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What one candidate did.

    Attributes:
        candidate: which.
        profile: digest of the profile that said its plan.
        steps: positions that were compared.
        kl: of each prompt, nats: mean over its positions.
        top1: share of positions whose most probable token is dense's.
        ms: milliseconds of a decode step behind the longest prompt, of each repetition.
        least_tokens, most_tokens: of the prompts' prefixes.
        sparse_share: of the rows that were decoded, those that the plan served.
    """

    candidate: Candidate
    profile: str
    steps: int
    kl: list[float]
    top1: float
    ms: list[float]
    least_tokens: int
    most_tokens: int
    sparse_share: float

    @property
    def mean_kl(self) -> float:
        """Mean over prompts."""
        return fmean(self.kl)

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of `mean_kl` over prompts, as positions of one prompt depend on each other; of one prompt
        it has no upper end."""
        half = _half(self.kl)
        return max(self.mean_kl - half, 0.0), self.mean_kl + half

    @property
    def step_ms(self) -> float:
        """Median of the repetitions."""
        return median(self.ms)


def _half(values: Sequence[float]) -> float:
    """Half of the 95% interval of a mean, by Student's t; infinite of one value."""
    spread = stdev(values) if len(values) > 1 else 1.0
    return T95[min(len(values), len(T95)) - 1] * spread / math.sqrt(len(values))


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The candidate that is recommended, those that are surely within the bound, the bound, why, and all that were
    judged, fastest first.
    """

    chosen: Candidate
    within: list[Candidate]
    max_kl: float
    reason: str
    judged: list[Judged]


def proposals(anchors: int, layers: int, keep_ratios: Sequence[float], *, given: bool = False) -> list[Candidate]:
    """Candidates to judge, the default one first.

    Args:
        anchors: how many keep the attention mass, or how many were asked for.
        layers: that are not dense.
        keep_ratios: budgets; the first is the default candidate's.
        given: they were asked for; no other plan is proposed beside the default.
    """
    counts = dict.fromkeys(max(1, round(share * anchors)) for share in ((1.0,) if given else ANCHOR_SHARES))
    plans = [None, *(count for count in counts if count < layers)]
    return [Candidate(anchors=count, keep_ratio=ratio) for count in plans for ratio in keep_ratios]


def choose(judged: Sequence[Judged], max_kl: float | None = None) -> Verdict:
    """The fastest candidate surely within the bound; the default where none is faster than it.

    Args:
        judged: of the same prompts, the default candidate first.
        max_kl: the bound in nats; None: `SLACK` of the default candidate's.

    Raises:
        ValueError: the default candidate's rows were not served by its plan: nothing can be compared.
    """
    default = judged[0]
    if default.sparse_share < USED:
        raise ValueError(
            f"expected the index to serve {USED:.0%} of the rows of {default.candidate.name!r}, got "
            f"{default.sparse_share:.0%}; see the log for why indexes were not used, or say --judge no"
        )
    bound = SLACK * default.mean_kl if max_kl is None else max_kl
    order = sorted(judged, key=lambda one: one.step_ms)
    within = [one for one in order if one.sparse_share >= USED and _surely_within(one, default, max_kl)]
    if default in within:
        faster = [one for one in within if one.step_ms <= GAIN * default.step_ms]
        best = faster[0] if faster else default
        why = (
            f", where the default takes {default.step_ms:.2f}"
            if faster
            else "; no candidate within the bound is faster"
        )
    else:
        best = within[0] if within else default
        why = "; the default is not within the bound"
        why += "" if within else ", and no candidate is: raise --max-kl or the budget"
    said = f"KL {best.mean_kl:.4f} (bound {bound:.4f}), {best.step_ms:.2f} ms a step{why}"
    if len(default.kl) == 1:
        said += "; judged behind one held-out prompt, of which nothing is sure: give prompts of more texts"
    if default.most_tokens < LONG_PREFIX:
        said += (
            f"; judged behind {default.most_tokens} tokens at most: says nothing about prefixes of {LONG_PREFIX} and "
            "more"
        )
    sure = [one.candidate for one in within]
    return Verdict(chosen=best.candidate, within=sure, max_kl=bound, reason=said, judged=order)


def _surely_within(one: Judged, default: Judged, max_kl: float | None) -> bool:
    """Whether the upper end of the interval is within the bound: of the KL, or of what it exceeds the default's by."""
    if max_kl is not None:
        return one.interval[1] <= max_kl
    if one is default:
        return True
    more = [own - his for own, his in zip(one.kl, default.kl, strict=True)]
    return fmean(more) + _half(more) <= (SLACK - 1) * default.mean_kl
