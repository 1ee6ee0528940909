"""Files of tuned launch parameters: what is found again, what is refused, what is left aside."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prefix_kernels.grouped_attention import AttentionConfig, AttentionShape, GroupedAttention, TunedConfigs
from prefix_kernels.grouped_attention import tuned as module
from prefix_kernels.grouped_attention.config import specialized_at_once
from prefix_kernels.grouped_attention.tuned import TileKey, TunedEntry, file_name, own_config, parse

SHAPE = AttentionShape(32, 8, 128, 128, torch.bfloat16, torch.bfloat16)
WIDE = AttentionShape(16, 2, 256, 256, torch.float16, torch.float8_e4m3fn)
FAST = AttentionConfig(16, 128, 8, 2, 1)
CPU = torch.device("cpu")


def entry(shape: AttentionShape = SHAPE, config: AttentionConfig = FAST) -> TunedEntry:
    return TunedEntry(TileKey.of(shape, config.block_m), config, {"prefix": 1.5, "selection": 0.25})


def test_what_was_saved_is_found_by_its_whole_key(tmp_path: Path) -> None:
    saved = TunedConfigs("cpu", [entry(), entry(WIDE, AttentionConfig(32, 32, 4, 3, 2))])
    before = os.umask(0o022)
    path = saved.save(tmp_path / "new" / "folder")
    os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644, "others may read it"
    found = TunedConfigs.for_device(CPU, tmp_path / "new" / "folder")
    assert found.entries == saved.entries
    assert found(SHAPE, 1) == found(SHAPE, 4) == FAST
    assert found(WIDE, 4) == AttentionConfig(32, 32, 4, 3, 2)
    for other in (
        replace(SHAPE, kv_dtype=torch.float8_e4m3fn),
        replace(SHAPE, head_dim=96),
        replace(SHAPE, v_head_dim=96),
    ):
        assert found(other, 1) == own_config(other, 16)
    assert found(SHAPE, 8) == own_config(SHAPE, 32)
    assert found.missing(SHAPE, [1, 2, 8, 32, 64]) == [32, 128]
    assert not list((tmp_path / "new" / "folder").glob(".*")), "the partial file is gone"


def test_without_a_file_the_own_parameters_run(tmp_path: Path) -> None:
    for cache in (None, tmp_path, tmp_path / "none"):
        found = TunedConfigs.for_device(CPU, cache)
        assert found.entries == []
        assert found(SHAPE, 32) == own_config(SHAPE, 128)


def test_an_own_finding_goes_before_a_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = TunedConfigs("cpu", [entry(), entry(WIDE, AttentionConfig(32, 32, 4, 3, 2))])
    shipped.write(tmp_path / "cpu.json")
    monkeypatch.setattr(module, "SHIPPED", tmp_path)
    assert TunedConfigs.for_device(CPU)(SHAPE, 1) == FAST
    own = replace(FAST, num_stages=4)
    TunedConfigs("cpu", [entry(config=own)]).save(tmp_path / "cache")
    found = TunedConfigs.for_device(CPU, tmp_path / "cache")
    assert found(SHAPE, 1) == own
    assert found(WIDE, 4) == AttentionConfig(32, 32, 4, 3, 2)
    found.save(tmp_path / "cache")
    TunedConfigs("cpu", [entry(WIDE, AttentionConfig(32, 64, 4, 3, 2))]).write(tmp_path / "cpu.json")
    later = TunedConfigs.for_device(CPU, tmp_path / "cache")
    assert later(WIDE, 4) == AttentionConfig(32, 64, 4, 3, 2), "what was shipped before is not a machine's own finding"


GOOD = {"format": 2, "gpu": "cpu", "triton": "3", "entries": []}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "\x00",
        "[" * 10**6,
        json.dumps({**GOOD, "format": 1}),
        json.dumps({**GOOD, "gpu": "NVIDIA H200"}),
        json.dumps({**GOOD, "gpu": 3}),
        json.dumps({**GOOD, "entries": {}}),
        json.dumps({**GOOD, "entries": [3]}),
        json.dumps({**GOOD, "entries": [{"block_m": 16}]}),
    ],
    ids=range(10),
)
def test_a_bad_file_is_named_and_in_the_cache_left_aside(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"^expected .* in here, got"):
        parse(text, "cpu", "here")
    path = TunedConfigs("cpu", [entry()]).save(tmp_path)
    path.write_text(text)
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        assert TunedConfigs.for_device(CPU, tmp_path).entries == []
    assert str(path) in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"block_n": 48},
        {"block_n": "64"},
        {"num_warps": 0},
        {"num_stages": True},
        {"num_stages": None},
        {"max_registers": 0},
        {"max_registers": 256},
        {"num_warps": 3},
        {"num_warps": 64},
        {"block_m": 8},
        {"rows": 8},
        {"dtype": None},
        {"us": [1]},
        {"us": {"prefix": "fast"}},
        {"us": {"prefix": 10**400}},
        {"specialized": 1},
        {"specialized": True},
        {"specialized": True, "block_m": 64, "num_warps": 8},
        {"specialized": True, "block_m": 64, "max_registers": 88},
        {"specialized": True, "block_m": 64, "dtype": "float32", "kv_dtype": "float32"},
        {"specialized": True, "block_m": 64, "kv_dtype": "float8_e4m3fn"},
        {"specialized": True, "block_m": 64, "head_dim": 256},
    ],
    ids=str,
)
def test_an_entry_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    document = json.loads(TunedConfigs("cpu", [entry()]).dump())
    document["entries"][0] |= change
    with pytest.raises(ValueError, match=r"expected an entry of tuned parameters in here, got "):
        parse(json.dumps(document), "cpu", "here")


def test_a_file_of_any_gpu_can_be_read_by_its_path(tmp_path: Path) -> None:
    TunedConfigs("NVIDIA H200", [entry()]).write(tmp_path / "x.json")
    found = TunedConfigs.read(tmp_path / "x.json")
    assert (found.gpu, found.entries) == ("NVIDIA H200", [entry()])
    with pytest.raises(OSError, match=r"none\.json"):
        TunedConfigs.read(tmp_path / "none.json")


def test_an_interrupted_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = TunedConfigs("cpu", [entry()]).save(tmp_path)
    before = path.read_text()

    def broken(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(module.os, "replace", broken)
    with pytest.raises(OSError, match="no space left"):
        TunedConfigs("cpu").save(tmp_path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_file_names() -> None:
    assert file_name("NVIDIA H200") == "nvidia-h200.json"
    assert file_name("NVIDIA A100-SXM4-80GB", "3.6.0") == "nvidia-a100-sxm4-80gb-triton-3.6.0.json"
    assert "/" not in file_name("../../x")


@pytest.mark.parametrize(
    ("shape", "low"), [(replace(SHAPE, head_dim=256), 32), (replace(SHAPE, dtype=torch.float32), 16)]
)
def test_a_tile_that_is_too_low_for_one_request_is_not_known(shape: AttentionShape, low: int) -> None:
    """Wide heads and fp32 have tiles lower than asked for; the same entry is met with more query heads to a KV head."""
    one = TunedEntry(TileKey.of(shape, 128), AttentionConfig(low, 32, 4, 3, 1), {})
    configs = TunedConfigs("cpu", [one])
    assert configs(shape, 32).block_m == low
    many = replace(shape, num_qo_heads=8 * 64)
    assert configs(many, 2) == own_config(many, 128)
    assert configs.missing(many, [2]) == [128]


def test_a_folder_that_cannot_be_looked_into_is_left_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = TunedConfigs("cpu", [entry()]).save(tmp_path)

    def refused(self: Path) -> bool:
        if self == path:
            raise PermissionError(13, "Permission denied", str(self))
        return False

    monkeypatch.setattr(Path, "is_file", refused)
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        assert TunedConfigs.for_device(CPU, tmp_path).entries == []
    assert "Permission denied" in caplog.text


def test_a_specialized_entry_is_higher_than_what_it_serves_and_does_for_suffixes_too() -> None:
    config = AttentionConfig(64, 64, 4, 3, 2, 128, specialized=True)
    shape = AttentionShape(32, 8, 128, 128, torch.bfloat16, torch.bfloat16)
    key = TileKey.of(shape, 32)
    found = TunedConfigs("cpu", parse(TunedConfigs("cpu", [TunedEntry(key, config, {})]).dump(), "cpu", "here"))
    assert found.passes(shape, 8) == [config, config]
    assert found.passes(shape, 1) == [own_config(shape, 16)] * 2
    assert found.passes(shape, 32) == [own_config(shape, 128), own_config(shape, 16)]


@pytest.mark.parametrize("registers", [40, 88, 111])
def test_a_specialized_kernel_needs_registers_for_all_of_its_warps(registers: int) -> None:
    with pytest.raises(ValueError, match="expected max_registers of at least 112 or None"):
        AttentionConfig(64, 64, 4, 3, 2, registers, specialized=True)
    with pytest.raises(ValueError, match="expected max_registers of at least 168 or None"):
        AttentionConfig(128, 64, 4, 3, 1, registers, specialized=True)
    with pytest.raises(ValueError, match="num_warps of 4"):
        AttentionConfig(32, 64, 4, 3, 1, specialized=True)


def test_programs_at_a_time_are_bounded_by_memory_and_by_registers() -> None:
    block, query = 64 * 512, 64 * 256
    two = AttentionConfig(64, 64, 4, 3, 2, 128, specialized=True)
    assert specialized_at_once(two, block, query, 228 << 10) == 2
    assert specialized_at_once(AttentionConfig(64, 64, 4, 3, 2, specialized=True), block, query, 228 << 10) == 1
    assert specialized_at_once(AttentionConfig(64, 64, 4, 4, 2, 128, specialized=True), block, query, 228 << 10) == 1
    assert specialized_at_once(AttentionConfig(128, 64, 4, 5, 1, specialized=True), block, 2 * query, 228 << 10) == 1
    assert specialized_at_once(AttentionConfig(128, 64, 4, 9, 1, specialized=True), block, 2 * query, 228 << 10) == 0


def test_a_shape_that_the_specialized_kernel_does_not_have_is_refused() -> None:
    config = AttentionConfig(64, 64, 4, 3, 2, 128, specialized=True)
    for shape in (
        AttentionShape(32, 8, 128, 128, torch.bfloat16, torch.float8_e4m3fn),
        AttentionShape(32, 8, 96, 96, torch.bfloat16, torch.bfloat16),
        AttentionShape(128, 1, 64, 64, torch.float16, torch.float16),
    ):
        with pytest.raises(ValueError, match="expected a shape that the specialized kernel has"):
            GroupedAttention(shape, 4, [config], torch.device("cpu"))


@pytest.mark.parametrize("path", sorted(module.SHIPPED.glob("*.json")), ids=lambda path: path.name)
def test_what_the_package_ships_can_be_read_and_fits_its_shapes(path: Path) -> None:
    shipped = TunedConfigs.read(path)
    assert path.name == file_name(shipped.gpu)
    assert shipped.entries
    for one in shipped.entries:
        assert one.us_by_case
        assert one.config.block_m >= min(one.key.block_m, 64)


def test_the_h200_runs_its_own_kernel_for_groups_of_every_size() -> None:
    shipped = TunedConfigs.read(module.SHIPPED / "nvidia-h200.json")
    shape = AttentionShape(32, 8, 128, 128, torch.bfloat16, torch.bfloat16)
    assert shipped.missing(shape, range(1, 65)) == []
    for rows in (1, 8, 16, 32, 64):
        group, suffix = shipped.passes(shape, rows)
        assert group == suffix
        assert group.specialized
