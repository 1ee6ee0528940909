"""`doctor` and `explain` on indexes that prebuild made of the shipped model: each cause of a miss is named.

The commands run in forks of a process that has SGLang imported and its plugins loaded (`sglang_process`).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from prefix_index import FileStore
from tests.compat.sglang_process import GROUP
from tests.llama_model import BOS, NEEDLE, SYSTEM, TRAINS, WEATHER, llama_model
from tests.server.harness import DISK
from tests.server.jobs import Prebuilt, run_prebuild

pytestmark = [GROUP, pytest.mark.timeout(900)]

DATE = {"date_string": "1 May 2031"}
TEXT = "".join(f"Stop {n} of the line is number {n * n}. " for n in range(40))
OTHER = "".join(f"Room {n} of the house is number {n * n}. " for n in range(40))
CONFIG: dict[str, Any] = {**DISK, "method": "token_index"}
CPU = ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"]


def run_cli(words: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """(status, standard output, standard error) of a command."""
    from sglang_ext.cli import main

    os.environ.update(environment)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as error:
            status = int(error.code or 0)
    return status, out.getvalue(), err.getvalue()


@pytest.fixture
def command(plugged: Any) -> Any:
    """Runs a command as `run_cli` does."""
    return lambda words, **environment: plugged(f"{__name__}:run_cli", words, environment)


@pytest.fixture
def told(command: Any) -> Any:
    """Runs a command with `--json`: (status, what is said)."""

    def run(words: list[str], **environment: str) -> tuple[int, Any]:
        status, out, err = command(words, **environment)
        assert status in (0, 1), err
        return status, json.loads(out)

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_model(tmp_path_factory.mktemp("diagnosed") / "model")


@pytest.fixture(scope="module")
def built(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Prebuilt:
    prompts = [
        {"id": "travel", "messages": [SYSTEM], "tools": [WEATHER, TRAINS], "chat_template_kwargs": DATE},
        {"id": "line", "text": TEXT},
        {"id": "house of b", "text": OTHER, "extra_key": "tenant-b"},
        {"id": "twice", "text": f"{BOS}Again. {OTHER}"},
    ]
    job = run_prebuild(tmp_path_factory.mktemp("diagnosis"), prompts, config=CONFIG, model=model)
    assert [line["status"] for line in job.report] == ["built"] * 4, job.output[-3000:]
    return job


@pytest.fixture
def explain(told: Any, model: Path, built: Prebuilt, tmp_path: Path) -> Any:
    """Runs `explain --json` on the store, or another one: what it says."""

    def run(prompt: Any, *words: str, store: Path = built.store, config: Any = CONFIG, flags: Any = CPU) -> Any:
        file = tmp_path / "asked.json"
        if isinstance(prompt, str):
            asked = ["--prompt", prompt]
        else:
            file.write_text(json.dumps(prompt))
            asked = ["--messages", str(file)]
        asked += [*words, "--sparse-attn-config", json.dumps(config), "--json", "--", *flags]
        status, said = told(["explain", "--model-path", str(model), "--store", str(store), *asked])
        found = said["compared"]
        assert (status == 0) == (found["index"] is not None)
        return found

    return run


def chat(*tools: Any, **keys: Any) -> dict[str, Any]:
    asked = [SYSTEM, {"role": "user", "content": "To the sea?"}]
    return {"messages": asked, "tools": list(tools), "chat_template_kwargs": DATE, **keys}


def test_a_prompt_that_begins_with_an_index_is_served(explain: Any, built: Prebuilt) -> None:
    found = explain(chat(WEATHER, TRAINS))
    assert found["index"] == built.line("travel")["digest"]
    first = found["candidates"][0]
    assert (first["name"], first["common"], first["differs"], first["at"]) == ("travel", first["tokens"], [], None)
    assert found["reason"] is None
    commons = [one["common"] for one in found["candidates"]]
    assert len(commons) == 4
    assert commons[0] == max(commons)


def test_another_tool_schema(explain: Any) -> None:
    other = json.loads(json.dumps(TRAINS).replace("tells of trains", "speaks of trains"))
    found = explain(chat(WEATHER, other))
    first = found["candidates"][0]
    assert (found["reason"], first["name"], first["differs"]) == ("no_index", "travel", [])
    assert 0 < first["common"] == first["at"] < first["tokens"]
    assert (first["prompt"]["token_text"], first["index"]["token_text"]) == ("s", "t")
    assert first["index"]["around"].endswith("tells")
    assert first["prompt"]["around"].endswith("speak")
    assert "travel" in found["summary"]


def test_bos_twice_in_the_prompt_or_in_the_index(explain: Any) -> None:
    found = explain(BOS + TEXT)
    first = found["candidates"][0]
    assert (first["name"], first["common"], first["at"]) == ("line", 1, 1)
    assert f"the prompt begins with token {first['prompt']['token']} ({BOS!r}) twice" in first["verdict"]
    assert first["shifted"] == first["tokens"]
    assert "BOS" in found["summary"]
    first = explain({"text": f"Again. {OTHER}"})["candidates"][0]
    assert (first["name"], first["common"]) == ("twice", 1)
    assert "the index begins with token" in first["verdict"]
    assert first["shifted"] == first["tokens"] - 1


def test_another_extra_key(explain: Any) -> None:
    found = explain(OTHER, "--extra-key", "c")
    first = found["candidates"][0]
    assert (found["index"], found["reason"], first["name"]) == (None, "no_index", "house of b")
    assert first["common"] == first["tokens"]
    (field,) = first["differs"]
    assert field.startswith("extra_key or cache_salt: expected extra_key 'c', found another one")
    assert explain(OTHER, "--extra-key", "tenant-b")["index"] == first["digest"]


@pytest.mark.parametrize(
    ("flags", "config", "differs"),
    [
        (["--kv-cache-dtype", "bfloat16"], {}, "model.kv_dtype: expected bfloat16, found float32"),
        ([], {"methods": {"token_index": {"bits": 8}}}, "methods.token_index.bits: expected 8, found 4"),
        ([], {"query_samples": 64}, "profile_digest: expected"),
    ],
    ids=["dtype", "parameter", "sample"],
)
def test_another_dtype_and_other_parameters_of_methods(explain: Any, flags: Any, config: Any, differs: str) -> None:
    found = explain(TEXT, flags=[*CPU, *flags], config={**CONFIG, **config})
    assert found["reason"] == "index_mismatch"
    (field,) = found["candidates"][0]["differs"]
    assert field.startswith(differs)
    assert field.split(":")[0] in found["summary"]


def test_a_prompt_that_is_too_short(explain: Any) -> None:
    found = explain(TEXT[:300])
    assert found["reason"] == "short_prefix"
    assert f"the prompt has {found['tokens']} tokens, indexes serve from 1024 on" in found["summary"]
    found = explain(TEXT[:1100])
    first = found["candidates"][0]
    assert (found["reason"], first["name"], first["prompt"]["token"]) == ("no_index", "line", None)
    assert "the prompt ends after" in first["verdict"]


def test_tokens_that_the_model_does_not_have(command: Any, model: Path, built: Prebuilt, tmp_path: Path) -> None:
    file = tmp_path / "asked.json"
    file.write_text(json.dumps({"input_ids": [5, 1 << 70]}))
    words = ["explain", "--model-path", str(model), "--store", str(built.store), "--messages", str(file), "--", *CPU]
    status, _, err = command(words)
    assert status == 2
    assert re.search(rf"expected token ids in 0\.\.\d+ \(the model's vocabulary\), got {1 << 70} at position 1", err)


def test_an_index_that_has_left(explain: Any, built: Prebuilt, tmp_path: Path) -> None:
    store = Path(shutil.copytree(built.store, tmp_path / "store"))
    digest = built.line("line")["digest"]
    with FileStore(store) as indexes:
        indexes.delete(digest)
    found = explain(TEXT, store=store)
    assert found["reason"] == "no_index"
    (gone,) = found["gone"]
    assert (gone["digest"], gone["name"], gone["why"], gone["differs"]) == (digest, "line", "removed", [])
    assert "its index line " in found["summary"]
    assert explain(OTHER, store=store)["gone"] == [], "of other tokens"
    shutil.copytree(built.store, store, dirs_exist_ok=True)
    found = explain(TEXT, store=store)
    assert (found["index"], found["gone"]) == (digest, []), "it is back"


@pytest.fixture
def doctor(told: Any, model: Path) -> Any:
    """Runs `doctor --json`: (status, findings by what they are about)."""

    def run(*words: str, flags: Any = CPU, **environment: str) -> Any:
        status, said = told(["doctor", "--model-path", str(model), *words, "--json", "--", *flags], **environment)
        return status, {one["what"]: one for one in said["findings"]}

    return run


def test_a_server_that_would_start_and_select(doctor: Any, built: Prebuilt) -> None:
    status, found = doctor("--store", str(built.store), "--sparse-attn-config", json.dumps(CONFIG))
    assert status == 0
    assert {one["verdict"] for one in found.values()} == {"ok"}
    assert found["indexes"]["found"].startswith("4 of 4 usable")
    assert found["attention backend"]["found"].startswith("torch_native")
    assert set(found) >= {"python", "torch", "triton", "sglang", "plugin", "gpu", "start", "profile", "kernels"}


def test_a_store_of_other_settings_and_damage(doctor: Any, built: Prebuilt, tmp_path: Path) -> None:
    store = Path(shutil.copytree(built.store, tmp_path / "store"))
    (store / "ab").mkdir(exist_ok=True)
    (store / "ab" / f"{'ab' * 32}.pfxindex").write_bytes(b"nonsense")
    config = json.dumps({**CONFIG, "methods": {"token_index": {"bits": 8}}})
    status, found = doctor("--store", str(store), "--sparse-attn-config", config)
    assert status == 0, "nothing fails: requests decode dense"
    assert (found["indexes"]["verdict"], found["unusable"]["verdict"], found["damaged"]["verdict"]) == ("warn",) * 3
    assert "4 built with other settings" in found["unusable"]["found"]
    assert "methods.token_index.bits: expected 8, found 4" in found["unusable"]["found"]


def test_a_retention_that_is_damaged_is_no_reason_to_remove_its_index(
    doctor: Any, built: Prebuilt, tmp_path: Path
) -> None:
    store, digest = Path(shutil.copytree(built.store, tmp_path / "store")), built.line("line")["digest"]
    (store / digest[:2] / f"{digest}.pfxkeep").write_bytes(b"scribble")
    _, found = doctor("--store", str(store), "--sparse-attn-config", json.dumps(CONFIG))
    assert found["indexes"]["found"].startswith("4 of 4 usable")
    assert "remove it, or set the retention again" in found["damaged"]["found"]
    assert "prebuild" not in found["damaged"]["todo"]


@pytest.mark.parametrize("build", ["off", "shared"])
def test_without_a_store_nothing_is_missed(doctor: Any, tmp_path: Path, build: str) -> None:
    config = json.dumps({**CONFIG, "build": build})
    status, found = doctor("--sparse-attn-config", config, XDG_CACHE_HOME=str(tmp_path))
    assert (status, found["store"]["verdict"]) == (0, "ok")
    assert "none named" in found["store"]["found"]
    assert not list(tmp_path.rglob("store")), "a look makes no folder"


@pytest.mark.parametrize(
    ("words", "flags", "said"),
    [
        ([], ["--dp-size", "2"], "expected no data parallelism"),
        ([], ["--attention-backend", "flex_attention"], "expected an attention backend among"),
        (["--sparse-attn-config", '{"profile": "OTHER"}'], [], "it is of another model"),
    ],
    ids=["mode", "backend", "profile"],
)
def test_what_a_start_refuses(doctor: Any, tmp_path: Path, words: list[str], flags: list[str], said: str) -> None:
    profile = json.loads((NEEDLE / "sparse_attn_profile.json").read_text())
    profile["model"]["config_digest"] = "0" * 64
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    words = [word.replace("OTHER", str(tmp_path / "profile.json")) for word in words]
    status, found = doctor(*words, flags=[*CPU, *flags])
    assert (status, found["start"]["verdict"]) == (1, "fail")
    assert said in found["start"]["found"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_a_gpu_that_is_not_there(doctor: Any) -> None:
    status, found = doctor(flags=["--device", "cuda"])
    assert (status, found["start"]["verdict"]) == (1, "fail")
    assert "expected a GPU for --device cuda, found none" in found["start"]["found"]


def test_sizes_are_those_of_the_built_indexes(told: Any, model: Path, built: Prebuilt) -> None:
    words = ["doctor", "--size", str(model), "--prompts", "3", "--tokens", str(built.line("line")["prompt_tokens"])]
    words += ["--sparse-attn-config", json.dumps(CONFIG), "--json", "--", *CPU]
    status, said = told(words)
    assert status == 0
    rows = {one["what"]: one for one in said["rows"]}
    line = built.line("line")
    assert rows["index, file"]["one"] - line["index_bytes"] in (0, 4096)
    assert rows["index, file"]["all"] == 3 * rows["index, file"]["one"]
    assert rows["index, resident"]["one"] == line["method_bytes"]["token_index"]
    assert rows["KV of the prompt"]["one"] == line["kv_bytes"] // line["num_tokens"] * line["prompt_tokens"]
