"""Tasks: documents are deterministic and exact, answers follow from them, scoring is strict.

The oracle below reads the document's text alone; it shares no code with the generator.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from scripts.needle import vocabulary as vocab
from scripts.needle.tasks import TASKS, Document, Question, make_document

REPOSITORY = Path(__file__).resolve().parents[2]
LENGTHS = (1024, 1777, 4096, 8192)


def lines_of(document: Document, marker: str) -> list[list[str]]:
    """The words after `marker` up to the full stop, for every line of that kind."""
    words = document.text.split()
    found = []
    for i, word in enumerate(words):
        if word == marker:
            found.append(words[i + 1 : words.index(".", i)])
    return found


def oracle(document: Document, question: Question) -> list[str]:
    """The answer, read off the document."""
    verb, *rest = question.text.split()
    assert rest.pop() == "answer"
    if verb == "ask":
        notes = {line[0]: line for line in lines_of(document, "note")}
        return [word if word == "then" else " ".join(notes[word]) for word in rest]
    if verb == "gather":
        number, key = rest
        lines = [line for line in lines_of(document, "list") if line[0] == key]
        assert len(lines) == {"two": 2, "three": 3, "four": 4}[number]
        return [" ".join(line) for line in lines]
    (key,) = rest
    if verb == "trace":
        links = dict(lines_of(document, "link"))
        chain = [key]
        while chain[-1] in links:
            chain.append(links[chain[-1]])
        return chain
    if verb == "tally":
        votes = Counter(word for name, word in lines_of(document, "vote") if name == key)
        (winner, most), *others = votes.most_common()
        assert not others or 2 * others[0][1] <= most
        return [key, winner]
    assert verb == "recite"
    return next(line for line in lines_of(document, "quote") if line[0] == key)


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("task", TASKS)
def test_every_answer_follows_from_the_document(task: str, num_tokens: int) -> None:
    for seed in range(4):
        document = make_document(task, seed, num_tokens, 24)
        if num_tokens == 8192:  # shorter documents have room for fewer
            assert len({question.text for question in document.questions}) == 24
        assert len(vocab.encode(document.text)) == num_tokens
        for text in (document.text, *(question.text for question in document.questions)):
            ids = vocab.encode(text)
            assert vocab.UNK not in ids
            assert vocab.decode(ids) == text
        for question in document.questions:
            expected = " ".join(oracle(document, question))
            assert question.score(expected)
            if not question.any_order:
                assert expected == " ".join(question.answer)


def test_equal_seeds_give_equal_documents_in_every_process() -> None:
    """Rows of benchmarks/results are of these documents."""
    made = [make_document(task, 11, 2048, 4) for task in TASKS]
    assert (
        hashlib.sha256(repr(made).encode()).hexdigest()
        == "249b8def587961c160052b4c336b7f64c904989b65eefacc4767bc508501dd11"
    )
    assert make_document("many_keys", 1, 2048, 4).text != make_document("many_keys", 2, 2048, 4).text


ORDERED = Question("ask bold-newt answer", ("bold-newt", "001", "002"))
PAIRS = Question("gather two bold-newt answer", ("bold-newt", "001", "bold-newt", "002"), any_order=True)


@pytest.mark.parametrize(
    ("question", "output", "right"),
    [
        (ORDERED, "bold-newt 001 002", True),
        (ORDERED, "bold-newt 001 002 <end> more words", True),
        (ORDERED, "  bold-newt   001 002\n", True),
        (ORDERED, "bold-newt 001", False),
        (ORDERED, "bold-newt 002 001", False),
        (ORDERED, "bold-newt 001 002 003", False),
        (ORDERED, "calm-newt 001 002", False),
        (ORDERED, "001 002", False),
        (ORDERED, "", False),
        (ORDERED, "<end>", False),
        (PAIRS, "bold-newt 001 bold-newt 002", True),
        (PAIRS, "bold-newt 002 bold-newt 001 <end>", True),
        (PAIRS, "bold-newt 001 bold-newt 001", False),
        (PAIRS, "bold-newt 001", False),
        (PAIRS, "bold-newt 001 bold-newt 002 bold-newt 003", False),
        (PAIRS, "bold-newt 001 002", False),
        (PAIRS, "", False),
    ],
)
def test_scoring(question: Question, output: str, right: bool) -> None:
    assert question.score(output) is right


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no_such_task", 1, 4096, 1), "unknown task 'no_such_task'; expected one of single_needle"),
        (("single_needle", 1, 100, 1), "a document has 1024 tokens or more, not 100"),
        (("single_needle", 1, 4096, 0), "num_questions must be 1 or more, not 0"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_document(*arguments)


def test_shipped_tokenizer_is_the_vocabulary() -> None:
    path = REPOSITORY / "models" / "needle" / "tokenizer.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert stored["model"]["vocab"] == vocab.WORD_TO_ID
    assert len(set(vocab.VOCABULARY)) == len(vocab.VOCABULARY)
