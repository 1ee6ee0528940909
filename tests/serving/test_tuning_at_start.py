"""The first start on a GPU measures and keeps, the second one reads; nothing that goes wrong there stops a start."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from prefix_kernels.grouped_attention import AttentionConfig, AttentionShape, TunedConfigs, tuned, tuning
from prefix_kernels.grouped_attention.tuned import TileKey, TunedEntry, own_config
from prefix_kernels.grouped_attention.tuning import Space, candidates
from sglang_ext.decode import tuning as tuning_at_start
from sglang_ext.decode.tuning import tune_at_start

SHAPE = AttentionShape(8, 2, 32, 32, torch.float32, torch.float32)
SPACE = Space(block_n=(16, 32), num_warps=(4,), num_stages=(2,), programs_per_sm=(1,))
"""With the package's own: 3 candidates of each height."""
ROWS = [1, 2, 8]
HEIGHTS = [16, 32]
BEST = AttentionConfig(16, 32, 4, 2, 1)
CPU = torch.device("cpu")


class Clock:
    """Stands for the GPU and for time: each candidate takes a second, and wider blocks are faster. Keeps the log."""

    def __init__(self, log: pytest.LogCaptureFixture) -> None:
        self.log = log
        self.now = 0.0
        self.timed: list[tuple[int, AttentionConfig]] = []

    def measured(self, problem: Any, config: AttentionConfig, timer: object) -> dict[str, float]:
        """As `tuning._measured`."""
        self.now += 1.0
        self.timed.append((problem.batch, config))
        return {"prefix": 100.0 / config.block_n + config.num_stages}

    def monotonic(self) -> float:
        return self.now

    @property
    def said(self) -> str:
        return self.log.text

    @property
    def warnings(self) -> list[str]:
        return [one.getMessage() for one in self.log.records if one.levelno == logging.WARNING]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Clock:
    monkeypatch.delenv("SGLANG_EXT_TUNE", raising=False)
    caplog.set_level(logging.INFO)
    clock = Clock(caplog)
    monkeypatch.setattr(tuning, "_measured", clock.measured)
    for module in (tuning, tuning_at_start):
        monkeypatch.setattr(module, "time", clock)
    return clock


def start(clock: Clock, cache: Path, limit_s: float = 1000.0) -> TunedConfigs:
    """What a process does: read what is known, measure the rest."""
    configs = TunedConfigs.for_device(CPU, cache)
    tune_at_start(configs, SHAPE, ROWS, CPU, cache, limit_s=limit_s, space=SPACE, timer=lambda work: 0.0)
    return configs


def test_the_first_start_measures_and_the_second_one_reads(clock: Clock, tmp_path: Path) -> None:
    cache = tmp_path / "new" / "tuned"
    configs = start(clock, cache)
    assert [entry.key.block_m for entry in configs.entries] == HEIGHTS
    assert configs(SHAPE, 1) == BEST
    assert "16, 32 rows" in clock.said
    assert "SGLANG_EXT_TUNE=0" in clock.said
    assert str(configs.path_in(cache)) in clock.said
    assert "measuring: 5 of 6 candidates (32 rows), 5 s" in clock.said
    assert (clock.now, clock.said.count("measuring: ")) == (6.0, 1), "a line every few seconds, not each candidate"
    assert configs.path_in(cache).is_file()
    assert not list(cache.glob(".*"))
    measured, clock.timed = clock.timed, []
    assert measured
    clock.log.clear()
    assert start(clock, cache).entries == configs.entries
    assert clock.timed == []
    assert not clock.log.records, "nothing to say either"


def test_what_the_time_does_not_suffice_for_is_measured_at_the_next_start(clock: Clock, tmp_path: Path) -> None:
    configs = start(clock, tmp_path, limit_s=0.0)
    assert (clock.timed, list(tmp_path.iterdir()), configs.missing(SHAPE, ROWS)) == ([], [], HEIGHTS)
    of_first = len(candidates(SHAPE, 16, SPACE, tuning.shared_memory_of(CPU)))
    configs = start(clock, tmp_path, limit_s=of_first + 0.5)
    assert [entry.key.block_m for entry in configs.entries] == [16]
    assert clock.now == of_first + 1, "one candidate of the second height, which is the package's own"
    assert configs(SHAPE, 8) == own_config(SHAPE, 32)
    assert configs.missing(SHAPE, ROWS) == [], "the best so far serves this process"
    assert "tiles of 32 rows were not finished" in clock.said
    clock.timed = []
    later = start(clock, tmp_path)
    assert {batch for batch, _ in clock.timed} == {8}
    assert [entry.key.block_m for entry in later.entries] == HEIGHTS
    clock.timed = []
    start(clock, tmp_path)
    assert clock.timed == []


def test_a_bad_file_is_named_measured_again_and_replaced(clock: Clock, tmp_path: Path) -> None:
    """What is a bad file: tests/prefix_kernels/test_tuned.py."""
    path = TunedConfigs("cpu", [TunedEntry(TileKey.of(SHAPE, 16), BEST, {})]).save(tmp_path)
    path.write_text(path.read_text().replace('"cpu"', '"X100"'))
    configs = start(clock, tmp_path)
    assert str(path) in clock.warnings[0]
    assert clock.timed
    assert json.loads(path.read_text())["gpu"] == "cpu"
    assert TunedConfigs.for_device(CPU, tmp_path).entries == configs.entries


def test_a_folder_that_cannot_be_written_is_a_warning(clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    configs = start(clock, tmp_path / "file" / "tuned")
    assert configs(SHAPE, 1) == BEST, "it serves this process"
    (warning,) = clock.warnings
    assert "expected a folder that can be written" in warning
    assert "XDG_CACHE_HOME" in warning
    assert "kept in " not in clock.log.records[-1].getMessage()


@pytest.mark.parametrize("value", ["0", "1", "", "no"])
def test_the_environment_turns_it_off(
    value: str, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_EXT_TUNE", value)
    configs = start(clock, tmp_path)
    assert bool(clock.timed) == (value != "0")
    assert configs(SHAPE, 1) == (own_config(SHAPE, 16) if value == "0" else BEST)
    assert ("expected SGLANG_EXT_TUNE as 0 or 1, got 'no'" in clock.said) == (value == "no")
    if value == "0":
        assert "defaults serve" in clock.said
        monkeypatch.delenv("SGLANG_EXT_TUNE")
        start(clock, tmp_path)
        monkeypatch.setenv("SGLANG_EXT_TUNE", "0")
        assert start(clock, tmp_path)(SHAPE, 1) == BEST, "what was kept serves all the same"


def test_shipped_parameters_are_not_measured_again(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    monkeypatch.setattr(tuned, "SHIPPED", shipped)
    entries = [TunedEntry(TileKey.of(SHAPE, 16), BEST, {})]
    TunedConfigs("cpu", entries).write(shipped / "cpu.json")
    start(clock, tmp_path / "cache")
    assert {batch for batch, _ in clock.timed} == {8}, "only the height that is not shipped"
    entries.append(TunedEntry(TileKey.of(SHAPE, 32), AttentionConfig(16, 16, 4, 2, 1), {}))
    TunedConfigs("cpu", entries).write(shipped / "cpu.json")
    clock.timed = []
    start(clock, tmp_path / "other")
    assert clock.timed == []
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), RuntimeError("broken"), KeyError("x")])
def test_a_failure_keeps_what_was_found_and_the_start_goes_on(
    error: Exception, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tuning._Problem

    def fails(shape: AttentionShape, block_m: int, device: torch.device) -> object:
        if block_m == 32:
            raise error
        return made(shape, block_m, device)

    monkeypatch.setattr(tuning, "_Problem", fails)
    configs = start(clock, tmp_path)
    (warning,) = clock.warnings
    assert type(error).__name__ in warning
    assert "the next start tries again" in warning
    assert configs(SHAPE, 1) == BEST
    assert configs(SHAPE, 8) == own_config(SHAPE, 32)
    assert TunedConfigs.for_device(CPU, tmp_path).missing(SHAPE, ROWS) == [32]


def test_what_cannot_even_be_asked_does_not_stop_the_start(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(device: torch.device) -> int:
        raise RuntimeError("no driver")

    monkeypatch.setattr(tuning_at_start, "_free_bytes", refused)
    start(clock, tmp_path)
    assert clock.timed == []
    assert "no driver" in clock.said


def test_too_little_memory_is_said_and_nothing_is_measured(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = tuning.memory_needed(SHAPE, 32)
    monkeypatch.setattr(tuning_at_start, "_free_bytes", lambda device: needed - 1)
    start(clock, tmp_path)
    assert clock.timed == []
    assert f"expected {needed >> 20} MiB of free device memory, got {(needed - 1) >> 20} MiB" in clock.said
    monkeypatch.setattr(tuning_at_start, "_free_bytes", lambda device: needed)
    start(clock, tmp_path)
    assert clock.timed


def test_what_another_process_found_meanwhile_stays(clock: Clock, tmp_path: Path) -> None:
    ours = TunedConfigs.for_device(CPU, tmp_path)
    theirs = TunedEntry(TileKey.of(SHAPE, 128), AttentionConfig(16, 16, 4, 2, 1), {})
    TunedConfigs("cpu", [theirs]).save(tmp_path)
    tune_at_start(ours, SHAPE, ROWS, CPU, tmp_path, space=SPACE, timer=lambda work: 0.0)
    kept = TunedConfigs.for_device(CPU, tmp_path)
    assert [entry.key.block_m for entry in kept.entries] == [*HEIGHTS, 128]
    assert kept.entries[-1] == theirs
