"""The listing of Hopper's selection, which comes while its scores are made: what it touches before these are done."""

from __future__ import annotations

import re

import pytest

from prefix_kernels.launching import compiled

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
