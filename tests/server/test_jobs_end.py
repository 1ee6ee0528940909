"""Jobs that are stopped from outside, or whose engine ends: they end in seconds, say so, and leave nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.harness import DISK, EXACT_CONFIG, JOB_SECONDS, MODEL, flags_of, rendezvous
from tests.server.jobs import begin

pytestmark = pytest.mark.full

#: Seconds from the signal to the end, on a busy machine; what this was written for took 600 s, or did not end.
SOON = 60.0


class Job:
    """A job in a process group of its own."""

    def __init__(self, words: list[str], log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "sglang_ext.cli", *words, "--", *rendezvous(), *flags_of(None, None, {})]
        self.process = begin(command, log)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, there: Any) -> None:
        deadline = time.monotonic() + JOB_SECONDS
        while not there():
            assert self.process.poll() is None, self.said[-4000:]
            assert time.monotonic() < deadline, self.said[-4000:]
            time.sleep(0.1)

    def schedulers(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in found if any("scheduler" in word for word in [one.name(), *one.cmdline()])]

    def ended(self) -> int:
        """Its status, once it has ended; nothing of it may be left."""
        begun = time.monotonic()
        status = self.process.wait(SOON)
        left = [
            one for one in psutil.process_iter() if _group(one.pid) == self.process.pid and one.status() != "zombie"
        ]
        assert left == [], self.said[-4000:]
        assert "Traceback" not in self.said.split("starting SGLang")[0]
        assert time.monotonic() - begun < SOON
        return status

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait(30)


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


@pytest.fixture
def job(serve: Any, tmp_path: Path) -> Iterator[Any]:
    """(command, number of prompts) -> a running job whose first prompt is done."""
    serve.close()
    started: list[Job] = []

    def start(command: str, count: int = 200) -> Job:
        prompts = tmp_path / "prompts.jsonl"
        lines = [{"id": f"p{n}", "input_ids": [5 + (n + i) % 90 for i in range(2048)]} for n in range(count)]
        prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
        words = [command, "--model-path", str(MODEL)]
        if command == "prebuild":
            report = tmp_path / "report.jsonl"
            words += ["--prompts", str(prompts), "--store", str(tmp_path / "store"), "--report", str(report)]
            words += ["--sparse-attn-config", json.dumps(DISK | EXACT_CONFIG)]
        else:
            words += ["--data", str(prompts), "--out", str(tmp_path / "profile.json")]
        one = Job(words, tmp_path / "job.log")
        started.append(one)
        done = (
            (lambda: report.exists() and "built" in report.read_text())
            if command == "prebuild"
            else (lambda: any((tmp_path / "profile.json.state").glob("*.safetensors")))
        )
        one.until(done)
        return one

    yield start
    for one in started:
        one.kill()


@pytest.mark.parametrize("command", ["prebuild", "calibrate"])
@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
@pytest.mark.parametrize("whom", ["the job", "its group"])
def test_a_job_that_is_stopped_ends_soon_and_says_how_to_go_on(
    job: Any, command: str, number: signal.Signals, status: int, word: str, whom: str
) -> None:
    running = job(command)
    (os.kill if whom == "the job" else os.killpg)(running.process.pid, number)
    assert running.ended() == status, running.said[-4000:]
    assert f"{word}; run the same command again to go on" in running.said


def test_a_job_that_is_stopped_while_sglang_starts_ends_soon(job: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"id": "a", "input_ids": [5] * 2048}) + "\n")
    words = ["prebuild", "--model-path", str(MODEL), "--prompts", str(prompts), "--store", str(tmp_path / "s")]
    running = Job(words, tmp_path / "start.log")
    try:
        running.until(running.schedulers)
        running.process.send_signal(signal.SIGTERM)
        assert running.ended() == 143, running.said[-4000:]
    finally:
        running.kill()


@pytest.mark.parametrize("command", ["prebuild", "calibrate"])
def test_no_job_waits_for_a_dead_scheduler(job: Any, tmp_path: Path, command: str) -> None:
    running = job(command)
    for scheduler in running.schedulers():
        scheduler.kill()
    assert running.ended() == 1, running.said[-4000:]
    assert "expected SGLang's processes to live, got the end of one" in running.said
    if command == "prebuild":
        last = json.loads((tmp_path / "report.jsonl").read_text().splitlines()[-1])
        assert (last["status"], last["reason"]) == ("failed", "engine_died")
