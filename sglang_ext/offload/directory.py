"""Which prefixes lie in host memory: states, users, and who leaves when room is wanted."""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Collection
from enum import Enum
from typing import Any

from torch import Tensor

from sglang_ext.config import PAGE_TOKENS
from sglang_ext.decode.types import HostPrefix
from sglang_ext.offload.host import HostPool


class OffloadState(Enum):
    """Life of an offloaded prefix; one that is not known lies on the device, if anywhere."""

    COPYING = "copying"
    LOADING = "loading"
    """From its file."""
    HOST = "host"
    FAILED = "failed"
    """Copying raised an error: it is not tried again."""


class Offload:
    """One prefix in host memory.

    Attributes:
        digest: of its index: namespace, tokens and model.
        prefix_len: tokens, a multiple of `PAGE_TOKENS` and of SGLang's page size.
        pages: [prefix_len / PAGE_TOKENS] int64 on the host, pages of the pool; owned until it leaves.
        state: see `OffloadState`.
        copied: tokens that are copied.
        users: rows of `req_to_token` that have it in front.
        key: namespace of its suffixes in SGLang's prefix cache. Not to be guessed: a request that named it would be
            given KV of other positions.
        dropped: it serves no new request, and leaves with its last user.
        moved_at: when it was last asked for from its file, or to it, seconds of `time.monotonic`.
        host: what decode steps need to know of it; None until all of it is copied.
    """

    host: HostPrefix | None = None

    def __init__(self, digest: str, prefix_len: int, pages: Tensor) -> None:
        self.digest, self.prefix_len, self.pages = digest, prefix_len, pages
        self.state = OffloadState.COPYING
        self.copied = self.users = 0
        self.moved_at = 0.0
        self.key = f"offloaded-{digest[:12]}-{secrets.token_hex(16)}"
        self.dropped = False


class OffloadDirectory:
    """Used by the scheduler's thread only.

    Attributes:
        events: prefixes that were `copied`, were `evicted` or `failed`, by that word; and as of `moved`.

    Args:
        pool: of host memory.
    """

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._known: OrderedDict[str, Offload] = OrderedDict()
        self._leaving: list[Offload] = []
        self.events: Counter[str] = Counter()

    def get(self, digest: str) -> Offload | None:
        """The prefix of an index, which is now the most recently used."""
        found = self._known.get(digest)
        if found is not None:
            self._known.move_to_end(digest)
        return found

    def state(self, digest: str) -> OffloadState | None:
        """Of the prefix of an index, without a use of it."""
        found = self._known.get(digest)
        return None if found is None else found.state

    @property
    def digests(self) -> list[str]:
        """Of prefixes that are known, those used last behind others."""
        return list(self._known)

    def begin(
        self,
        digest: str,
        prefix_len: int,
        live: Collection[str],
        state: OffloadState = OffloadState.COPYING,
    ) -> Offload | str:
        """Room for a prefix that is to be copied, or loaded. Those without users leave for it, the least recently used
        first.

        Args:
            live: digests of all requests that run or wait. None of them leaves: its request would have it copied out,
                or read, at once again, and the one that it left for would leave in turn.

        Returns:
            It; or why there is no room, in a word: `too_long` for the whole pool, `host_full` of what is in use.
        """
        wanted = prefix_len // PAGE_TOKENS
        if wanted > self._pool.num_pages:
            return "too_long"
        known = (one for one in self._known.values() if one.digest not in live)
        idle = [one for one in known if one.users == 0 and one.state is not OffloadState.FAILED]
        if self._pool.free_pages + sum(len(one.pages) for one in idle) < wanted:
            return "host_full"
        for one in idle:
            if self._pool.free_pages >= wanted:
                break
            self.leave(one)
            self.events["evicted"] += 1
        pages = self._pool.alloc(wanted)
        assert pages is not None
        offload = self._known[digest] = Offload(digest, prefix_len, pages)
        offload.state = state
        return offload

    def copied(self, offload: Offload, tokens: int) -> None:
        """So many more tokens are copied; with the last ones it may serve."""
        offload.copied += tokens
        if offload.copied == offload.prefix_len:
            offload.state = OffloadState.HOST
            self.events["copied"] += 1

    def moved(self, event: str, offload: Offload) -> None:
        """It was read from its file (`loaded`), and may serve; it could not be read (`load_failed`): as if it had not
        been known; it was written (`saved`), or not (`save_failed`).
        """
        self.events[event] += 1
        if event == "loaded":
            offload.copied, offload.state = offload.prefix_len, OffloadState.HOST
        elif event == "load_failed" and self._known.get(offload.digest) is offload:
            self.leave(offload)

    def failed(self, offload: Offload) -> None:
        """Copying raised an error: its room is free."""
        offload.state = OffloadState.FAILED
        self._pool.free(offload.pages)
        offload.pages = offload.pages[:0]
        self.events["failed"] += 1

    def leave(self, offload: Offload) -> None:
        """It serves no new request: as if it had not been known."""
        del self._known[offload.digest]
        offload.dropped = True
        if offload.users:
            self._leaving.append(offload)
        else:
            self._pool.free(offload.pages)

    def pin(self, offload: Offload) -> None:
        """A row has it in front."""
        offload.users += 1

    def unpin(self, offload: Offload) -> None:
        """A row is given back."""
        offload.users -= 1
        if offload.dropped and not offload.users:
            self._leaving.remove(offload)
            self._pool.free(offload.pages)

    def drop(self) -> None:
        """Forget all: the cache was flushed, or weights have changed. What is in use leaves with its last user."""
        for one in list(self._known.values()):
            self.leave(one)

    @property
    def users(self) -> int:
        """Rows with a prefix of host memory in front."""
        return sum(one.users for one in (*self._known.values(), *self._leaving))

    def problem(self) -> str | None:
        """What is wrong where the pages of all prefixes and the free ones are not all pages; None where they are."""
        held = sum(len(one.pages) for one in (*self._known.values(), *self._leaving))
        if held + self._pool.free_pages == self._pool.num_pages:
            return None
        return f"expected held + free pages to be all {self._pool.num_pages}; got {held} + {self._pool.free_pages}"

    def snapshot(self) -> dict[str, Any]:
        """State as plain values."""
        return {
            "prefixes": dict(Counter(one.state.value for one in self._known.values())),
            "users": self.users,
            "pages": self._pool.num_pages,
            "free_pages": self._pool.free_pages,
        }
