"""Tuning on the device at hand: the fastest right candidate is kept, a wrong one never."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from prefix_kernels.grouped_attention import AttentionConfig, AttentionShape, GroupedAttention, TunedConfigs, tuning
from prefix_kernels.grouped_attention.tuned import TileKey, own_config
from prefix_kernels.grouped_attention.tuning import Space, candidates, fastest, tune_missing

SHAPE = AttentionShape(8, 2, 32, 32, torch.float32, torch.float32)
SPACE = Space(block_n=(16, 32), num_warps=(4,), num_stages=(2,), programs_per_sm=(1, 2))


class Clock:
    """Stands for the time of a candidate: of the work's own configuration."""

    def __init__(self, us: Callable[[AttentionConfig, int], float]) -> None:
        self.us = us
        self.timed: list[AttentionConfig] = []

    def __call__(self, work: Callable[[], None]) -> float:
        work()
        attention: GroupedAttention = work.__defaults__[0]  # type: ignore[attr-defined]
        config = attention.passes[0].config
        self.timed.append(config)
        return self.us(config, self.timed.count(config))


def test_the_fastest_is_found_once_and_kept(device: torch.device, tmp_path: Path) -> None:
    clock = Clock(lambda config, case: 1.0 + abs(config.block_n - 32) + config.programs_per_sm)
    configs = TunedConfigs.for_device(device)
    steps: list[tuple[int, int, str]] = []

    def tune(to: TunedConfigs) -> list[AttentionConfig]:
        found = tune_missing(
            to, SHAPE, [1, 4], device, space=SPACE, timer=clock, progress=lambda *step: steps.append(step)
        )
        return [one.config for one in found]

    best = AttentionConfig(16, 32, 4, 2, 1)
    assert tune(configs) == [best]
    of_height = candidates(SHAPE, 16, SPACE, tuning.shared_memory_of(device))
    assert set(clock.timed) == set(of_height)
    assert steps == [(n + 1, len(of_height), "16 rows") for n in range(len(of_height))]
    assert configs(SHAPE, 4) == best
    configs.save(tmp_path)
    again = TunedConfigs.for_device(device, tmp_path)
    assert again(SHAPE, 1) == best
    assert tune(again) == []
    assert tune_missing(again, SHAPE, [4], device) == [], "nothing to measure: no clock is made, nor its memory taken"


def test_a_candidate_with_another_result_is_out(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = GroupedAttention.run

    def wrong(self: GroupedAttention, *args: torch.Tensor, **options: object) -> None:
        run(self, *args, **options)  # type: ignore[arg-type]
        if self.passes[0].config.block_n == 32:
            args[4][-1, -1, -1] += 0.01

    monkeypatch.setattr(GroupedAttention, "run", wrong)
    configs = TunedConfigs("cpu")
    with caplog.at_level(logging.WARNING, logger=tuning.__name__):
        (found,) = tune_missing(
            configs, SHAPE, [1], device, space=SPACE, timer=Clock(lambda config, case: 1.0 / config.block_n)
        )
    assert found.config.block_n == 16
    assert caplog.text.count("left out") == 2


@pytest.mark.parametrize("how", ["fit", "compile"])
def test_what_cannot_run_is_no_candidate_and_none_at_all_keeps_the_own_one(
    how: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from triton.runtime.errors import OutOfResources, PTXASError

    def none_fits(*_: object, **__: object) -> None:
        raise OutOfResources(1, 0, "shared memory") if how == "fit" else PTXASError("too much")

    monkeypatch.setattr(GroupedAttention, "run", none_fits)
    configs = TunedConfigs("cpu")
    assert tune_missing(configs, SHAPE, [1], device, space=SPACE, timer=Clock(lambda *_: 1.0)) == []
    assert "16 rows" in caplog.text
    assert configs(SHAPE, 1) == own_config(SHAPE, 16)
    assert configs.missing(SHAPE, [1]) == [16]


def test_candidates_fit_the_shared_memory() -> None:
    shape = AttentionShape(32, 8, 128, 128, torch.bfloat16, torch.bfloat16)
    found = candidates(shape, 128, Space(), 100 << 10)
    assert found[0] == own_config(shape, 128)
    assert len(set(found)) == len(found)
    assert all((one.num_stages - 1) * one.block_n * 512 <= 100 << 10 for one in found[1:])
    assert {one.block_m for one in found} == {128}
    assert {one.max_registers for one in found if one.num_warps == 4} == {None}
    assert {one.max_registers for one in found if one.num_warps == 8} == {None, 128}
    wide = AttentionShape(32, 8, 256, 256, torch.bfloat16, torch.bfloat16)
    assert {one.block_m for one in candidates(wide, 128, Space(), 227 << 10)} == {32}, "lower, and in registers"


def test_candidates_of_hopper_s_own_kernel_fill_the_shared_memory() -> None:
    shape = AttentionShape(32, 8, 128, 128, torch.bfloat16, torch.bfloat16)
    for height, rows in ((16, 64), (64, 64), (128, 128)):
        found = [one for one in candidates(shape, height, Space(), 227 << 10, True) if one.specialized]
        assert {one.block_m for one in found} == {rows}
        for one in found:
            held = rows * 256 + one.num_stages * one.block_n * 512
            assert held * one.programs_per_sm <= 227 << 10
            assert (one.max_registers == 128) == (one.programs_per_sm == 2)
        assert max(one.num_stages * one.block_n for one in found) >= 320
    for other in (
        AttentionShape(32, 8, 128, 128, torch.bfloat16, torch.float8_e4m3fn),
        AttentionShape(32, 8, 96, 96, torch.bfloat16, torch.bfloat16),
        AttentionShape(8, 2, 64, 64, torch.float32, torch.float32),
    ):
        assert not any(one.specialized for one in candidates(other, 16, Space(), 227 << 10, True))


def test_the_choice_is_by_ratios_so_that_a_long_case_does_not_decide_alone() -> None:
    one, two = AttentionConfig(16, 16, 4, 2, 1), AttentionConfig(16, 32, 4, 2, 1)
    assert fastest({one: {"long": 100.0, "short": 20.0}, two: {"long": 110.0, "short": 10.0}}) == two
    assert fastest({one: {"long": 100.0, "short": 10.5}, two: {"long": 110.0, "short": 10.0}}) == one


@pytest.mark.parametrize(("gqa", "most", "heights"), [(4, 64, [16, 32, 64, 128]), (16, 1, [16]), (5, 4, [16, 32])])
def test_the_heights_that_a_largest_batch_needs(gqa: int, most: int, heights: list[int]) -> None:
    shape = AttentionShape(gqa, 1, 64, 64, torch.float16, torch.float16)
    assert TunedConfigs("cpu").missing(shape, range(1, most + 1)) == heights
    assert TileKey.of(shape, heights[0]).block_m == heights[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times of the interpreter mean nothing")
def test_the_gpu_is_tuned_with_its_own_clock(device: torch.device) -> None:
    shape = AttentionShape(32, 8, 128, 128, torch.bfloat16, torch.bfloat16)
    space = Space(block_n=(64,), num_warps=(4,), num_stages=(2, 3), programs_per_sm=(1, 2))
    (found,) = tune_missing(TunedConfigs("none"), shape, [1], device, space=space)
    assert set(found.us_by_case) == {"prefix", "selection"}
    assert all(1.0 < us < 1e4 for us in found.us_by_case.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no device memory")
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_the_memory_that_tuning_takes_is_foreseen(kv_heads: int, device: torch.device) -> None:
    shape = AttentionShape(32, kv_heads, 128, 128, torch.bfloat16, torch.bfloat16)
    space = Space(block_n=(64,), num_warps=(4,), num_stages=(2,), programs_per_sm=(1, 2))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    tune_missing(TunedConfigs("none"), shape, [32], device, space=space)
    assert torch.cuda.max_memory_reserved() - before <= tuning.memory_needed(shape, 128)
