"""The store as one scheduler process sees it: a prompt's index, found in what is known of it without waiting for it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from prefix_index import (
    Ask,
    FileStore,
    IndexEntry,
    IndexIdentity,
    IndexStore,
    IndexStoreError,
    ModelFingerprint,
    namespace_digest,
    page_hashes,
)
from sglang_ext.config import PAGE_TOKENS, Settings
from sglang_ext.options import Build
from sglang_ext.prefix.mismatch import misfit
from sglang_ext.storage import configured_store

logger = logging.getLogger(__name__)

RESCAN_S = 0.2
_PUBLISH_SECONDS = 5.0
#: What is waited for a store that is quick as a rule; else what was known before counts.
_PATIENCE_S = 0.05
_LATE = f"index store: expected an answer within {_PATIENCE_S:g} s, found none yet; what is shown is as last known"


@dataclass(frozen=True)
class Lookup:
    """Outcome of a look-up: an index, or the named reason why there is none.

    Attributes:
        entry: the longest usable index of the prompt; None with a reason.
        reason: a word of the list of fallbacks; None with an entry, and for a prompt without a whole page, of which
            nobody would expect an index (SGLang's warm-up and health probes).
        detail: for people: which field of an otherwise fitting index differs.
        hashes: of the prompt's pages, chained; empty for a prompt that is too short to be looked up.
    """

    entry: IndexEntry | None
    reason: str | None = None
    detail: str | None = None
    hashes: Sequence[bytes] = ()


class PrefixDirectory:
    """Owns the store that the settings name, keeps what is known of it, and looks prompts up in that by chained page
    hash. Used by the scheduler thread, which waits for a store at start only.

    Args:
        settings: checked settings.
        model: fingerprint of the model served.
        profile_digest: digest of how this server expects indexes to be built.
        publish: receives (usable indexes, bytes of all, problems) now and then, for exported metrics.

    Attributes:
        problems: what in the store is no usable index, as last known (`known`); what readers found damaged among it.

    Raises:
        IndexStoreError: the store cannot be used, or its service or remote tier does not answer.
    """

    def __init__(
        self,
        settings: Settings,
        model: ModelFingerprint,
        profile_digest: str,
        publish: Callable[[int, int, int], None] | None = None,
    ) -> None:
        builds = settings.config.build in (Build.SHARED, Build.PREFILL)
        self.address = settings.store
        self.store: IndexStore = configured_store(settings.store, settings.config, write=builds)
        self._model, self._profile_digest = model, profile_digest
        self._min_prefix_len = settings.config.min_sparse_prompt_len
        # Two threads, since a rescan must not wait until a question for problems has ended.
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="sparse-attn-watch")
        self._workers.submit(int)  # begins the first of them: later the system may have none left
        # A folder's rescan is some stat calls as a rule, and then worth waiting for. Not where the last one took long:
        # a slow disk, a folder of very many files. Over a socket or a network it may take until a time limit.
        self._is_quick = isinstance(self.store, FileStore)
        self._rescanning: Future[None] | None = None
        self._looking: Future[None] | None = None
        self._publish = publish
        self._next_rescan = self._next_publish = 0.0
        self._listed: tuple[Sequence[IndexEntry], Counter[str | None]] = (), Counter()
        self.problems: list[str] = []
        self._scan_problem: str | None = None
        self._look()
        for problem in self.problems:
            logger.warning("sparse attention: ignored in the store: %s", problem)

    def lookup(self, namespace_fields: Mapping[str, str | None], prompt: Sequence[int]) -> Lookup:
        """Find the longest index whose tokens all stand at the start of this prompt.

        Args:
            namespace_fields: everything in SGLang's RadixKey that is not tokens.
            prompt: [num_tokens] token ids of the request's own prompt, without generated tokens.
        """
        if len(prompt) < self._min_prefix_len:
            return Lookup(None, "short_prefix" if len(prompt) >= PAGE_TOKENS else None)
        hashes = page_hashes(prompt, PAGE_TOKENS)
        ask = Ask(namespace_digest(namespace_fields), hashes, self._model, self._profile_digest)
        if time.monotonic() >= self._next_rescan:
            self._next_rescan = time.monotonic() + RESCAN_S
            self.rescan()
        entry = self.store.longest(ask)
        if entry is None:
            why = self.store.near_miss(ask)
            return Lookup(None, "index_mismatch" if why else "no_index", why or None, hashes)
        if entry.identity.num_tokens < self._min_prefix_len:
            return Lookup(None, "short_prefix", None, hashes)
        return Lookup(entry, hashes=hashes)

    def rescan(self) -> None:
        """Learn what other processes changed, on a thread of its own: now, for a folder that is quick, else soon."""
        if self._rescanning is None or self._rescanning.done():
            self._rescanning = self._workers.submit(self._rescan)
            if self._is_quick:
                wait([self._rescanning], _PATIENCE_S)

    def _rescan(self) -> None:
        """What is known stays known where the store cannot be scanned, its folder has gone for instance."""
        begun, problem = time.monotonic(), None
        try:
            self.store.rescan()
        except Exception as error:  # the server lives on
            problem = str(error)
            if problem != self._scan_problem:
                logger.error("sparse attention: the index store cannot be scanned for new indexes: %s", problem)
        self._scan_problem, now = problem, time.monotonic()
        self._is_quick = isinstance(self.store, FileStore) and now - begun < _PATIENCE_S
        if self._publish is not None and now >= self._next_publish:
            if problem is None:
                self._list()
            self._tell(1 if problem is not None else len(self.store.problems()))

    def _tell(self, problems: int) -> None:
        self._next_publish = time.monotonic() + _PUBLISH_SECONDS
        if self._publish is not None:
            entries, fitting = self._listed
            self._publish(fitting[None], sum(entry.nbytes for entry in entries), problems)

    def misfit(self, identity: IndexIdentity) -> str | None:
        """Why an index can serve no request here, in few words; None where it can."""
        return misfit(identity, self._model, self._profile_digest)

    def _list(self) -> None:
        """Take what the store has, and how many of it can serve requests here (None), and how many cannot, by the
        reason: counted only where it changed, as questions come between decode steps.
        """
        entries = self.store.list()
        if entries != self._listed[0]:
            self._listed = entries, Counter(self.misfit(entry.identity) for entry in entries)

    def _look(self) -> None:
        try:
            self._list()
            self.problems = [str(problem.error) for problem in self.store.problems()]
            self._tell(len(self.problems))
        except Exception as error:  # the server lives on
            self.problems = [str(error) if isinstance(error, IndexStoreError) else repr(error)]

    def summary(self) -> str:
        """One line for people: how many indexes are usable here, of how many, and what the others are."""
        entries, fitting = self._listed
        others = ", ".join(f"{count} {why}" for why, count in fitting.most_common() if why is not None)
        return f"usable {fitting[None]} of {len(entries)} indexes" + (f" ({others})" if others else "")

    def known(self) -> tuple[Sequence[IndexEntry], bool]:
        """All usable indexes in the store, and whether that is as last known only: it does not answer at once."""
        late = False
        if self._is_quick:
            self.rescan()
        if self._is_quick and (self._rescanning is None or self._rescanning.done()):
            self._look()
        else:
            if self._looking is None or self._looking.done():
                self._looking = self._workers.submit(self._look)
            late = bool(wait([self._looking], _PATIENCE_S).not_done)
        return self._listed[0], late

    def change(self, how: Callable[[IndexStore], object]) -> str:
        """Change something in the store, on a thread of its own.

        Returns:
            "done"; or "under way" where that takes long: what comes of it stands in the log, if it fails.

        Raises:
            IndexStoreError: the store refuses, at once.
        """
        changing = self._workers.submit(how, self.store)
        if wait([changing], _PATIENCE_S).not_done:
            changing.add_done_callback(_log_failure)
            return "under way"
        changing.result()
        return "done"

    def snapshot(self) -> dict[str, Any]:
        """What the store holds and did, as plain values. Where it does not answer at once, that is a problem in the
        list, and the rest is as last known.
        """
        _, late = self.known()
        problems = self.problems
        if self._scan_problem is not None and self._scan_problem not in problems:
            problems = [self._scan_problem, *problems]
        entries, fitting = self._listed
        counters = getattr(self.store, "counters", None)
        return {
            "indexes_in_store": len(entries),
            "indexes_usable": fitting[None],
            "indexes_unusable": {why: count for why, count in fitting.items() if why is not None},
            "store_bytes": sum(entry.nbytes for entry in entries),
            "store_problems": [*problems, *([_LATE] if late else [])],
            "store_counters": counters._asdict() if counters is not None else {},
        }

    def close(self) -> None:
        """Close the store. What its threads are asking ends with it."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self.store.close()
        self._workers.shutdown(wait=True)


def _log_failure(changing: Future[object]) -> None:
    if not changing.cancelled() and (error := changing.exception()) is not None:
        logger.error("sparse attention: the index store refused a change: %s", error)
