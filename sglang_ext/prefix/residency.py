"""Indexes on the device: loaded off the scheduler's thread, shared by requests, evicted by recency."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from prefix_index import IndexEntry, IndexFile, IndexStore, IndexStoreError

logger = logging.getLogger(__name__)

LayerArrays = dict[str, Tensor]


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
    """

    def __init__(
        self,
        store: IndexStore,
        method: str,
        num_layers: int,
        num_kv_heads: int,
        device: torch.device,
        budget_bytes: int,
    ) -> None:
        self._store = store
        self._method = method
        self._num_layers = num_layers
        self._num_kv_heads = num_kv_heads
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
            if index is None or (index.state is State.FAILED and not index.hopeless):
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
                self._make_room(index, sum(file.record(key).nbytes for key in file.keys if key.name.startswith(prefix)))
                layers = [self._load_layer(file, layer) for layer in range(self._num_layers)]
            self._wait_for_device()
            index.layers = layers
            index.nbytes = sum(t.nbytes for arrays in layers for t in arrays.values())
            index.state = State.READY
        except IndexStoreError as error:
            self._store.report(index.entry.identity, error)
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

    def _load_layer(self, file: IndexFile, layer: int) -> LayerArrays:
        prefix = f"{self._method}."
        names = sorted({key.name for key in file.keys if key.layer == layer and key.name.startswith(prefix)})
        if not names:
            found = sorted({key.name.split(".")[0] for key in file.keys})
            raise UnusableIndexError(
                "index_mismatch",
                f"index {file.identity.digest[:12]} layer {layer}: expected arrays of method {self._method!r}, "
                f"found methods {found}; prebuild it with this method under 'methods'",
            )
        out = {}
        for name in names:
            heads = [np.asarray(file.array(name, layer, head)) for head in range(self._num_kv_heads)]
            out[name.removeprefix(prefix)] = torch.from_numpy(np.stack(heads)).to(self._device)
        return out

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
