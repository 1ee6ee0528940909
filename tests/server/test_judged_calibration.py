"""`sglang-ext calibrate` on the real SGLang: a profile that fits the model comes out, and its proposals are served:
real engines one after another, results kept, the bound obeyed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.needle.tasks import make_document
from sglang_ext.methods.profile import load_profile
from tests.server.harness import CPU_FLAGS, MODEL
from tests.server.jobs import run_job

pytestmark = [pytest.mark.full, pytest.mark.server]


def calibrate(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """The report's figures, and what the job said. One prompt is left out."""
    command = [sys.executable, "-m", "sglang_ext.cli", "calibrate", "--model-path", str(MODEL)]
    command += ["--data", str(folder / "prompts.jsonl"), "--out", str(folder / "profile.json")]
    command += ["--report", str(folder / "report"), "--judge", "yes", "--rows", "4", "--anchors", "1", *words, "--"]
    flags = [*CPU_FLAGS, "--page-size", "16", "--chunked-prefill-size", "4096", "--max-total-tokens", "16384"]
    env = {"SGLANG_EXT_CPU_SHORT_EXTEND": "1"}
    status, output = run_job([*command, *flags], folder / "calibrate.log", env=env)
    assert status == 1, output[-4000:]
    assert "long: left out" in output
    report: dict[str, Any] = json.loads((folder / "report" / "report.json").read_text())
    return report, output


def test_proposals_are_served_kept_and_chosen_within_the_bound(tmp_path: Path) -> None:
    with (tmp_path / "prompts.jsonl").open("w") as file:
        for seed in (500, 501):  # one is fitted, the other is held out
            document = make_document("many_keys", seed=seed, num_tokens=4096, num_questions=4)
            for number, question in enumerate(document.questions):
                line = {"id": f"many_keys-{seed}-{number}", "text": document.text, "question": question.text}
                file.write(json.dumps(line) + "\n")
        file.write(json.dumps({"id": "long", "input_ids": [5] * 12288}) + "\n")  # does not fit the context
    report, said = calibrate(tmp_path)
    assert "8 measured, 1 left out" in said
    judged = {(one["candidate"]["anchors"], one["candidate"]["keep_ratio"]): one for one in report["judged"]["judged"]}
    assert set(judged) == {(count, ratio) for count in (None, 1) for ratio in (0.05, 0.02)}
    for one in judged.values():
        assert one["steps"] == 4 * 47, "one held-out document, four rows"
        assert one["sparse_share"] > 0.98
        assert one["most_tokens"] == 4096
    assert fmean(judged[None, 0.05]) < fmean(judged[None, 0.02]), "a smaller budget is farther from dense"
    assert fmean(judged[None, 0.05]) < fmean(judged[1, 0.05]), "and so is reuse"
    bound = report["judged"]["max_kl"]
    assert bound == pytest.approx(1.25 * fmean(judged[None, 0.05]))
    assert report["judged"]["chosen"] == judged[None, 0.05]["candidate"], "of one document nothing is sure"
    assert (tmp_path / "report" / "judged.png").stat().st_size > 1000

    # Again, with another bound: nothing is served anew.
    (results,) = (tmp_path / "profile.json.state" / "judged").glob("*/judged.json")
    before = results.stat().st_mtime_ns
    report, said = calibrate(tmp_path, "--max-kl", "1000")
    assert results.stat().st_mtime_ns == before
    assert "8 measured, 1 left out" in said
    assert report["judged"]["max_kl"] == 1000
    profile = load_profile(tmp_path / "profile.json")
    assert profile.model == load_profile(MODEL / "sparse_attn_profile.json").model
    assert profile.plan().dense_layers == (0,)
    assert profile.calibration.prompts == 8
    assert profile.calibration.tokens > 8 * 4096, "the questions are among them"
    assert profile.recommended.keep_ratio == report["judged"]["chosen"]["keep_ratio"]


def fmean(one: dict[str, Any]) -> float:
    return sum(one["kl"]) / len(one["kl"])
