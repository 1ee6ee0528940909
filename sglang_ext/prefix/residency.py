"""Indexes on the device: loaded off the scheduler's thread, shared by requests, evicted by recency."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum

import torch
from torch import Tensor

from prefix_index import (
    ArrayKey,
    IndexEntry,
    IndexFile,
    IndexFormatError,
    IndexMismatch,
    IndexStore,
    IndexStoreError,
)
from sglang_ext.indexing.heads import join_heads

logger = logging.getLogger(__name__)

LayerArrays = dict[str, Tensor]

#: Host memory of one bulk read, about: enough to keep the disk busy, little beside a whole index.
STAGING_BYTES = 256 << 20

#: What the store must not offer again. One that has gone, that the disk or the store does not give now, may come back.
_DAMAGE = (IndexFormatError, IndexMismatch)


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


class ResidentIndex:
    """One index in device memory. `layers[i]` maps array names to tensors with leading dim num_kv_heads.

    Attributes:
        entry: the store's entry.
        state: LOADING until the worker thread sets READY or FAILED; never changes back.
        layers: per layer; valid when READY.
        reason, detail: named fallback reason and text; set when FAILED.
        nbytes: device bytes of all tensors.
        hopeless: failed for a reason that no later try can change (larger than the whole budget).
        users: requests that hold it; only an index without users is evicted.
    """

    def __init__(self, entry: IndexEntry) -> None:
        self.entry = entry
        self.state = State.LOADING
        self.layers: list[LayerArrays] = []
        self.reason = ""
        self.detail = ""
        self.nbytes = 0
        self.users = 0
        self.loaded: Future[None] | None = None
        self.hopeless = False

    @property
    def prefix_len(self) -> int:
        """Tokens that the index speaks of."""
        return self.entry.identity.num_tokens


class Residency:
    """Loads indexes of one method and keeps them within a byte budget.

    Args:
        store: open store; not owned.
        method: only this method's arrays are loaded.
        num_layers: layers of the model.
        num_kv_heads: KV heads of this rank; heads are stacked into one tensor per array.
        device: where the tensors go.
        budget_bytes: device bytes for all indexes; an index that alone exceeds it is refused.
        first_kv_head: number of this rank's first KV head in the whole model.
    """

    def __init__(
        self,
        store: IndexStore,
        method: str,
        num_layers: int,
        num_kv_heads: int,
        device: torch.device,
        budget_bytes: int,
        first_kv_head: int = 0,
    ) -> None:
        self._store = store
        self._method = method
        self._num_layers = num_layers
        self._kv_heads = range(first_kv_head, first_kv_head + num_kv_heads)
        self._device = device
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._by_digest: OrderedDict[str, ResidentIndex] = OrderedDict()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sparse-attn-load")

    def acquire(self, entry: IndexEntry) -> ResidentIndex:
        """The index of `entry`, loading it in the background if need be; never blocks on I/O.

        Pair with `release`. A failed index is tried again by the next request that acquires it.
        """
        with self._lock:
            index = self._by_digest.get(entry.digest)
            ended = index is not None and index.loaded is not None and index.loaded.done()  # before its state is read
            if index is None or _can_be_tried_again(index, ended=ended):
                index = ResidentIndex(entry)
                self._by_digest[entry.digest] = index
                index.loaded = self._worker.submit(self._load, index)
            self._by_digest.move_to_end(entry.digest)
            index.users += 1
            return index

    def release(self, index: ResidentIndex) -> None:
        """Give an index back. It stays resident until the budget needs its bytes."""
        with self._lock:
            index.users -= 1

    def close(self) -> None:
        """Stop the worker; a load in progress ends first."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    def resident_bytes(self) -> int:
        """Device bytes held now."""
        with self._lock:
            return sum(index.nbytes for index in self._by_digest.values())

    def num_users(self) -> int:
        """Requests that hold a resident index now."""
        with self._lock:
            return sum(index.users for index in self._by_digest.values())

    def check_integrity(self) -> None:
        """Raise RuntimeError when the books do not balance: a negative user count, bytes that nobody holds."""
        with self._lock:
            for digest, index in self._by_digest.items():
                held = sum(t.nbytes for arrays in index.layers for t in arrays.values())
                if index.users < 0 or (index.state is State.READY and held != index.nbytes):
                    raise RuntimeError(
                        f"residency of {digest[:12]}: users {index.users} >= 0, nbytes {index.nbytes} == {held}"
                    )

    def _load(self, index: ResidentIndex) -> None:
        try:
            with self._store.get(index.entry.identity) as file:
                prefix = f"{self._method}."
                own = [key for key in file.keys if key.name.startswith(prefix) and key.kv_head in self._kv_heads]
                self._make_room(index, sum(file.record(key).nbytes for key in own))
                layers = self._load_layers(file)
            self._wait_for_device()
            nbytes = sum(t.nbytes for arrays in layers for t in arrays.values())
            with self._lock:  # at once, for whoever looks at the books
                index.layers, index.nbytes, index.state = layers, nbytes, State.READY
        except IndexStoreError as error:
            try:
                if isinstance(error, _DAMAGE):  # before requests are told: who asks then is not offered it again
                    self._store.report(index.entry.identity, error)
            except Exception as problem:  # a store that cannot take note of it offers it again: tried again then
                logger.warning("sparse attention: a damaged index could not be reported to its store: %s", problem)
            self._fail(index, error.reason, str(error))
        except UnusableIndexError as error:
            self._fail(index, error.reason, str(error))
        except torch.OutOfMemoryError as error:
            self._fail(index, "index_memory", f"the device has no memory left for this index: {error}")
        except Exception as error:  # the server must live on, dense
            self._fail(index, "index_corrupt", f"{type(error).__name__}: {error}")

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _fail(self, index: ResidentIndex, reason: str, detail: str) -> None:
        logger.error("sparse attention: an index cannot be used, its requests stay dense: %s", detail)
        index.reason, index.detail = reason, detail
        index.state = State.FAILED

    def _load_layers(self, file: IndexFile) -> list[LayerArrays]:
        """All layers, checked while they are read; a batch of layers at a time lies in host memory."""
        names = self._names_of_layers(file)
        heads = self._kv_heads
        keys = [[ArrayKey(name, layer, head) for name in some for head in heads] for layer, some in enumerate(names)]
        layers: list[LayerArrays] = []
        for batch in _batches([file.read_nbytes(wanted) for wanted in keys]):
            arrays = file.read_many(key for layer in batch for key in keys[layer])
            for layer in batch:
                pieces = [
                    {
                        name.removeprefix(f"{self._method}."): torch.from_numpy(arrays[ArrayKey(name, layer, head)])
                        for name in names[layer]
                    }
                    for head in heads
                ]
                layers.append({name: array.to(self._device) for name, array in join_heads(pieces).items()})
        return layers

    def _names_of_layers(self, file: IndexFile) -> list[list[str]]:
        """Names of this method's arrays, per layer. Raises UnusableIndexError for a layer that has none."""
        names: list[set[str]] = [set() for _ in range(self._num_layers)]
        for key in file.keys:
            if key.name.startswith(f"{self._method}.") and 0 <= key.layer < self._num_layers:
                names[key.layer].add(key.name)
        if not all(names):
            found = sorted({key.name.split(".")[0] for key in file.keys})
            raise UnusableIndexError(
                "index_mismatch",
                f"index {file.identity.digest[:12]} layer {names.index(set())}: expected arrays of method "
                f"{self._method!r}, found methods {found}; prebuild it with this method under 'methods'",
            )
        return [sorted(some) for some in names]

    def _make_room(self, incoming: ResidentIndex, nbytes: int) -> None:
        if nbytes > self._budget_bytes:
            incoming.hopeless = True
            raise UnusableIndexError(
                "index_memory",
                f"index {incoming.entry.digest[:12]} needs {nbytes} bytes, index_gpu_bytes is "
                f"{self._budget_bytes}; raise index_gpu_bytes in --sparse-attn-config",
            )
        evicted = []
        with self._lock:
            held = sum(index.nbytes for index in self._by_digest.values())
            for digest, index in list(self._by_digest.items()):
                if held + nbytes <= self._budget_bytes:
                    break
                if index is not incoming and index.users == 0 and index.state is State.READY:
                    held -= index.nbytes
                    evicted.append(self._by_digest.pop(digest))
            if held + nbytes > self._budget_bytes:
                raise UnusableIndexError(
                    "index_memory",
                    f"index {incoming.entry.digest[:12]} needs {nbytes} bytes and {held} of index_gpu_bytes="
                    f"{self._budget_bytes} are in use by running requests; raise index_gpu_bytes",
                )
        if evicted:
            # A request that just ended may still be in a running step: its tensors must outlive that step, or the
            # allocator would hand their memory to the index that comes in.
            self._wait_for_device()


def _can_be_tried_again(index: ResidentIndex, *, ended: bool) -> bool:
    if index.state is State.FAILED:
        return not index.hopeless
    return ended and index.state is State.LOADING  # its load ended without a word


def _batches(layer_nbytes: Sequence[int]) -> Iterator[range]:
    """Runs of neighbouring layers of up to STAGING_BYTES together, or of one layer that has more."""
    begin = total = 0
    for layer, nbytes in enumerate(layer_nbytes):
        if layer > begin and total + nbytes > STAGING_BYTES:
            yield range(begin, layer)
            begin, total = layer, 0
        total += nbytes
    yield range(begin, len(layer_nbytes))
