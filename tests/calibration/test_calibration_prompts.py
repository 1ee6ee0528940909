"""The development set: what is read, what is refused, how it is split and tokenized."""

import json

import pytest

from sglang_ext.calibration.prompts import CalibrationPrompt, held_out_ids, prompt_tokens, read_calibration_prompts
from sglang_ext.prefill.prompts import PromptError
from tests.token_sources import TextTokens


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def words(text):
    return [sum(map(ord, word)) for word in text.split()]


def tokens(prompt, tokenize=words):
    """(token ids, prefix length) of a prompt without warnings."""
    found, prefix_len = prompt_tokens(prompt, TextTokens(tokenize))
    assert not found.warnings
    return found.ids, prefix_len


def test_prompts_are_read_with_ids_and_tasks(tmp_path):
    path = write(
        tmp_path / "d.jsonl",
        {"id": "copy-8k-1", "text": "a b", "question": "c"},
        "",
        {"input_ids": [1, 2], "question": [3], "task": "count"},
    )
    (first, second), digest = read_calibration_prompts(path)
    assert (first.id, first.task, second.id, second.task) == ("copy-8k-1", "copy", "3", "count")
    assert len(digest) == 64
    write(path, {"text": "a"}, {"text": "b"})
    assert read_calibration_prompts(path)[1] != digest


GOOD = {"id": "x", "text": "a"}
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD], "at least two prompts, got 1"),
        ([GOOD, {"text": ""}], r":2: expected a prompt of at least one token"),
        (
            [{"text": "a", "question": "b"}, {"text": "a", "question": "c"}],
            r"two different prompts, got 2 with the same",
        ),
        ([{"text": "a"}, {"text": "a", "add_special_tokens": True}], "two different prompts, got 2 with the same"),
        ([{"messages": [USER]}, {"messages": [USER], "tools": []}], "two different prompts, got 2 with the same"),
        ([GOOD, '{"text": "\\ud800"}'], ":2: expected an object like"),
        ([GOOD, {"text": "a", "question": [1]}], r":2: expected the question as text"),
        ([GOOD, {"input_ids": [1], "question": "a"}], r":2: expected the question as token ids"),
    ],
)
def test_bad_data_is_refused_with_its_line(tmp_path, lines, message):
    with pytest.raises(PromptError, match=message):
        read_calibration_prompts(write(tmp_path / "d.jsonl", *lines))


def test_every_second_prompt_of_each_task_is_held_out():
    prompts = [CalibrationPrompt(id=f"{task}{i}", text=f"{task}{i}", task=task) for i in range(5) for task in "abc"]
    held = held_out_ids(prompts)
    assert len(held) == 7
    for task in "abc":
        assert sum(name.startswith(task) for name in held) in (2, 3)
    single = [CalibrationPrompt(id=task, text=task, task=task) for task in "abcd"]
    assert held_out_ids(single) == {"b", "d"}, "also with one prompt per task"


def test_questions_about_one_text_stay_together():
    """Documents 0..3 with three questions each, mixed; as text and as token ids."""
    prompts = []
    for question in "uvw":
        for i in range(4):
            kinds = ({"text": f"doc {i}", "question": question}, {"input_ids": [i, 7], "question": [ord(question)]})
            prompts.append(CalibrationPrompt(id=f"{i}{question}", task="a", **kinds[i % 2]))
    held = held_out_ids(prompts)
    assert held == {f"{i}{question}" for i in (1, 3) for question in "uvw"}
    shared = [CalibrationPrompt(id=f"{task}{i}", text=f"doc {i}", task=task) for i in range(2) for task in "ab"]
    assert held_out_ids(shared) == {"a1", "b1"}, "also over tasks"
    message = {"role": "system", "content": "doc 0"}
    turned = [dict(message), dict(reversed(message.items())), {**message, "content": "doc 1"}]
    chats = [CalibrationPrompt(id=str(i), messages=[one], task="a") for i, one in enumerate(turned)]
    assert held_out_ids(chats) == {"2"}, "in whatever order the keys of a message are"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ({"input_ids": [1, 2, 3], "question": [4, 5]}, ([1, 2, 3, 4, 5], 3)),
        ({"text": "one two", "question": "three"}, (words("one two three"), 2)),
        # Without a question the whole prompt is the prefix.
        ({"text": "one two"}, (words("one two"), None)),
        ({"input_ids": [7, 8]}, ([7, 8], None)),
    ],
)
def test_a_question_follows_its_prompt(prompt, expected):
    assert tokens(CalibrationPrompt(**prompt)) == expected
    spaced = CalibrationPrompt(text="one two", question="\nthree")
    assert tokens(spaced, list) == (list("one two\nthree"), 7)


def test_the_prefix_ends_where_tokens_merge():
    def pairs(text):
        return [text[i : i + 2] for i in range(0, len(text), 2)]

    ids, prefix = tokens(CalibrationPrompt(text="abc ", question="d"), pairs)
    assert (ids, prefix) == (["ab", "c ", "d"], 2)
    assert tokens(CalibrationPrompt(text="abc\n\n ", question="de"), lambda t: [t[:4], t[4:]])[1] == 1
    with pytest.raises(ValueError, match="tokens in front of the question's"):
        tokens(CalibrationPrompt(text="a", question="b"), lambda text: [text])
