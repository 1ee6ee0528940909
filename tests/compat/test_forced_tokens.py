"""Forcing: log-probabilities are those before it, the generated token is the given one, and two files compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.calibration.agreement import Agreement, agreement, check_generated, load_steps
from sglang_ext.compat.forced_tokens import ForcedTokens, forcing

VOCAB, STEPS = 24, 4


def decode(requests: list[dict[str, Any]], logits: torch.Tensor) -> list[list[int]]:
    """`logits` [steps, rows, vocab] through the processor as SGLang calls it, greedy; tokens of each request."""
    processor = ForcedTokens.from_str(requests[0]["custom_logit_processor"])
    params = [json.loads(json.dumps(one["sampling_params"]["custom_params"])) for one in requests]
    chosen = [processor(step.clone(), params).argmax(dim=1) for step in logits]
    return torch.stack(chosen, dim=1).tolist()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_forced_requests_compare_over_the_references_tokens(tmp_path: Path, generator: torch.Generator) -> None:
    first, second = torch.randn(2, STEPS, 2, VOCAB, generator=generator)
    names = [(tmp_path / f"reference-{i}", tmp_path / f"other-{i}") for i in range(2)]
    own = decode([forcing(reference, STEPS, top=VOCAB) for reference, _ in names], first)
    assert own == first.argmax(dim=2).T.tolist(), "nothing is forced without a reference"
    ours = decode([forcing(out, STEPS, reference=reference) for reference, out in names], second)
    assert ours == own
    for i, (reference, out) in enumerate(names):
        found = agreement(load_steps(reference), load_steps(out))
        p, q = (torch.log_softmax(one[1:, i].double(), dim=1) for one in (first, second))
        assert found.steps == STEPS - 1, "the first token is prefill's"
        assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum(dim=1).mean()), rel=1e-5)
        assert found.top1 == float((p.argmax(dim=1) == q.argmax(dim=1)).double().mean())
        tokens = torch.tensor(own[i][1:])[:, None]
        assert found.delta == pytest.approx(float((p.gather(1, tokens) - q.gather(1, tokens)).abs().mean()), rel=1e-5)
        assert load_steps(out).rows.tolist() == [2] * STEPS
        assert agreement(load_steps(reference), load_steps(out), 2) == found, "both decoded together"
        assert agreement(load_steps(reference), load_steps(out), 3) is None


def test_tokens_behind_the_top_are_one_bin(tmp_path: Path, generator: torch.Generator) -> None:
    logits = torch.randn(STEPS, 1, VOCAB, generator=generator)
    decode([forcing(tmp_path / "a", STEPS, top=4)], logits)
    ids = torch.from_numpy(load_steps(tmp_path / "a").ids)[:, None]
    # The same distribution but for a shift among tokens that are not in the top.
    other = logits.clone()
    rest = torch.ones_like(logits, dtype=torch.bool).scatter_(2, ids, value=False)
    other[rest] = logits[rest].flip(0)
    scale = torch.logsumexp(logits.masked_fill(~rest, -torch.inf), dim=2, keepdim=True)
    other = torch.where(
        rest, other - torch.logsumexp(other.masked_fill(~rest, -torch.inf), 2, keepdim=True) + scale, other
    )
    decode([forcing(tmp_path / "b", STEPS, reference=tmp_path / "a")], other)
    found = agreement(load_steps(tmp_path / "a"), load_steps(tmp_path / "b"))
    assert found == Agreement(STEPS - 1, pytest.approx(0.0, abs=1e-6), 1.0, pytest.approx(0.0, abs=1e-6))


def test_a_step_that_ran_ahead_of_the_end_changes_nothing(tmp_path: Path, generator: torch.Generator) -> None:
    logits = torch.randn(STEPS + 1, 1, VOCAB, generator=generator)
    request = [forcing(tmp_path / "a", STEPS)]
    decode(request, logits[:STEPS])
    before = (tmp_path / "a").read_bytes()
    decode(request, logits[STEPS:])
    assert (tmp_path / "a").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_other_tokens_are_not_compared(tmp_path: Path, generator: torch.Generator) -> None:
    logits = torch.randn(STEPS, 2, VOCAB, generator=generator)
    decode([forcing(tmp_path / name, STEPS) for name in ("a", "b")], logits)
    a, b = load_steps(tmp_path / "a"), load_steps(tmp_path / "b")
    assert not np.array_equal(a.tokens, b.tokens)
    with pytest.raises(ValueError, match="expected the reference's tokens forced on the other"):
        agreement(a, b)


def test_tokens_that_were_not_generated_are_seen(tmp_path: Path, generator: torch.Generator) -> None:
    (tokens,) = decode([forcing(tmp_path / "a", STEPS)], torch.randn(STEPS, 1, VOCAB, generator=generator))
    check_generated(tmp_path / "a", tokens)
    with pytest.raises(ValueError, match=r"expected the tokens of .* to be generated, got others"):
        check_generated(tmp_path / "a", [*tokens[1:], tokens[0]])


def test_tokens_are_drawn_by_seed(tmp_path: Path, generator: torch.Generator) -> None:
    logits = torch.randn(STEPS, 1, VOCAB, generator=generator)
    drawn = [decode([forcing(tmp_path / f"{i}", STEPS, seed=seed)], logits) for i, seed in enumerate((1, 1, 2, 3))]
    assert drawn[0] == drawn[1]
    assert len({tuple(one[0]) for one in drawn}) > 1
    assert load_steps(tmp_path / "0").tokens.tolist() == drawn[0][0]
