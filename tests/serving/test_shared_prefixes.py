"""What a server that builds beside serving knows of prefixes: how often each was hit, and queries of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import sleep
from typing import TypeAlias

import numpy as np
import pytest
import torch

from sglang_ext.prefill import background_build
from sglang_ext.prefill.background_build import pieces_of
from sglang_ext.prefill.prefixes import MAX_PREFIXES, HitCounter, Prefix, QuerySample, QuerySamples
from tests.serving.admitting import DIM, GQA, KV_HEADS, LAYERS, PROMPT, hashes


def test_a_prefix_is_due_once_after_so_many_hits() -> None:
    counter = HitCounter(after=2, least=32, align=16)
    prompts = [hashes([*PROMPT, *range(1000 * n, 1000 * n + 96)]) for n in range(1, 6)]
    found = [counter.hit("", one, cached, 0) for one, cached in zip(prompts, (0, 70, 64, 64, 0), strict=True)]
    assert [one and (one.num_tokens, one.hits) for one in found] == [None, None, (64, 4), None, None]
    # The last one's came out of no cache: it begins with a known prefix all the same. So does a longer one.
    longer = [counter.hit("", prompts[0], 160, 0) for _ in range(3)]
    assert [one and one.num_tokens for one in longer] == [None, 160, None]


def test_another_namespace_a_short_prefix_and_one_that_an_index_nearly_covers_are_not_due() -> None:
    counter = HitCounter(after=1, least=32, align=16)
    prompt = hashes([*PROMPT, *range(100, 164)])
    assert counter.hit("", prompt, 16, 0) is None  # 16 tokens
    assert counter.hit("", prompt, 64, 48) is None  # an index of 48 is there
    assert len(counter) == 1
    assert counter.hit("other", prompt, 0, 0) is None
    due = counter.hit("", prompt, 0, 0)
    assert due.namespace == ""


def test_a_little_more_than_what_is_being_built_already_is_not_begun() -> None:
    counter = HitCounter(after=1, least=16, align=16)
    first = counter.hit("", hashes([*range(1280)]), 1264, 0)
    longer = hashes([*range(1280), *range(5000, 5128)])
    assert counter.hit("", longer, 1392, 0) is None
    counter.failed(first)
    assert counter.hit("", longer, 1392, 0) is not None


def test_a_build_that_failed_waits_for_more_hits_and_an_index_that_left_is_built_again() -> None:
    counter = HitCounter(after=1, least=16, align=16)
    prompt = hashes(PROMPT)
    due = counter.hit("", prompt, 64, 0)
    counter.failed(due)
    assert [counter.hit("", prompt, 64, 0) is not None for _ in range(5)] == [False, False, False, True, False]
    due.built_at, due.tries = 5.0, 0
    assert counter.hit("", prompt, 64, 64) is None
    assert counter.hit("", prompt, 64, 0, admitted=4.0) is None  # it was looked up before
    assert counter.hit("", prompt, 64, 0, admitted=6.0) is due  # no index serves it any more


def test_indexes_that_leave_a_small_store_before_they_have_paid_are_not_built_for_ever() -> None:
    """Twelve prefixes in turn, 240 requests, a store that holds four indexes: the one used last leaves last."""
    counter = HitCounter(after=2, least=16, align=16)
    prompts = [hashes([*range(1000 * n, 1000 * n + 64)]) for n in range(12)]
    store: list[Prefix] = []
    builds = 0
    for now in range(240):
        prompt = prompts[now % 12]
        there = next((one for one in store if one.begins("", prompt)), None)
        due = counter.hit("", prompt, 64, 64 if there else 0, admitted=float(now))
        if due is not None:
            due.built_at, builds = now + 0.5, builds + 1
            store = [*store, due][-4:]
    assert builds <= 12 * 2
    assert counter.evicted > 0


@pytest.mark.parametrize(("built_at", "served_at"), [(1.0, (2.0, 2.0)), (600.0, (1.0, 2.0))], ids=["known", "late"])
def test_an_index_that_paid_before_it_left_is_built_again_as_soon_as_a_new_one(
    built_at: float, served_at: tuple[float, float]
) -> None:
    """Also where a rank that left its part for another one learns late that the index is stored."""
    counter = HitCounter(after=2, least=16, align=16)
    prompt = hashes(PROMPT)
    due = [counter.hit("", prompt, 64, 0) for _ in range(2)][1]
    due.built_at = built_at
    assert [counter.hit("", prompt, 64, 64, admitted=now) for now in served_at] == [None, None]
    assert counter.hit("", prompt, 64, 0, admitted=built_at + 1) is None
    assert due.tries == 0
    assert counter.hit("", prompt, 64, 0, admitted=built_at + 1) is due


def test_what_is_asked_for_is_built_again_after_it_has_left_the_store() -> None:
    counter = HitCounter(after=9, least=16, align=16)
    prompt = hashes(PROMPT)
    asked = counter.ask_for("", prompt)
    assert counter.hit("", prompt, 0, 0) is asked
    asked.built_at = 1.0
    assert counter.hit("", prompt, 64, 64, admitted=2.0) is None
    assert counter.ask_for("", prompt) is asked
    assert counter.hit("", prompt, 64, 64, admitted=3.0) is None, "it is still there"
    assert counter.hit("", prompt, 64, 0, admitted=4.0) is asked


def test_what_is_asked_for_goes_before_a_longer_prefix_and_does_not_keep_it_back_later() -> None:
    counter = HitCounter(after=1, least=64, align=16)
    longer = hashes([*PROMPT, *range(900, 916)])
    for _ in range(3):
        assert counter.hit("", longer, 80, 32) is None, "48 tokens more are too few"
    asked = counter.ask_for("", hashes(PROMPT))
    assert counter.hit("", longer, 80, 32) is asked
    asked.built_at = 1.0
    longest = hashes([*PROMPT, *range(900, 1028)])
    due = counter.hit("", longest, 192, 64, admitted=2.0)
    assert due.num_tokens == 192


def test_what_is_asked_for_is_not_forgotten_before_a_request_begins_with_it() -> None:
    """On a busy server each turn of each conversation is another prefix. What was built may be forgotten."""
    counter = HitCounter(after=2, least=16, align=16)
    asked = counter.ask_for("", hashes(PROMPT))
    others = [hashes([n] * 16 + PROMPT) for n in range(1, 2 * MAX_PREFIXES)]
    for prompt in others:
        counter.hit("", prompt, 64, 0)
    assert len(counter) == MAX_PREFIXES
    assert counter.hit("", hashes(PROMPT), 0, 0) is asked
    asked.built_at = 1.0
    for prompt in others:
        counter.hit("", prompt, 64, 0)
    assert asked not in counter._known.values()
    for prompt in others:
        counter.ask_for("", prompt)
    assert [counter.hit("", hashes(PROMPT), 64, 0) is not None for _ in range(2)] == [False, True], "not all are spared"
    assert len(counter) == MAX_PREFIXES


def test_prefixes_that_nobody_hits_are_forgotten() -> None:
    counter = HitCounter(after=9, least=16, align=16)
    prompts = [hashes([n] * 16 + PROMPT) for n in range(MAX_PREFIXES + 5)]
    for n, prompt in enumerate(prompts):
        counter.hit("", prompt, 16 + 16 * (n % 3), 0)
    assert len(counter) == MAX_PREFIXES
    oldest = next(iter(counter._known.values()))
    counter.hit("", prompts[5], 64, 0)
    assert (len(counter), oldest.hits) == (MAX_PREFIXES, 2), "the one that is hit stays, also for what begins with it"
    assert oldest in counter._known.values()


@pytest.fixture
def keep() -> Iterator[Callable[..., QuerySamples]]:
    """Samples of so many bytes, with those given."""
    made: list[QuerySamples] = []

    def keep(*given: QuerySample, nbytes: int = 1 << 30) -> QuerySamples:
        made.append(QuerySamples(nbytes, torch.device("cpu")))
        for one in given:
            made[-1].take(one)
        return made[-1]

    yield keep
    for samples in made:
        samples.close()


Keep: TypeAlias = Callable[..., QuerySamples]


def sample(tokens: list[int], begin: int, value: float, rows: int = 8) -> QuerySample:
    """Queries whose values say who they are and where."""
    positions = np.linspace(begin, len(tokens) - 1, rows).astype(np.int64)
    queries = torch.full((LAYERS, rows, KV_HEADS * GQA, DIM), value) + torch.from_numpy(positions)[None, :, None, None]
    return QuerySample("", hashes(tokens), begin, positions, queries.float())


def test_a_prefix_gets_queries_of_its_own_tokens_only_and_evenly(keep: Keep) -> None:
    samples = keep(
        sample([*PROMPT[:32], *range(700, 732)], 0, 1000.0),  # begins as it does, then differs
        sample([*PROMPT, *range(100, 132)], 20, 2000.0),  # computed from 20 on
        sample(list(range(9, 99)), 0, 9000.0),  # another prompt
        sample([*PROMPT, *range(800, 832)], 48, 8000.0, rows=2),  # nothing that the others have not
    )
    found = samples.of(Prefix("", hashes(PROMPT)), KV_HEADS, 4)
    assert found.shape[:2] == (LAYERS, KV_HEADS)
    values = found[0, 0, :, 0].tolist()
    positions = [value % 1000 for value in values]
    assert all(value < 3000 for value in values)
    assert max(positions) < 64
    assert sum(1000 <= value < 2000 for value in values) == sum(value >= 2000 for value in values) > 0
    assert all((value < 2000) == (position < 32) for value, position in zip(values, positions, strict=True))


def test_of_samples_of_the_same_tokens_the_one_with_most_queries_of_them_counts(keep: Keep) -> None:
    prefix, long = Prefix("", hashes(PROMPT)), [*PROMPT, *range(100, 6100)]
    sparse = sample(long, 0, 10_000.0)
    sparse.positions[0] = 70  # of eight tokens that were drawn evenly, none is of the prefix
    samples = keep(sparse)
    assert samples.of(prefix, KV_HEADS, 4) is None
    samples.take(sample([*PROMPT[:48], *range(900, 932)], 0, 20_000.0))
    samples.take(sample([*PROMPT, *range(800, 832)], 0, 30_000.0))
    values = samples.of(prefix, KV_HEADS, 8)[0, 0, :, 0]
    assert bool((values >= 20_000).all())
    samples.take(sample(long, 16, 40_000.0, rows=3))
    assert torch.equal(samples.of(prefix, KV_HEADS, 8)[0, 0, :, 0], values)


def test_samples_stay_within_their_bytes_and_the_one_used_last_stays(keep: Keep) -> None:
    one = sample(PROMPT, 0, 0.0)
    samples = keep(one, sample(list(range(300, 364)), 0, 0.0), nbytes=2 * one.queries.nbytes)
    assert samples.of(Prefix("", hashes(PROMPT)), KV_HEADS, 4) is not None
    assert samples.of(Prefix("other", hashes(PROMPT)), KV_HEADS, 4) is None
    assert samples.of(Prefix("", hashes([*PROMPT, *range(80)])), KV_HEADS, 4) is None, "less than half of it"
    samples.take(sample(list(range(600, 664)), 0, 0.0))
    assert samples.of(Prefix("", hashes(PROMPT)), KV_HEADS, 4) is not None
    assert samples.of(Prefix("", hashes(list(range(300, 364)))), KV_HEADS, 4) is None
    assert samples.nbytes == 2 * one.queries.nbytes


def test_a_build_waits_for_samples_that_are_on_their_way(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = keep()
    arrived = samples._arrived
    for lost in (False, True):
        monkeypatch.setattr(samples, "_arrived", lambda kept, lost=lost: (sleep(0.2), arrived(None if lost else kept)))
        samples.take(sample(PROMPT, 0, 0.0))
        assert samples.of(Prefix("", hashes(PROMPT)), KV_HEADS, 4) is not None
        assert samples.coming == 0


@pytest.mark.parametrize("heads", [range(8), range(4, 6), range(3, 4)], ids=str)
def test_pieces_cover_every_head_of_every_layer_once(heads: range) -> None:
    """Also those of one rank."""
    for length in (1000, 40_000, 131_072, 1_000_000):
        pieces = pieces_of(3, heads, length)
        covered = [(piece.layer, head) for piece in pieces for head in piece.heads]
        assert covered == [(layer, head) for layer in range(3) for head in heads]
        assert all(
            len(piece.heads) == 1 or len(piece.heads) * length <= background_build.PIECE_TOKENS for piece in pieces
        )
