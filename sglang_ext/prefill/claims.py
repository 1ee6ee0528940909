"""The right to build an index, found out without holding up the scheduler: a service or a remote store may be slow."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from prefix_index import BuildLease, FileStore, IndexIdentity, IndexStore

logger = logging.getLogger(__name__)

#: What an admission waits for a store that is quick as a rule; the answer may as well come while the prompt runs.
_PATIENCE_S = 0.02


def take_lease(store: IndexStore, identity: IndexIdentity) -> BuildLease | dict[str, Any]:
    """The lease to build an index under, or why not: fields of a report's line. May block until the store's time
    limits; raises what the store raises.
    """
    exists = {"status": "exists", "digest": identity.digest, "num_tokens": identity.num_tokens}
    if store.contains(identity):
        return exists
    lease = store.lease(identity)
    if lease is None:
        detail = "expected nobody else to build this index, found its lease held; wait for it, or ask again"
        return {"status": "skipped", "reason": "building_elsewhere", "digest": identity.digest, "detail": detail}
    try:
        if not store.contains(identity):
            return lease
    except BaseException:
        lease.release()
        raise
    lease.release()  # its last holder was done a moment ago
    return exists


class Claim:
    """Whether this process builds one index: not known yet, then a lease, or why not.

    Attributes:
        identity: of the index.
        known: set once the store has answered.
        refusal: once known, what to report where there is no lease: the fields of a report's line, or the error. None
            with a lease.
    """

    def __init__(self, identity: IndexIdentity) -> None:
        self.identity = identity
        self.known = threading.Event()
        self.refusal: dict[str, Any] | Exception | None = None
        self._lease: BuildLease | None = None

    def settle(self, store: IndexStore) -> None:
        """Asks the store; may block until its time limits."""
        try:
            found = take_lease(store, self.identity)
            if isinstance(found, dict):
                self.refusal = found
            else:
                self._lease = found
        except Exception as error:  # whatever a store raises, the server must live on
            self.refusal = error
        self.known.set()

    def release(self) -> None:
        """Gives the lease of a settled claim back. Twice does nothing."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


class ClaimDesk:
    """Makes claims: at once in a folder, else on a thread of its own. That gives them back, too, in the order of calls.

    Args:
        store: open store; not owned.
    """

    def __init__(self, store: IndexStore) -> None:
        self._store = store
        self._at_once = isinstance(store, FileStore)
        self._last: Claim | None = None
        # A SimpleQueue may be filled in the middle of anything, in a garbage collection too.
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), name="sparse-attn-claims", daemon=True).start()

    def claim(self, identity: IndexIdentity) -> Claim:
        """A claim, known already where the store is quick."""
        claim, last = Claim(identity), self._last
        if self._at_once:
            claim.settle(self._store)
            return claim
        self._last = claim
        self._jobs.put(lambda: claim.settle(self._store))
        if last is None or last.known.is_set():
            claim.known.wait(_PATIENCE_S)
        return claim

    def give_back(self, claim: Claim) -> None:
        """Ends a claim, without waiting for a store that is not a folder."""
        if self._at_once:
            claim.release()
        else:
            self._jobs.put(claim.release)

    def close(self) -> None:
        """Ends the thread once it has done what it was given."""
        self._jobs.put(None)


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:  # one lease that cannot be given back must not keep the others
            logger.exception("sparse attention: a build lease could not be given back")
        del job  # holds a claim, and so a lease
