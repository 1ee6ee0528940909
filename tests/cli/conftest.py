"""A store of small indexes, and the commands run on it in this process or in one of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefix_index import BuildInfo, FileStore, IndexEntry, Retention
from prefix_index.connect import open_store
from sglang_ext.cli import main
from sglang_ext.storage import ENV_STORE
from tests.prefix_index.samples import sample_identity, sample_model, sample_payload
from tests.prefix_index.tiers import Service

PROGRAM = [sys.executable, "-m", "sglang_ext.cli"]


@dataclass(frozen=True)
class Ran:
    """What a command said, and how it ended."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def message(self) -> str:
        """Standard error as one line; nothing that people read is wider than 80 columns."""
        assert all(len(line) <= 80 for line in self.err.splitlines())
        return " ".join(self.err.split())

    @property
    def text(self) -> str:
        """Standard output, for people."""
        assert all(len(line) <= 80 for line in self.out.splitlines())
        return self.out


@dataclass
class Shelf:
    """A store on disk: its folder, its entries, oldest first."""

    folder: Path
    entries: list[IndexEntry]

    def path(self, number: int) -> Path:
        assert self.entries[number].path is not None
        return Path(self.entries[number].path)

    def flip(self, number: int, at: int = 8192 + 5) -> None:
        """One byte of an array, or of the header, is no longer what was written."""
        flip(self.path(number), at)

    def use(self, number: int, when: float) -> None:
        """It was used last at that time."""
        os.utime(self.path(number), (when, self.path(number).stat().st_mtime))

    def digests(self) -> list[str]:
        return list(kept(self.folder))


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def kept(folder: Path) -> dict[str, Retention]:
    """Retentions of a store's usable indexes, by digest."""
    with FileStore(folder) as store:
        return {entry.digest: entry.retention for entry in store.list()}


def fill(folder: Path, count: int, values: int = 2048) -> list[IndexEntry]:
    """Indexes of growing prompts, alternately of two namespaces and two models, a day apart."""
    with FileStore(folder, create=True) as store:
        entries = []
        for number in range(count):
            identity = sample_identity(
                tuple(range(16 * (number + 1))),
                extra_key="tenant" if number % 2 else None,
                model=sample_model(kv_dtype="float32" if number % 3 == 2 else "bfloat16"),
            )
            payload = sample_payload(identity, fill=number, values_per_array=values)
            info = BuildInfo(created=time.time() - 86400.0 * (count - number), build_seconds=12.0 + number)
            entries.append(store.put(replace(payload, info=info)))
        return entries


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """Five indexes, in the store that commands take unless they are told another one."""
    folder = tmp_path / "store"
    monkeypatch.setenv(ENV_STORE, str(folder))
    return Shelf(folder, fill(folder, 5))


@pytest.fixture
def index(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs `sglang-ext index ...` in this process, at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: object) -> Ran:
        capsys.readouterr()
        status = main(["index", *map(str, words)])
        said = capsys.readouterr()
        return Ran(status, said.out, said.err)

    return run


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """Starts `sglang-ext ...` as a process of its own."""

    def start(*words: object, **options: Any) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "COLUMNS": "80", **options.pop("env", {})}
        return subprocess.Popen([*PROGRAM, *map(str, words)], env=environment, **options)

    return start


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process wait longer for a service: one that is slow here is not what they are tried on."""
    monkeypatch.setattr("sglang_ext.cli.index.targets.open_store", partial(open_store, timeout_s=120.0))


@pytest.fixture
def served(patient: None, shelf: Shelf, tmp_path: Path) -> Iterator[Service]:
    """A service of the shelf's folder."""
    with Service(tmp_path) as service:  # whose store is the shelf's
        yield service
