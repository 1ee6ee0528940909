"""The prefix cache of the installed SGLang behind offloaded prefixes: every sum holds, whatever requests do.

A scheduler of one loop over SGLang's own tree, allocator, table and requests. What SGLang's scheduler does between two
forwards is done here by its own functions, without a model: match, lock, take slots, insert behind a prefill, release
with and without inserting, evict, flush. `Loop.check` holds the sums.
"""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.compat.flags import TREES
from sglang_ext.compat.offload_tree import OffloadedTree, row_of
from sglang_ext.compat.versions import installed, older_than
from sglang_ext.offload.offloading import Offloading
from sglang_ext.options import Offload as Options
from sglang_ext.prefix.requests import Attachment
from sglang_ext.prefix.residency import State
from tests.compat.sglang_process import GROUP, in_sglang
from tests.examples import CHECKS, examples
from tests.offload.host_memory import PlainPools
from tests.server.harness import MODEL

pytestmark = [GROUP, pytest.mark.skipif(installed() not in TREES, reason="offload is refused on this release")]

_OLD = older_than("0.5.23")
SIZE, CONTEXT, ROWS = 512, 256, 6
INDEXED = 48
"""Tokens of a document, whole pages of every size tried."""
PAGES = (1, 4, 16)

#: (document, suffix, chunk of its prefill): a few tokens each, so that suffixes share beginnings.
ARRIVE = st.tuples(
    st.just("arrive"), st.integers(0, 2), st.lists(st.integers(1, 2), max_size=40), st.sampled_from([None, 3, 17])
)
OTHERS = ("chunk", "decode", "decode", "copy_out", "copy_out", "finish", "abort", "retract", "flush", "drop")
OTHER = st.tuples(st.sampled_from(OTHERS), st.integers(0, 5), st.integers(1, 20))
FIRST = [("arrive", 0, [1], None), ("copy_out", 0, 1), ("arrive", 1, [2], None), ("copy_out", 1, 1), ("finish", 0, 1)]
"""Two documents are in host memory; there is room for no third one."""


class Pool(PlainPools):
    """That no slot of the padding page is copied out."""

    first_slot = 0

    def backup(self, slots: torch.Tensor, pages: torch.Tensor) -> None:
        assert int(slots.min()) >= self.first_slot
        super().backup(slots, pages)


class Loop:
    """See the module.

    Args:
        page_size: SGLang's.
        host_pages: pages of host memory.
    """

    def __init__(self, page_size: int, host_pages: int = 16) -> None:
        self.page_size = page_size
        self.tree, self.table, self.allocator = _made(page_size)
        view = SimpleNamespace(
            num_layers=1, num_kv_heads=1, head_dim=8, kv_dtype=torch.float32, device=torch.device("cpu"),
            req_to_token=self.table.req_to_token, kv=None,
        )  # fmt: skip
        options = Options(host_bytes=16, min_tokens=16, staging_tokens=16)
        pool = Pool(SIZE + page_size, host_pages, 1, 1)
        pool.first_slot = page_size
        self.offloading = Offloading(options, view, pool, range(0), page_size)
        self.attachments: dict[Any, Attachment] = {}
        hooks = OffloadedTree(self.tree, self.offloading, self.attachments.get)
        hooks.install()
        match = self.tree.match_prefix
        self.tree.match_prefix = lambda params: match(params) if params.req is None else hooks.match(match, params)
        self.running: list[Any] = []
        self._spare: dict[int, list[int]] = {}
        self._rids = count()

    def request(self, prompt: list[int], indexed: int = 0) -> Any:
        """A waiting request; `indexed`: tokens of the index that its look-up found."""
        rid = str(next(self._rids))
        req = Req(rid, "", array("q", prompt), SamplingParams(max_new_tokens=8))
        entry = None
        if indexed:
            digest = f"{indexed}-" + "-".join(map(str, prompt[:indexed]))
            entry = SimpleNamespace(digest=digest, identity=SimpleNamespace(num_tokens=indexed))
        ready = SimpleNamespace(state=State.READY)
        self.attachments[req] = Attachment(rid, None, entry, ready)
        return req

    def prefill(self, req: Any, chunk: int | None = None) -> bool:
        """The next chunk of a request's prefill, or all of it; whether there was room."""
        first = row_of(req) is None
        if first:
            req.init_next_round_input(self.tree)
        begin = self._prefix_len(req)
        total = len(req.origin_input_ids) + len(req.output_ids)
        end = total if chunk is None else min(total, begin + chunk)
        node = req.last_node
        if first and not self._lock(req, node, end - begin):
            return False
        held = req.kv.kv_allocated_len if not first else begin
        new = self._slots(req, end - held)
        if new is None:
            if first:
                self._unlock(req, node)
            return False
        if first:
            prefix = self._prefix(req)
            assert len(prefix) == begin
            self._take_row(req)
            self.table.write((row_of(req), slice(0, begin)), prefix.to(torch.int32))
            self.running.append(req)
        row = row_of(req)
        self._spare[row] = self._spare.pop(-1)
        self.table.write((row, slice(held, end)), torch.tensor(new, dtype=torch.int32))
        self._computed(req, begin, end)
        self._insert(req, chunked=end < total)
        return True

    def decode(self, req: Any, token: int) -> bool:
        """One more token; whether there was room."""
        row, kv = row_of(req), req.kv
        end = kv.kv_allocated_len + 1
        if end > CONTEXT:
            return False
        new = self._slots(req, 1)
        if new is None:
            return False
        self._spare[row] = self._spare.pop(-1)
        self.table.write((row, slice(end - 1, end)), torch.tensor(new, dtype=torch.int32))
        req.output_ids.append(token)
        self._allocated(req, end)
        return True

    def copy_out(self, req: Any) -> None:
        """What a decode step does for its prefix."""
        lens = torch.tensor([len(req.origin_input_ids) + len(req.output_ids)])
        batch = SimpleNamespace(req_pool_indices=torch.tensor([row_of(req)]), batch_size=1, seq_lens_cpu=lens + 1)
        self.offloading.decoding(batch, [self.attachments[req]])

    def release(self, req: Any, *, insert: bool) -> None:
        """A request ends, or is retracted without insert."""
        self.running.remove(req)
        row = row_of(req)
        if insert:
            req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
        common.release_kv_cache(req, self.tree, **{"is_insert" if _OLD else "checkpoint": insert})
        self.offloading.slot_freed(row)
        if not insert:
            req.reset_for_retract()
        self._spare.pop(row)

    def _prefix_len(self, req: Any) -> int:
        return len(req.prefix_indices) if _OLD else int(req.prefix_len)

    def _prefix(self, req: Any) -> torch.Tensor:
        found = req.prefix_indices if _OLD else self.tree.prefix_device_indices(req) if req.prefix_len else []
        return torch.as_tensor(found, dtype=torch.int64)

    def _lock(self, req: Any, node: Any, wanted: int) -> bool:
        if _OLD:
            self.tree.inc_lock_ref(node)
        else:
            req.lock = self.tree.lock(node)
        room = self.allocator.available_size() + self.tree.evictable_size()
        if wanted + 2 * self.page_size <= room and len(self.table.free_slots):
            return True
        self._unlock(req, node)
        return False

    def _unlock(self, req: Any, node: Any) -> None:
        if _OLD:
            self.tree.dec_lock_ref(node)
        else:
            self.tree.unlock(req.lock)
            req.lock = None

    def _take_row(self, req: Any) -> None:
        if _OLD:
            from sglang.srt.managers.schedule_batch import ReqKvInfo

            req.kv = ReqKvInfo(kv_allocated_len=0, swa_evicted_seqlen=0)
        self.table.alloc([req])
        self.offloading.slot_taken(req, row_of(req))

    def _computed(self, req: Any, begin: int, end: int) -> None:
        if _OLD:
            req.set_extend_range(begin, end)
        else:
            req.extend_end = end
        self._allocated(req, end)

    def _allocated(self, req: Any, end: int) -> None:
        kv = req.kv
        kv.kv_allocated_len = end
        if _OLD:
            req.kv_committed_len = end
        else:
            kv.kv_committed_len = end

    def _insert(self, req: Any, *, chunked: bool) -> None:
        if _OLD:
            common.maybe_cache_unfinished_req(req, self.tree, **({"chunked": True} if chunked else {}))
        else:
            common.checkpoint_kv_cache(req, self.tree)

    def _slots(self, req: Any, num: int) -> list[int] | None:
        """New slots of a request, the rest of its last page first; what is left of the new last page is kept at -1."""
        row = row_of(req)
        spare = [] if row is None else list(self._spare.get(row, []))
        taken, spare = spare[:num], spare[num:]
        missing = num - len(taken)
        if missing:
            wanted = -(-missing // self.page_size) * self.page_size
            common.evict_from_tree_cache(self.tree, wanted)
            fresh = self.allocator.alloc(wanted)
            if fresh is None:
                return None
            taken, spare = taken + fresh.tolist()[:missing], fresh.tolist()[missing:]
        self._spare[-1] = spare
        return taken

    def check(self) -> None:
        """No slot of the padding page in a tree or in a free list; all slots are somewhere, once."""
        page = self.page_size
        empty = self.tree.evictable_size() + self.tree.protected_size() == 0  # 0.5.16 concatenates values, at least one
        in_tree = [] if empty else self.tree.all_values_flatten().tolist()
        free = _free_slots(self.allocator)
        held: list[int] = []
        for req in self.running:
            row, kv, front = row_of(req), req.kv, self.offloading.of_row(row_of(req))
            protected = req.cache_protected_len if _OLD else kv.cache_protected_len
            slots = self.table.req_to_token[row, : kv.kv_allocated_len].tolist()
            virtual = 0 if front is None else front.prefix_len
            assert slots[:virtual] == [position % page for position in range(virtual)]
            assert min(slots[virtual:]) >= page
            assert protected >= virtual
            assert set(slots[virtual:protected]) <= set(in_tree)
            held += slots[protected:] + self._spare[row]
        assert min([*in_tree, *free, *held]) >= page
        assert sorted([*in_tree, *free, *held]) == list(range(page, SIZE + page))
        assert self.tree.evictable_size() + self.tree.protected_size() == len(in_tree)
        assert self.offloading.directory.problem() is None
        assert self.offloading.directory.users == sum(
            self.offloading.of_row(row_of(req)) is not None for req in self.running
        )


def _free_slots(allocator: Any) -> list[int]:
    page = allocator.page_size
    parts = (allocator.free_pages, allocator.release_pages)
    pages = [number for part in parts if part is not None for number in part.tolist()]
    return [page * number + offset for number in pages for offset in range(page)]


def _made(page_size: int) -> tuple[Any, Any, Any]:
    """SGLang's tree, table and allocator."""
    table = ReqToTokenPool(size=ROWS, max_context_len=CONTEXT, device="cpu", enable_memory_saver=False)
    kv = SimpleNamespace(page_size=page_size)
    common: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "kvcache": kv, "need_sort": False}
    if page_size == 1:
        allocator = TokenToKVPoolAllocator(SIZE, **common)
    else:
        allocator = PagedTokenToKVPoolAllocator(SIZE, page_size=page_size, **common)
    params = {"disable": False, "req_to_token_pool": table, "token_to_kv_pool_allocator": allocator}
    params["page_size"] = page_size
    if _OLD:
        from sglang.srt.mem_cache.radix_cache import RadixCache

        return RadixCache(CacheInitParams(**params)), table, allocator
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    return UnifiedRadixCache(CacheInitParams(**params, tree_components=(ComponentType.FULL,))), table, allocator


def play(page_size: int, steps: list[tuple[Any, ...]]) -> dict[str, int]:
    """Requests on one loop, checked after each step; what happened, at the end."""
    loop = Loop(page_size, host_pages=8)
    waiting: list[tuple[Any, int | None]] = []
    for step in [*FIRST, *steps]:
        if step[0] == "arrive":
            _, document, suffix, chunk = step
            prompt = [*range(100 * (document + 1), 100 * (document + 1) + INDEXED), *suffix]
            waiting.append((loop.request(prompt, INDEXED), chunk))
        elif step[0] == "flush":
            if not loop.running:
                loop.tree.reset()
                loop.allocator.clear()
                loop.table.clear()
        elif step[0] == "drop":
            loop.offloading.drop()
        elif loop.running:
            _act(loop, step, waiting)
        waiting = [one for one in waiting if not loop.prefill(*one)]
        loop.check()
    for req in list(loop.running):
        loop.release(req, insert=_computed(req))
        loop.check()
    assert loop.offloading.directory.users == 0
    assert loop.allocator.available_size() + loop.tree.evictable_size() == 512
    state = loop.offloading.snapshot()
    return {"translated": state["translated"], **state["events"], **state["refused"]}


def _computed(req: Any) -> bool:
    """Whether all of a request's tokens have K and V."""
    return bool(req.kv.kv_allocated_len >= len(req.origin_input_ids) + len(req.output_ids))


def _act(loop: Loop, step: tuple[Any, ...], waiting: list[tuple[Any, int | None]]) -> None:
    what, who, how_many = step
    req = loop.running[who % len(loop.running)]
    whole = _computed(req)
    if what == "chunk" and not whole:
        loop.prefill(req, how_many)
    elif what == "decode" and whole:
        for token in range(how_many):
            if not loop.decode(req, token % 2 + 1):
                break
    elif what == "copy_out" and whole:
        loop.copy_out(req)
    elif what == "finish" and whole:
        loop.release(req, insert=True)
    elif what == "abort":
        loop.release(req, insert=False)
    elif what == "retract" and whole:
        loop.release(req, insert=False)
        waiting.append((req, None))


def all_plays(page_size: int, number: int) -> Counter[str]:
    """So many plays, in a process of their own; sums of what happened."""
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    record = ServerArgs(model_path=str(MODEL), device="cpu", attention_backend="torch_native", page_size=page_size)
    get_context().set_server_args(record)  # which SGLang's functions ask for
    happened: Counter[str] = Counter()

    @settings(max_examples=number, deadline=None, suppress_health_check=CHECKS)
    @given(st.lists(st.one_of(ARRIVE, OTHER, OTHER), min_size=10, max_size=60))
    def property_(steps: list[tuple[Any, ...]]) -> None:
        happened.update(play(page_size, steps))

    property_()
    return happened


@pytest.mark.parametrize("page_size", PAGES)
def test_sums_hold_whatever_requests_do(page_size: int) -> None:
    number = examples(100)
    happened = in_sglang("tests.compat.test_offload_tree:all_plays", page_size, number)
    # Chance decides how often: a fifth of what is usual.
    assert happened["copied"] >= number // 2, happened
    assert happened["translated"] > number // 4, happened
