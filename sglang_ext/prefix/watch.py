"""The store of one scheduler process: opened for it, looked at anew without blocking it, and counted."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from prefix_index import FileStore, IndexEntry, IndexIdentity, IndexStore, IndexStoreError
from sglang_ext.config import Build, Settings
from sglang_ext.storage import configured_store

logger = logging.getLogger(__name__)

_PUBLISH_SECONDS = 5.0
#: What is waited for a store that is quick as a rule; else what was known before counts.
_PATIENCE_S = 0.05
_LATE = f"index store: expected an answer within {_PATIENCE_S:g} s, found none yet; what is shown is as last known"


def _builds(settings: Settings) -> bool:
    return settings.config.build in (Build.SHARED, Build.PREFILL)


class StoreWatch:
    """Owns the store that the settings name. Used by the scheduler thread, which waits for a store at start only.

    Args:
        settings: checked settings.
        misfit: why an index can serve nobody here, in few words; None where it can.
        publish: receives (usable indexes, bytes of all) now and then, for exported metrics.

    Raises:
        IndexStoreError: the store cannot be used, or its service or remote tier does not answer.
    """

    def __init__(
        self,
        settings: Settings,
        misfit: Callable[[IndexIdentity], str | None],
        publish: Callable[[int, int], None] | None = None,
    ) -> None:
        self.store: IndexStore = configured_store(settings.store, settings.config, write=_builds(settings))
        # Two threads, since a rescan must not wait until a question for problems has ended.
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="sparse-attn-watch")
        # A folder's rescan is some stat calls as a rule, and then worth waiting for. Not where the last one took long:
        # a slow disk, a folder of very many files. Over a socket or a network it may take until a time limit.
        self._is_quick = isinstance(self.store, FileStore)
        self._rescanning: Future[None] | None = None
        self._looking: Future[None] | None = None
        self._misfit = misfit
        self._publish = publish
        self._next_publish = 0.0
        self._entries: Sequence[IndexEntry] = ()
        self._problems: list[str] = []
        self._scan_problem: str | None = None
        self._look()
        for problem in self._problems:
            logger.warning("sparse attention: ignored in the store: %s", problem)

    def rescan(self) -> None:
        """Learn what other processes changed, on a thread of its own: now, for a folder that is quick, else soon.

        Raises IndexStoreError: that of the last finished rescan, once.
        """
        last = self._rescanning
        if last is not None and not last.done():
            return
        self._rescanning = self._workers.submit(self._rescan)
        if last is not None:
            last.result()
        if self._is_quick and not wait([self._rescanning], _PATIENCE_S).not_done:
            done, self._rescanning = self._rescanning, None
            done.result()

    def _rescan(self) -> None:
        begun = time.monotonic()
        try:
            self.store.rescan()
            self._scan_problem = None
        except IndexStoreError as error:
            self._scan_problem = str(error)
            raise
        finally:
            now = time.monotonic()
            self._is_quick = isinstance(self.store, FileStore) and now - begun < _PATIENCE_S
        if self._publish is not None and now >= self._next_publish:
            self._next_publish = now + _PUBLISH_SECONDS
            self._entries = entries = self.store.list()
            self._publish(self._fitting(entries)[None], sum(entry.nbytes for entry in entries))

    def _fitting(self, entries: Sequence[IndexEntry]) -> Counter[str | None]:
        """How many can serve requests here (None), and how many cannot, by the reason."""
        return Counter(self._misfit(entry.identity) for entry in entries)

    def _look(self) -> None:
        try:
            self._entries = self.store.list()
            self._problems = [str(problem.error) for problem in self.store.problems()]
        except IndexStoreError as error:
            self._problems = [str(error)]

    def summary(self) -> str:
        """One line for people: how many indexes are usable here, of how many, and what the others are."""
        fitting = self._fitting(self._entries)
        others = ", ".join(f"{count} {why}" for why, count in fitting.most_common() if why is not None)
        return f"usable {fitting[None]} of {len(self._entries)} indexes" + (f" ({others})" if others else "")

    def snapshot(self) -> dict[str, Any]:
        """What the store holds and did, as plain values. Where it does not answer at once, that is a problem in the
        list, and the rest is as last known.
        """
        late = False
        if self._is_quick:
            with suppress(IndexStoreError):  # it is among the problems
                self.rescan()
        if self._is_quick and (self._rescanning is None or self._rescanning.done()):
            self._look()
        else:
            if self._looking is None or self._looking.done():
                self._looking = self._workers.submit(self._look)
            late = bool(wait([self._looking], _PATIENCE_S).not_done)
        entries, problems = self._entries, self._problems
        if self._scan_problem is not None and self._scan_problem not in problems:
            problems = [self._scan_problem, *problems]
        fitting = self._fitting(entries)
        counters = getattr(self.store, "counters", None)
        return {
            "indexes_in_store": len(entries),
            "indexes_usable": fitting.pop(None, 0),
            "indexes_unusable": dict(fitting),
            "store_bytes": sum(entry.nbytes for entry in entries),
            "store_problems": [*problems, *([_LATE] if late else [])],
            "store_counters": counters._asdict() if counters is not None else {},
        }

    def close(self) -> None:
        """Close the store. What its threads are asking ends with it."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self.store.close()
        self._workers.shutdown(wait=True)
