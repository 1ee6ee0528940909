"""Training sequences of the needle model, and the processes that make them.

A sequence is a document with a random mix of facts, followed by questions and answers about it,
each fact at most once; the loss is on the answers. The documents of `scripts.needle.tasks`
are special cases of this mix.
"""

from __future__ import annotations

import multiprocessing as mp
import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.needle.facts import (
    KINDS,
    Exchange,
    Fact,
    FactMaker,
    ask,
    lay_out,
    lines_length,
    shuffle_list,
)

# What a target token is: given by the question, or retrieved for a fact of one kind.
CODES = ("given", *KINDS, "notes")
_COST = {"note": 6.0, "list": 12.0, "link": 12.0, "vote": 40.0, "quote": 17.0}
_MOST = {"note": 320, "list": 64, "link": 48, "vote": 24, "quote": 16}
_WEIGHT = {"note": 2.0, "list": 1.5, "link": 1.0, "vote": 1.2, "quote": 0.7}


@dataclass(frozen=True)
class Batch:
    """Sequences of one length and their targets.

    ids int32 [batch, length]; positions int64 [targets]: index into the flattened ids of the
    token *before* each answer token; targets int64 [targets]: the answer tokens; others int64
    [targets, 3]: what would be as right as the target (a list may be given in any order), -1
    where there is nothing; codes int64 [targets]: indices into `CODES`.
    """

    ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    others: npt.NDArray[np.int64]
    codes: npt.NDArray[np.int64]


def _facts(rng: np.random.Generator, num_tokens: int) -> list[Fact]:
    """A random mix of facts whose lines take at most 0.9 x `num_tokens` tokens."""
    if num_tokens <= 512:
        fill = rng.uniform(0.4, 0.9)
    else:
        fill = rng.uniform(0.02, 0.2) if rng.random() < 0.5 else rng.uniform(0.2, 0.8)
    weights = rng.exponential(size=len(KINDS)) * np.array([_WEIGHT[kind] for kind in KINDS])
    weights *= rng.random(len(KINDS)) > 0.3
    if weights.sum() == 0:
        weights[0] = 1.0
    shares = fill * num_tokens * weights / weights.sum()
    maker = FactMaker(rng)
    facts: list[Fact] = []
    left = 0.9 * num_tokens
    for kind, share in zip(KINDS, shares.tolist(), strict=True):
        count = min(_MOST[kind], round(share / _COST[kind]))
        for fact in maker.make(kind, count):
            left -= lines_length([fact])
            if left < 0:
                break
            facts.append(fact)
    return facts or maker.make("note", 2)


def _exchanges(rng: np.random.Generator, facts: Sequence[Fact]) -> list[tuple[str, Exchange]]:
    """Every fact asked once, kinds evenly mixed, some notes several at once; with their codes."""
    groups: list[tuple[str, list[Fact]]] = []
    notes = [fact for fact in facts if fact.kind == "note"]
    several = rng.random()
    while notes:
        size = int(rng.integers(2, 5)) if rng.random() < 0.5 * several else 1
        taken, notes = notes[:size], notes[size:]
        groups.append(("notes" if len(taken) > 1 else "note", taken))
    groups += [
        (fact.kind, [shuffle_list(rng, fact) if fact.kind == "list" else fact]) for fact in facts if fact.kind != "note"
    ]
    codes = [code for code, _ in groups]
    weight = np.array([_WEIGHT.get(code, 1.0) / codes.count(code) for code in codes])
    order = np.argsort(np.log(rng.random(len(groups))) / weight)[::-1].tolist()
    return [(groups[i][0], ask(groups[i][1])) for i in order]


def _others(code: str, answer: Sequence[int]) -> list[list[int]]:
    """Per answer token the words that would be as right: the values of a list still to come."""
    rows = [[-1] * 3 for _ in answer]
    if code == "list":
        values = answer[1:-1:2]
        for i in range(len(values)):
            left = list(values[i + 1 :])
            rows[2 * i + 1][: len(left)] = left
    return rows


def sequence(
    rng: np.random.Generator, length: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Token ids and codes int64 [length], and `Batch.others` of the targets.

    The code is -1 where the token is not a target.
    """
    share = rng.uniform(0.2, 0.5) if length <= 512 else rng.uniform(0.02, 0.25)
    budget = max(24, int(share * length))
    facts = _facts(rng, length - budget)
    ids: list[int] = []
    codes: list[int] = []
    others: list[list[int]] = []
    for code, exchange in _exchanges(rng, facts):
        size = len(exchange.question) + len(exchange.answer)
        if len(ids) + size > budget:
            break
        number = CODES.index(code)
        ids += [*exchange.question, *exchange.answer]
        codes += [-1] * len(exchange.question)
        codes += [number if retrieved else 0 for retrieved in exchange.retrieved]
        others += _others(code, exchange.answer)
    document = lay_out(rng, facts, length - len(ids))
    return (
        np.concatenate([document, np.array(ids, np.int64)]),
        np.array([-1] * len(document) + codes, np.int64),
        np.array(others, np.int64).reshape(-1, 3),
    )


def batch(rng: np.random.Generator, num_sequences: int, length: int) -> Batch:
    """`num_sequences` sequences of `length` tokens."""
    made = [sequence(rng, length) for _ in range(num_sequences)]
    ids = np.stack([ids for ids, _, _ in made])
    codes = np.stack([codes for _, codes, _ in made]).reshape(-1)
    others = np.concatenate([others for _, _, others in made])
    where = np.flatnonzero(codes >= 0)
    return Batch(ids.astype(np.int32), where - 1, ids.reshape(-1)[where], others, codes[where])


@dataclass(frozen=True)
class Stage:
    """One length of the curriculum: sequences of `length` tokens, `num_sequences` a step."""

    length: int
    num_sequences: int


def _work(seed: int, worker: int, stages: Sequence[Stage], emphasis: str | None, level: Any, out: Any) -> None:
    if emphasis is not None:
        _WEIGHT[emphasis] *= 4  # This process's own copy.
    rng = np.random.Generator(np.random.PCG64([seed, worker]))
    while True:
        top = int(level.value)
        # Shorter lengths stay in the mix, or the model forgets them.
        pick = top if top == 0 or rng.random() < 0.5 else int(rng.integers(0, top))
        out.put(batch(rng, stages[pick].num_sequences, stages[pick].length))


class Feeder:
    """Processes that make batches ahead of the training loop; `close()` ends them.

    Facts of the kind `emphasis` come four times as often. `level` holds the index of the longest
    stage in use; the training loop raises it.
    """

    def __init__(self, seed: int, num_workers: int, stages: Sequence[Stage], emphasis: str | None = None) -> None:
        context = mp.get_context("spawn")
        self.level = context.Value("i", 0)
        # Short, so that a new level is felt within a few steps.
        self._queue: Any = context.Queue(maxsize=num_workers + 4)
        self._workers = [
            context.Process(target=_work, args=(seed, i, stages, emphasis, self.level, self._queue), daemon=True)
            for i in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            try:
                yield self._queue.get(timeout=60)
            except queue.Empty as error:
                raise RuntimeError("no batch came for 60 s: the data processes died") from error

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.terminate()
