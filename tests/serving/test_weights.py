"""The digest of weights on a device: any changed bit shows, whatever the dtype and the layout in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang_ext import weights
from sglang_ext.ranks import OneRank, Ranks
from sglang_ext.weights import ServedWeights, WeightsDigest
from tests.serving.meeting import Meeting

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor that lies dense there, to write into."""
    start, nbytes = tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start, (nbytes,), (1,))


def _tensors(device: str) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    table = torch.randn(40, 7, generator=gen)
    of_dtype = {
        "bfloat16": table.bfloat16(), "float16": table.half(), "fp8": table.to(torch.float8_e4m3fn),
        "int8": torch.randint(-128, 127, (33,), generator=gen).to(torch.int8), "float64": table.double(),
        "bool": torch.ones(5, dtype=torch.bool), "scalar": torch.tensor(2.0),
        "complex": torch.randn(3, generator=gen) + 1j,
    }  # fmt: skip
    on_device = {name: one.to(device) for name, one in of_dtype.items()}
    on_device["transposed"] = table.to(device).t()
    on_device["from the third byte on"] = torch.arange(64, dtype=torch.uint8, device=device)[3:60]
    on_device["parameter"] = torch.nn.Parameter(table.to(device))
    on_device["empty"] = torch.empty(0, device=device)
    return on_device


@pytest.mark.parametrize("device", DEVICES)
def test_every_bit_counts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_WORDS", 16)  # several pieces
    tensors, hashing = _tensors(device), WeightsDigest()
    before = hashing.of(tensors.items())
    assert hashing.of(tensors.items()) == before
    for name, tensor in tensors.items():
        memory = _bytes_of(tensor.detach())
        for at in range(len(memory)):
            for bit in (1, 0x80):
                memory[at] ^= bit
                assert hashing.of(tensors.items()) != before, (name, at, bit)
                memory[at] ^= bit
    assert hashing.of(tensors.items()) == before


def test_what_stands_elsewhere_counts() -> None:
    hashing, one = WeightsDigest(), torch.randn(64, 64)
    assert hashing.of([("a", one), ("b", one + 1)]) != hashing.of([("a", one + 1), ("b", one)])
    assert hashing.of([("a", one)]) != hashing.of([("b", one)])
    assert hashing.of([("a", one.flip(0).contiguous())]) != hashing.of([("a", one)])
    assert hashing.of([("a", -one)]) != hashing.of([("a", one)])


def test_little_is_allocated() -> None:
    """Three buffers, whatever the weights' size; here by what torch's allocator of host memory is asked for."""
    large = [("a", torch.zeros(64 << 20, dtype=torch.bfloat16))]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        WeightsDigest().of(large)
    asked = sum(max(0, event.self_cpu_memory_usage) for event in seen.key_averages())
    assert asked < 6 * 8 * weights._WORDS < large[0][1].nbytes


def test_a_tensor_made_of_others_is_taken_apart() -> None:
    class Quantized:
        """As tensor subclasses say what they are made of."""

        def __init__(self) -> None:
            self.codes, self.scale = torch.arange(100, dtype=torch.int8), torch.tensor([0.5])

        def __tensor_flatten__(self) -> tuple[list[str], Any]:
            return ["codes", "scale"], {"bits": 8}

    hashing, one = WeightsDigest(), Quantized()
    before = hashing.of([("a", one)])  # type: ignore[list-item]
    one.scale += 1
    assert hashing.of([("a", one)]) != before  # type: ignore[list-item]


def test_weights_that_cannot_be_read_count_as_changed(caplog: pytest.LogCaptureFixture) -> None:
    def read() -> Iterator[tuple[str, torch.Tensor]]:
        yield "sparse", torch.eye(3).to_sparse()

    served = ServedWeights(read, OneRank())
    served.note()
    assert not served.unchanged(replaced=False)
    assert "cannot be compared" in caplog.text


@pytest.mark.parametrize("who", ["nobody", "changed", "replaced"])
def test_all_ranks_keep_their_indexes_or_none_does(who: str) -> None:
    def work(ranks: Ranks) -> bool:
        own = torch.full((100,), float(ranks.rank))
        served = ServedWeights(lambda: [("own", own)], ranks)
        assert not served.unchanged(replaced=False), "nobody knows what they were"
        served.note()
        if who == "changed" and ranks.rank == 1:
            own[7] = 9
        return served.unchanged(replaced=who == "replaced" and ranks.rank == 1)

    assert Meeting(2).run(work) == [who == "nobody"] * 2
