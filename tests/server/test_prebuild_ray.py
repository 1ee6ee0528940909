"""`sglang-ext prebuild --ray` on a Ray cluster of two nodes on this machine, with the real SGLang on each."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefix_index import FileStore
from tests.server.harness import JOB_SECONDS, MODEL, flags_of
from tests.server.jobs import many_prompts, prebuild_command, run_job, running

pytestmark = pytest.mark.full
pytest.importorskip("ray", reason="Ray is not installed here: pip install 'sglang-ext[ray]'")

PROMPTS = 24


@pytest.fixture
def cluster(serve: Any) -> Iterator[Any]:
    """Two nodes of one CPU each, beside a head that runs no actor."""
    import ray.cluster_utils

    serve.close()
    cluster = ray.cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        cluster.nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


def command(folder: Path, address: str, report: Path, count: int) -> list[str]:
    prompts = many_prompts(folder / "prompts.jsonl", count)
    words = prebuild_command(prompts, folder / "store", report, None, MODEL, "--ray", address)
    return [*words, *flags_of(None, None, {})]


def lines_of(report: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []


def test_prompts_are_spread_over_the_nodes_and_none_is_lost_with_a_node(cluster: Any, tmp_path: Path) -> None:
    report, log = tmp_path / "report.jsonl", tmp_path / "job.log"
    with running(command(tmp_path, cluster.address, report, PROMPTS), log) as job:
        deadline = time.monotonic() + JOB_SECONDS
        while len({line["node"] for line in lines_of(report)}) < 2:
            assert job.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < deadline, log.read_text()[-6000:]
            time.sleep(0.1)
        cluster.remove_node(cluster.nodes[0], allow_graceful=False)
        before = len(lines_of(report))
        assert before < PROMPTS, "the node is gone while there is work"
        status = job.wait(JOB_SECONDS)
    said, lines = log.read_text(errors="replace"), lines_of(report)
    assert status == 0, said[-6000:]
    assert sorted(line["id"] for line in lines) == sorted(f"p{n}" for n in range(PROMPTS))
    assert {line["status"] for line in lines} <= {"built", "exists"}
    # What was stored before its line was sent is found there by whoever gets the prompt next.
    assert [line["status"] for line in lines].count("exists") <= 1
    assert len({line["node"] for line in lines[before + 1 :]}) == 1
    assert "its engine was lost" in said
    assert f"{PROMPTS} prompts: " in said
    with FileStore(tmp_path / "store") as store:
        assert {entry.retention.name for entry in store.list()} == {f"p{n}" for n in range(PROMPTS)}

    again = tmp_path / "again.jsonl"
    status, said = run_job(command(tmp_path, cluster.address, again, PROMPTS + 1), tmp_path / "again.log")
    assert status == 0, said[-6000:]
    assert {line["id"] for line in lines_of(again) if line["status"] == "built"} == {f"p{PROMPTS}"}
    assert f"{PROMPTS + 1} prompts: 1 built, {PROMPTS} exists" in said


def test_what_sglang_or_the_address_is_refused_for_is_said_once_and_status_2(cluster: Any, tmp_path: Path) -> None:
    words = command(tmp_path, cluster.address, tmp_path / "report.jsonl", 1)
    status, said = run_job([*words, "--no-such-flag"], tmp_path / "job.log")
    assert status == 2, said[-6000:]
    assert "sglang-ext prebuild: expected flags of SGLang behind --, got: unrecognized arguments" in said
    words[words.index("--ray") + 1] = "127.0.0.1:1"
    status, said = run_job(words, tmp_path / "job.log")
    assert status == 2, said[-6000:]
    assert "expected a Ray cluster at --ray 127.0.0.1:1, got: " in said
