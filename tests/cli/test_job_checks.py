"""What a job finds wrong before it starts SGLang: one line, and the exit status of wrong usage. What it reads off the
flags that it passes on."""

from __future__ import annotations

import json
import sys
import threading
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.cli import main
from sglang_ext.cli.arguments import checkpoint_options, names_cpu
from sglang_ext.cli.engines import reported
from sglang_ext.cli.explain.answers import read_prompt
from sglang_ext.cli.prebuild import _begin_line
from sglang_ext.prefill.prompts import PromptError
from tests.server.harness import MODEL

ON_CPU = ("--device", "cpu")


@pytest.fixture
def prebuild(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the command in this process, with changes of its arguments: (status, what it said)."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "input_ids": [5] * 2048}) + "\n")

    def run(*flags: str, **changes: str) -> tuple[int, str]:
        given = {"model_path": str(MODEL), "prompts": str(prompts), "store": str(tmp_path / "store"), **changes}
        words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
        status = main(["prebuild", *words, "--", *flags])
        return status, capsys.readouterr().err

    return run


def refused(ran: tuple[int, str], *words: str) -> None:
    status, said = ran
    assert status == 2
    (line,) = said.splitlines()
    assert line.startswith("sglang-ext prebuild: ")
    for word in words:
        assert word in line


MODELS = ("/nowhere/model", "./nowhere", "models/nowhere", "a/b/c", "s3://bucket/model")
BAD: list[tuple[dict[str, str], list[str]]] = [
    *(({"model_path": path}, ["expected --model-path to be a folder", repr(path)]) for path in MODELS),
    ({"model_path": "nobody/nothing"}, ["expected --model-path", "'nobody/nothing'"]),  # nothing is downloaded here
    ({"report": "/tmp"}, ["expected a --report that can be written", "/tmp"]),
    ({"report": "/nowhere/report.jsonl"}, ["/nowhere/report.jsonl"]),
    ({"store": "ipc:///nowhere/none", "sparse_attn_config": '{"store_timeout_s": 0.2}'}, ["/nowhere/none"]),
    ({"store": "/etc/hostname"}, ["/etc/hostname"]),
    ({"store": "ipc:///nowhere/none", "ray": "auto"}, ["expected --store to be a folder with --ray", "store_remote"]),
    ({"prompts": "/nowhere/prompts.jsonl"}, ["/nowhere/prompts.jsonl", "check --prompts"]),
    ({"sparse_attn_config": '{"nope": 1}'}, ["Known keys"]),
]


@pytest.mark.parametrize(("changes", "words"), BAD)
def test_what_is_not_there_or_not_right(
    prebuild: Any, changes: dict[str, str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(MODEL.parents[1])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused(prebuild(*ON_CPU, **changes), *words)


def test_a_report_that_is_the_file_of_the_prompts(prebuild: Any, tmp_path: Path) -> None:
    (tmp_path / "same").symlink_to(tmp_path / "prompts.jsonl")
    refused(prebuild(*ON_CPU, report=str(tmp_path / "same")), "expected a --report of its own", "Name another")


def test_a_report_whose_last_line_a_full_disk_has_cut_loses_no_other(tmp_path: Path) -> None:
    for before, after in (('{"id": "a"', '{"id": "a"\nb\n'), ("a\n", "a\nb\n"), ("", "b\n")):
        path = tmp_path / "report.jsonl"
        path.write_text(before)
        with open(path, "a") as report:
            _begin_line(report)
            report.write("b\n")
        assert path.read_text() == after


def test_a_cluster_without_ray(prebuild: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices are those of its nodes: none is asked for here."""
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(prebuild(ray="auto"), "expected Ray for --ray", "pip install 'sglang-ext[ray]'")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("flags", [(), ("--device", "cuda"), ("--device=cuda:0",)])
def test_no_gpu(prebuild: Any, flags: tuple[str, ...]) -> None:
    refused(prebuild(*flags), "expected a GPU", "--device cpu")


def test_a_device_that_there_is_nowhere(prebuild: Any) -> None:
    """SGLang's process would die of it once it had started, in 30 lines."""
    refused(prebuild("--device", "gpu"), "expected --device to be cpu, cuda", "got 'gpu'")


def test_what_is_read_off_sglangs_flags() -> None:
    on_cpu = ("--device cpu", "--device=cpu --dtype float32", "--device cuda --device=cpu")
    others = ("", "--device cuda", "--dtype cpu", "--device")
    assert [flags for flags in (*on_cpu, *others) if names_cpu(flags.split())] == [*on_cpu]
    assert checkpoint_options(["--revision=v2", "--download-dir", "/x"]) == ("v2", "/x")
    assert checkpoint_options(["--page-size", "16"]) == (None, None)


def test_a_report_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"rid": "a", "status": "built"}\n{"rid": "b", "sta')
    rest = threading.Timer(0.1, lambda: path.write_text(path.read_text() + 'tus": "failed"}\n'))
    rest.start()
    assert reported(path, "a") == {"status": "built"}
    assert reported(path, "b") == {"status": "failed"}
    rest.join()


def test_a_prompt_of_a_file_is_what_the_file_says(tmp_path: Path) -> None:
    """Ends of lines are tokens; a byte order mark is none."""
    text, chat = tmp_path / "prompt.txt", tmp_path / "chat.json"
    text.write_bytes("\ufeffone\r\ntwo é\r\n".encode())
    chat.write_bytes(b'\xef\xbb\xbf[{"role": "user", "content": "a"}]')
    none = {"extra_key": None, "cache_salt": None, "tools": None, "messages": None, "prompt": None}
    assert read_prompt(Namespace(**{**none, "prompt": f"@{text}"})).text == "one\r\ntwo é\r\n"
    assert read_prompt(Namespace(**{**none, "messages": str(chat)})).messages == [{"role": "user", "content": "a"}]
    with pytest.raises(PromptError, match=f"got a file's name; say @{text}"):
        read_prompt(Namespace(**{**none, "prompt": str(text)}))
    with pytest.raises(ValueError, match=r"^--prompt: expected text in Unicode, got .*half a character"):
        read_prompt(Namespace(**{**none, "prompt": "caf\udce9"}))
