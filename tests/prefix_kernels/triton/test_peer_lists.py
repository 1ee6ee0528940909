"""Questions and answers between two sides, here in one process: words, and lists that stay inside the prefix."""

from __future__ import annotations

import torch

from prefix_kernels.peer_lists import AskingSide, answer, copy_lists, copy_words, group_table
from prefix_kernels.types import SelectionGroup, pack_lists

LAYERS, HEADS, ENTRIES = 3, 2, 400


def words_of(device: torch.device) -> torch.Tensor:
    """int64 [4] of the host, that the device may write."""
    words = torch.zeros(512, dtype=torch.int64)
    return words if device.type == "cpu" else words.pin_memory()


def test_an_answer_comes_once_and_only_to_its_question(device: torch.device) -> None:
    words, came = words_of(device), torch.zeros(32, dtype=torch.int64, device=device)
    groups = pack_lists([SelectionGroup(90, 40), SelectionGroup(20, 17)], HEADS)
    side = AskingSide(words.data_ptr(), came, 5, 3)
    inbox = torch.arange(LAYERS * ENTRIES, dtype=torch.int32, device=device) % 130 - 5
    lists = torch.full_like(inbox, -7)
    side.ask()
    side.take(inbox, lists, LAYERS)
    settle(device)
    assert words[1:3].tolist() == [0, 0], "without a plan nothing is asked"
    side.plan(6, groups, HEADS)
    side.take(inbox, lists, LAYERS)
    settle(device)
    assert (words[1:3].tolist(), lists.unique().tolist()) == ([0, 0], [-7]), "nothing was asked"
    side.ask()
    settle(device)
    assert words[0] == 6 << 32 | 2
    side.take(inbox, lists, LAYERS)
    settle(device)
    assert (words[1:3].tolist(), lists.unique().tolist()) == ([0, 1], [-7]), "no one answers"
    side.ask()
    answer(came.data_ptr(), 6 << 32 | 2)
    side.take(inbox, lists, LAYERS)
    settle(device)
    assert (words[1:3].tolist(), lists.unique().tolist()) == ([0, 2], [-7]), "an answer to the question before"
    side.ask()
    answer(came.data_ptr(), int(words[0]) if device.type == "cpu" else 6 << 32 | 4)
    side.take(inbox, lists, LAYERS)
    settle(device)
    assert words[1:3].tolist() == [1, 2]
    wanted = torch.full_like(lists, -7).view(LAYERS, ENTRIES)
    for group in groups:
        used = slice(group.list_begin, group.list_begin + HEADS * group.head_stride)
        wanted[:, used] = inbox.view(LAYERS, ENTRIES)[:, used].clamp(0, group.prefix_len - 1)
    assert torch.equal(lists, wanted.view(-1))
    side.ask()
    side.forget()
    lists.fill_(-7)
    side.take(inbox, lists, LAYERS)
    settle(device)
    assert (words[1:3].tolist(), lists.unique().tolist()) == ([1, 2], [-7])


def test_words_and_lists_are_copied_by_their_addresses(device: torch.device) -> None:
    source = torch.randint(1 << 30, (70_001,), dtype=torch.int32, device=device)
    target = torch.zeros_like(source)
    copy_words(source.data_ptr(), target.data_ptr(), len(source) - 1)
    assert torch.equal(target[:-1], source[:-1])
    assert target[-1] == 0
    groups = pack_lists([SelectionGroup(1 << 30, 100)], HEADS)
    table = group_table(groups, HEADS, 2).to(device)
    target.zero_()
    copy_lists(torch.zeros(1, dtype=torch.int64, device=device), source.data_ptr(), target.data_ptr(), table, 1, 500)
    assert not target.any()
    copy_lists(torch.ones(1, dtype=torch.int64, device=device), source.data_ptr(), target.data_ptr(), table, 1, 500)
    assert torch.equal(target[:200], source[:200])
    assert not target[200:].any()


def settle(device: torch.device) -> None:
    """Wait for what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize()
