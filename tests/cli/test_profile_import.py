"""`sglang-ext profile import`: a published head map in, a profile that a server settles with out; what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from sglang_ext.cli import main
from sglang_ext.config import ConfigError, SparseAttnConfig, make_settings
from sglang_ext.methods.profile import ProfileError, load_profile
from sglang_ext.prefill.builder import profile_digest
from sglang_ext.profiles import PROFILE_FILE, check_profile
from sglang_ext.runtime import SparseRuntime
from tests.prefix_index.samples import sample_model
from tests.serving.admitting import DIM, KV_HEADS, LAYERS, Model

NAME = "Some-Model-8B_layers_0_1.npy"
#: Layers 0 and 1 are anchors there, and layer 2 follows layer 1.
HEAD_MAP = np.array([[0, 1], [0, 1], [1, 0]], dtype=np.int32)
PLAN = ["dense", "anchor", {"reuse": 1, "head_map": [1, 0]}]
MODEL = sample_model(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM, kv_dtype="float32")

Import = Callable[..., tuple[int, str]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Flags that SGLang is asked for a model with; this one is not imported for it (`tests/compat` does)."""
    asked: list[list[str]] = []

    def preview(flags: list[str]) -> Any:
        asked.append(flags)
        return SimpleNamespace(model=lambda weights: MODEL)

    monkeypatch.setitem(sys.modules, "sglang_ext.compat.preview", SimpleNamespace(ServerPreview=preview))
    return asked


@pytest.fixture
def run(tmp_path: Path, asked: list[list[str]], capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Import:
    """Runs the command in this process and in a folder with head maps and a model: (status, what it said)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "store").mkdir()
    for name in (NAME, "map.npy"):
        np.save(tmp_path / name, HEAD_MAP)

    def run(*words: str, file: str = NAME, out: str = "profile.json", model: str = "model") -> tuple[int, str]:
        status = main(["profile", "import", file, "--model", model, "--out", out, *words])
        return status, capsys.readouterr().err

    return run


def test_a_server_settles_with_the_imported_plan(run: Import, tmp_path: Path) -> None:
    """By its name and in the model's folder; all else is the server's default, and keys that are given win."""
    assert run()[0] == 0
    assert run(out=f"model/{PROFILE_FILE}")[0] == 0
    profile = load_profile(tmp_path / "profile.json")
    check_profile(profile, MODEL)
    named = make_settings('{"profile": "profile.json"}', "store")
    assert named.profile == make_settings(None, "store", "model").profile == profile
    changed = msgspec.structs.replace(SparseAttnConfig(), layer_plan=PLAN, profile=str(tmp_path / "profile.json"))
    assert named.config == changed
    assert profile_digest(named.config, profile) == profile_digest(SparseAttnConfig()), "indexes stay valid"
    given = make_settings('{"profile": "profile.json", "keep_ratio": 0.3, "layer_plan": []}', "store").config
    assert (given.keep_ratio, given.layer_plan) == (0.3, [])
    runtime = SparseRuntime(named, Model(MODEL))
    assert runtime.planner.sparse is not None
    assert runtime.planner.sparse.layer_plan.to_dict()["layers"] == PLAN
    runtime.close()
    with pytest.raises(ProfileError, match="it is of another model"):
        check_profile(profile, msgspec.structs.replace(MODEL, config_digest="f" * 64))


def test_it_says_that_nothing_was_measured(run: Import, tmp_path: Path) -> None:
    status, said = run()
    first, ranks, warning = said.splitlines()
    assert status == 0
    assert first.startswith("layer 0 attends everything, layers 1 select, 1 others reuse their selections")
    assert ranks.startswith("a server with --tp-size 2 refuses this plan")
    assert warning.startswith("warning: answers of this plan were not measured here")
    calibration = load_profile(tmp_path / "profile.json").calibration
    assert (calibration.prompts, calibration.tokens, calibration.versions) == (0, 0, {})
    for text in (warning, calibration.description):
        for words in ("not measured here", "benchmarks/answers.py", "calibrate --judge"):
            assert words in text
    assert f"{NAME} (SHA-256 " in calibration.description


def test_a_head_map_whose_name_is_no_text_is_imported(run: Import, tmp_path: Path) -> None:
    named = f"caf\udce9{NAME}"
    np.save(tmp_path / named, HEAD_MAP)
    assert run(file=named)[0] == 0
    assert rf"caf\xe9{NAME} (SHA-256 " in load_profile(tmp_path / "profile.json").calibration.description


def test_what_was_never_measured_is_not_served(run: Import) -> None:
    run()
    config = {"profile": "profile.json", "method": "ab_sparse", "methods": {"ab_sparse": {"sizes": "profile"}}}
    with pytest.raises(ConfigError, match=r"ab_sparse\.sizes=profile, got one without block sizes; .*calibrate"):
        make_settings(json.dumps(config), "store")


@pytest.mark.parametrize(("accelerator", "device"), [(False, ["--device", "cpu"]), (True, [])])
def test_flags_reach_sglang(
    run: Import, asked: list[list[str]], monkeypatch: pytest.MonkeyPatch, accelerator: bool, device: list[str]
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: accelerator)
    assert run("--", "--quantization", "fp8")[0] == 0
    assert asked == [["--model-path", "model", "--log-level", "error", "--quantization", "fp8", *device]]


def test_a_profile_that_is_there_stays_unless_forced(run: Import, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("mine")
    status, said = run()
    assert (status, (tmp_path / "profile.json").read_text()) == (2, "mine")
    assert "expected no file at --out, got 'profile.json'; name another one, or overwrite it with --replace" in said
    assert run("--replace", "--anchors", "0,1", file="map.npy")[0] == 0
    assert load_profile(tmp_path / "profile.json").layer_plan == {"layers": PLAN}


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ({"file": "none.npy"}, ["expected a head map (.npy), got no file 'none.npy'", "correct the path"]),
        ({"file": "map.npy"}, ["MODEL_layers_0_2_8_13_14.npy, got 'map.npy'", "--anchors"]),
        ({"file": "a_layers_0.npy"}, ["3 layers and 2 KV heads (the model's), got (3, 4)", "of this model"]),
        ({"out": "model"}, ["expected --out to be a file, got the folder 'model'"]),
        ({"out": "nowhere/profile.json"}, ["expected to be able to write --out", "a folder that exists"]),
        ({"model": "/nowhere/model"}, ["expected --model-path to be a folder", "'/nowhere/model'", "download"]),
    ],
)
def test_what_is_refused(run: Import, places: dict[str, str], said: list[str], tmp_path: Path) -> None:
    np.save(tmp_path / "a_layers_0.npy", np.zeros((3, 4), dtype=np.int32))
    status, output = run(**places)
    assert status == 2
    (line,) = output.splitlines()
    assert line.startswith("sglang-ext profile import: ")
    for word in said:
        assert word in line
    assert not (tmp_path / "profile.json").exists()
