"""Tokens that lossless decode draws: of the exact step's distribution, and as often as can be those of the draft."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from sglang_ext.decode.draws import Draws, Sampling

MANY = 20_000
ALL = 1 << 30
"""Of `top_k`: SGLang's number for all tokens."""


def shares(tokens: Tensor, size: int) -> Tensor:
    return torch.bincount(tokens, minlength=size) / len(tokens)


def within(found: Tensor, wanted: Tensor, count: int) -> bool:
    """Whether frequencies are those of so many samples, within 4.5 standard deviations, and none of what cannot be."""
    off = (found - wanted).abs()
    return bool((off <= 4.5 * (wanted * (1 - wanted) / count).sqrt()).all() and (found[wanted == 0] == 0).all())


def wanted_shares(logits: list[float], one: Sampling) -> list[float]:
    """Of each token, by the definitions of the parameters."""
    weights = torch.tensor(logits, dtype=torch.float64).div(one.temperature).softmax(0).tolist()
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    whole = sum(weights[token] for token in order[: one.top_k]) if one.chained else 1.0
    kept, before = {}, 0.0
    for rank, token in enumerate(order):
        if rank < one.top_k and before <= one.top_p * whole and weights[token] >= one.min_p * weights[order[0]]:
            kept[token] = weights[token]
        before += weights[token]
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(len(weights))]


LOGITS = [0.4, 2.0, -1.0, 1.2, -3.0, 0.9]


@pytest.mark.parametrize(
    "one",
    [
        Sampling(1.0, ALL),
        Sampling(0.5, ALL),
        Sampling(1.5, 3),
        Sampling(1.0, ALL, top_p=0.8),
        Sampling(0.8, 4, top_p=0.75, min_p=0.05),
        *(Sampling(1.5, 3, top_p=0.7, min_p=0.05, chained=chained) for chained in (False, True)),
        Sampling(1.0, ALL, min_p=0.3),
        Sampling(1.0, 1),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_the_parameters_say(one: Sampling) -> None:
    """Also in a batch of others, which have others, and of greedy ones."""
    torch.manual_seed(3)
    draws = Draws([one] * MANY + [None, Sampling(2.0, ALL), None])
    logits = torch.tensor([LOGITS]).expand(MANY + 3, -1)
    tokens = draws.tokens(logits, [(row, 0) for row in range(MANY + 3)])
    assert tokens[[MANY, MANY + 2]].tolist() == [1, 1]
    assert within(shares(tokens[:MANY], 6), torch.tensor(wanted_shares(LOGITS, one)), MANY)


def test_what_is_kept_of_rounds_is_of_the_exact_distribution_whatever_was_drafted() -> None:
    """Three tokens of a chain, drafted by another chain, two a round: all 27 answers are as frequent as the exact
    chain says, and drafts are kept as often as 2408.07978 promises.
    """
    torch.manual_seed(5)
    exact, other = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1))
    p, q = exact.softmax(-1), other.softmax(-1)
    answers = torch.full((MANY, 3), -1)
    length = torch.zeros(MANY, dtype=torch.int64)
    rows = torch.arange(MANY)
    first_kept = None
    while bool((length < 3).any()):
        draws = Draws([Sampling(1.0, ALL)] * MANY)
        last = torch.where(length > 0, answers[rows, (length - 1).clamp(min=0)], 3)  # state 3: the prompt
        drafts = [last]
        for depth in range(2):
            drafts.append(draws.tokens(other[drafts[-1]], [(row, depth) for row in range(MANY)]))
        places = [(row, depth) for depth in range(3) for row in range(MANY)]
        said = draws.tokens(exact[torch.cat(drafts)], places).view(3, MANY)
        alive = torch.ones(MANY, dtype=torch.bool)
        for depth in range(3):
            at = alive & (length < 3)
            answers[rows[at], length[at]] = said[depth][at]
            length[at] += 1
            alive &= said[depth] == drafts[depth + 1] if depth < 2 else alive
        if first_kept is None:
            first_kept = float((said[0] == drafts[1]).float().mean())
    found = shares(answers[:, 0] * 9 + answers[:, 1] * 3 + answers[:, 2], 27)
    wanted = torch.tensor([p[3, a] * p[a, b] * p[b, c] for a, b, c in product(range(3), repeat=3)])
    assert within(found, wanted, MANY)
    tv = float((p[3] - q[3]).abs().sum() / 2)
    assert first_kept is not None
    assert 0.05 < tv < 0.9
    assert (1 - tv) / (1 + tv) - 0.01 < first_kept < 1 - tv + 0.01
