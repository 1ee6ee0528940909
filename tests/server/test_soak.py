"""`benchmarks/soak.py` on a real engine, small: sparse traffic, and every traced token the best one of its replay."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.decode.trace import Selected
from tests.server.harness import CPU_FLAGS, DISK, ROOT, SGLANG, rendezvous
from tests.server.jobs import run_job

pytestmark = [pytest.mark.full, pytest.mark.skipif(SGLANG != "0.5.16", reason="soaks are run on 0.5.16")]
FLAGS = [*CPU_FLAGS, "--page-size", "16", "--max-total-tokens", "2816", "--chunked-prefill-size", "512"]
TRAFFIC = (
    "--seconds 2 --stall 300 --documents 1 --lengths 1024 --questions 2 --tokens 24 --concurrency 4 "
    "--sparse-documents 3 --sparse-lengths 1280 --traced 0.7 --dense 0.15 --index-bytes 900000 --tie 0.002"
)


@pytest.fixture(scope="module")
def soaked(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folder and row of a soak; of a longer one where a busy machine did too little in the shorter one."""
    serve.close()
    for seconds in (12, 60):
        folder = tmp_path_factory.mktemp("soak")
        status, output = _soak(folder, seconds)
        assert (folder / "row.json").exists(), output[-6000:]
        row = json.loads((folder / "row.json").read_text())
        if row["replay"]["sparse"]["tokens of sparse steps"] > 10:
            break
    assert status == 0, output[-6000:]
    return folder, row


def _soak(folder: Path, seconds: int) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), *TRAFFIC.split()]
    command += ["--sparse-seconds", str(seconds), "--config", json.dumps(DISK)]
    command += ["--replay", "12", "--trace", str(folder / "trace"), "--out", str(folder / "row.json")]
    roots = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "index_store")))
    env = {"SGLANG_EXT_CPU_SHORT_EXTEND": "1", "PYTHONPATH": roots}
    return run_job([*command, "--", *FLAGS, *rendezvous()], folder / "soak.log", env=env)


def test_sparse_traffic_is_replayed_with_the_same_selections(soaked: tuple[Path, dict[str, Any]]) -> None:
    row = soaked[1]
    sparse = row["replay"]["sparse"]
    assert row["good"]
    assert sparse["equal"] + sparse.get("tie", 0) == sparse["replayed"] > 3
    assert sparse["tokens of sparse steps"] > 10
    assert sparse["max_logprob_off"] < 1e-3
    assert row["held"]["sparse_rows"] > 0
    assert row["memory"]["after"]["used_kv_tokens"] == 0


def test_a_replay_with_other_selections_differs(
    soaked: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traffic can tell: with the first selected position of each head alone the probabilities are others."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import replay

    whole = Selected.mask
    monkeypatch.setattr(Selected, "mask", lambda step, layer: whole(step, layer) & (whole(step, layer).cumsum(1) == 1))
    row = replay.replay(soaked[0] / "trace", ROOT / "models" / "needle", 12, 0, 540.0, 0.002)
    assert row["sparse"]["tokens of sparse steps"] == soaked[1]["replay"]["sparse"]["tokens of sparse steps"]
    assert row["sparse"]["max_logprob_off"] > 0.01
