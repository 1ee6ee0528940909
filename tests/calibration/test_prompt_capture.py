"""A prompt's capture: what it offers, that its file keeps it, what is refused; and how much attention changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from sglang_ext.calibration.prompt_capture import (
    PromptCapture,
    attention_importance,
    check_capture,
    load_capture,
    save_capture,
)
from tests.calibration.captures import make_layers


def _capture(prompt_len: int = 20, dtype: torch.dtype = torch.float32) -> PromptCapture:
    positions = torch.tensor([1, 4, 9, 15, 18, 18, 19, 20, 21])
    sampled = torch.tensor([True, True, True, True, True, False, False, False, False])
    generator = torch.Generator().manual_seed(0)
    return PromptCapture(
        queries=torch.randn(3, 9, 4, 8, generator=generator).to(dtype),
        positions=positions,
        sampled=sampled,
        keys=torch.randn(3, prompt_len, 2, 8, generator=generator).to(dtype),
        importance=torch.rand(3, 9, generator=generator),
        prompt_len=prompt_len,
        sm_scale=8**-0.5,
    )


def test_asked_are_the_late_tokens_behind_the_prefix() -> None:
    capture = _capture()
    assert capture.asked().tolist() == [7, 8]
    behind = capture.behind(18)
    assert behind.asked().tolist() == [5, 6, 7, 8], "the sampled token at 18 is there once"
    layer = behind.layer(1, behind.asked())
    assert torch.equal(layer.queries, capture.queries[1, 5:])
    assert layer.positions.tolist() == [18, 19, 20, 21]
    assert layer.visible.tolist() == [18] * 4


@pytest.mark.parametrize("length", [0, 21])
def test_a_prefix_that_is_not_there_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=rf"expected a prefix of 1\.\.20 tokens .* got {length}"):
        _capture().behind(length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_file_keeps_everything(tmp_path: Path, dtype: torch.dtype) -> None:
    capture = _capture(dtype=dtype).behind(7)
    path = tmp_path / "a.safetensors"
    save_capture(capture, path)
    back = load_capture(path)
    for name in ("queries", "positions", "sampled", "keys", "importance"):
        assert torch.equal(getattr(back, name), getattr(capture, name)), name
        assert getattr(back, name).dtype == getattr(capture, name).dtype
    assert (back.prompt_len, back.sm_scale) == (20, 8**-0.5)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"], "nothing half-written stays"


def test_a_file_that_is_no_capture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"expected a capture in .* take it again"):
        load_capture(path)
    save_file({"x": torch.zeros(1)}, str(path), {"version": "99"})
    with pytest.raises(ValueError, match=r"expected a capture of version 2 .* got '99'; take it again"):
        load_capture(path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("queries", lambda q: q[..., :4], "head_dim=8"),
        ("queries", lambda q: q[:, :3], "a multiple of num_kv_heads=2"),
        ("queries", lambda q: q.long(), "in a floating dtype"),
        ("queries", lambda q: q / 0.0, "expected finite queries"),
        ("keys", lambda k: k * torch.inf, "expected finite keys"),
        ("keys", lambda k: k[0], r"expected keys \[prefix_len >= 1"),
    ],
)
def test_layers_that_cannot_be_used_are_refused(name: str, change: Callable[[Tensor], Tensor], message: str) -> None:
    (layer,) = make_layers(1)
    check_capture(layer)
    with pytest.raises(ValueError, match=message):
        check_capture(layer._replace(**{name: change(getattr(layer, name))}))


@given(st.lists(st.tuples(*[st.floats(-5, 5, width=32)] * 6), min_size=1, max_size=4))
def test_importance_against_the_cosine_of_the_standard_library(rows: list[tuple[float, ...]]) -> None:
    x, y = torch.tensor([row[:3] for row in rows]), torch.tensor([row[3:] for row in rows])
    for row, ours in zip(rows, attention_importance(x, y).tolist(), strict=True):
        one, two = row[:3], row[3:]
        lengths = math.hypot(*one) * math.hypot(*two)
        if lengths < 1e-12:
            continue
        cosine = sum(a * b for a, b in zip(one, two, strict=True)) / lengths
        assert ours == pytest.approx(1 - cosine, abs=1e-9)


def test_importance_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [3.0, 4.0]])
    y = torch.tensor([[2.0, 0.0], [0.0, 5.0], [-1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [3.0, 4.0]])
    assert attention_importance(x, y).tolist() == pytest.approx([0, 1, 2, 0, 1, 0], abs=1e-12)
    # A small change is not lost in rounding.
    half = torch.tensor([[1.0, 1e-3]]).half()
    found = attention_importance(torch.tensor([[1.0, 0.0]]).half(), half)
    assert found.item() == pytest.approx(float(half[0, 1]) ** 2 / 2, rel=1e-3)


def test_hidden_states_that_cannot_be_used_are_refused() -> None:
    good = torch.ones(2, 3)
    for x, y in ((good, good[:1]), (good[0], good[0]), (good[:0], good[:0])):
        with pytest.raises(ValueError, match=r"expected x and y \[num_tokens >= 1, hidden_size\]"):
            attention_importance(x, y)
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="expected finite hidden states"):
            attention_importance(good, good * bad)
