"""Files of KV: what is written comes back, whatever is damaged is noticed, and the folder keeps to its size."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from prefix_kernels.residents import from_pages, to_pages
from sglang_ext.offload import kv_files
from sglang_ext.offload.directory import OffloadDirectory
from sglang_ext.offload.kv_files import Bytes, KVFileError, KVFiles, Piece, of_pages, of_slots
from sglang_ext.options import Offload
from sglang_ext.ranks import Ranks
from tests.offload.host_memory import PlainPools

TOKENS, LAYERS = 96, 2


class Kept:
    """Prefixes with content in a pool, and a folder for them."""

    def __init__(
        self, folder: Path, most_bytes: int | None = None, heads: int = 2, dim: int = 8, ranks: Ranks | None = None
    ) -> None:
        self.pools = PlainPools(16 + TOKENS, 24, heads=heads, dim=dim)
        self.directory = OffloadDirectory(self.pools)
        options = Offload(host_bytes=1, folder=str(folder / "kv"), folder_bytes=most_bytes)
        view = SimpleNamespace(num_layers=LAYERS, num_kv_heads=heads, head_dim=dim, v_head_dim=dim)
        view.kv_dtype, self.scales = torch.float32, (1.0, 1.0)
        view.kv = lambda layer: self.pools.kv(layer, *self.scales)
        self.files = KVFiles(options, view, ranks)

    def filled(self, digest: str) -> torch.Tensor:
        """A prefix of random content, written to its file; [layers, 2, TOKENS, heads, dim]."""
        offload = self.directory.begin(digest, TOKENS, ())
        content = torch.randn(LAYERS, 2, TOKENS, *self.pools.device[0].shape[2:])
        for layer, part in zip(self.pools.memory, content, strict=True):
            layer[offload.pages] = to_pages(*part)
        self.files.write(digest, TOKENS, of_pages(self.pools, offload.pages))
        return content

    def damage(self, at: int) -> None:
        """One bit of a's file."""
        path = self.files.path("a")
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1
        path.write_bytes(raw)

    def read(self, digest: str) -> torch.Tensor:
        """The same, out of its file, into other pages."""
        offload = self.directory.begin(f"read {digest}", TOKENS, ())
        self.files.read(digest, TOKENS, of_pages(self.pools, offload.pages))
        found = torch.empty(LAYERS, 2, TOKENS, *self.pools.device[0].shape[2:])
        for layer, part in zip(self.pools.memory, found, strict=True):
            from_pages(layer[offload.pages], *part)
        return found


def test_what_is_written_comes_back_to_other_pages(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    assert torch.equal(kept.filled("a"), kept.read("a"))
    assert list((tmp_path / "kv").iterdir()) == [kept.files.path("a")]
    slots = torch.randperm(TOKENS) + 16
    kept.files.write("b", TOKENS, of_slots(kept.pools.kv, slots))
    wanted = torch.stack([layer[:, slots] for layer in kept.pools.device])
    assert torch.equal(kept.read("b"), wanted)


def test_who_may_read_a_folder(tmp_path: Path) -> None:
    """KV tells what a prompt said: as a store's, a folder that is made is for its user alone; one that was there is
    for whom it was for.
    """
    Kept(tmp_path)
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    (tmp_path / "kv").chmod(0o755)
    Kept(tmp_path)
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o755


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "kv").touch()
    with pytest.raises(OSError, match=r"offload\.folder to be a folder, or .*; got .*File exists: '.*/kv'\. Name"):
        Kept(tmp_path)


@pytest.fixture(params=[False, True], ids=["on disk", "cached"])
def cached(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the page cache is said to have all of a file."""
    monkeypatch.setattr(kv_files, "_in_page_cache", lambda _, size: np.full(-(-size // 4096), request.param))
    return bool(request.param)


@pytest.mark.parametrize("readers", [1, 3, 64])
def test_pieces_of_any_size_are_read_from_the_page_cache_and_past_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool, readers: int
) -> None:
    """Of 960 bytes a page none begins at a block of the disk but the first."""
    monkeypatch.setattr(kv_files, "_PIECE", 2 * 960 + 1)
    monkeypatch.setattr(kv_files, "_READERS", readers)
    kept = Kept(tmp_path, heads=3, dim=5)
    assert torch.equal(kept.filled("a"), kept.read("a"))
    kept.damage(-1000)
    with pytest.raises(KVFileError, match="with its checksum"):
        kept.read("a")


@pytest.mark.parametrize("memory", ["whole blocks", "one token off"])
def test_whole_blocks_are_read_past_the_page_cache(tmp_path: Path, memory: str) -> None:
    kept = Kept(tmp_path, dim=16)
    if memory != "whole blocks":
        memory = kept.pools.memory
        kept.pools.memory = torch.empty(memory.numel() + 16)[16:].view(memory.shape)
    content, path = kept.filled("a"), kept.files.path("a")
    with closing(kv_files._File(path)) as found:
        assert found._in_cache.all(), "it was written a moment ago"
    assert kept.files.size(TOKENS) == 4096 * (1 + LAYERS * TOKENS // 16), "a page is a block"
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if kv_files._in_page_cache(file.fileno(), path.stat().st_size).any():
            pytest.skip("this file system is memory")
        assert torch.equal(content, kept.read("a"))
        found = kv_files._in_page_cache(file.fileno(), path.stat().st_size)
    assert found[-1] == (memory != "whole blocks")


def test_a_read_that_ends_within_a_block_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the page cache the rest would be refused."""
    kept, read = Kept(tmp_path, dim=16), os.preadv
    content = kept.filled("a")
    monkeypatch.setattr(kv_files, "_in_page_cache", lambda _, size: np.zeros(-(-size // 4096), bool))
    monkeypatch.setattr(os, "preadv", lambda *of: min(1000, read(*of)))
    assert torch.equal(content, kept.read("a"))


def test_a_file_that_becomes_shorter_while_it_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    monkeypatch.setattr(kv_files, "_PIECE", 2 * 960)
    kept = Kept(tmp_path, heads=3, dim=5)
    kept.filled("a")

    def cut(piece: kv_files.Piece) -> list[kv_files.Bytes]:
        os.truncate(kept.files.path("a"), 9000)
        return [np.empty(piece.size, np.uint8)]

    with pytest.raises(KVFileError, match="got fewer while it was read"):
        kept.files.read("a", TOKENS, cut)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    kept, limits = Kept(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            kept.filled("a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "kv").iterdir()) == []


@pytest.mark.parametrize("damage", ["content", "short", "header", "empty", "foreign"])
def test_a_file_that_is_not_what_its_name_says_is_noticed(tmp_path: Path, damage: str) -> None:
    kept = Kept(tmp_path)
    kept.filled("a")
    path = kept.files.path("a")
    if damage in ("content", "header"):
        kept.damage({"content": -3, "header": 3}[damage])
    elif damage in ("short", "empty"):
        os.truncate(path, {"short": kept.files.size(TOKENS) - 16, "empty": 0}[damage])
    else:
        kept.filled("b")
        kept.files.path("b").replace(path)
    with pytest.raises(KVFileError, match="expected"):
        kept.read("a")
    assert not path.exists()


def test_numbers_that_stand_for_others_are_not_read(tmp_path: Path) -> None:
    """Scales of an fp8 pool come from the checkpoint, or from `--quantization-param-path`: no digest has these."""
    for written, found in (((1.0, 0.5), (1.0, 0.25)), ((1.0, 0.5), (1.0, 1.0)), ((1.0, 1.0), (2.0, 1.0))):
        kept, other = Kept(tmp_path), Kept(tmp_path)
        kept.scales, other.scales = written, found
        content = kept.filled("a")
        assert torch.equal(content, kept.read("a"))
        with pytest.raises(KVFileError, match="expected"):
            other.read("a")
        assert not other.files.path("a").exists()


def test_a_file_that_took_a_damaged_ones_place_stays(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    content, path = kept.filled("a"), kept.files.path("a")
    whole = path.read_bytes()
    kept.damage(-1)
    offload = kept.directory.begin("damaged", TOKENS, ())
    memory = of_pages(kept.pools, offload.pages)

    def replacing(piece: Piece) -> Sequence[Bytes]:
        other = tmp_path / f"{piece.begin}"
        other.write_bytes(whole)
        other.replace(path)
        return memory(piece)

    with pytest.raises(KVFileError, match="expected"):
        kept.files.read("a", TOKENS, replacing)
    assert torch.equal(kept.read("a"), content)


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
    assert {*(tmp_path / "kv").iterdir()} == {kept.files.path("a"), kept.files.path("c")}
    with pytest.raises(OSError, match=f"expected folder_bytes of at least {size}"):
        Kept(tmp_path, most_bytes=size - 1).filled("d")
    assert {*(tmp_path / "kv").iterdir()} == {kept.files.path("a"), kept.files.path("c")}, "none left for nothing"
    for name, age in ((".d.kv.partial-1-a", 7200), (".e.kv.partial-2-b", 60)):
        (tmp_path / "kv" / name).touch()
        os.utime(tmp_path / "kv" / name, (time.time() - age,) * 2)
    Kept(tmp_path)
    assert [path.name for path in (tmp_path / "kv").glob(".*")] == [".e.kv.partial-2-b"]


def test_what_cannot_be_removed_keeps_nothing_else_from_being_written(tmp_path: Path) -> None:
    """Another user's file, say; here a folder."""
    foreign = tmp_path / "kv" / "foreign.kv"
    foreign.mkdir(parents=True)
    os.utime(foreign, (0, 0))
    size = Kept(tmp_path).files.size(TOKENS)
    kept = Kept(tmp_path, most_bytes=foreign.stat().st_size + size)
    for digest in "ab":
        kept.filled(digest)
        assert {*foreign.parent.iterdir()} == {foreign, kept.files.path(digest)}
    with pytest.raises(OSError, match=rf"room for {size} bytes .* cannot be removed"):
        Kept(tmp_path, most_bytes=size).filled("c")


def test_parts_of_one_prefix_have_room_together_or_not_at_all(tmp_path: Path) -> None:
    """Of tensor-parallel ranks each writes its own; whether one has been written yet, or not, decides nothing."""

    def parts(most_bytes: int) -> list[Kept]:
        ranks = [Ranks(), Ranks()]
        for number, rank in enumerate(ranks):
            rank.rank, rank.size = number, 2
        return [Kept(tmp_path, most_bytes, ranks=rank) for rank in ranks]

    def files() -> set[Path]:
        return {*(tmp_path / "kv").iterdir()}

    size = parts(1)[0].files.size(TOKENS)
    for part in parts(2 * size - 1):
        with pytest.raises(OSError, match=f"expected folder_bytes of at least {2 * size}"):
            part.filled("a")
    assert files() == set()
    first, second = parts(3 * size)
    for digest in "ab":
        for part in (first, second):
            part.filled(digest)
        assert files() == {part.files.path(digest) for part in (first, second)}
    for part in (second, first):
        assert part.read("b").shape[2] == TOKENS
