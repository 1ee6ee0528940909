"""An update of weights in place by SGLang's own code: the plugin hears of one that succeeds and of one that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sglang")

from tests.compat.sglang_process import GROUP, in_sglang

pytestmark = GROUP


def test_an_update_is_heard_of_whatever_came_of_it(tmp_path: Path) -> None:
    found = in_sglang("tests.compat.weight_updates:weight_updates", tmp_path)
    for kind, success in (("good", True), ("missing", False)):
        one = found[kind]
        assert (one["success"], one["same"], one["heard"]) == (success, not success, 1), one["said"]
