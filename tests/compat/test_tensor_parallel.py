"""What does not go with tensor parallelism is refused by name, and what one rank alone sees counts for all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.compat import tensor_parallel, versions
from sglang_ext.config import config_from_dict
from sglang_ext.ranks import Ranks


@pytest.mark.parametrize(
    ("fields", "config", "words"),
    [
        ({}, {}, None),
        ({}, {"build": "prefill"}, None),
        ({}, {"build": "shared"}, None),
        ({}, {"build": "capture", "capture_folder": "c"}, ["off, prefill or shared", "build='capture'", "tp_size=2"]),
        ({}, {"trace_folder": "traces"}, ["no trace_folder", "serve on one GPU"]),
        ({"nnodes": 2}, {}, ["more than one machine (--nnodes)", "nnodes=2"]),
        ({"attn_cp_size": 2}, {}, ["context parallelism (--attn-cp-size)"]),
        ({"dcp_size": 2}, {}, ["--dcp-size"]),
        ({"enable_dp_attention": True}, {}, ["--enable-dp-attention"]),
        ({"elastic_ep_backend": "mooncake"}, {}, ["--elastic-ep-backend"]),
    ],
)
def test_what_does_not_go_with_it_is_named(fields: dict[str, Any], config: Any, words: list[str] | None) -> None:
    settings = config_from_dict(config)
    message = tensor_parallel.refusal(SimpleNamespace(tp_size=2, **fields), settings)
    assert (message is None) == (words is None)
    for word in words or ():
        assert word in str(message)
    assert tensor_parallel.refusal(SimpleNamespace(tp_size=1, **fields), settings) is None


def test_a_clock_of_each_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for seconds, size in (("-1", 2), ("30", 2), ("30", 1)):
        monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", seconds)
        said.append(tensor_parallel.refusal(SimpleNamespace(tp_size=size), config_from_dict({})))
    assert "SGLANG_REQ_RUNNING_TIMEOUT unset" in str(said[1])
    assert said[0] is said[2] is None


@pytest.mark.skipif(versions.installed() != "0.5.16", reason="a later release may have fewer fields")
def test_sglang_knows_these_fields() -> None:
    from sglang.srt.server_args import ServerArgs

    for field, _, _ in tensor_parallel._UNSUPPORTED:
        assert hasattr(ServerArgs, field) or field in ServerArgs.__dataclass_fields__


def test_one_rank_needs_no_group_and_others_one_process_each() -> None:
    assert isinstance(tensor_parallel.ranks_of(0, 1), Ranks)
    with pytest.raises(RuntimeError, match="expected 2 processes, one for each tensor-parallel rank; got 1"):
        tensor_parallel.ranks_of(0, 2)
