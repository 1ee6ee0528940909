"""Long-context tasks whose answers can be checked: documents, questions, scoring. No torch.

    from scripts.needle.tasks import TASKS, make_document

    document = make_document("single_needle", seed=7, num_tokens=8192, num_questions=16)
    for question in document.questions:
        prompt = document.text + " " + question.text
        output = generate(prompt, max_new_tokens=question.max_new_tokens)  # greedy
        correct += question.score(output)

`document.text` is the shared prefix: exactly `num_tokens` words, and every word is one token of
the needle model. A question follows it after one space and is independent of all others. Every
answer ends with `<end>` (the model's eos; `score` accepts an output with or without it), and its
first word stands in the question: while serving, that word comes out of the dense prefill of the
question, and everything that has to be found in the document comes out of later decode steps.

`TASKS` maps names to `Task`s: single_needle, many_keys, multi_value, multi_query,
variable_tracking, frequent_word, copy_span. The wording of facts and questions is in `facts`.
Documents are a function of (task, seed, num_tokens, num_questions) alone.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from scripts.needle import vocabulary as vocab
from scripts.needle.facts import KINDS, Exchange, Fact, FactMaker, ask, lay_out, lines_length

MIN_DOCUMENT_TOKENS = 1024


@dataclass(frozen=True)
class Task:
    """A task: which facts its documents carry and how its questions are scored.

    `kind` is the fact kind asked about and `num_facts` how many of them a document carries (more
    if more questions are wanted than that, fewer if they would take over half of the document).
    With `any_order`, the (key, value) pairs of an answer may come in any order. A question asks
    `keys_per_question` = (fewest, most) keys at once.
    """

    name: str
    kind: str
    num_facts: int
    any_order: bool = False
    keys_per_question: tuple[int, int] = (1, 1)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("single_needle", "note", 16),  # one of a few notes of three numbers
        Task("many_keys", "note", 256),  # one of hundreds of notes
        Task("multi_value", "list", 16, any_order=True),  # all two to four numbers of a key, each on a line of its own
        Task("multi_query", "note", 64, keys_per_question=(2, 4)),  # several notes asked at once, answered in order
        Task("variable_tracking", "link", 16),  # a chain of two to four links
        Task("frequent_word", "vote", 8),  # the word with the most votes in a poll
        Task("copy_span", "quote", 12),  # a quote of 12 to 16 words, word for word
    )
}

# Facts of the other kinds, so that the kind asked about is not the only one that stands out.
_DISTRACTORS = {"note": 8, "list": 4, "link": 4, "vote": 2, "quote": 2}


@dataclass(frozen=True)
class Question:
    """One question about a document.

    `text` follows the document after one space. `answer` holds the expected words, without
    `<end>`; `answer[0]` stands in `text`.
    """

    text: str
    answer: tuple[str, ...]
    any_order: bool = False

    @property
    def max_new_tokens(self) -> int:
        """Tokens to generate: the answer and `<end>`."""
        return len(self.answer) + 1

    def score(self, output: str) -> bool:
        """Whether `output` (generated text, cut at `<end>` if it stands there) is right."""
        words = _words(output)
        if self.any_order:
            return _pairs(words) == _pairs(self.answer)
        return tuple(words) == self.answer


def _words(output: str) -> list[str]:
    words = output.split()
    return words[: words.index(vocab.END_WORD)] if vocab.END_WORD in words else words


def _pairs(words: tuple[str, ...] | list[str]) -> list[tuple[str, ...]]:
    """Consecutive pairs, sorted; an odd last word makes a pair of one, which equals no other."""
    return sorted(tuple(words[i : i + 2]) for i in range(0, len(words), 2))


@dataclass(frozen=True)
class Document:
    """A shared prefix of `num_tokens` words and independent questions about it."""

    text: str
    task: str
    seed: int
    num_tokens: int
    questions: tuple[Question, ...]


def make_document(task: str, seed: int, num_tokens: int, num_questions: int) -> Document:
    """The document of (`task`, `seed`) with `num_tokens` words and `num_questions` questions.

    Questions differ from one another, except that a document too short for that many facts asks
    the facts it has again. Raises ValueError for an unknown task, for fewer than
    `MIN_DOCUMENT_TOKENS` tokens or fewer than one question.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; expected one of {', '.join(TASKS)}")
    if num_tokens < MIN_DOCUMENT_TOKENS:
        raise ValueError(f"a document has {MIN_DOCUMENT_TOKENS} tokens or more, not {num_tokens}")
    if num_questions < 1:
        raise ValueError(f"num_questions must be 1 or more, not {num_questions}")
    spec = TASKS[task]
    # crc32, not hash(): the latter differs from process to process.
    rng = np.random.Generator(np.random.PCG64([zlib.crc32(task.encode()), seed, num_tokens]))
    maker = FactMaker(rng)
    wanted = spec.num_facts if spec.keys_per_question[1] > 1 else max(spec.num_facts, num_questions)
    facts = _that_fit(maker.make(spec.kind, wanted), num_tokens // 2)
    others = [fact for kind in KINDS if kind != spec.kind for fact in maker.make(kind, _DISTRACTORS[kind])]
    others = _that_fit(others, num_tokens // 4)
    ids = lay_out(rng, [*facts, *others], num_tokens)
    exchanges = _questions(rng, spec, facts, num_questions)
    return Document(
        text=vocab.decode(ids.tolist()),
        task=task,
        seed=seed,
        num_tokens=num_tokens,
        questions=tuple(_to_question(exchange, spec.any_order) for exchange in exchanges),
    )


def _that_fit(facts: list[Fact], num_tokens: int) -> list[Fact]:
    """The longest head of `facts` whose lines take at most `num_tokens` tokens, at least one."""
    kept: list[Fact] = []
    used = 0
    for fact in facts:
        used += lines_length([fact])
        if kept and used > num_tokens:
            break
        kept.append(fact)
    return kept


def _questions(rng: np.random.Generator, spec: Task, facts: list[Fact], count: int) -> list[Exchange]:
    fewest, most = spec.keys_per_question
    if most == 1:
        order = rng.permutation(len(facts)).tolist()
        return [ask([facts[order[i % len(order)]]]) for i in range(count)]
    sizes = rng.integers(fewest, most + 1, size=count).tolist()
    return [ask([facts[i] for i in rng.permutation(len(facts))[:n].tolist()]) for n in sizes]


def _to_question(exchange: Exchange, any_order: bool) -> Question:
    return Question(
        text=vocab.decode(exchange.question),
        answer=tuple(vocab.VOCABULARY[i] for i in exchange.answer[:-1]),
        any_order=any_order,
    )
