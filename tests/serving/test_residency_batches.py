"""An index comes in by batches of layers: whatever their size, the same tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sglang_ext.prefix.residency as module
from sglang_ext.methods.exact import ExactSpec
from sglang_ext.prefix.residency import Residency, State, _batches


@pytest.mark.parametrize("staging", [1, 40_000, 1 << 30], ids=["layer by layer", "some layers", "all at once"])
def test_batches_do_not_show(bench: Any, staging: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STAGING_BYTES", staging)
    prompt = list(range(64))
    residency = Residency(bench.store, ExactSpec(), 3, 2, torch.device("cpu"), 1 << 30)
    index = residency.acquire(bench.put(prompt))
    assert index.loaded is not None
    index.loaded.result(30)
    assert index.state is State.READY
    for layer in range(3):
        assert torch.equal(index.layers[layer]["keys"], bench.keys(prompt, layer).transpose(0, 1))
    residency.close()


def test_a_batch_has_at_least_one_layer_and_at_most_the_staging_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STAGING_BYTES", 10)
    assert [list(batch) for batch in _batches([4, 4, 4, 30, 10, 1, 9])] == [[0, 1], [2], [3], [4], [5, 6]]
    assert [list(batch) for batch in _batches([11, 0, 0])] == [[0], [1, 2]]
