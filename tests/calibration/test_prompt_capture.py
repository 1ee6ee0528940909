"""A prompt's capture: what it offers, that its file keeps it, what is refused; and how much attention changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_ext.calibration.prompt_capture import (
    attention_importance,
    load_capture,
    save_capture,
)
from tests.calibration.captures import make_capture


def test_asked_are_the_late_tokens_behind_the_prefix() -> None:
    positions = torch.tensor([1, 4, 9, 15, 18, 18, 19, 20, 21])
    capture = replace(make_capture(prefix_len=20, sampled=5, asked=4), positions=positions)
    assert capture.asked().tolist() == [7, 8]
    behind = capture.behind(18)
    assert behind.asked().tolist() == [5, 6, 7, 8], "the sampled token at 18 is there once"
    layer = behind.layer(1, behind.asked())
    assert torch.equal(layer.queries, capture.queries[1, 5:])
    assert layer.positions.tolist() == [18, 19, 20, 21]
    assert layer.visible.tolist() == [18] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_file_keeps_everything(tmp_path: Path, dtype: torch.dtype) -> None:
    made = make_capture(prefix_len=20, sampled=5)
    capture = replace(made, queries=made.queries.to(dtype), keys=made.keys.to(dtype)).behind(7)
    path = tmp_path / "a.safetensors"
    save_capture(capture, path)
    back = load_capture(path)
    for name in ("queries", "positions", "sampled", "keys", "importance"):
        assert torch.equal(getattr(back, name), getattr(capture, name)), name
        assert getattr(back, name).dtype == getattr(capture, name).dtype
    assert (back.prompt_len, back.sm_scale) == (26, 16**-0.5)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"], "nothing half-written stays"


def test_importance_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [3.0, 4.0]])
    y = torch.tensor([[2.0, 0.0], [0.0, 5.0], [-1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [3.0, 4.0]])
    assert attention_importance(x, y).tolist() == pytest.approx([0, 1, 2, 0, 1, 0], abs=1e-12)
    # A small change is not lost in rounding.
    half = torch.tensor([[1.0, 1e-3]]).half()
    found = attention_importance(torch.tensor([[1.0, 0.0]]).half(), half)
    assert found.item() == pytest.approx(float(half[0, 1]) ** 2 / 2, rel=1e-3)
    for odd in (torch.nan, torch.inf):
        assert attention_importance(x * odd, x * odd).isnan().all()
