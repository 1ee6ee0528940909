"""What `sglang-ext store serve` finds out about its folders; the service itself: tests/prefix_index."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_ext.cli.store import file_system


def test_a_file_system_is_known_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [file_system(Path(name)) for name in ("/proc", "/dev/shm")] == ["proc", "tmpfs"]
    monkeypatch.setattr("sglang_ext.cli.store.os.minor", lambda device: -1)  # as a subvolume of btrfs, in no list
    assert file_system(Path("/proc")) == "unknown"
