"""What a job finds wrong before it starts SGLang: one line, and the exit status of wrong usage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.cli import main
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


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "models/nowhere", "a/b/c", "s3://bucket/model"])
def test_a_model_that_is_not_there(prebuild: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MODEL.parents[1])
    refused(prebuild(*ON_CPU, model_path=path), "expected --model-path to be a folder", repr(path))


def test_a_name_on_the_hub_where_nothing_is_downloaded(prebuild: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused(prebuild(*ON_CPU, model_path="nobody/nothing"), "expected --model-path", "'nobody/nothing'")


def test_a_report_that_cannot_be_written(prebuild: Any, tmp_path: Path) -> None:
    refused(prebuild(*ON_CPU, report=str(tmp_path)), "expected a --report that can be written", str(tmp_path))
    refused(prebuild(*ON_CPU, report="/nowhere/report.jsonl"), "/nowhere/report.jsonl")


def test_a_service_that_is_not_there(prebuild: Any, tmp_path: Path) -> None:
    config = '{"store_timeout_s": 0.2}'
    refused(prebuild(*ON_CPU, store=f"ipc://{tmp_path}/none", sparse_attn_config=config), f"{tmp_path}/none")


def test_a_store_that_is_no_folder(prebuild: Any) -> None:
    refused(prebuild(*ON_CPU, store="/etc/hostname"), "/etc/hostname")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("flags", [(), ("--device", "cuda"), ("--device=cuda:0",)])
def test_no_gpu(prebuild: Any, flags: tuple[str, ...]) -> None:
    refused(prebuild(*flags), "expected a GPU", "--device cpu")


def test_prompts_that_are_not_there(prebuild: Any) -> None:
    refused(prebuild(*ON_CPU, prompts="/nowhere/prompts.jsonl"), "/nowhere/prompts.jsonl")
