"""An update of weights in place that fails: SGLang's own code says what came of it, the plugin looks for itself."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang")

from tests.compat.sglang_process import GROUP, in_sglang

pytestmark = GROUP


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `weight_updates` found: by kind of update whether it succeeded, left the weights the same, kept indexes."""
    return in_sglang("tests.compat.weight_updates:weight_updates", tmp_path_factory.mktemp("weights"))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "success", "same", "kept"),
    [
        ("good", True, False, False),
        ("missing", False, True, True),
        ("empty", False, True, True),
        ("torn", False, False, False),  # SGLang's roll-back reads the new path: the weights are new, and it says no
        ("a table grew", False, True, True),
        ("given away", False, True, False),
    ],
)
def test_indexes_stay_in_use_where_the_weights_are_shown_to_be_the_same(
    updates: dict[str, dict[str, Any]], kind: str, success: bool, same: bool, kept: bool
) -> None:
    found = updates[kind]
    assert (found["success"], found["same"], found["kept"]) == (success, same, [kept]), found["said"]


def test_the_torn_update_failed_in_its_first_pass(updates: dict[str, dict[str, Any]]) -> None:
    assert "Rolling back" in updates["torn"]["said"]
