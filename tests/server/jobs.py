"""Jobs that start SGLang by themselves: any command, and `sglang-ext prebuild`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from prefix_index import FileStore, IndexPayload
from tests.server.harness import DISK, EXACT_CONFIG, JOB_SECONDS, MODEL, ROOT, begin, flags_of, rendezvous


@dataclass(frozen=True)
class Prebuilt:
    """A finished prebuild job."""

    store: Path
    status: int
    report: list[dict[str, Any]]
    output: str

    @property
    def kv(self) -> Path:
        """Where files of KV lie, if the configuration says so."""
        return self.store.parent / "kv"

    def line(self, name: str) -> dict[str, Any]:
        return next(line for line in self.report if line["id"] == name)

    def index(self, name: str) -> IndexPayload:
        """That of this prompt."""
        with FileStore(self.store) as store, store.get(self.line(name)["digest"]) as file:
            return IndexPayload(file.identity, file.read_many(), spec=file.spec, stats=file.stats, info=file.info)


def processes(group: int, word: str = "") -> list[psutil.Process]:
    """Those of a process group that live, whose name or command has this word."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            named = any(word in part for part in (one.name(), *one.cmdline()))
            if os.getpgid(one.pid) == group and one.status() != psutil.STATUS_ZOMBIE and (named or not word):
                found.append(one)
    return found


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    """A job, whose process group does not outlive the block."""
    job = begin(command, log, env, cwd)
    try:
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait(30)


def run_job(
    command: Sequence[str], log: Path, timeout: float = JOB_SECONDS, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """(status, output). A job that takes too long may end by itself first, and what it started in other groups."""
    with running(command, log, env) as job:
        try:
            status = job.wait(timeout)
        except subprocess.TimeoutExpired:
            job.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(30)
            raise
    return status, log.read_text(errors="replace")


def prebuild_command(
    prompts: Path, store: Path, report: Path, config: dict[str, Any] | None = None, model: Path = MODEL, *more: str
) -> list[str]:
    """Flags of SGLang come behind it."""
    command = [sys.executable, "-m", "sglang_ext.cli", "prebuild", "--model-path", str(model), *more]
    command += ["--prompts", str(prompts), "--store", str(store), "--report", str(report)]
    return [*command, "--sparse-attn-config", json.dumps(DISK | (EXACT_CONFIG if config is None else config)), "--"]


def many_prompts(file: Path, count: int) -> Path:
    """A file of different prompts of 2,048 tokens, "p0" and so on."""
    lines = [{"id": f"p{n}", "input_ids": [5 + (n + i) % 90 for i in range(2048)]} for n in range(count)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def run_prebuild(
    folder: Path,
    prompts: Sequence[dict[str, Any]] | str,
    *,
    config: dict[str, Any] | None = None,
    model: Path = MODEL,
    **changes: str | None,
) -> Prebuilt:
    """`sglang-ext prebuild` in a process of its own; `prompts` may be the text of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    store, file, report = folder / "store", folder / "prompts.jsonl", folder / f"report-{time.monotonic_ns()}.jsonl"
    file.write_text(prompts if isinstance(prompts, str) else "".join(json.dumps(line) + "\n" for line in prompts))
    command = [*prebuild_command(file, store, report, config, model), *rendezvous()]
    command += flags_of(None, None, {"--" + k.replace("_", "-"): v for k, v in changes.items()})
    status, output = run_job(command, folder / "prebuild.log")
    lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    return Prebuilt(store, status, lines, output)
