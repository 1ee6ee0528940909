"""What the hooks take for granted of arguments and results is what SGLang's functions have, on this release.

A hook once looked for a tuple, as the function's annotation says, where an object comes; its test gave it a tuple.
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.plugins.hook_registry import HookType

from sglang_ext.compat.seam import Seam, here
from sglang_ext.compat.seams import SEAMS
from sglang_ext.compat.versions import SUPPORTED
from tests.compat.sglang_process import GROUP, in_sglang

pytestmark = GROUP


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    """What `seam_types` found, by target."""
    return in_sglang("tests.compat.seam_types:seam_types")


@pytest.mark.parametrize("seam", here(), ids=lambda seam: seam.target.rsplit(".", 1)[1])
def test_a_hook_gets_the_arguments_and_reads_of_the_result_what_is_there(real: dict[str, Any], seam: Seam) -> None:
    found = real[seam.target]
    assert tuple(found["takes"][: len(seam.takes)]) == seam.takes
    assert found["fits"] == "", "the hook takes every argument that the function does"
    assert (found["results"] > 0) == bool(seam.reads)
    assert found["wrong"] == []


@pytest.mark.parametrize("seam", here(), ids=lambda seam: seam.target.rsplit(".", 1)[1])
def test_a_seam_tells_what_its_hook_reads_of_the_result(seam: Seam) -> None:
    nodes = list(ast.walk(ast.parse(inspect.getsource(seam.hook))))
    if seam.kind is HookType.AFTER:
        result = next(iter(inspect.signature(seam.hook).parameters))
        used = any(isinstance(node, ast.Name) and node.id == result for node in nodes)
        assert used == bool(seam.reads)
    words = {getattr(node, "attr", getattr(node, "value", None)) for node in nodes}
    assert set(filter(None, seam.reads)) <= words


def test_slots_are_heard_of_from_their_beginning_to_their_end(real: dict[str, Any]) -> None:
    *calls, rows, freed = real["life"]
    assert calls == [["taken", "a"], ["taken", "b"], ["freed", "b", freed, False, 0], ["taken", "c"]]
    assert len(set(rows)) == 2


def test_every_seam_is_of_a_supported_release() -> None:
    later = {seam.target.rsplit(".", 1)[1]: seam.since for seam in SEAMS if seam.since != SUPPORTED[0]}
    assert later == {"end_weight_update": "0.5.21"}
