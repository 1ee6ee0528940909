"""The store of one scheduler process: opened for it, looked at anew without blocking it, and counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from prefix_index import FileStore, IndexEntry, IndexStore, IndexStoreError
from sglang_ext.config import Settings
from sglang_ext.storage import configured_store

logger = logging.getLogger(__name__)

_PUBLISH_SECONDS = 5.0
#: What a snapshot waits for a store that is quick as a rule; else it shows what was known before.
_PATIENCE_S = 0.05
_LATE = f"index store: expected an answer within {_PATIENCE_S:g} s, found none yet; what is shown is as last known"


class StoreWatch:
    """Owns the store that the settings name. Used by the scheduler thread, which waits for a store at start only.

    Args:
        settings: checked settings.
        publish: receives (indexes, bytes) now and then, for exported metrics.

    Raises:
        IndexStoreError: the store cannot be used, or its service or remote tier does not answer.
    """

    def __init__(self, settings: Settings, publish: Callable[[int, int], None] | None = None) -> None:
        self.store: IndexStore = configured_store(settings.store, settings.config)
        # A folder's rescan is some stat calls. Over a socket or a network it may take until a time limit: elsewhere.
        # Two threads, since a rescan must not wait until a question for problems has ended.
        self._workers: ThreadPoolExecutor | None = None
        if not isinstance(self.store, FileStore):
            self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="sparse-attn-watch")
        self._rescanning: Future[None] | None = None
        self._looking: Future[None] | None = None
        self._publish = publish
        self._next_publish = 0.0
        self._entries: Sequence[IndexEntry] = ()
        self._problems: list[str] = []
        self._look()
        for problem in self._problems:
            logger.warning("sparse attention: ignored in the store: %s", problem)

    def rescan(self) -> None:
        """Learn what other processes changed: now, for a folder; else soon, on a thread of its own.

        Raises IndexStoreError; with a thread, that of the last finished rescan, once.
        """
        if self._workers is None:
            self._rescan()
            return
        last = self._rescanning
        if last is None or last.done():
            self._rescanning = self._workers.submit(self._rescan)
            if last is not None:
                last.result()

    def _rescan(self) -> None:
        self.store.rescan()
        now = time.monotonic()
        if self._publish is not None and now >= self._next_publish:
            self._next_publish = now + _PUBLISH_SECONDS
            self._entries = entries = self.store.list()
            self._publish(len(entries), sum(entry.nbytes for entry in entries))

    def _look(self) -> None:
        try:
            self._entries = self.store.list()
            self._problems = [str(problem.error) for problem in self.store.problems()]
        except IndexStoreError as error:
            self._problems = [str(error)]

    def snapshot(self) -> dict[str, Any]:
        """What the store holds and did, as plain values. Where it does not answer at once, that is a problem in the
        list, and the rest is as last known.
        """
        late = False
        if self._workers is None:
            self._look()
        else:
            if self._looking is None or self._looking.done():
                self._looking = self._workers.submit(self._look)
            late = bool(wait([self._looking], _PATIENCE_S).not_done)
        entries, problems = self._entries, self._problems
        counters = getattr(self.store, "counters", None)
        return {
            "indexes_in_store": len(entries),
            "store_bytes": sum(entry.nbytes for entry in entries),
            "store_problems": [*problems, *([_LATE] if late else [])],
            "store_counters": counters._asdict() if counters is not None else {},
        }

    def close(self) -> None:
        """Close the store. What its threads are asking ends with it."""
        if self._workers is not None:
            self._workers.shutdown(wait=False, cancel_futures=True)
        self.store.close()
        if self._workers is not None:
            self._workers.shutdown(wait=True)
