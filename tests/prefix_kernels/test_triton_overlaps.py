"""Launches that overlap the one before: compiled for sm_90, they touch no memory before that one has ended."""

from __future__ import annotations

import re

import pytest

from prefix_kernels.launching import overlapped_launches

from .test_triton_compiles import _GLOBAL, compiled, launches

pytestmark = pytest.mark.full

#: Case -> how many launches of it are overlapped.
OVERLAPPED = {
    "prefix_attention of 1 request": 2,
    "token_scores of 1 request": 2,
    "csa_scores_compact on offsets": 2,
    "top_k_selection of tokens": 5,
    "top_k_selection among 32,768 candidates": 3,
    "raw scores of 1 request": 2,
    "selection of blocks in four launches": 4,
    "copy_slot_lists": 1,
    "common_slots": 1,
}


@pytest.mark.parametrize(("case", "count"), OVERLAPPED.items())
def test_an_overlapped_kernel_touches_no_memory_before_the_one_before_it_has_ended(case: str, count: int) -> None:
    with overlapped_launches():
        found = launches(case)
    assert len(found) == count
    for one in found:
        assert one.options["launch_pdl"] is True
        before, _, after = compiled(one, 90).asm["ptx"].partition("griddepcontrol.wait")
        assert "griddepcontrol.launch_dependents" in after
        assert re.search(_GLOBAL, after)
        assert not re.search(_GLOBAL, before)
    for one in launches(case):
        assert "launch_pdl" not in one.options
        assert one.arguments["OVERLAPPED"] is False
