"""Own tokens of a decode step's rows: selected from only where the row's prefix is in a group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_ext.attention.step_buffers import PrefixRows
from sglang_ext.attention.step_groups import StepGroups


def test_own_tokens_of_a_row_in_no_group_are_attended_in_full() -> None:
    """Selected from, too, such a row would attend its prefix twice: once by itself and once in front of them."""
    numbers: dict[int, int] = {}
    step: Any = StepGroups(SimpleNamespace(), lambda index: numbers.setdefault(id(index), len(numbers)))  # type: ignore[arg-type]
    own = [SimpleNamespace(prefix_len=length) for length in (96, 64, 32)]
    groups = [(PrefixRows((7,), (0, 2), 300), SimpleNamespace(prefix_len=300))]
    found = step.stretches(groups, [own[0], own[1], own[2], None])
    assert [(rows.rows, rows.length, rows.begin) for rows, _ in found] == [((0,), 96, 300), ((2,), 32, 300)]
    assert [index for _, index in found] == [own[0], own[2]]
    assert step.stretches([], own) == []
