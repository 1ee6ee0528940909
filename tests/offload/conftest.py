"""Time, and what a decode step copies out, as a test sets them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.serving.admitting import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What `Offloading` takes for the time."""
    clock = Clock()
    clock.now = 1e6
    monkeypatch.setattr("sglang_ext.offload.agreement.time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def by_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step copies 32 tokens of two layers, heads and 8 dimensions out, at most."""
    monkeypatch.setattr("sglang_ext.offload.offloading.COPY_BYTES", 40 * 2 * 2 * 2 * 8 * 4)
