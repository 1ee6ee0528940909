"""What sparse attention, tensor parallelism and offload do not go with is refused by name, where SGLang knows it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

from sglang_ext.compat import flags, server_args
from sglang_ext.compat.versions import SUPPORTED, installed
from sglang_ext.config import config_from_dict
from sglang_ext.options import Build, SparseAttnConfig
from sglang_ext.ranks import Ranks, ranks_of

OFFLOAD = config_from_dict({"offload": {"host_bytes": 1 << 20, "staging_tokens": 100}})
OFFLOADS = pytest.mark.skipif(installed() not in flags.TREES, reason="offload is refused on this release")

_LATER_FIELDS = {"enable_nvidia_megakernel", "enable_amd_monokernel", "disaggregation_decode_retraction_backup"}
_LATER_FIELDS |= {"attn_dp_size", "weight_cache_mode"}
"""That the oldest release lacks. Releases between it and the newest one may have any."""
_BAD_VALUES = {
    "disaggregation_mode": "prefill", "speculative_algorithm": "EAGLE", "dllm_algorithm": "x", "kv_canary": "log",
    "radix_cache_backend": "mine", "hicache_storage_backend": "file", "elastic_ep_backend": "mooncake",
    "disaggregation_decode_retraction_backup": "host_pool", "kv_events_config": "{}",
    "weight_cache_mode": "client",
}  # fmt: skip


def _each_is_named(table: flags.Fields, refuse: Callable[[Any], str | None], **fine: Any) -> None:
    """Each field of a table is one of this SGLang's, or its check would never fire, and is refused by its name."""
    known = {*(getattr(ServerArgs, "__struct_fields__", None) or [f.name for f in dataclasses.fields(ServerArgs)])}
    if installed() != SUPPORTED[-1]:
        known |= _LATER_FIELDS if installed() == SUPPORTED[0] else {field for field, *_ in table}
    fine |= {field: value for field, value, _ in table}
    assert refuse(SimpleNamespace(**fine)) is None
    for field, value, name in table:
        assert field in known, f"this SGLang has no {field}"
        bad = _BAD_VALUES.get(field, 2 if value == 1 else True)
        message = str(refuse(SimpleNamespace(**{**fine, field: bad})))
        assert name in message
        assert f"{field}={bad!r}" in message


def test_help_shows_the_three_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/100%")
    parser = argparse.ArgumentParser()
    server_args.after_add_cli_args(None, parser)
    shown = parser.format_help()
    for flag in ("--sparse-attn\n", "--sparse-attn-config JSON|@FILE", "--sparse-attn-store DIR|ipc://SOCKET", "/100%"):
        assert flag in shown.replace("--sparse-attn ", "--sparse-attn\n")


def test_every_mode_that_is_not_supported_is_refused_by_name() -> None:
    _each_is_named(flags.UNSUPPORTED, flags.unsupported, load_format="auto")
    message = str(flags.unsupported(SimpleNamespace(load_format="remote")))
    assert "--load-format" in message
    # A model's identity is taken from its folder.
    elsewhere = {"modelopt_checkpoint_restore_path", "kt_weight_path", "decrypted_config_file"}
    assert {field for field, *_ in flags.UNSUPPORTED} >= elsewhere
    assert "'remote'" in message


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, None),
        ({"build": "prefill"}, None),
        ({"build": "shared"}, None),
        ({"build": "capture", "capture_folder": "c"}, ["off, prefill or shared", "build='capture'", "tp_size=2"]),
        ({"trace_folder": "traces"}, ["no trace_folder", "serve on one GPU"]),
        ({"method": "two_level", "select_ahead": True, "cache_device": "cuda:1"}, ["no cache_device", "tp_size=2"]),
    ],
)
def test_what_does_not_go_with_ranks_is_named(config: Any, words: list[str] | None) -> None:
    settings = config_from_dict(config)
    message = flags.ranks_refusal(SimpleNamespace(tp_size=2), settings)
    assert (message is None) == (words is None)
    for word in words or ():
        assert word in str(message)
    assert flags.ranks_refusal(SimpleNamespace(tp_size=1), settings) is None


def test_modes_that_do_not_go_with_ranks_are_named() -> None:
    _each_is_named(flags.BESIDE_RANKS, lambda record: flags.ranks_refusal(record, SparseAttnConfig()), tp_size=2)
    named = {field for field, *_ in flags.BESIDE_RANKS}
    assert named >= {"nnodes", "attn_cp_size", "dcp_size", "enable_dp_attention", "attn_dp_size", "elastic_ep_backend"}


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
def test_a_match_that_sglang_takes_back_does_not_go_with_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RADIX_FORCE_MISS", "1")
    assert "expected SGLANG_RADIX_FORCE_MISS unset" in str(flags.offload_refusal(SimpleNamespace(), OFFLOAD))
    monkeypatch.setenv("SGLANG_RADIX_FORCE_MISS", "0")
    assert flags.offload_refusal(SimpleNamespace(), OFFLOAD) is None


@OFFLOADS
def test_what_does_not_go_with_offload_is_named() -> None:
    _each_is_named(flags._BESIDE_OFFLOAD, lambda record: flags.offload_refusal(record, OFFLOAD), tp_size=2)
    assert flags.offload_refusal(SimpleNamespace(enable_lora=True), SparseAttnConfig()) is None
    message = str(flags.offload_refusal(SimpleNamespace(disable_radix_cache=True), OFFLOAD))
    assert "expected no --disable-radix-cache beside offload" in message
    assert {field for field, *_ in flags._BESIDE_OFFLOAD} >= {
        *("enable_mixed_chunk", "speculative_algorithm", "disable_radix_cache", "radix_cache_backend", "enable_lora"),
        *("enable_hierarchical_cache", "hicache_storage_backend", "enable_lmcache", "enable_flexkv", "kv_canary"),
        *("enable_streaming_session", "enable_session_radix_cache", "disaggregation_decode_retraction_backup"),
        "kv_events_config",
    }


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
def test_what_is_asked_for_in_vain_is_said() -> None:
    shared = SparseAttnConfig(build=Build.SHARED)
    [said] = flags.in_vain(SimpleNamespace(disable_radix_cache=True), shared)
    assert "got --disable-radix-cache" in said
    assert not [*flags.in_vain(SimpleNamespace(disable_radix_cache=False), shared)]
    assert not [*flags.in_vain(SimpleNamespace(disable_radix_cache=True), SparseAttnConfig())]


@pytest.mark.skipif(not hasattr(envs, "SGLANG_RUST_SERVER"), reason="this release has no Rust server")
def test_a_server_without_our_routes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    [said] = flags.in_vain(SimpleNamespace(), SparseAttnConfig())
    assert "got SGLANG_RUST_SERVER" in said
    monkeypatch.setenv("SGLANG_RUST_SERVER", "0")
    assert not [*flags.in_vain(SimpleNamespace(), SparseAttnConfig())]


def test_a_grpc_server_says_so_too() -> None:
    assert {"smg_grpc_mode"} <= set(ServerArgs.__annotations__)
    [said] = flags.in_vain(SimpleNamespace(smg_grpc_mode=True), SparseAttnConfig())
    assert "got --smg-grpc-mode" in said


def test_several_tokenizer_workers_say_what_they_lack() -> None:
    """The state and what `/generate` says come from the scheduler, so that they are there."""
    assert {"tokenizer_worker_num"} <= set(ServerArgs.__annotations__)
    [said] = flags.in_vain(SimpleNamespace(tokenizer_worker_num=2), SparseAttnConfig())
    assert "got --tokenizer-worker-num 2, which has neither" in said
    assert "/server_info" not in said
    assert not [*flags.in_vain(SimpleNamespace(tokenizer_worker_num=1), SparseAttnConfig())]


@OFFLOADS
def test_another_prefix_cache_is_refused() -> None:
    assert "got SimpleNamespace" in str(flags.tree_refusal(SimpleNamespace()))


BUILDS, CAPTURES = {"build": "prefill"}, {"build": "capture", "capture_folder": "captures"}


@pytest.mark.parametrize(
    ("decode", "prefill", "given", "words"),
    [
        ("full", "breakable", {}, None),
        ("disabled", "disabled", CAPTURES, None),
        ("full", "disabled", CAPTURES, "decode CUDA graphs to be off while prompts are captured"),
        ("other", "breakable", {}, "decode graph backend 'full'"),
        ("disabled", "breakable", CAPTURES, "prefill CUDA graphs to be off while prompts are captured"),
        ("full", "breakable", {"offload": {"host_bytes": 1 << 20}}, "off with offload"),
        ("full", "other", {}, None),
        ("full", "other", BUILDS, "prefill graph backend 'breakable'"),
        ("full", "breakable", BUILDS, None),
    ],
)
def test_graphs_that_do_not_go_with_ours_are_refused(
    decode: str, prefill: str, given: dict[str, Any], words: str | None
) -> None:
    config = config_from_dict(given)
    message = flags.graph_refusal("cuda", config, lambda *asked: asked in {("decode", decode), ("prefill", prefill)})
    assert message is None if words is None else words in str(message)
    assert flags.graph_refusal("cpu", config) is None
