"""Settings of the store's tests, what several of their modules ask for, and the index of the golden bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefix_index import ArrayKey, BuildInfo, FileStore, IndexPayload, IndexStore, SharedStore, link
from prefix_index.remote import RemoteStore
from tests.prefix_index.remote_stores import CHUNK_NBYTES, Make, Shaky
from tests.prefix_index.samples import sample_identity
from tests.prefix_index.small_stores import SOON, Clock, balanced
from tests.prefix_index.tiers import TIERS, Service

#: By day of each kind the one that costs least.
BY_DAY = ("file", "copied", "service", "shared-file", "shared-memory")


@pytest.fixture(params=[pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.full) for name in TIERS])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[IndexStore]:
    """Of the conformance suite: each tier in turn, open, and looked over when the test is done."""
    with TIERS[request.param](tmp_path) as store:
        store.open()
        yield store
        balanced(store)
        store.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a test's store is: not there yet."""
    return tmp_path / "store"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Service]:
    """A service in a process of its own."""
    with Service(tmp_path) as service:
        yield service


@pytest.fixture
def blobs() -> Iterator[Shaky]:
    """A remote store behind a bad network, that lets everything go at the end."""
    blobs = Shaky()
    yield blobs
    blobs.gate.set()


@pytest.fixture
def make(tmp_path: Path, blobs: Shaky, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes machines on one remote store, each with a folder of its name, open; hardly a pause after failures."""
    monkeypatch.setattr(link, "FIRST_AWAY_S", 0.0)
    with contextlib.ExitStack() as stores:

        def machine(
            name: str = "a", *, remote: Any = None, max_bytes: int | None = None, **options: Any
        ) -> SharedStore:
            local = FileStore(tmp_path / name, create=True, max_bytes=max_bytes)
            over = RemoteStore(blobs, chunk_nbytes=CHUNK_NBYTES, **{"timeout_s": SOON, **(remote or {})})
            return stores.enter_context(SharedStore(local, [over], **{"timeout_s": SOON, "rescan_s": 0.0, **options}))

        yield machine
        blobs.fails = False
        blobs.answers.set()
        blobs.gate.set()


@pytest.fixture(scope="session")
def fixture_file() -> Path:
    """An index file as version 1 wrote it on the day it was released. Never regenerate it."""
    return Path(__file__).parent / "fixtures" / "v1.pfxindex"


@pytest.fixture(scope="session")
def tiny_payload() -> IndexPayload:
    """What ``fixture_file`` holds."""
    scores = ArrayKey("csa.scores", 0, 1)
    packed = ArrayKey("blocks", 1, 0)
    return IndexPayload(
        identity=sample_identity(),
        arrays={
            scores: np.array([0x3F80, 0x4000, 0xC000], dtype=np.uint16),
            ArrayKey("csa.ids", 0, 1): np.arange(6, dtype=np.int32).reshape(2, 3),
            packed: np.array([[0x21], [0x43]], dtype=np.uint8),
            ArrayKey("empty"): np.empty((0, 4), dtype=np.float16),
        },
        dtypes={scores: "bfloat16", packed: "int4x2"},
        spec={"method": "csattention", "budget": 0.05, "layers": ["dense", "anchor"], "seed": None},
        stats={"recall": 0.993},
        info=BuildInfo(created=1_700_000_000.25, build_seconds=12.5),
    )
