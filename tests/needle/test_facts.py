"""Facts: layout errors, pools, and the training sequences that are made of them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.needle.facts import KINDS, FactMaker, ask, lay_out, lines_length

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from needle_data import sequence


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_lines_that_fill_the_document_fit_and_one_more_token_does_not(kind: str) -> None:
    facts = FactMaker(generator()).make(kind, 3)
    needed = 1 + lines_length(facts)
    assert len(lay_out(generator(), facts, needed)) == needed
    with pytest.raises(ValueError, match=f"the facts take {needed} tokens, the document has only"):
        lay_out(generator(), facts, needed - 1)


def test_limits_are_named() -> None:
    maker = FactMaker(generator())
    with pytest.raises(ValueError, match="unknown fact kind 'rumour'; expected one of note"):
        maker.make("rumour", 1)
    with pytest.raises(ValueError, match="a document has at most 1024 keys"):
        maker.make("note", 1025)
    with pytest.raises(ValueError, match="only notes can be asked several at once"):
        ask(FactMaker(generator()).make("list", 2))


@pytest.mark.parametrize("length", [128, 512, 2048, 36864])
def test_training_sequences_are_exact_and_their_answers_stand_in_the_document(length: int) -> None:
    rng = generator(3)
    for _ in range(8):
        ids, codes, others = sequence(rng, length)
        assert len(ids) == len(codes) == length
        first = int(np.flatnonzero(codes >= 0)[0])
        document = set(ids[:first].tolist())
        assert set(ids[codes > 0].tolist()) <= document
        assert others.shape == (int((codes >= 0).sum()), 3)
        assert set(others[others >= 0].tolist()) <= document
