"""Offload's host pool and resident rows, of SGLang's own classes."""

from __future__ import annotations

import gc
import json
import weakref
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from prefix_kernels.residents import to_pages
from sglang_ext.compat import memory, scheduler_hooks
from sglang_ext.compat.flags import TREES
from sglang_ext.compat.host_pool import around_create_buffers, host_pool, offloading, rows_behind
from sglang_ext.compat.server_args import settings_of
from sglang_ext.compat.versions import installed
from sglang_ext.methods.layer_plan import LayerPlan
from sglang_ext.options import Offload
from sglang_ext.ranks import Ranks
from tests.compat.test_memory import GIB, configurator

pytestmark = pytest.mark.usefixtures("mends")


def test_rows_behind_the_pool_are_promised_before_it_is_sized(tmp_path: Path) -> None:
    """An 8B model's 32 layers of 8 KV heads of 128, in bf16: 131,072 bytes a token. Layers that attend all have what
    the host has, too.
    """
    model = SimpleNamespace(num_hidden_layers=32, num_key_value_heads=8, head_dim=128, dtype=torch.bfloat16)
    plan = ["dense", "dense", *["anchor"] * 30]
    settings = {"index_gpu_bytes": 1, "layer_plan": plan}
    offloaded = {**settings, "offload": {"host_bytes": GIB, "staging_tokens": 1000, "resident_tokens": 2000}}
    without = memory.after_profile_available_bytes(20 * GIB, configurator(tmp_path, json.dumps(settings)))
    assert memory.offload_rows(64) == 0
    given = configurator(tmp_path, json.dumps(offloaded), model_config=model)
    taken = without - memory.after_profile_available_bytes(20 * GIB, given)
    assert taken == (2000 + 4 * 1000 / 32) * 131_072 + GIB // 16 + GIB // 128
    offloaded["offload"]["select_prefill_tokens"] = 64
    selecting = configurator(tmp_path, json.dumps(offloaded), model_config=model)
    promised = memory.offload_bytes(settings_of(selecting.server_args), selecting)
    assert promised == taken + memory.SELECTING_BYTES
    given.server_args.tp_size = 2  # each rank half of all
    assert memory.offload_bytes(settings_of(given.server_args), given) == taken / 2
    assert [memory.offload_rows(page) for page in (1, 16, 64)] == [2000, 2000, 2048]


@pytest.mark.skipif(installed() not in TREES, reason="offload is refused on this release")
def test_pages_go_to_host_memory_and_back_to_layers_that_attend_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV pool with rows behind it, and host memory. Layer 1 attends all."""
    create = MHATokenToKVPool._create_buffers
    monkeypatch.setattr(MHATokenToKVPool, "_create_buffers", lambda pool: around_create_buffers(create, pool))
    monkeypatch.setattr(MHATokenToKVPool, "_init_kv_copy_and_warmup", lambda pool: None)
    monkeypatch.setattr(memory, "_offload", Offload(host_bytes=1, resident_tokens=80))
    shape = {"head_num": 2, "head_dim": 8, "layer_num": 3, "page_size": 16, "enable_memory_saver": False}
    pool = MHATokenToKVPool(size=256, dtype=torch.float32, device="cpu", **shape)
    residents = rows_behind(pool)
    replaced = [weakref.ref(buffers[1]) for buffers in (pool.k_buffer, pool.v_buffer)]
    host = host_pool(pool, Offload(host_bytes=20 * 16 * 2 * 3 * 2 * 8 * 4), (1,), residents.stop)
    gc.collect()
    assert [one() for one in replaced] == [None, None], "memory of layers that have larger tensors now"
    whole = host.num_pages
    assert whole in (20, 21)
    assert (pool.size, residents) == (256, range(272, 352))
    assert [len(one) for one in pool.k_buffer] == [352, 352 + 16 * whole, 352]
    first, taken = host.alloc(3), host.alloc(4)
    host.free(first)
    assert host.alloc(whole) is None
    again = host.alloc(3)
    assert again.tolist() == first.tolist() == [0, 1, 2], "pages that came back are given out in order"
    host.free(again)
    assert host.free_pages == whole - 4
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()
    slots = torch.randperm(256)[:64] + 16
    host.backup(slots, taken)
    for layer in range(3):
        wanted = to_pages(pool.k_buffer[layer][slots], pool.v_buffer[layer][slots])
        assert torch.equal(host.layer(layer)[taken], wanted)
    rows = (residents.stop + taken[:, None] * 16 + torch.arange(16)).flatten()
    for buffer in (pool.k_buffer[1], pool.v_buffer[1]):
        assert torch.equal(buffer[rows], buffer[slots])
        buffer[rows] = 0
    host.restore(taken)
    for buffer in (pool.k_buffer[1], pool.v_buffer[1]):
        assert torch.equal(buffer[rows], buffer[slots])
    eight = MHATokenToKVPool(size=64, dtype=torch.float8_e4m3fn, device="cpu", **shape)
    for buffer in (*eight.k_buffer, *eight.v_buffer):
        buffer.copy_(torch.randint(0, 100, buffer.shape))
    bytes_of_eight = host_pool(eight, Offload(host_bytes=20 * 16 * 2 * 3 * 2 * 8 * 4), (), 0)
    bytes_of_eight.backup(torch.arange(16, 48), bytes_of_eight.alloc(2))
    found, wanted = bytes_of_eight.layer(2)[:2], to_pages(eight.k_buffer[2][16:48], eight.v_buffer[2][16:48])
    assert found.dtype is torch.float8_e4m3fn
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    monkeypatch.setattr(memory, "_offload", Offload(host_bytes=1, resident_tokens=96))
    with pytest.raises(RuntimeError, match="expected KV tensors of 368 rows for offload, the last 96 for it; got 352"):
        rows_behind(pool)
    with pytest.raises(RuntimeError, match=r"Lower offload\.host_bytes"):
        host_pool(pool, Offload(host_bytes=1 << 50), (), 0)

    page = 16 * 2 * 3 * 2 * 8 * 4
    view: Any = SimpleNamespace(
        num_layers=3, num_kv_heads=2, head_dim=8, v_head_dim=8, kv_dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    monkeypatch.setattr(memory, "_offload", Offload(host_bytes=1, resident_tokens=80))
    plan, runner = LayerPlan((), 2), SimpleNamespace(token_to_kv_pool=pool)
    with pytest.raises(RuntimeError, match=rf"min_tokens, 330; .* Raise host_bytes to {21 * page} or more"):
        offloading(runner, view, Offload(host_bytes=10 * page, min_tokens=330), Ranks(), plan, waits_s=0.0)
    assert offloading(runner, view, Offload(host_bytes=21 * page, min_tokens=330), Ranks(), plan, waits_s=0.0)


@pytest.mark.parametrize("empty", [True, False])
def test_nothing_that_runs_is_not_taken_for_a_full_batch(empty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt longer than the pool, which SGLang finds in its grammar queue, says that a batch is full; of one that is
    empty nobody would take it back before 0.5.23.
    """
    offload = SimpleNamespace(before_batch=lambda waiting, most: [])
    monkeypatch.setattr(scheduler_hooks, "_runtime", SimpleNamespace(offload=offload))
    grammars = GrammarManager.__new__(GrammarManager)
    grammars.grammar_queue = []
    scheduler = SimpleNamespace(waiting_queue=[], max_req_input_len=64, grammar_manager=grammars)
    running = SimpleNamespace(is_empty=lambda: empty, batch_is_full=True)
    full = scheduler_hooks.around_get_new_batch_prefill(lambda _, batch: batch.batch_is_full, scheduler, running)
    assert full is not empty


def test_a_request_whose_grammar_is_ready_waits_for_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang puts it into the queue in the midst of looking for some to prefill: it would be prefilled at once."""
    done: Future[BaseGrammarObject] = Future()
    done.set_result(BaseGrammarObject())
    sampling = SimpleNamespace(custom_params=None)
    ready, compiles = (
        SimpleNamespace(
            grammar=grammar, grammar_key=("regex", ""), grammar_wait_ct=0, finished=lambda: False, origin_input_ids=[1],
            sampling_params=sampling, require_reasoning=False,
        )
        for grammar in (done, Future())
    )  # fmt: skip
    grammars = GrammarManager.__new__(GrammarManager)
    sizes = {"pp_rank": 0, "pp_size": 1, "pp_group": None, "grammar_sync_size": 1, "grammar_queue": [ready, compiles]}
    waits = {"SGLANG_GRAMMAR_POLL_INTERVAL": 0.01, "SGLANG_GRAMMAR_MAX_POLL_ITERATIONS": 9}
    backend = SimpleNamespace(set_cache=lambda key, value: None)
    vars(grammars).update(sizes, grammar_backend=backend, **waits)
    running = SimpleNamespace(is_empty=lambda: True, batch_is_full=False)
    scheduler: Any = SimpleNamespace(
        waiting_queue=[], running_batch=running, max_req_input_len=64, grammar_manager=grammars, chunked_req=None,
        enable_hierarchical_cache=False, enable_priority_preemption=False, is_hybrid_swa=False,
        server_args=SimpleNamespace(enable_flexkv=False),
    )  # fmt: skip
    scheduler._add_request_to_queue = lambda req: scheduler.waiting_queue.append(req)
    seen = []

    def original(scheduler: Any, batch: Any) -> Any:
        batch.batch_is_full = True  # what follows needs a whole scheduler
        delayer = {"prefill_delayer_single_pass": None}
        found = Scheduler._get_new_batch_prefill_raw(scheduler, running_batch=batch, **delayer)
        seen.extend(scheduler.waiting_queue)
        return found[0]

    held = SimpleNamespace(before_batch=lambda waiting, most: [req for req, _ in waiting])
    requests = SimpleNamespace(of=lambda req: req)
    monkeypatch.setattr(scheduler_hooks, "_runtime", SimpleNamespace(offload=held, requests=requests))
    assert scheduler_hooks.around_get_new_batch_prefill(original, scheduler, running) is None
    assert seen == [], "it is held"
    assert scheduler.waiting_queue == [ready]
    assert grammars.grammar_queue == [compiles]
    assert grammars.has_waiting_grammars()
    assert compiles.grammar_wait_ct == 1, "looked at once"
