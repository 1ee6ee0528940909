"""A scheduler of one loop over the prefix cache of the installed SGLang: its own tree, allocator, table and requests.

What SGLang's scheduler does between two forwards is done here by its own functions, without a model: match, lock, take
slots, insert behind a prefill, release with and without inserting, evict, flush. `check` holds the sums.
"""

from __future__ import annotations

from array import array
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch

from sglang_ext.compat.offload_tree import OffloadedTree, row_of
from sglang_ext.compat.versions import older_than
from sglang_ext.offload.offloading import Offloading
from sglang_ext.options import Offload as Options
from sglang_ext.prefix.requests import Attachment
from sglang_ext.prefix.residency import State
from tests.offload.host_memory import PlainPools
from tests.server.harness import MODEL

SIZE, CONTEXT, ROWS = 512, 256, 6


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
        _publish(page_size)
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
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

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
        held = self._kv(req).kv_allocated_len if not first else begin
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
        row, kv = row_of(req), self._kv(req)
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
        batch = SimpleNamespace(req_pool_indices=torch.tensor([row_of(req)]), batch_size=1)
        self.offloading.decoding(batch, [self.attachments[req]])

    def release(self, req: Any, *, insert: bool) -> None:
        """A request ends, or is retracted without insert."""
        from sglang.srt.mem_cache.common import release_kv_cache

        self.running.remove(req)
        row = row_of(req)
        if insert:
            from sglang.srt.managers.schedule_batch import FINISH_LENGTH

            req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
        release_kv_cache(req, self.tree, **{"is_insert" if _OLD else "checkpoint": insert})
        self.offloading.slot_freed(row)
        if not insert:
            req.reset_for_retract()
        self._spare.pop(row)

    def retract(self, req: Any) -> None:
        """It gives its slots back, and waits."""
        self.release(req, insert=False)

    def _kv(self, req: Any) -> Any:
        return req.kv

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
            from sglang.srt.mem_cache.common import maybe_cache_unfinished_req

            maybe_cache_unfinished_req(req, self.tree, **({"chunked": True} if chunked else {}))
        else:
            from sglang.srt.mem_cache.common import checkpoint_kv_cache

            checkpoint_kv_cache(req, self.tree)

    def _slots(self, req: Any, num: int) -> list[int] | None:
        """New slots of a request, the rest of its last page first; what is left of the new last page is kept at -1."""
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        row = row_of(req)
        spare = [] if row is None else list(self._spare.get(row, []))
        taken, spare = spare[:num], spare[num:]
        missing = num - len(taken)
        if missing:
            wanted = -(-missing // self.page_size) * self.page_size
            evict_from_tree_cache(self.tree, wanted)
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
            row, kv, front = row_of(req), self._kv(req), self.offloading.of_row(row_of(req))
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


_OLD = older_than("0.5.23")


def _free_slots(allocator: Any) -> list[int]:
    page = allocator.page_size
    parts = (allocator.free_pages, allocator.release_pages)
    pages = [number for part in parts if part is not None for number in part.tolist()]
    return [page * number + offset for number in pages for offset in range(page)]


def _made(page_size: int) -> tuple[Any, Any, Any]:
    """SGLang's tree, table and allocator."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    table = ReqToTokenPool(size=ROWS, max_context_len=CONTEXT, device="cpu", enable_memory_saver=False)
    kv = SimpleNamespace(page_size=page_size)
    common: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "kvcache": kv, "need_sort": False}
    if page_size == 1:
        allocator = TokenToKVPoolAllocator(SIZE, **common)
    else:
        allocator = PagedTokenToKVPoolAllocator(SIZE, page_size=page_size, **common)
    params = {
        "disable": False,
        "req_to_token_pool": table,
        "token_to_kv_pool_allocator": allocator,
        "page_size": page_size,
    }
    if _OLD:
        from sglang.srt.mem_cache.radix_cache import RadixCache

        return RadixCache(CacheInitParams(**params)), table, allocator
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    return UnifiedRadixCache(CacheInitParams(**params, tree_components=(ComponentType.FULL,))), table, allocator


@cache
def _record(page_size: int) -> Any:
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(model_path=str(MODEL), device="cpu", attention_backend="torch_native", page_size=page_size)


def _publish(page_size: int) -> None:
    """A server's settings, which SGLang's functions ask for."""
    from sglang.srt.runtime_context import get_context

    get_context().set_server_args(_record(page_size))
