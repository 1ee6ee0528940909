"""The kernels' own test that `sglang-ext doctor` runs: it passes, and sees kernels that are wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefix_kernels.grouped_attention.runner import GroupedAttention
from sglang_ext.config import config_from_dict
from sglang_ext.decode import self_test
from sglang_ext.decode.self_test import run_self_test

#: The interpreter multiplies bf16 wrongly.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32


@pytest.mark.parametrize("method", ["token_index", "ab_sparse", "csattention", "two_level", "union", "exact"])
def test_kernels_agree_with_the_reference(method: str, device: torch.device) -> None:
    found = run_self_test(config_from_dict({"method": method}), DTYPE, device)
    assert found.passed, found
    assert (found.agreement is None) == (method == "exact")


def test_wrong_kernels_are_seen(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    config, made, run = config_from_dict({}), self_test.graph_op, GroupedAttention.run

    def shifted(*args: Any) -> Any:
        op = made(*args)
        select = op.run

        def run_shifted(*of: Any) -> None:
            select(*of)
            of[-1].positions.add_(1)  # whose neighbour is as a rule none of the best

        op.run = run_shifted
        return op

    def without_a_row(self: Any, q: Any, kv: Any, slots: Any, sm_scale: float, out: Any, lse: Any) -> None:
        run(self, q, kv, slots, sm_scale, out, lse)
        out[1] = torch.nan

    with monkeypatch.context() as planted:
        planted.setattr(self_test, "graph_op", shifted)
        found = run_self_test(config, DTYPE, device)
        assert not found.passed
        assert found.agreement is not None
        assert found.agreement < 0.9
    monkeypatch.setattr(GroupedAttention, "run", without_a_row)
    found = run_self_test(config, DTYPE, device)
    assert not found.passed
    assert found.error == float("inf")
