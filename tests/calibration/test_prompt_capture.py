"""A prompt's capture: what it offers, and that its file keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_ext.calibration.prompt_capture import PromptCapture, load_capture, save_capture


def _capture(prompt_len: int = 20, dtype: torch.dtype = torch.float32) -> PromptCapture:
    positions = torch.tensor([1, 4, 9, 15, 18, 18, 19, 20, 21])
    sampled = torch.tensor([True, True, True, True, True, False, False, False, False])
    generator = torch.Generator().manual_seed(0)
    return PromptCapture(
        queries=torch.randn(3, 9, 4, 8, generator=generator).to(dtype),
        positions=positions,
        sampled=sampled,
        keys=torch.randn(3, prompt_len, 2, 8, generator=generator).to(dtype),
        values=torch.randn(3, prompt_len, 2, 8, generator=generator).to(dtype),
        importance=torch.rand(3, 9, generator=generator),
        prompt_len=prompt_len,
        sm_scale=8**-0.5,
    )


def test_samples_are_the_sampled_queries_of_the_prefix_by_kv_head() -> None:
    capture = _capture().behind(16)
    assert capture.prefix_len == 16
    samples = capture.samples()
    assert samples.shape == (3, 2, 4 * 2, 8)
    for layer in range(3):
        for head in range(2):
            expected = [capture.queries[layer, row, head * 2 + one] for row in range(4) for one in range(2)]
            assert torch.equal(samples[layer, head], torch.stack(expected))


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
    for name in ("queries", "positions", "sampled", "keys", "values", "importance"):
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
    with pytest.raises(ValueError, match=r"expected a capture of version 1 .* got '99'; take it again"):
        load_capture(path)
