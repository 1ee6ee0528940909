"""An exchange between two processes, each with a GPU: queries go out, lists of positions come back.

All memory that both see belongs to the process that asks, and words on the host: when the other process dies, nothing
that this one reads or writes goes with it. Launches of both sides can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefix_kernels.launching import launch, send
from prefix_kernels.peer_lists.kernels import (
    CAME,
    EXPECTED,
    PLAN,
    answer_kernel,
    copy_lists_kernel,
    copy_words_kernel,
    post_kernel,
    wait_kernel,
)
from prefix_kernels.types import SelectionGroup

_STATE = 6
_BLOCK, _PARTS, _COPIES = 1024, 4, 132


class AskingSide:
    """Of the process whose lists they are.

    Attributes:
        answer: int64 [1], the word of the last answer; the other process writes it.

    Args:
        words: address of int64 [3] on the host, that this device may write and both processes read: the last
            question, as plan << 32 | number; answers that came; and answers that did not.
        answer: see above.
        max_groups: of a plan, at most.
        most: how often an answer is looked for, which takes about a microsecond each time.
    """

    def __init__(self, words: int, answer: Tensor, max_groups: int, most: int) -> None:
        self._words, self.answer, self._most = words, answer, most
        self._state = torch.zeros(_STATE, dtype=torch.int64, device=answer.device)
        self._groups = torch.zeros(max_groups, 3, dtype=torch.int32, device=answer.device)

    def plan(self, number: int, groups: Sequence[SelectionGroup], num_kv_heads: int) -> None:
        """Groups of the next questions, without a wait.

        Args:
            number: of the plan, from 1 to 2^31 - 1.
            groups: whose lists come back, as `pack_lists` places them.
            num_kv_heads: lists of each.
        """
        send(torch.tensor([number]), self._state[PLAN.value : PLAN.value + 1])
        send(group_table(groups, num_kv_heads, len(self._groups)), self._groups)

    def ask(self) -> None:
        """Whatever was written before is the question."""
        launch(post_kernel, (1,), {"state_ptr": self._state, "words": self._words}, num_warps=1)

    def forget(self) -> None:
        """Wait for no answer next time."""
        self._state[EXPECTED.value : EXPECTED.value + 1].zero_()

    def take(self, inbox: Tensor, lists: Tensor, num_layers: int) -> None:
        """Wait for the answer to the last question. What comes goes to `lists`; else these stay as they are.

        Args:
            inbox: int32 [num_layers * layer_entries], that the other process writes.
            lists: int32, the same.
            num_layers: whose lists lie one behind the other.
        """
        state, came = self._state, self._state[CAME.value :]
        waits = {"state_ptr": state, "answer_ptr": self.answer, "words": self._words, "most": self._most}
        launch(wait_kernel, (1,), waits, num_warps=1)
        copy_lists(came, inbox.data_ptr(), lists.data_ptr(), self._groups, num_layers, len(lists) // num_layers)


def group_table(groups: Sequence[SelectionGroup], num_kv_heads: int, max_groups: int) -> Tensor:
    """int32 [max_groups, 3] on the host, as `copy_lists` reads it."""
    table = torch.zeros(max_groups, 3, dtype=torch.int32)
    for row, group in enumerate(groups):
        table[row] = torch.tensor([group.list_begin, num_kv_heads * group.head_stride, group.prefix_len])
    return table


def copy_lists(came: Tensor, source: int, target: int, groups: Tensor, num_layers: int, layer_entries: int) -> None:
    """Copy the groups' lists of all layers between two addresses, with entries inside the prefix.

    Args:
        came: int64 [1]; 0: nothing is copied.
        source, target: addresses of int32 [num_layers, layer_entries], of this device or one that it can reach.
        groups: int32 [max_groups, 3], from `group_table`.
        num_layers, layer_entries: see above.
    """
    arguments = {"came_ptr": came, "source": source, "target": target, "groups_ptr": groups}
    arguments |= {"layer_entries": layer_entries, "BLOCK": _BLOCK}
    launch(copy_lists_kernel, (num_layers, len(groups), _PARTS), arguments)


def copy_words(source: int, target: int, count: int) -> None:
    """Copy int32 [count] between two addresses, of this device or one that it can reach."""
    launch(copy_words_kernel, (_COPIES,), {"source": source, "target": target, "count": count, "BLOCK": _BLOCK})


def answer(address: int, word: int) -> None:
    """Say, behind what was written before, that it is the answer.

    Args:
        address: of `AskingSide.answer`.
        word: of the question.
    """
    launch(answer_kernel, (1,), {"answer": address, "word": word}, num_warps=1)
