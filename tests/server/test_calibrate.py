"""`sglang-ext calibrate` on the real SGLang: prompts in, a profile that fits the model out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.methods.profile import load_profile
from sglang_ext.quality.tasks import make_document
from tests.server.harness import JOB_SECONDS, MODEL, flags_of, rendezvous
from tests.server.jobs import run_job

pytestmark = pytest.mark.full


def run_calibrate(folder: Path, *words: str, timeout: float = JOB_SECONDS) -> tuple[int, str]:
    """The command in a process of its own: (status, output)."""
    command = [sys.executable, "-m", "sglang_ext.cli", "calibrate", "--model-path", str(MODEL)]
    command += ["--data", str(folder / "dev.jsonl"), "--out", str(folder / "profile.json"), *words]
    command += ["--", *rendezvous(), *flags_of(None, None, {})]
    return run_job(command, folder / "calibrate.log", timeout)


@pytest.fixture(scope="module")
def calibrated(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """Two prompts of each of two tasks, and one that does not fit the context."""
    serve.close()
    folder = tmp_path_factory.mktemp("calibrated")
    lines: list[dict[str, Any]] = [{"id": "long", "input_ids": [5] * 12288}]
    for task in ("many_keys", "variable_tracking"):
        for seed in (81, 82):
            document = make_document(task, seed=seed, num_tokens=1024, num_questions=1)
            lines.append({"id": f"{task}-{seed}", "text": document.text, "question": document.questions[0].text})
    (folder / "dev.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, output = run_calibrate(folder, "--decode-steps", "4", "--query-samples", "512")
    return folder, status, output


def test_the_profile_fits_the_model(calibrated: tuple[Path, int, str]) -> None:
    folder, status, output = calibrated
    assert status == 1, output[-4000:]
    assert "long: left out" in output
    assert "4 measured, 1 left out" in output
    profile = load_profile(folder / "profile.json")
    profile.check_model(num_layers=6, num_kv_heads=2, head_dim=64)
    assert profile.plan().dense_layers == (0,)
    assert profile.calibration.prompts == 4
    assert profile.calibration.tokens > 4 * 1024, "the questions are among them"


def test_other_settings_are_refused_before_the_model_is_loaded(calibrated: tuple[Path, int, str]) -> None:
    folder, _, _ = calibrated
    assert len(list((folder / "profile.json.state").iterdir())) == 5, "settings and four measurements"
    status, output = run_calibrate(folder, "--decode-steps", "5", "--query-samples", "512")
    assert status == 2
    assert "expected measurements with decode_steps=5" in output
    assert "starting SGLang" not in output
