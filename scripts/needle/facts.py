"""Facts, filler and the layout of a document: what `tasks` (evaluation) and training share.

A fact is one or more short lines such as `note amber-falcon 417 902 033 .`; the first word of a
line names the fact's kind, the second its key, and every key is one token. All that is asked about
a fact is reached by one rule, applied once per retrieved word: find the key (or the word just
written) in the document and write the word that follows it there.

kind    lines of one fact                                        asked as               answered as
note    note K v1 v2 v3 .                                        ask K answer           K v1 v2 v3
list    list K v1 . | list K v2 . (2 to 4 lines, scattered)      gather two K answer    K v1 K v2
link    link K1 K2 . | link K2 K3 . | link K3 v . (2 to 4)       trace K1 answer        K1 K2 K3 v
vote    vote K w . (one line per vote, scattered)                tally K answer         K w
quote   quote K w1 .. w12 .  (12 to 16 words)                    recite K answer        K w1 .. w12

`K` is a hyphenated name, `v` a three-digit number. Every answer ends with the token `<end>`.
Randomness comes from the caller's numpy Generator alone, so equal seeds give equal documents.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scripts.needle import vocabulary as vocab

Ids = npt.NDArray[np.int64]

KINDS = ("note", "list", "link", "vote", "quote")
_NUMBERS = {n: vocab.WORD_TO_ID[w] for n, w in ((2, "two"), (3, "three"), (4, "four"))}
_MARKER = {kind: vocab.WORD_TO_ID[kind] for kind in KINDS}
_VERB = {
    kind: vocab.WORD_TO_ID[verb]
    for kind, verb in zip(KINDS, ("ask", "gather", "trace", "tally", "recite"), strict=True)
}
_THEN = vocab.WORD_TO_ID["then"]
_ANSWER = vocab.WORD_TO_ID["answer"]
DOCUMENT = vocab.WORD_TO_ID["document"]


@dataclass(frozen=True)
class Fact:
    """One fact: its lines in the document (each a list of token ids) and its answer.

    `answer` starts with the key and lacks `<end>`; `retrieved[i]` says whether answer word i has
    to be looked up in the document (as against repeated from the question).
    """

    kind: str
    key: int
    lines: tuple[tuple[int, ...], ...]
    answer: tuple[int, ...]
    retrieved: tuple[bool, ...]


@dataclass(frozen=True)
class Exchange:
    """A question and its answer as token ids; `answer` ends with `<end>`."""

    question: tuple[int, ...]
    answer: tuple[int, ...]
    retrieved: tuple[bool, ...]


class Pool:
    """Words of one class in random order, without repetition until all were used once."""

    def __init__(self, rng: np.random.Generator, ids: range) -> None:
        self._rng = rng
        self._ids = ids
        self._left: list[int] = []

    def take(self, count: int) -> list[int]:
        """`count` words; they repeat only across refills of the pool."""
        while len(self._left) < count:
            order = self._rng.permutation(len(self._ids)) + self._ids.start
            self._left = order.tolist() + self._left
        taken = self._left[-count:]
        del self._left[-count:]
        return taken


class FactMaker:
    """Makes facts for one document; keys never repeat within it."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._key_pool = Pool(rng, vocab.KEYS)
        self._keys_left = len(vocab.KEYS)
        self._values = Pool(rng, vocab.VALUES)
        self._quoted = Pool(rng, vocab.QUOTED)

    def make(self, kind: str, count: int) -> list[Fact]:
        """`count` facts of `kind`; ValueError for an unknown kind."""
        if kind not in KINDS:
            raise ValueError(f"unknown fact kind {kind!r}; expected one of {', '.join(KINDS)}")
        return [getattr(self, f"_{kind}")() for _ in range(count)]

    def _keys(self, count: int) -> list[int]:
        self._keys_left -= count
        if self._keys_left < 0:
            raise ValueError(f"a document has at most {len(vocab.KEYS)} keys; ask for fewer facts")
        return self._key_pool.take(count)

    def _note(self) -> Fact:
        (key,) = self._keys(1)
        answer = (key, *self._values.take(3))
        line = (_MARKER["note"], *answer, vocab.STOP)
        return Fact("note", key, (line,), answer, (False, True, True, True))

    def _list(self) -> Fact:
        (key,) = self._keys(1)
        values = self._values.take(int(self._rng.integers(2, 5)))
        lines = tuple((_MARKER["list"], key, value, vocab.STOP) for value in values)
        answer = tuple(word for value in values for word in (key, value))
        return Fact("list", key, lines, answer, (False, True) * len(values))

    def _link(self) -> Fact:
        hops = int(self._rng.integers(2, 5))
        chain = (*self._keys(hops), *self._values.take(1))
        lines = tuple((_MARKER["link"], here, there, vocab.STOP) for here, there in itertools.pairwise(chain))
        return Fact("link", chain[0], lines, chain, (False,) + (True,) * hops)

    def _vote(self) -> Fact:
        (key,) = self._keys(1)
        most = int(self._rng.integers(4, 9))
        rivals = self._rng.integers(1, most // 2 + 1, size=int(self._rng.integers(1, 4))).tolist()
        candidates = self._rng.permutation(len(vocab.CANDIDATES))[: 1 + len(rivals)]
        words = (candidates + vocab.CANDIDATES.start).tolist()
        lines = tuple(
            (_MARKER["vote"], key, word, vocab.STOP)
            for word, votes in zip(words, [most, *rivals], strict=True)
            for _ in range(votes)
        )
        return Fact("vote", key, lines, (key, words[0]), (False, True))

    def _quote(self) -> Fact:
        (key,) = self._keys(1)
        length = int(self._rng.integers(12, 17))
        answer = (key, *self._quoted.take(length))
        line = (_MARKER["quote"], *answer, vocab.STOP)
        return Fact("quote", key, (line,), answer, (False,) + (True,) * length)


def shuffle_list(rng: np.random.Generator, fact: Fact) -> Fact:
    """A list fact whose answer gives the values in another random order: any order is right."""
    order = rng.permutation(len(fact.lines)).tolist()
    answer = tuple(word for i in order for word in fact.lines[i][1:3])
    return Fact(fact.kind, fact.key, fact.lines, answer, fact.retrieved)


def ask(facts: Sequence[Fact]) -> Exchange:
    """One question about a fact, or about two to four notes in order."""
    kind = facts[0].kind
    if len(facts) > 1 and any(fact.kind != "note" for fact in facts):
        raise ValueError("only notes can be asked several at once")
    question = [_VERB[kind]]
    if kind == "list":
        question.append(_NUMBERS[len(facts[0].lines)])
    answer: list[int] = []
    retrieved: list[bool] = []
    for i, fact in enumerate(facts):
        if i:
            question.append(_THEN)
            answer.append(_THEN)
            retrieved.append(False)
        question.append(fact.key)
        answer.extend(fact.answer)
        retrieved.extend(fact.retrieved)
    question.append(_ANSWER)
    return Exchange(tuple(question), (*answer, vocab.END), (*retrieved, False))


def _template_tables() -> tuple[Ids, Ids, Ids]:
    """First id and number of words per slot, both [templates, longest], and slots per template."""
    longest = max(map(len, vocab.TEMPLATES))
    first = np.zeros((len(vocab.TEMPLATES), longest), np.int64)
    size = np.zeros_like(first)
    for i, template in enumerate(vocab.TEMPLATES):
        for j, part in enumerate(template):
            first[i, j] = vocab.FILLER[part].start
            size[i, j] = len(vocab.FILLER[part])
    return first, size, np.array([len(t) for t in vocab.TEMPLATES])


_FIRST, _SIZE, _SLOTS = _template_tables()


def filler(rng: np.random.Generator, num_tokens: int) -> tuple[Ids, Ids]:
    """`num_tokens` token ids of plain sentences, and the sorted offsets where a line may stand.

    The last sentence may be cut short; the offsets are 0 and every end of a whole sentence.
    """
    count = num_tokens // int(_SLOTS.min()) + 1
    which = rng.integers(len(_SLOTS), size=count)
    words = _FIRST[which] + (rng.random((count, _FIRST.shape[1])) * _SIZE[which]).astype(np.int64)
    ids = words[np.arange(_FIRST.shape[1]) < _SLOTS[which, None]][:num_tokens]
    ends = np.cumsum(_SLOTS[which])
    return ids, np.concatenate([[0], ends[ends <= num_tokens]])


def lines_length(facts: Sequence[Fact]) -> int:
    """Tokens that the lines of `facts` take in a document."""
    return sum(len(line) for fact in facts for line in fact.lines)


def lay_out(rng: np.random.Generator, facts: Sequence[Fact], num_tokens: int) -> Ids:
    """A document of exactly `num_tokens` ids: `document`, then filler with all lines scattered.

    Raises ValueError if the lines do not fit.
    """
    lines = [line for fact in facts for line in fact.lines]
    needed = 1 + sum(map(len, lines))
    if needed > num_tokens:
        raise ValueError(f"the facts take {needed} tokens, the document has only {num_tokens}")
    ids, offsets = filler(rng, num_tokens - needed)
    document = np.empty(num_tokens, np.int64)
    document[0] = DOCUMENT
    body = document[1:]
    is_filler = np.ones(num_tokens - 1, np.bool_)
    if lines:
        lines = [lines[i] for i in rng.permutation(len(lines)).tolist()]
        flat = np.array([word for line in lines for word in line])
        lengths = np.array([len(line) for line in lines])
        gaps = np.sort(offsets[rng.integers(len(offsets), size=len(lines))])
        where = np.repeat(gaps, lengths) + np.arange(len(flat))
        body[where] = flat
        is_filler[where] = False
    body[is_filler] = ids
    document[-1] = vocab.STOP
    return document
