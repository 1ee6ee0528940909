"""What the assembler makes of Hopper's loops over codes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from triton import knobs

from .test_triton_compiles import CASES, compiled, launches

pytestmark = pytest.mark.full


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("specialized selection")])
def test_nothing_is_spilled_where_codes_are_multiplied(case: str, tmp_path: Path) -> None:
    """Where few numbers of the tables are (`SPILLED`), they are written and read outside of these loops."""
    scores, _ = launches(case)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compiled(scores, 90).asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "--dump-sass", str(path)]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(\S.*?);", sass, re.MULTILINE)
    at = {int(address, 16): number for number, (address, _) in enumerate(lines)}
    loops = []
    for number, (_, text) in enumerate(lines):
        target = re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text)
        begin = at[int(target[1], 16)] if target else number
        if begin < number and any("MMA." in text for _, text in lines[begin : number + 1]):
            loops.append((begin, number))
    # Others go over these: over tiles of query rows, and over groups.
    inner = [one for one in loops if not any(one != of and one[0] <= of[0] and of[1] <= one[1] for of in loops)]
    assert len(inner) >= 2, "one sums, and one pools"
    for begin, end in inner:
        assert not [text for _, text in lines[begin : end + 1] if re.search(r"\b(STL|LDL)\b", text)]
