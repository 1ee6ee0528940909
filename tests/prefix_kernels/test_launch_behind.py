"""The listing of Hopper's selection, which comes while its scores are made: what it touches before these are done."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

from prefix_kernels import kernels, launching
from tests.prefix_kernels.compiling import compiled

from .test_triton_compiles import launches

CASES = ["specialized selection of tokens", "specialized selection by a sample's sums for 32 requests"]


@pytest.mark.parametrize("case", CASES)
def test_before_the_scores_are_made_only_tables_are_read(case: str) -> None:
    _, listing = launches(case)
    assert listing.options["launch_pdl"] is True
    first, *others = compiled(listing, 90).asm["ptx"].split("griddepcontrol.wait")
    assert not re.search(r"(st|red|atom|cp\.async\S*)\.global", first)
    loads = re.findall(r"ld\.global\S*", first)
    # Seven numbers of an item, three of a KV head and the size of its blocks, one by one; scores come four at a time.
    assert len(loads) == 11
    assert not any(".v" in load or ".cg" in load for load in loads)
    assert len(others) == 2, "once where there is work, and once for all at the end"
    assert not re.search(r"(ld|st|red|atom)\.global", others[-1]), "nothing is left to do"


@pytest.mark.parametrize("refused", [False, True])
def test_where_cuda_refuses_it_the_listing_waits(
    refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[dict[str, Any]] = []

    class Nothing:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return self

        def __call__(self, **options: Any) -> None:
            tried.append(options)
            if refused:
                raise RuntimeError("Triton Error [CUDA]: invalid argument")

    monkeypatch.setattr(kernels, "nothing", Nothing())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launching, "_can_overlap", lambda: True)
    launching._can_overlap_cooperative.cache_clear()
    try:
        with launching.recording() as kept, caplog.at_level(logging.WARNING):
            for _ in range(2):
                launching.launch_behind(None, (1,), {}, launch_cooperative_grid=True)
    finally:
        launching._can_overlap_cooperative.cache_clear()
    assert len(tried) == 1
    assert (tried[0]["launch_cooperative_grid"], tried[0]["launch_pdl"]) == (True, True)
    for one in kept.launches:
        assert (one.arguments["OVERLAPPED"], "launch_pdl" in one.options) == (not refused, not refused)
        assert one.options["launch_cooperative_grid"] is True
    assert ("invalid argument" in caplog.text) == refused
