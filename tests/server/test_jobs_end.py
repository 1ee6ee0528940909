"""Jobs that are stopped from outside, or whose engine ends: they end in seconds, say so, and leave nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.harness import JOB_SECONDS, MODEL, flags_of, rendezvous
from tests.server.jobs import many_prompts, prebuild_command, processes, running

pytestmark = pytest.mark.full

#: Seconds from the signal to the end, on a busy machine; what this was written for took 600 s, or did not end.
SOON = 60.0


@dataclass
class Job:
    """A job in a process group of its own."""

    process: subprocess.Popen[bytes]
    log: Path

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
        return processes(self.process.pid, "scheduler")

    def ended(self) -> int:
        """Its status, once it has ended; nothing of it may be left."""
        begun = time.monotonic()
        status = self.process.wait(SOON)
        assert processes(self.process.pid) == [], self.said[-4000:]
        assert "Traceback" not in self.said.split("starting SGLang")[0]
        assert time.monotonic() - begun < SOON
        return status


@pytest.fixture
def begun(serve: Any, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """(command, number of prompts) -> a job that has been started, with its files in the test's folder."""
    serve.close()
    with contextlib.ExitStack() as jobs:

        def begin(command: str, count: int = 200) -> Job:
            prompts, log = many_prompts(tmp_path / "prompts.jsonl", count), tmp_path / "job.log"
            if command == "prebuild":
                words = prebuild_command(prompts, tmp_path / "store", tmp_path / "report.jsonl")
            else:
                words = [sys.executable, "-m", "sglang_ext.cli", command, "--model-path", str(MODEL)]
                words += ["--data", str(prompts), "--out", str(tmp_path / "profile.json"), "--"]
            words += [*rendezvous(), *flags_of(None, None, {})]
            return Job(jobs.enter_context(running(words, log)), log)

        yield begin


@pytest.fixture
def job(begun: Any, tmp_path: Path) -> Callable[[str], Job]:
    """Command -> a running job whose first prompt is done."""
    report, captures = tmp_path / "report.jsonl", tmp_path / "profile.json.state"

    def start(command: str) -> Job:
        one: Job = begun(command)
        one.until(lambda: any(captures.glob("*.safetensors")) or (report.exists() and "built" in report.read_text()))
        return one

    return start


@pytest.mark.parametrize(
    ("command", "number", "whom"),
    [
        ("prebuild", signal.SIGINT, "its group"),
        ("prebuild", signal.SIGTERM, "the job"),
        ("calibrate", signal.SIGINT, "the job"),
        ("calibrate", signal.SIGTERM, "its group"),
    ],
)
def test_a_job_that_is_stopped_ends_soon_and_says_how_to_go_on(
    job: Any, command: str, number: signal.Signals, whom: str
) -> None:
    status, word = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}[number]
    one = job(command)
    (os.kill if whom == "the job" else os.killpg)(one.process.pid, number)
    assert one.ended() == status, one.said[-4000:]
    assert f"{word}; run the same command again to go on" in one.said


def test_a_job_that_is_stopped_while_sglang_starts_ends_soon(begun: Any) -> None:
    one = begun("prebuild", 1)
    one.until(one.schedulers)
    one.process.send_signal(signal.SIGTERM)
    assert one.ended() == 143, one.said[-4000:]


@pytest.mark.parametrize("command", ["prebuild", "calibrate"])
def test_no_job_waits_for_a_dead_scheduler(job: Any, tmp_path: Path, command: str) -> None:
    one = job(command)
    for scheduler in one.schedulers():
        scheduler.kill()
    assert one.ended() == 1, one.said[-4000:]
    assert "expected SGLang's processes to live, got the end of one" in one.said
    if command == "prebuild":
        last = json.loads((tmp_path / "report.jsonl").read_text().splitlines()[-1])
        assert (last["status"], last["reason"]) == ("failed", "engine_died")
