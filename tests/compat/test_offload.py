"""What offload does not go with, and its host pool and resident rows, of SGLang's own classes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_ext.compat import memory, offload
from sglang_ext.compat.server_args import settings_of
from sglang_ext.compat.versions import installed
from sglang_ext.config import config_from_dict
from sglang_ext.options import Offload, SparseAttnConfig
from tests.compat.sglang_process import GROUP, in_sglang
from tests.compat.test_memory import GIB, configurator

CONFIG = config_from_dict({"offload": {"host_bytes": 1 << 20, "staging_tokens": 100}})


@pytest.mark.skipif(installed() not in offload.TREES, reason="offload is refused on this release")
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
def test_what_it_does_not_go_with_is_refused_by_name(field: str, value: Any) -> None:
    record = SimpleNamespace(**{field: value})
    message = offload.refusal(record, CONFIG)
    assert message is not None
    assert f"beside offload; got {field}={value!r}" in message
    assert offload.refusal(record, SparseAttnConfig()) is None
    assert offload.refusal(SimpleNamespace(kv_canary="none", tp_size=2), CONFIG) is None


def test_a_job_of_several_ranks_writes_no_files() -> None:
    """Each would have its own KV heads only."""
    config = config_from_dict({"build": "prefill", "offload": {"host_bytes": 16, "folder": "kv"}})
    message = offload.refusal(SimpleNamespace(tp_size=2), config)
    assert message is not None
    assert "expected no tensor parallelism (--tp-size) beside offload; got tp_size=2" in message
    assert offload.refusal(SimpleNamespace(tp_size=1), config) is None


@pytest.mark.parametrize("release", ["0.5.17", "0.5.22"])
def test_releases_on_which_it_was_not_run_are_refused(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(offload, "installed", lambda: release)
    message = offload.refusal(SimpleNamespace(), CONFIG)
    assert message is not None
    assert (
        f"expected SGLang 0.5.16 or 0.5.23 with offload, which was run on no other release; found {release}" in message
    )


@pytest.mark.skipif(installed() not in offload.TREES, reason="offload is refused on this release")
def test_another_prefix_cache_is_refused() -> None:
    message = offload.tree_refusal(SimpleNamespace())
    assert message is not None
    assert "got SimpleNamespace" in message


def test_rows_behind_the_pool_are_promised_before_it_is_sized(tmp_path: Path) -> None:
    """An 8B model's 32 layers of 8 KV heads of 128, in bf16: 131,072 bytes a token. Layers that attend all have what
    the host has, too.
    """
    import torch

    model = SimpleNamespace(num_hidden_layers=32, num_key_value_heads=8, head_dim=128, dtype=torch.bfloat16)
    plan = ["dense", "dense", *["anchor"] * 30]
    settings = {"index_gpu_bytes": 1, "layer_plan": plan}
    offloaded = {**settings, "offload": {"host_bytes": GIB, "staging_tokens": 1000, "resident_tokens": 2000}}
    without = memory.after_profile_available_bytes(20 * GIB, configurator(tmp_path, json.dumps(settings)))
    assert memory.offload_rows(64) == 0
    given = configurator(tmp_path, json.dumps(offloaded), model_config=model)
    taken = without - memory.after_profile_available_bytes(20 * GIB, given)
    assert taken == (2000 + 4 * 1000 / 32) * 131_072 + GIB // 16 + GIB // 128
    given.server_args.tp_size = 2  # each rank half of all
    assert memory.offload_bytes(settings_of(given.server_args), given) == taken / 2
    assert [memory.offload_rows(page) for page in (1, 16, 64)] == [2000, 2000, 2048]


def pools() -> dict[str, Any]:
    """A KV pool with rows behind it, host memory, and pages on their way there and back. Layer 1 attends all."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from prefix_kernels.residents import to_pages
    from sglang_ext.compat import host_pool

    create = MHATokenToKVPool._create_buffers
    memory._offload = Offload(host_bytes=1, resident_tokens=80)
    MHATokenToKVPool._create_buffers = lambda pool: host_pool.around_create_buffers(create, pool)
    MHATokenToKVPool._init_kv_copy_and_warmup = lambda pool: None
    shape = {"dtype": torch.float32, "head_num": 2, "head_dim": 8, "layer_num": 3, "device": "cpu"}
    pool = MHATokenToKVPool(size=256, page_size=16, enable_memory_saver=False, **shape)
    residents = host_pool.rows_behind(pool)
    options = Offload(host_bytes=20 * 16 * 2 * 3 * 2 * 8 * 4)
    host = host_pool.SGLangHostPool(pool, options, (1,), residents.stop)
    whole = host.num_pages
    first, taken = host.alloc(3), host.alloc(4)
    host.free(first)
    for layer in range(3):
        pool.k_buffer[layer].normal_()
        pool.v_buffer[layer].normal_()
    slots = torch.randperm(256)[:64] + 16
    host.backup(slots, taken)
    alike = []
    for layer in range(3):
        wanted = to_pages(pool.k_buffer[layer][slots], pool.v_buffer[layer][slots])
        alike.append(torch.equal(host.layer(layer)[taken], wanted))
    rows = (residents.stop + taken[:, None] * 16 + torch.arange(16)).flatten()
    for buffer in (pool.k_buffer[1], pool.v_buffer[1]):
        alike.append(torch.equal(buffer[rows], buffer[slots]))
        buffer[rows] = 0
    host.restore(taken)
    alike += [torch.equal(buffer[rows], buffer[slots]) for buffer in (pool.k_buffer[1], pool.v_buffer[1])]
    eight = MHATokenToKVPool(size=64, page_size=16, enable_memory_saver=False, **shape | {"dtype": torch.float8_e4m3fn})
    for buffer in (*eight.k_buffer, *eight.v_buffer):
        buffer.copy_(torch.randint(0, 100, buffer.shape))
    bytes_of_eight = host_pool.SGLangHostPool(eight, options, (), 0)
    bytes_of_eight.backup(torch.arange(16, 48), bytes_of_eight.alloc(2))
    wanted = to_pages(eight.k_buffer[2][16:48], eight.v_buffer[2][16:48]).view(torch.float8_e4m3fn)
    found = bytes_of_eight.layer(2)[:2]
    alike.append(found.dtype == wanted.dtype and torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)))
    too_many, again = host.alloc(whole), host.alloc(3)
    host.free(again)
    memory._offload = Offload(host_bytes=1, resident_tokens=96)
    try:
        host_pool.rows_behind(pool)
        short = ""
    except RuntimeError as error:
        short = str(error)
    try:
        host_pool.SGLangHostPool(pool, Offload(host_bytes=1 << 50), (), 0)
        large = ""
    except RuntimeError as error:
        large = str(error)
    return {
        "size": pool.size, "rows": [len(one) for one in pool.k_buffer], "residents": residents, "alike": alike,
        "short": short,
        "large": large, "pages": (whole, host.free_pages), "too_many": too_many is None,
        "again": again.tolist() == first.tolist() == [0, 1, 2],
    }  # fmt: skip


@GROUP
@pytest.mark.skipif(installed() not in offload.TREES, reason="offload is refused on this release")
def test_pages_go_to_host_memory_and_back_to_layers_that_attend_all() -> None:
    found = in_sglang("tests.compat.test_offload:pools")
    assert found["size"] == 256
    pages, free = found["pages"]
    assert found["rows"] == [352, 352 + 16 * pages, 352]
    assert found["residents"] == range(272, 352)
    assert found["alike"] == [True] * 8
    assert pages in (20, 21)
    assert free == pages - 4
    assert found["too_many"]
    assert found["again"], "pages that came back are given out in order"
    assert "expected KV tensors of 368 rows for offload, the last 96 for it; got 352" in found["short"]
    assert "Lower offload.host_bytes" in found["large"]
