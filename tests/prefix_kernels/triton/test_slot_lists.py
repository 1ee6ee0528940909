"""Lists of slots: the kernels against the references, and what callers must not be able to hand in."""

from __future__ import annotations

import pytest
import torch

from prefix_kernels.slot_lists import common_slots, copy_slot_lists

MAX_LEN = 5000


def table_of(device: torch.device) -> torch.Tensor:
    gen = torch.Generator().manual_seed(0)
    return torch.randint(0, 10_000, (6, MAX_LEN), generator=gen, dtype=torch.int32).to(device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_lists_follow_the_lengths_on_the_device(dtype: torch.dtype, device: torch.device) -> None:
    table = table_of(device)
    rows = torch.tensor([4, 0, 2], dtype=dtype, device=device)
    seq_lens = torch.tensor([4999, 70, 1], dtype=dtype, device=device)
    lists = torch.tensor(
        [
            (0, 17, -1, 3, 4990),  # as long as the sequence says
            (1, 64, -1, 5000, 128),
            (2, 1, -1, 5200, 128),  # nothing left
            (0, 0, 2048, 6000, 2048),  # a given end
            (1, 0, -1, 8100, 33),  # cut off at its room
            (2, 9, -1, 8200, 64),  # begins behind its end
        ],
        dtype=torch.int32,
        device=device,
    )
    slots, wanted_slots = torch.full((2, 9000), -7, dtype=torch.int32, device=device)
    counts, wanted_counts = torch.full((2, 8, 3), -7, dtype=torch.int32, device=device)
    copy_slot_lists(table, rows, seq_lens, lists, wanted_slots, wanted_counts, implementation="reference")
    copy_slot_lists(table, rows, seq_lens, lists, slots, counts, implementation="triton")
    assert torch.equal(slots, wanted_slots)
    assert torch.equal(counts, wanted_counts)
    assert counts[:, 0].tolist() == [4982, 6, 0, 2048, 33, 0, -7, -7]
    assert torch.equal(slots[6000:8048], table[4, :2048])
    assert int((slots == -7).sum()) == 9000 - (4982 + 6 + 2048 + 33)


def test_rows_are_compared_up_to_the_shorter_one(device: torch.device) -> None:
    table = table_of(device)
    table[3] = table[1]
    table[3, 3333] += 1
    table[5] = table[1]
    table[2, :100] = table[1, :100]
    rows = torch.tensor([3, 1, 5, 2, 1, 0], device=device)
    seq_lens = torch.tensor([4800, 4700, 1, 4000, 4500, 4000], device=device)
    for which in range(len(rows)):
        wanted = torch.full((6,), -7, dtype=torch.int32, device=device)
        common_slots(table, rows, seq_lens, which, wanted)
        out = torch.full((6,), -7, dtype=torch.int32, device=device)
        common_slots(table, rows, seq_lens, which, out, implementation="triton")
        assert torch.equal(out, wanted)
        if which == 1:
            assert out.tolist() == [3333, 4700, 1, 100, 4500, 0]


def test_bad_tensors_are_named(device: torch.device) -> None:
    table = table_of(device)
    rows, seq_lens = torch.zeros(2, device=device).int(), torch.ones(2, device=device).int()
    lists = torch.zeros(1, 5, dtype=torch.int32, device=device)
    slots = torch.zeros(8, dtype=torch.int32, device=device)
    counts = torch.zeros(1, 2, dtype=torch.int32, device=device)
    for arguments, message in (
        ((table.long(), rows, seq_lens, lists, slots, counts), r"expected table .* int32"),
        ((table, rows, seq_lens[:1], lists, slots, counts), r"expected seq_lens \[batch_size=2\]"),
        ((table, rows, seq_lens, lists[:, :4], slots, counts), r"expected lists \(1, 5\) int32"),
        ((table, rows, seq_lens, lists, slots, counts[:0]), r"expected counts \(1, 2\) int32"),
        ((table, rows, seq_lens, lists, slots.long(), counts), r"expected slots \(8,\) int32"),
    ):
        with pytest.raises(ValueError, match=message):
            copy_slot_lists(*arguments)
    for which, out, implementation, message in (
        (2, rows.clone(), "triton", "batch row below 2, got 2"),
        (0, slots, "triton", r"expected out \(2,\) int32"),
        (0, rows.clone(), "cuda", "no implementation 'cuda'; expected one of: reference, triton"),
    ):
        with pytest.raises(ValueError, match=message):
            common_slots(table, rows, seq_lens, which, out, implementation=implementation)
