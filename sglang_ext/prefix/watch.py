"""The store of one scheduler process: opened for it, looked at anew without blocking it, and counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from prefix_index import FileStore, IndexEntry, IndexStore, IndexStoreError
from sglang_ext.config import Settings
from sglang_ext.storage import configured_store

logger = logging.getLogger(__name__)

_PUBLISH_SECONDS = 5.0


class StoreWatch:
    """Owns the store that the settings name. Used by the scheduler thread.

    Args:
        settings: checked settings.
        publish: receives (indexes, bytes) now and then, for exported metrics.

    Raises:
        IndexStoreError: the store cannot be used, or its service or remote tier does not answer.
    """

    def __init__(self, settings: Settings, publish: Callable[[int, int], None] | None = None) -> None:
        self.store: IndexStore = configured_store(settings.store, settings.config)
        # A folder's rescan is some stat calls. Over a socket or a network it may take until a time limit: elsewhere.
        self._worker: ThreadPoolExecutor | None = None
        if not isinstance(self.store, FileStore):
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sparse-attn-rescan")
        self._running: Future[None] | None = None
        self._publish = publish
        self._next_publish = 0.0
        for problem in self.store.problems():
            logger.warning("sparse attention: ignored in the store: %s", problem.error)

    def rescan(self) -> None:
        """Learn what other processes changed: now, for a folder; else soon, on a thread of its own.

        Raises IndexStoreError; with a thread, that of the last finished rescan, once.
        """
        if self._worker is None:
            self.store.rescan()
            self._tell()
            return
        last = self._running
        if last is None or last.done():
            self._running = self._worker.submit(self._rescan)
            if last is not None:
                last.result()

    def _rescan(self) -> None:
        self.store.rescan()
        self._tell()

    def _tell(self) -> None:
        now = time.monotonic()
        if self._publish is not None and now >= self._next_publish:
            self._next_publish = now + _PUBLISH_SECONDS
            entries = self.store.list()
            self._publish(len(entries), sum(entry.nbytes for entry in entries))

    def snapshot(self) -> dict[str, Any]:
        """What the store holds and did, as plain values. A store that does not answer is a problem in the list."""
        entries: Sequence[IndexEntry] = ()
        try:
            entries = self.store.list()
            problems = [str(problem.error) for problem in self.store.problems()]
        except IndexStoreError as error:
            problems = [str(error)]
        counters = getattr(self.store, "counters", None)
        return {
            "indexes_in_store": len(entries),
            "store_bytes": sum(entry.nbytes for entry in entries),
            "store_problems": problems,
            "store_counters": counters._asdict() if counters is not None else {},
        }

    def close(self) -> None:
        """Close the store; a rescan under way ends first."""
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
        self.store.close()
