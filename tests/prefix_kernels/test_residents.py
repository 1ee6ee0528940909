"""Residents in torch against a model of dictionaries; and what callers must not be able to hand in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_kernels import PagedKV
from prefix_kernels.residents import PAGE_TOKENS, ResidentGroup, Residents, ResidentShape
from prefix_kernels.residents.reference import OLDEST
from prefix_kernels.types import SelectionGroup, new_lists
from tests.examples import examples
from tests.prefix_kernels.resident_steps import BEFORE, Prefixes, Steps, Wanted


class Model:
    """One KV head's cells: by cell, which token lies there and when it was last wanted."""

    def __init__(self, num_cells: int) -> None:
        self.cells: list[tuple[Any, int]] = [(None, 0)] * num_cells
        self.step = 0

    def tokens(self) -> dict[Any, int]:
        return {token: cell for cell, (token, _) in enumerate(self.cells) if token is not None}

    def want(self, wanted: list[Any]) -> int:
        """A step; how many tokens came."""
        self.step += 1
        there = self.tokens()
        for token in wanted:
            if token in there:
                self.cells[there[token]] = (token, self.step)
        missing = [token for token in wanted if token not in there]
        others = [cell for cell, (token, _) in enumerate(self.cells) if token not in wanted]
        others.sort(key=lambda cell: (self.cells[cell][0] is not None, self.cells[cell][1], cell))
        taken = sorted(others[: len(missing)])
        for cell, token in zip(taken, missing, strict=True):
            self.cells[cell] = (token, self.step)
        return len(taken)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int, list[Wanted]]:
    """Pages of the prefixes, KV heads, cells, and what steps want."""
    pages = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    heads = draw(st.integers(1, 2))
    prefix = st.sampled_from(range(len(pages)))

    def positions(of: int) -> st.SearchStrategy[list[list[int]]]:
        tokens = st.sets(st.integers(0, pages[of] * PAGE_TOKENS - 1), max_size=24).map(sorted)
        return st.lists(tokens, min_size=heads, max_size=heads)

    step = st.sets(prefix).flatmap(lambda some: st.fixed_dictionaries({one: positions(one) for one in some}))
    steps = draw(st.lists(step, min_size=1, max_size=8))
    return pages, heads, draw(st.integers(1, 60)), steps


@settings(max_examples=examples(300, 60))
@given(case=cases())
def test_steps_against_a_model(case: tuple[list[int], int, int, list[Wanted]]) -> None:
    pages, heads, num_cells, steps = case
    num_cells = max(num_cells, *(sum(max(1, *map(len, lists)) for lists in one.values()) for one in steps))
    prefixes = Prefixes.of(pages, heads, torch.float32)
    of, models = Steps(prefixes, num_cells, "reference"), [Model(num_cells) for _ in range(heads)]
    for wanted in steps:
        totals = of.residents.counters[0].clone()
        lists = of.run(wanted)
        of.check(lists, wanted)
        counted = [0, 0]
        for head, model in enumerate(models):
            named = [(prefix, position) for prefix, by_head in wanted.items() for position in by_head[head]]
            counted = [counted[0] + len(named), counted[1] + model.want(named)]
            for place, by_head in enumerate(wanted.values()):
                assert of.listed(lists, place, head)[0].tolist() == by_head[head]
            held = {
                int(prefixes.rows(prefix, torch.tensor(position))): cell
                for (prefix, position), cell in model.tokens().items()
            }
            cells = of.residents.state.cell_of_row[0, head]
            assert {row: int(cells[row]) for row in (cells >= 0).nonzero().flatten().tolist()} == held
        assert (of.residents.counters[0] - totals).tolist() == counted
    assert int(of.residents.counters[1].sum()) == 0


def test_what_stays_is_not_copied_again() -> None:
    prefixes = Prefixes.of([6], 1, torch.float32)
    of = Steps(prefixes, 4, "reference")
    of.run({0: [[0, 15, 16, 80]]})
    of.pools[0].k_cache.mul_(2)
    positions, slots = of.listed(of.run({0: [[0, 33, 80]]}), 0, 0)
    # Token 33 takes the cell of token 15; 0 and 80 lie where they lay.
    assert slots.tolist() == [BEFORE, BEFORE + 1, BEFORE + 3]
    rows, _ = prefixes.kv(prefixes.rows(0, positions), 0)
    assert torch.equal(of.pools[0].k_cache[slots.long(), 0], rows * torch.tensor([[2.0], [1.0], [2.0]]))


def test_ages_tie_beyond_what_is_told_apart_and_steps_wrap() -> None:
    prefixes = Prefixes.of([6], 1, torch.float32)
    for start in (1, 2**31 - 3):
        of = Steps(prefixes, 3, "reference")
        of.residents.state.steps.fill_(start)
        row = prefixes.rows(0, torch.arange(96)).tolist()
        for token in (16, 32, 48, 16):  # in cells 0, 1 and 2
            of.run({0: [[token]]})
        cells = of.residents.state.row_of_cell[0, 0]
        before = cells.tolist()
        of.run({0: [[64]]})
        assert cells.tolist() == [before[0], row[64], before[2]]
        for _ in range(OLDEST + 2):
            of.run({})
        of.run({0: [[80]]})
        # All three were wanted too long ago.
        assert cells.tolist() == [row[80], row[64], before[2]]
        of.check(of.run({0: [[64, 81]]}), {0: [[64, 81]]})


def test_tokens_of_pages_are_forgotten_in_all_sets() -> None:
    prefixes = Prefixes.of([3, 2], 2, torch.float32)
    of = Steps(prefixes, 5, "reference")
    wanted: Wanted = {0: [[0, 20], [40]], 1: [[3, 17], [31]]}
    for number in (0, 1):
        of.run(wanted, number)
    of.residents.state.forget(prefixes.tables[:3].long())
    of.check_state()
    kept = prefixes.rows(1, torch.tensor([3, 17])).tolist()
    assert of.residents.state.row_of_cell[1].tolist()[0] == [-1, -1, *kept, -1]
    # As the host's pool has it after it gave them to another prefix.
    prefixes.host[prefixes.tables[:3].long()] += 1
    before = of.residents.counters
    of.check(of.run(wanted), wanted)
    assert (of.residents.counters - before).tolist() == [[6, 3], [0, 0]]


def residents(num_cells: int = 4) -> Residents:
    return Residents(ResidentShape(1, 1, num_cells, 8, BEFORE), 2, 64, torch.device("cpu"))


def group(begin: int, budget: int = 2, table_begin: int = 0, number: int = 0) -> ResidentGroup:
    return ResidentGroup(number, SelectionGroup(48, budget, list_begin=begin, head_stride=budget), table_begin)


def test_bad_plans_are_named() -> None:
    of = residents(6)
    of.plan([group(0), group(8, 4, table_begin=3, number=1)])
    for groups, message in (
        ([group(0), group(8, 5, table_begin=3)], "cells as a step can want, 7 for 2 groups, got 6; keep fewer tokens"),
        ([group(63)], "at most 2 groups and 64 entries of lists, got 1 and 65"),
        ([group(0), group(8), group(16)], "at most 2 groups and 64 entries of lists, got 3"),
        ([group(0), group(8, table_begin=2)], "tables of host pages that do not overlap"),
    ):
        with pytest.raises(ValueError, match=message):
            of.plan(groups)
    for make, message in (
        (lambda: ResidentGroup(0, SelectionGroup(40, 2)), "whole pages of 16 tokens, got 40"),
        (lambda: ResidentGroup(-1, SelectionGroup(48, 2)), "of at least 0"),
        (lambda: ResidentShape(1, 1, 0, 8, 0), "of at least 1 and rows below 2"),
        (lambda: ResidentShape(1, 1, 2**31, 8, 0), "of at least 1 and rows below 2"),
        (lambda: Residents(of.shape, 0, 64, of.device), "list_entries of at least 1"),
        (lambda: Residents(of.shape, 1, 64, of.device, implementation="cuda"), "no implementation 'cuda'"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_bad_tensors_are_named() -> None:
    of = residents()
    of.plan([group(0, number=1)])
    kv, pool = torch.zeros(8, 1, PAGE_TOKENS, 8), torch.zeros(7, 1, 4)
    own = PagedKV(pool, pool)
    lists, tables = new_lists(64, (2, 1), of.device, with_slots=True), torch.arange(3, dtype=torch.int32)
    of.run(0, tables, lists, kv, own)
    odd = torch.zeros(7, 1, 3, dtype=torch.float16)
    for arguments, message in (
        ((1, tables, lists, kv, own), "a set below 1, got 1"),
        ((0, tables, lists, kv[:7], own), r"expected host \(8, 1, 16, 8\) torch.float32, contiguous, got \(7, "),
        ((0, tables, lists, kv, PagedKV(pool[1:], pool[1:])), r"expected pool \[7 rows or more"),
        ((0, tables, lists, kv.half(), own), r"expected host .*float32, contiguous, got .*float16"),
        ((0, tables, lists, kv, PagedKV(odd, odd)), "adjacent heads of whole words of 4 bytes"),
        ((0, tables, new_lists(64, (2, 1), of.device, with_slots=False), kv, own), "lists with slots, got none"),
        ((0, tables, new_lists(1, (2, 1), of.device, with_slots=True), kv, own), r"expected positions \(2,\)"),
        ((0, tables, new_lists(64, (1, 1), of.device, with_slots=True), kv, own), r"expected counts \(2, 1\)"),
        ((0, tables[:2], lists, kv, own), r"expected host_pages \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            of.run(*arguments)
    with pytest.raises(ValueError, match=r"expected head_map \(1,\) int32"):
        of.fetch(0, kv, own, torch.zeros(1))
