"""The directory of host memory under any order of events: nothing that a live request has there leaves for another."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_ext.config import PAGE_TOKENS
from sglang_ext.offload.directory import Offload, OffloadDirectory, OffloadState
from tests.offload.host_memory import PlainPools

PAGES = 8
SIZES = {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6}
"""Pages of each prefix."""
digests = st.sampled_from(sorted(SIZES))


class Directory(RuleBasedStateMachine):
    """Requests come and end; while they live they have their prefix copied out, or read; rows and moves use it."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = OffloadDirectory(PlainPools(PAGE_TOKENS, PAGES))
        self.live: set[str] = set()
        self.used: list[Offload] = []

    def wants(self, digest: str, state: OffloadState = OffloadState.COPYING) -> bool:
        """A live request asks for room, as at each step; whether it was given some."""
        if self.directory.get(digest) is not None:
            return False
        before = {one: self.directory.get(one) for one in SIZES}
        idle = sum(len(one.pages) for one in before.values() if one and not one.users and one.digest not in self.live)
        room = self.directory.snapshot()["free_pages"] + idle
        found = self.directory.begin(digest, SIZES[digest] * PAGE_TOKENS, self.live, state)
        assert isinstance(found, str) == (SIZES[digest] > room)
        kept = [one for one in before.values() if one and (one.users or one.digest in self.live)]
        assert all(self.directory.get(one.digest) is one and not one.dropped for one in kept)
        return not isinstance(found, str)

    @rule(digest=digests)
    def comes(self, digest: str) -> None:
        self.live.add(digest)

    @rule(digest=digests)
    def ends(self, digest: str) -> None:
        self.live.discard(digest)

    @rule(digest=digests, state=st.sampled_from([OffloadState.COPYING, OffloadState.LOADING]))
    def asks(self, digest: str, state: OffloadState) -> None:
        self.live.add(digest)
        if self.wants(digest, state) and state is OffloadState.LOADING:
            found = self.directory.get(digest)
            assert found is not None
            self.directory.pin(found)
            self.used.append(found)

    @rule(digest=digests)
    def is_copied(self, digest: str) -> None:
        found = self.directory.get(digest)
        if found is not None and found.state is OffloadState.COPYING:
            self.directory.copied(found, PAGE_TOKENS)

    @rule(digest=digests)
    def is_used(self, digest: str) -> None:
        found = self.directory.get(digest)
        if found is not None and found.state is OffloadState.HOST:
            self.directory.pin(found)
            self.used.append(found)

    @precondition(lambda self: self.used)
    @rule(data=st.data(), event=st.sampled_from(["loaded", "load_failed"]))
    def is_given_back(self, data: st.DataObject, event: str) -> None:
        one = self.used.pop(data.draw(st.integers(0, len(self.used) - 1)))
        if one.state is OffloadState.LOADING and not one.dropped:
            self.directory.moved(event, one)
        self.directory.unpin(one)

    @rule(digest=digests)
    def fails(self, digest: str) -> None:
        found = self.directory.get(digest)
        if found is not None and found.state is OffloadState.COPYING:
            self.directory.failed(found)

    @rule()
    def flushes(self) -> None:
        self.directory.drop()

    @rule()
    def nobody_takes_turns(self) -> None:
        """However often the same requests ask: each is given room once at most."""
        given = [digest for _ in range(4) for digest in sorted(self.live) if self.wants(digest)]
        assert len(given) == len(set(given))

    @invariant()
    def balances(self) -> None:
        assert self.directory.problem() is None
        assert self.directory.users == len(self.used)

    def teardown(self) -> None:
        while self.used:
            self.directory.unpin(self.used.pop())
        self.directory.drop()
        assert self.directory.snapshot() == {"prefixes": {}, "users": 0, "pages": PAGES, "free_pages": PAGES}


Directory.TestCase.settings = settings(stateful_step_count=40, deadline=None)
TestDirectory = Directory.TestCase
