"""Files of KV: what is written comes back, whatever is damaged is noticed, and the folder keeps to its size."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.offload.directory import OffloadDirectory
from sglang_ext.offload.kv_files import KVFileError, KVFiles, Move, Mover, into_pages, of_pages, of_slots
from sglang_ext.options import Offload
from tests.offload.host_memory import PlainPools

TOKENS, LAYERS = 96, 2


class Kept:
    """Prefixes with content in a pool, and a folder for them."""

    def __init__(self, folder: Path, most_bytes: int | None = None) -> None:
        self.pools = PlainPools(16 + TOKENS, 16, 24)
        self.directory = OffloadDirectory(self.pools)
        options = Offload(host_bytes=1, folder=str(folder / "kv"), folder_bytes=most_bytes)
        view: Any = SimpleNamespace(num_layers=LAYERS, num_kv_heads=2, head_dim=8, v_head_dim=8, kv_dtype=torch.float32)
        self.files = KVFiles(options, view)

    def filled(self, digest: str) -> torch.Tensor:
        """A prefix of random content, written to its file; [layers, 2, TOKENS, heads, dim]."""
        offload = self.directory.begin(digest, TOKENS)
        assert not isinstance(offload, str)
        content = torch.randn(LAYERS, 2, TOKENS, *self.pools.host[0].shape[2:])
        rows = (offload.pages[:, None] * 16 + torch.arange(16)).flatten()
        for layer, part in zip(self.pools.host, content, strict=True):
            layer[:, rows] = part
        self.files.write(digest, TOKENS, of_pages(self.pools, offload.pages))
        return content

    def read(self, digest: str) -> torch.Tensor:
        """The same, out of its file, into other pages."""
        offload = self.directory.begin(f"read {digest}", TOKENS)
        assert not isinstance(offload, str)
        self.files.read(digest, TOKENS, into_pages(self.pools, offload.pages))
        rows = (offload.pages[:, None] * 16 + torch.arange(16)).flatten()
        return torch.stack([layer[:, rows] for layer in self.pools.host])


def test_what_is_written_comes_back_to_other_pages(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    assert torch.equal(kept.filled("a"), kept.read("a"))
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["a.kv"]
    slots = torch.randperm(TOKENS) + 16
    kept.files.write("b", TOKENS, of_slots(kept.pools.kv, slots))
    wanted = torch.stack([layer[:, slots] for layer in kept.pools.device])
    assert torch.equal(kept.read("b"), wanted)


@pytest.mark.parametrize("damage", ["content", "short", "header", "empty", "foreign"])
def test_a_file_that_is_not_what_its_name_says_is_noticed(tmp_path: Path, damage: str) -> None:
    kept = Kept(tmp_path)
    kept.filled("a")
    path = kept.files.path("a")
    content = bytearray(path.read_bytes())
    if damage == "content":
        content[-3] ^= 1
    elif damage == "short":
        del content[-16:]
    elif damage == "header":
        content[3] ^= 1
    elif damage == "empty":
        content.clear()
    else:
        kept.filled("b")
        content = bytearray(kept.files.path("b").read_bytes())
    path.write_bytes(content)
    with pytest.raises(KVFileError, match="expected"):
        kept.read("a")


def test_what_was_used_longest_ago_leaves(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.filled("a")
    size = kept.files.path("a").stat().st_size
    kept = Kept(tmp_path, most_bytes=2 * size)
    kept.filled("b")
    for number, digest in enumerate(("a", "b")):
        os.utime(kept.files.path(digest), (number, number))
    kept.read("a")
    kept.filled("c")
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["a.kv", "c.kv"]
    with pytest.raises(OSError, match=f"expected folder_bytes of at least {size}"):
        Kept(tmp_path, most_bytes=size - 1).filled("d")
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["a.kv", "c.kv"], "none left for nothing"
    for name, age in ((".d.kv.partial-1-a", 7200), (".e.kv.partial-2-b", 60)):
        (tmp_path / "kv" / name).touch()
        os.utime(tmp_path / "kv" / name, (time.time() - age,) * 2)
    Kept(tmp_path)
    assert [path.name for path in (tmp_path / "kv").glob(".*")] == [".e.kv.partial-2-b"]


def test_the_thread_gives_back_what_failed_and_goes_on(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.filled("a")
    mover, found = Mover(kept.files, kept.pools), list[Move]()
    missing, there = (kept.directory.begin(name, 16) for name in ("missing", "there"))
    assert not isinstance(missing, str)
    assert not isinstance(there, str)
    mover.begin(Move(missing, True, lambda: None))
    mover.begin(Move(there, False, lambda: None))
    while len(found) < 2:
        found += mover.ended()
    assert [one.offload for one in found] == [missing, there]
    assert isinstance(found[0].error, FileNotFoundError)
    assert found[1].error is None
