"""A real language model behind the server: dense's tokens forced through sparse decode, compared step by step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.server.harness import CPU_FLAGS, ROOT
from tests.server.jobs import run_job

pytestmark = [pytest.mark.full, pytest.mark.server]

MODELS = ROOT / ".models"
MODEL = MODELS / "smollm2-135m-instruct"

BOUNDS = {"kl": 0.004, "top1": 0.985, "delta": 0.04}
"""At a keep ratio of 10%. Measured 2026-11-26: KL 0.0022 nats, top-1 99.3%, 0.023 nats."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Configuration -> means over its forced steps."""
    assert MODEL.exists(), f"expected {MODEL}; run `make models`"
    work = tmp_path_factory.mktemp("answers")
    command = [sys.executable, str(ROOT / "benchmarks" / "answers.py"), "--model-path", str(MODEL), "--work", str(work)]
    command += ["--packages", str(MODELS / "packages"), "--out", str(work / "rows.jsonl"), "--suites", "forced"]
    command += ["--lengths", "4096", "--forced-documents", "1", "--steps", "24", "--in-flight", "4"]
    command += ["--config", "dense", "--config", 'all={"keep_ratio": 1.0}', "--config", 'tenth={"keep_ratio": 0.1}']
    flags = [*CPU_FLAGS, "--page-size", "16", "--chunked-prefill-size", "4096", "--max-total-tokens", "16384"]
    flags += ["--context-length", "8192"]  # the model has no more
    env = {"SGLANG_EXT_CPU_SHORT_EXTEND": "1"}
    status, output = run_job([*command, "--", *flags], work / "answers.log", env=env)
    assert status == 0, output[-3000:]
    found = [json.loads(line) for line in Path(work / "rows.jsonl").read_text().splitlines()]
    assert all(row["all"]["steps"] == 16 * 23 for row in found)
    for row in found[1:]:  # with overlap a step runs ahead of a request's end, unless a prefill takes its place
        assert 16 * 23 <= row["sparse_rows"] <= 16 * 24
        assert row["dense_rows"] == 0
    return {row["config"]: row["all"] for row in found}


@pytest.mark.parametrize("config", ["dense", "all"])
def test_with_all_positions_selected_the_model_says_what_dense_says(
    rows: dict[str, dict[str, float]], config: str
) -> None:
    assert rows[config]["top1"] == 1.0
    assert rows[config]["kl"] < 1e-6


def test_with_a_tenth_selected_it_stays_within_the_bounds(rows: dict[str, dict[str, float]]) -> None:
    found = rows["tenth"]
    assert 1e-6 < found["kl"] < BOUNDS["kl"], "and something was left out"
    assert found["top1"] > BOUNDS["top1"]
    assert found["delta"] < BOUNDS["delta"]
