"""Indexes on the device: loaded and checked off the scheduler's thread, shared by requests, evicted by recency.

This is the one door by which an index comes in, whoever hands it: the own folder, a service, another machine, another
rank. What is READY may be read by any decode path without a look at its arrays.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from enum import Enum

import torch
from torch import Tensor

from prefix_index import (
    ArrayKey,
    Evictions,
    IndexCorrupt,
    IndexEntry,
    IndexFile,
    IndexForeign,
    IndexFormatError,
    IndexMismatch,
    IndexStore,
    IndexStoreError,
    IndexTooNew,
)
from sglang_ext.methods.arrays import ContentError, IndexSize, check_forms, check_layer, join_heads
from sglang_ext.methods.base import IndexSpec
from sglang_ext.metrics import Figures

logger = logging.getLogger(__name__)

LayerArrays = dict[str, Tensor]

#: Host memory of one bulk read, about: enough to keep the disk busy, little beside a whole index.
STAGING_BYTES = 256 << 20

TELL_S = 3600.0
"""How seldom a store is told that an index which is loaded is in use."""

#: What the store must not offer again. One that has gone, that the disk or the store does not give now, may come back.
_DAMAGE = (IndexFormatError, IndexMismatch)
_KINDS: dict[type[Exception], str] = {IndexForeign: "foreign", IndexTooNew: "too_new", IndexMismatch: "mismatch"}
"""Of damage, as it is counted; of other bytes `bytes`, of content that no builder makes `content`."""


class State(Enum):
    """Life of a resident index."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


class UnusableIndexError(Exception):
    """An intact index that cannot serve here: why, by a word of the fallback list."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class NotNeededYetError(UnusableIndexError):
    """Only others' bytes would make room, for a request that waits: it is loaded when the request has its slot."""

    def __init__(self) -> None:
        super().__init__("index_memory", "no room without evicting others; nobody needs it yet")


class ResidentIndex:
    """One index in device memory. `layers[i]` maps array names to tensors with leading dim num_kv_heads.

    Attributes:
        entry: the store's entry.
        state: LOADING until the worker thread sets READY or FAILED; never changes back.
        layers: per layer; valid when READY.
        reason, detail: named fallback reason and text; set when FAILED.
        nbytes: device bytes of all tensors.
        hopeless: failed for a reason that no later try can change: larger than the whole budget, or wrong in content.
            Another index of the same prefix is another try.
        users: requests with a slot that hold it; only an index without users is evicted.
        hit: whether its load was begun by a request that counts as a hit.
        begun: when its load was asked for (`time.monotonic`).
        told: when the store was last told of a use: its load tells it.
        before: the build that this one replaces, until the device reads it no more.
    """

    def __init__(self, entry: IndexEntry, *, hit: bool = False) -> None:
        self.entry, self.hit = entry, hit
        self.state = State.LOADING
        self.begun = self.told = time.monotonic()
        self.layers: list[LayerArrays] = []
        self.reason = ""
        self.detail = ""
        self.nbytes = 0
        self.users = 0
        self.loaded: Future[None] | None = None
        self.hopeless = False
        self.before: ResidentIndex | None = None

    @property
    def prefix_len(self) -> int:
        """Tokens that the index speaks of."""
        return self.entry.identity.num_tokens

    def can_be_tried_again(self, entry: IndexEntry) -> bool:
        """Whether a request that asks for an entry of the same identity has it loaded anew."""
        ended = self.loaded is not None and self.loaded.done()  # before its state is read
        if self.state is State.FAILED:
            return not self.hopeless or _build_of(entry) != _build_of(self.entry)
        if self.state is State.READY:
            return self.users == 0 and entry.created > self.entry.created  # built again since
        return ended and self.state is State.LOADING  # its load ended without a word


class Residency:
    """Loads indexes of one method and keeps them within a byte budget.

    Attributes:
        pinned: digests of indexes that stay on the device when bytes are wanted. The scheduler's thread changes it.

    Args:
        store: open store; not owned.
        spec: only its method's arrays are loaded, as it wants them.
        num_layers: layers of the model.
        num_kv_heads: KV heads of this rank; heads are stacked into one tensor per array.
        device: where the tensors go.
        budget_bytes: device bytes for all indexes; an index that alone exceeds it is refused.
        first_kv_head: number of this rank's first KV head in the whole model.
    """

    def __init__(
        self,
        store: IndexStore,
        spec: IndexSpec,
        num_layers: int,
        num_kv_heads: int,
        device: torch.device,
        budget_bytes: int,
        first_kv_head: int = 0,
    ) -> None:
        self._store = store
        self._spec, self._method = spec, spec.method
        self._num_layers = num_layers
        self._kv_heads = range(first_kv_head, first_kv_head + num_kv_heads)
        self._device = device
        self._budget_bytes = budget_bytes
        self.pinned: set[str] = set()
        self._lock = threading.Lock()
        self._by_digest: OrderedDict[str, ResidentIndex] = OrderedDict()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sparse-attn-load")
        self._fetcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sparse-attn-fetch")
        for worker in (self._worker, self._fetcher):
            worker.submit(int)  # begins its thread: later the system may have none left
        self._reading = threading.Lock()  # one index at a time: of staging, and of the room that is made
        self.evicted = Evictions()
        names = ["index_hits", "load", "load_bytes", "load_seconds", "load_failures"]
        names += ["corrupt", "corrupt_bytes", "corrupt_seconds"]
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in names}

    def prefetch(self, entry: IndexEntry, *, hit: bool = False) -> None:
        """Begin to load the index of `entry` for a request that waits. Holds nothing: it may be evicted meanwhile."""
        self.release(self.acquire(entry, hit=hit))

    def acquire(self, entry: IndexEntry, *, retry: bool = True, hit: bool = False) -> ResidentIndex:
        """The index of `entry`, loading it in the background if need be; never blocks on I/O. Pair with `release`.

        Args:
            entry: the store's.
            retry: load an index anew that failed, unless it is hopeless. False where the same request's `prefetch` did:
                then only where memory was short, which may have passed.
            hit: count where it was: on the device, or on its way there; else, behind its load, where that read it.
        """
        with self._lock:
            index = self._by_digest.get(entry.digest)
            if index is None or ((retry or index.reason == "index_memory") and index.can_be_tried_again(entry)):
                before, index = index, ResidentIndex(entry, hit=hit)
                index.before = before
                self._by_digest[entry.digest] = index
                worker = self._fetcher if self._store.is_fetched(entry.digest) else self._worker
                index.loaded = worker.submit(self._load, index)
            elif hit:
                self._counts["index_hits"]["failed" if index.state is State.FAILED else "device"] += 1
            self._by_digest.move_to_end(entry.digest)
            index.users += 1
            if index.state is State.READY and time.monotonic() - index.told >= TELL_S:
                index.told = time.monotonic()
                with suppress(RuntimeError):  # closed meanwhile
                    self._worker.submit(self._tell, index.entry)
            return index

    def release(self, index: ResidentIndex) -> None:
        """Give an index back. It stays resident until the budget needs its bytes."""
        with self._lock:
            index.users -= 1

    def load(self, entry: IndexEntry) -> ResidentIndex:
        """Begin to load the index of `entry` now, whoever has to leave for it that nobody uses."""
        index = self.acquire(entry)  # held while it is loaded: what nobody holds makes no room
        assert index.loaded is not None
        index.loaded.add_done_callback(lambda _: self.release(index))
        return index

    def evict(self, digest: str) -> bool:
        """Let go of an index that no request holds. Waits for the device.

        Returns:
            Whether it is gone; False where it is held, or being loaded.
        """
        with self._lock:
            index = self._by_digest.get(digest)
            loading = index is not None and index.loaded is not None and not index.loaded.done()
            if index is None or index.users > 0 or loading:
                return index is None
            del self._by_digest[digest]
        self._wait_for_device()  # as in `_make_room`
        return True

    def forget_gone(self) -> None:
        """Drop what has failed and is in the store no more."""
        with self._lock:
            for digest, index in tuple(self._by_digest.items()):
                if index.state is State.FAILED and index.users == 0 and not self._store.knows(digest):
                    del self._by_digest[digest]

    def state(self, digest: str) -> State | None:
        """Of an index; None where nothing is known of it."""
        with self._lock:
            index = self._by_digest.get(digest)
        return None if index is None else index.state

    def resident(self) -> dict[str, ResidentIndex]:
        """The indexes that are loaded, loading or failed, by digest."""
        with self._lock:
            return dict(self._by_digest)

    def close(self) -> None:
        """Stop the workers; loads in progress end first."""
        for worker in (self._worker, self._fetcher):
            worker.shutdown(wait=True, cancel_futures=True)

    def resident_bytes(self) -> int:
        """Device bytes held now."""
        return sum(index.nbytes for index in self.resident().values())

    def num_users(self) -> int:
        """Requests that hold a resident index now."""
        return sum(index.users for index in self.resident().values())

    def figures(self) -> Figures:
        """What is exported of loads: by tier, reason or kind."""
        with self._lock:
            return {name: dict(counts) for name, counts in self._counts.items()}

    def _load(self, index: ResidentIndex) -> None:
        begun, tier = time.perf_counter(), "failed"
        try:
            if index.before is not None:
                self._wait_for_device()  # as in `_make_room`
                index.before = None
            self.forget_gone()
            with self._store.get(index.entry.identity) as file, self._reading:
                tier = file.tier
                try:
                    layers = self._load_layers(index, file)
                except _DAMAGE as error:
                    self._report(file, error)  # before requests are told: who asks then is not offered it again
                    raise
                self._wait_for_device()
                nbytes = sum(t.nbytes for arrays in layers for t in arrays.values())
                with self._lock:  # at once, for whoever looks at the books
                    self._count("load", tier, nbytes, begun)
                    index.layers, index.nbytes, index.state = layers, nbytes, State.READY
        except NotNeededYetError as error:
            index.reason, index.detail, index.state = error.reason, str(error), State.FAILED
        except (IndexStoreError, UnusableIndexError) as error:
            kind = "content" if index.hopeless else _KINDS.get(type(error), "bytes")
            self._fail(index, begun, error.reason, str(error), kind if isinstance(error, _DAMAGE) else None)
        except (torch.OutOfMemoryError, MemoryError) as error:
            self._fail(index, begun, "index_memory", f"no memory is left for this index: {error}")
        except Exception as error:  # the server must live on, dense
            self._fail(index, begun, "index_corrupt", f"{type(error).__name__}: {error}", "error")
        finally:
            if index.hit:
                with self._lock:
                    self._counts["index_hits"][tier] += 1

    def _tell(self, entry: IndexEntry) -> None:
        """A use of what is loaded long since: else its store would take it for unused. It is advice, and may fail."""
        with suppress(Exception):
            self._store.touch(entry.identity)

    def _report(self, file: IndexFile, error: IndexStoreError) -> None:
        try:
            self._store.report(file, error.bare())
        except Exception as problem:  # a store that cannot take note of it offers it again: tried again then
            logger.warning("sparse attention: a damaged index could not be reported to its store: %s", problem)

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _count(self, name: str, label: str, nbytes: int, begun: float) -> None:
        for what, value in ((name, 1), (f"{name}_bytes", nbytes), (f"{name}_seconds", time.perf_counter() - begun)):
            self._counts[what][label] += value  # type: ignore[assignment]  # seconds are no integers

    def _fail(self, index: ResidentIndex, begun: float, reason: str, detail: str, kind: str | None = None) -> None:
        logger.error("sparse attention: an index cannot be used, its requests stay dense: %s", detail)
        with self._lock:
            self._counts["load_failures"][reason] += 1
            if kind is not None:
                self._count("corrupt", kind, index.entry.nbytes, begun)
        index.reason, index.detail = reason, detail
        index.state = State.FAILED

    def _load_layers(self, index: ResidentIndex, file: IndexFile) -> list[LayerArrays]:
        """All layers, checked while they are read; a batch of layers at a time lies in host memory.

        Raises IndexCorrupt for arrays that no builder of this spec makes of this prefix.
        """
        identity, layers = index.entry.identity, list[LayerArrays]()
        size = IndexSize(identity.num_tokens, identity.model.head_dim)
        try:
            keys = self._own_keys(file, size)
            self._make_room(index, sum(file.record(key).nbytes for layer in keys for head in layer for key in head))
            flat = [[key for head in layer for key in head] for layer in keys]
            for batch in _batches([file.read_nbytes(wanted) for wanted in flat]):
                read = file.read_many(key for layer in batch for key in flat[layer])
                for layer in batch:
                    arrays = join_heads(
                        [{self._array(key): torch.from_numpy(read[key]) for key in head} for head in keys[layer]]
                    )
                    check_layer(self._spec, arrays, size, f"layer {layer}")
                    layers.append({name: array.to(self._device) for name, array in arrays.items()})
        except ContentError as error:
            index.hopeless = True
            # Of no file: whatever copies the store has of it are alike.
            what, remedy = f"{error.what} in index {identity.digest[:12]}", "remove the index and build it again"
            raise IndexCorrupt(what, expected=error.expected, found=error.found, remedy=remedy) from error
        return layers

    def _array(self, key: ArrayKey) -> str:
        """What the method calls an array."""
        return key.name.removeprefix(f"{self._method}.")

    def _own_keys(self, file: IndexFile, size: IndexSize) -> list[list[list[ArrayKey]]]:
        """[num_layers][num_kv_heads] addresses of this method's arrays on this rank, whose forms are right.

        Raises:
            UnusableIndexError: the index has none of this method.
            ContentError: another form, an array too many, or one that a head or a layer lacks.
        """
        own = [[list[ArrayKey]() for _ in self._kv_heads] for _ in range(self._num_layers)]
        found = set()
        for key in file.keys:
            if key.layer < 0:
                continue  # no method's
            found.add(key.name.split(".")[0])
            if key.name.startswith(f"{self._method}.") and key.kv_head in self._kv_heads and 0 <= key.layer < len(own):
                own[key.layer][key.kv_head - self._kv_heads.start].append(key)
        if self._method not in found:
            raise UnusableIndexError(
                "index_mismatch",
                f"index {file.identity.digest[:12]}: expected arrays of method {self._method!r}, found methods "
                f"{sorted(found)}; prebuild it with this method under 'methods'",
            )
        forms = self._spec.forms(size)
        for layer, heads in enumerate(own):
            for head, keys in zip(self._kv_heads, heads, strict=True):
                records = {self._array(key): file.record(key) for key in keys}
                rows = {name: (record.dtype, record.shape) for name, record in records.items()}
                check_forms(forms, rows, f"layer {layer}, KV head {head}")
        return own

    def _make_room(self, incoming: ResidentIndex, nbytes: int) -> None:
        if nbytes > self._budget_bytes:
            incoming.hopeless = True
            raise UnusableIndexError(
                "index_memory",
                f"index {incoming.entry.digest[:12]} needs {nbytes} bytes, index_gpu_bytes is "
                f"{self._budget_bytes}; raise index_gpu_bytes in --sparse-attn-config",
            )
        evicted, begun = dict[str, int](), time.perf_counter()
        with self._lock:
            held = sum(index.nbytes for index in self._by_digest.values())
            if held + nbytes > self._budget_bytes and incoming.users == 0:
                # Of a request that still waits: what others may need sooner stays, it is loaded when it has its slot.
                self._by_digest.pop(incoming.entry.digest, None)
                raise NotNeededYetError
            for digest, index in self._by_digest.items():
                if held + nbytes <= self._budget_bytes:
                    break
                idle = index is not incoming and index.users == 0 and index.state is State.READY
                if idle and digest not in self.pinned:
                    held -= index.nbytes
                    evicted[digest] = index.nbytes
            if held + nbytes <= self._budget_bytes:
                for digest in evicted:
                    del self._by_digest[digest]
            else:
                raise UnusableIndexError(
                    "index_memory",
                    f"index {incoming.entry.digest[:12]} needs {nbytes} bytes and {held} of index_gpu_bytes="
                    f"{self._budget_bytes} are in use by running requests, or pinned; raise index_gpu_bytes",
                )
        if evicted:
            # A request that just ended may still be in a running step: its tensors must outlive that step, or the
            # allocator would hand their memory to the index that comes in.
            self._wait_for_device()
            self.evicted = self.evicted.and_of([*evicted.values()], begun)


def _build_of(entry: IndexEntry) -> tuple[object, ...]:
    """What tells two indexes of one identity apart."""
    return entry.nbytes, entry.created, entry.build_seconds


def _batches(layer_nbytes: Sequence[int]) -> Iterator[range]:
    """Runs of neighbouring layers of up to STAGING_BYTES together, or of one layer that has more."""
    begin = total = 0
    for layer, nbytes in enumerate(layer_nbytes):
        if layer > begin and total + nbytes > STAGING_BYTES:
            yield range(begin, layer)
            begin, total = layer, 0
        total += nbytes
    yield range(begin, len(layer_nbytes))
