"""The prefix cache of the installed SGLang behind offloaded prefixes: every sum holds, whatever requests do."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang")

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.compat.offload import TREES
from sglang_ext.compat.versions import installed
from tests.compat.offload_scheduler import Loop
from tests.compat.sglang_process import GROUP, in_sglang
from tests.examples import CHECKS, examples

pytestmark = [GROUP, pytest.mark.skipif(installed() not in TREES, reason="offload is refused on this release")]

INDEXED = 48
"""Tokens of a document, whole pages of every size tried."""
PAGES = (1, 4, 16)

#: (document, suffix, chunk of its prefill): a few tokens each, so that suffixes share beginnings.
ARRIVE = st.tuples(
    st.just("arrive"), st.integers(0, 2), st.lists(st.integers(1, 2), max_size=40), st.sampled_from([None, 3, 17])
)
OTHERS = ("chunk", "decode", "decode", "copy_out", "copy_out", "finish", "abort", "retract", "flush", "drop")
OTHER = st.tuples(st.sampled_from(OTHERS), st.integers(0, 5), st.integers(1, 20))
FIRST = [("arrive", 0, [1], None), ("copy_out", 0, 1), ("arrive", 1, [2], None), ("copy_out", 1, 1), ("finish", 0, 1)]
"""Two documents are in host memory; there is room for no third one."""


def play(page_size: int, steps: list[tuple[Any, ...]]) -> dict[str, int]:
    """Requests on one loop, checked after each step; what happened, at the end."""
    loop = Loop(page_size, host_pages=8)
    waiting: list[tuple[Any, int | None]] = []
    for step in [*FIRST, *steps]:
        if step[0] == "arrive":
            _, document, suffix, chunk = step
            prompt = [*range(100 * (document + 1), 100 * (document + 1) + INDEXED), *suffix]
            waiting.append((loop.request(prompt, INDEXED), chunk))
        elif step[0] == "flush":
            if not loop.running:
                loop.tree.reset()
                loop.allocator.clear()
                loop.table.clear()
        elif step[0] == "drop":
            loop.offloading.drop()
        elif loop.running:
            _act(loop, step, waiting)
        waiting = [one for one in waiting if not loop.prefill(*one)]
        loop.check()
    for req in list(loop.running):
        loop.release(req, insert=_computed(req))
        loop.check()
    assert loop.offloading.directory.users == 0
    assert loop.allocator.available_size() + loop.tree.evictable_size() == 512
    state = loop.offloading.snapshot()
    return {"translated": state["translated"], **state["events"], **state["refused"]}


def _computed(req: Any) -> bool:
    """Whether all of a request's tokens have K and V."""
    return bool(req.kv.kv_allocated_len >= len(req.origin_input_ids) + len(req.output_ids))


def _act(loop: Loop, step: tuple[Any, ...], waiting: list[tuple[Any, int | None]]) -> None:
    what, who, how_many = step
    req = loop.running[who % len(loop.running)]
    whole = _computed(req)
    if what == "chunk" and not whole:
        loop.prefill(req, how_many)
    elif what == "decode" and whole:
        for token in range(how_many):
            if not loop.decode(req, token % 2 + 1):
                break
    elif what == "copy_out" and whole:
        loop.copy_out(req)
    elif what == "finish" and whole:
        loop.release(req, insert=True)
    elif what == "abort":
        loop.release(req, insert=False)
    elif what == "retract" and whole:
        loop.retract(req)
        waiting.append((req, None))


def all_plays(page_size: int, number: int) -> dict[str, int]:
    """So many plays, in a process of their own; sums of what happened."""
    happened: dict[str, int] = {}

    @settings(max_examples=number, deadline=None, suppress_health_check=CHECKS)
    @given(st.lists(st.one_of(ARRIVE, OTHER, OTHER), min_size=10, max_size=60))
    def property_(steps: list[tuple[Any, ...]]) -> None:
        for name, count in play(page_size, steps).items():
            happened[name] = happened.get(name, 0) + count

    property_()
    return happened


@pytest.mark.parametrize("page_size", PAGES)
def test_sums_hold_whatever_requests_do(page_size: int) -> None:
    number = examples(100)
    happened = in_sglang("tests.compat.test_offload_tree:all_plays", page_size, number)
    # Chance decides how often: a fifth of what is usual.
    assert happened["copied"] >= number // 2, happened
    assert happened["translated"] > number // 4, happened
