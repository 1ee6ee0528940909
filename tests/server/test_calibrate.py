"""`sglang-ext calibrate` on the real SGLang: prompts in, a profile that fits the model out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.needle.tasks import make_document
from sglang_ext.methods.profile import load_profile
from tests.server.harness import MODEL, flags_of, rendezvous
from tests.server.jobs import run_job

pytestmark = pytest.mark.full


def test_the_profile_fits_the_model(serve: Any, tmp_path: Path) -> None:
    """Two prompts of each of two tasks, and one that does not fit the context."""
    serve.close()
    lines: list[dict[str, Any]] = [{"id": "long", "input_ids": [5] * 12288}]
    for task in ("many_keys", "variable_tracking"):
        for seed in (81, 82):
            document = make_document(task, seed=seed, num_tokens=1024, num_questions=1)
            lines.append({"id": f"{task}-{seed}", "text": document.text, "question": document.questions[0].text})
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "sglang_ext.cli", "calibrate", "--model-path", str(MODEL)]
    command += ["--data", str(tmp_path / "dev.jsonl"), "--out", str(tmp_path / "profile.json")]
    command += ["--decode-steps", "4", "--query-samples", "512", "--", *rendezvous(), *flags_of(None, None, {})]
    status, output = run_job(command, tmp_path / "calibrate.log")
    assert status == 1, output[-4000:]
    assert "long: left out" in output
    assert "4 measured, 1 left out" in output
    profile = load_profile(tmp_path / "profile.json")
    profile.check_model(num_layers=6, num_kv_heads=2, head_dim=64)
    assert profile.plan().dense_layers == (0,)
    assert profile.calibration.prompts == 4
    assert profile.calibration.tokens > 4 * 1024, "the questions are among them"
