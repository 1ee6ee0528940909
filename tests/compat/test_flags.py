"""What sparse attention, tensor parallelism and offload do not go with is refused by name, where SGLang knows it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.server_args import ServerArgs

from sglang_ext.compat import flags
from sglang_ext.compat.versions import SUPPORTED, installed
from sglang_ext.config import config_from_dict
from sglang_ext.options import SparseAttnConfig
from sglang_ext.ranks import Ranks, ranks_of

OFFLOAD = config_from_dict({"offload": {"host_bytes": 1 << 20, "staging_tokens": 100}})
OFFLOADS = pytest.mark.skipif(installed() not in flags.TREES, reason="offload is refused on this release")

_LATER_FIELDS = {"enable_nvidia_megakernel", "enable_amd_monokernel"}
_BAD_VALUES = {"disaggregation_mode": "prefill", "speculative_algorithm": "EAGLE", "dllm_algorithm": "x"}


def test_every_mode_that_is_not_supported_is_refused_by_name() -> None:
    known = getattr(ServerArgs, "__struct_fields__", None) or [f.name for f in dataclasses.fields(ServerArgs)]
    fine = {"load_format": "auto", **{field: value for field, value, _ in flags.UNSUPPORTED}}
    assert flags.unsupported(SimpleNamespace(**fine)) is None
    for field, value, name in flags.UNSUPPORTED:
        newer = field in _LATER_FIELDS and installed() != SUPPORTED[-1]
        assert newer or field in known, f"this SGLang has no {field}: the check never fires"
        bad = _BAD_VALUES.get(field, 2 if value == 1 else True)
        message = flags.unsupported(SimpleNamespace(**{**fine, field: bad}))
        assert message is not None
        assert name in message
        assert f"{field}={bad!r}" in message
    message = flags.unsupported(SimpleNamespace(**{**fine, "load_format": "remote"}))
    assert message is not None
    assert "--load-format" in message
    assert "'remote'" in message
    if installed() == SUPPORTED[0]:  # a later release may have fewer fields
        assert {field for field, _, _ in flags.BESIDE_RANKS} <= set(known)


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
def test_what_does_not_go_with_ranks_is_named(fields: dict[str, Any], config: Any, words: list[str] | None) -> None:
    settings = config_from_dict(config)
    message = flags.ranks_refusal(SimpleNamespace(tp_size=2, **fields), settings)
    assert (message is None) == (words is None)
    for word in words or ():
        assert word in str(message)
    assert flags.ranks_refusal(SimpleNamespace(tp_size=1, **fields), settings) is None


def test_a_clock_of_each_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for seconds, size in (("-1", 2), ("30", 2), ("30", 1)):
        monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", seconds)
        said.append(flags.ranks_refusal(SimpleNamespace(tp_size=size), config_from_dict({})))
    assert "SGLANG_REQ_RUNNING_TIMEOUT unset" in str(said[1])
    assert said[0] is said[2] is None


def test_one_rank_needs_no_group_and_others_one_process_each() -> None:
    assert isinstance(ranks_of(0, 1), Ranks)
    with pytest.raises(RuntimeError, match="expected 2 processes, one for each tensor-parallel rank; got 1"):
        ranks_of(0, 2)


@OFFLOADS
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("enable_mixed_chunk", True),
        ("speculative_algorithm", "EAGLE"),
        ("disable_radix_cache", True),
        ("radix_cache_backend", "mine"),
        ("enable_hierarchical_cache", True),
        ("hicache_storage_backend", "file"),
        ("enable_lmcache", True),
        ("enable_flexkv", True),
        ("kv_canary", "log"),
        ("enable_streaming_session", True),
        ("enable_session_radix_cache", True),
        ("disaggregation_decode_retraction_backup", "host_pool"),
        ("kv_events_config", "{}"),
        ("enable_lora", True),
    ],
)
def test_what_does_not_go_with_offload_is_named(field: str, value: Any) -> None:
    record = SimpleNamespace(**{field: value})
    assert f"beside offload; got {field}={value!r}" in str(flags.offload_refusal(record, OFFLOAD))
    assert flags.offload_refusal(record, SparseAttnConfig()) is None
    assert flags.offload_refusal(SimpleNamespace(kv_canary="none", tp_size=2), OFFLOAD) is None


def test_a_job_of_several_ranks_writes_no_files() -> None:
    """Each would have its own KV heads only."""
    config = config_from_dict({"build": "prefill", "offload": {"host_bytes": 16, "folder": "kv"}})
    message = str(flags.offload_refusal(SimpleNamespace(tp_size=2), config))
    assert "expected no tensor parallelism (--tp-size) beside offload; got tp_size=2" in message
    assert flags.offload_refusal(SimpleNamespace(tp_size=1), config) is None


@pytest.mark.parametrize("release", ["0.5.17", "0.5.22"])
def test_releases_on_which_offload_was_not_run_are_refused(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(flags, "installed", lambda: release)
    message = str(flags.offload_refusal(SimpleNamespace(), OFFLOAD))
    expected = f"expected SGLang 0.5.16 or 0.5.23 with offload, which was run on no other release; found {release}"
    assert expected in message


@OFFLOADS
def test_another_prefix_cache_is_refused() -> None:
    assert "got SimpleNamespace" in str(flags.tree_refusal(SimpleNamespace()))
