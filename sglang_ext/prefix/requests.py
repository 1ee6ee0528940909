"""What is known of each live request, and which index its next decode step may use."""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from sglang_ext.metrics import REASONS, Counters
from sglang_ext.options import SparseAttnConfig
from sglang_ext.prefix.residency import ResidentIndex, State
from sglang_ext.prefix.suffix_index import SuffixIndex
from sglang_ext.ranks import LOADING, READY, Agreement, Ranks, Word

if TYPE_CHECKING:
    from prefix_index import IndexEntry
    from sglang_ext.prefill.recorder import Admission

logger = logging.getLogger(__name__)
_serials = itertools.count()

ALONE = ("by_request", "unsupported_mode")
"""Reasons for which a request shares nothing."""

CASCADE, SPARSE = range(1, 3)
"""Ways of a request's decode step that are noted: exact with shared slots read once, and by an index."""
GUARDED = 4
"""Beside a way, or alone: the quality guard compared the step."""


class StepLog:
    """Which way each output token of a request came, if not densely, and what its steps by an index selected.

    One step beyond the tokens that are asked about may be noted already.
    """

    def __init__(self) -> None:
        self._ways, self._selected = bytearray(), array("q")  # by output token

    def note(self, token: int, way: int, selected: int = 0) -> None:
        """The step that makes output token `token` goes this way; prefill makes token 0."""
        more = max(0, token + 1 - len(self._ways))
        self._ways.extend(bytes(more))
        self._selected.extend([0] * more)
        self._ways[token], self._selected[token] = way, selected

    def guarded(self, token: int) -> None:
        """The guard compares the step that makes this output token."""
        if token >= len(self._ways):
            self.note(token, 0)
        self._ways[token] |= GUARDED

    def keep(self, tokens: int) -> None:
        """Only the first `tokens` output tokens came of steps that are over; what later ones gave was dropped."""
        del self._ways[tokens:], self._selected[tokens:]

    def counts(self, tokens: int) -> dict[str, int]:
        """Decode steps of the first `tokens` output tokens by way. A token that prefill made behind a retraction
        counts as dense.
        """
        ways = self._ways[:tokens]
        sparse, cascade = (ways.count(way) + ways.count(way | GUARDED) for way in (SPARSE, CASCADE))
        return {"sparse": sparse, "cascade": cascade, "dense": max(0, tokens - 1) - sparse - cascade}

    def told(self, tokens: int) -> dict[str, Any]:
        """Of the first `tokens` output tokens: `counts`; tokens of the prefix that a selecting layer attended, mean
        over the steps by an index (0: none); and steps that the guard compared.
        """
        steps, ways = self.counts(tokens), self._ways[:tokens]
        selected = round(sum(self._selected[:tokens]) / steps["sparse"]) if steps["sparse"] else 0
        guarded = sum(ways.count(way | GUARDED) for way in (0, CASCADE, SPARSE))
        return {"steps": steps, "selected_tokens": selected, "guarded_steps": guarded}


@dataclass(eq=False)
class Attachment:
    """What is known of one request, from admission to its end.

    Attributes:
        rid: request id.
        reason: named reason for dense decode.
        entry: of the index that its look-up found.
        index: what serves it; held while it has a slot, and no longer. None with a reason, and without a slot.
        admission: what those that record prompts are told when it gets a slot; None for nothing.
        runs_again: it had a slot before, and was retracted.
        waits_with: output tokens of a retracted request, until it has a slot again; 0 for others.
        suffix: index of its suffix tokens; None where all of them are attended in full.
        prompt_len: tokens of its own prompt.
        steps: which way its decode steps went.
        offload_refusal: why its prefix is not copied to host memory, in a word; None where it is, or may be.
        drafts: tokens that lossless decode drafted for it, and how many of them its answer has.
        serial: unlike any other attachment's, also of a later request with the same id.
        reported: reasons that were already counted for this request, in this order.
    """

    rid: str
    reason: str | None = None
    entry: IndexEntry | None = None
    index: ResidentIndex | None = None
    admission: Admission | None = None
    runs_again: bool = False
    waits_with: int = 0
    suffix: SuffixIndex | None = None
    prompt_len: int = 0
    steps: StepLog = field(default_factory=StepLog)
    offload_refusal: str | None = None
    drafts: tuple[int, ...] = (0, 0)
    serial: int = field(default_factory=_serials.__next__)
    reported: list[str] = field(default_factory=list)

    def start_over(self) -> None:
        """Its slots are given back, so nothing is known of its suffix tokens."""
        self.suffix, self.runs_again = None, True

    def told(self, tokens: int) -> dict[str, Any]:
        """What the response of so many output tokens says: docs/using.md has the fields."""
        entry = self.entry
        return {
            **self.steps.told(tokens),
            "index": None if entry is None else entry.retention.name or entry.digest[:12],
            "prefix_tokens": 0 if entry is None else entry.identity.num_tokens,
            "reasons": sorted(self.reported),
            **(dict(zip(("drafted", "accepted"), self.drafts, strict=True)) if self.drafts[0] else {}),
        }

    def count(self, reason: str, counters: Counters) -> None:
        """It decodes dense: counted once for each reason."""
        if reason not in self.reported:
            self.reported.append(reason)
            counters.count_fallback(reason)

    def cut(self, drafts: int, counters: Counters) -> None:
        """Of the drafts that were kept last, so many stand behind the end of its answer."""
        if self.index is not None:  # else they were not counted
            self.drafts = self.drafts[0], self.drafts[1] - drafts
            counters.count_drafts(0, -drafts)

    def ended(self, tokens: int, counters: Counters) -> None:
        """It ended with so many output tokens."""
        counters.count_ended(self.steps.counts(tokens), self.reported[-1] if self.reported else None)


class RequestTable:
    """Attachments of requests: by object from admission on, by id only while they have a slot.

    Holds requests weakly: one that SGLang forgets disappears here too. One that is aborted while it waits SGLang may
    never forget (its `custom_params` name the request itself), and nobody is told: such a request must hold nothing.
    """

    def __init__(self) -> None:
        self._attachments: weakref.WeakKeyDictionary[Hashable, Attachment] = weakref.WeakKeyDictionary()
        self._running: dict[str, list[Attachment]] = {}
        self._forgotten: deque[Attachment] = deque()

    def add(self, request: Hashable, attachment: Attachment) -> None:
        """Admit a request, which waits for its slot."""
        self._attachments[request] = attachment

    def enter(self, request: Hashable) -> list[Attachment]:
        """A request that was admitted gets its slot: from now on its id means it.

        Returns:
            Attachments that must not keep their index: a second request of the same id that runs makes its own and
            the others' ambiguous. Their reason is set; the caller takes the index back.
        """
        attachment = self._attachments[request]
        attachment.waits_with = 0
        running = self._running.setdefault(attachment.rid, [])
        running.append(attachment)
        twins = running if len(running) > 1 else []
        for twin in twins:
            twin.reason = "unsupported_mode"
        if not attachment.runs_again:
            # A net: SGLang says when a request gives its slot back. Only queues: it may run in any thread, in the
            # middle of anything.
            weakref.finalize(request, self._forgotten.append, attachment).atexit = False
        return list(twins)

    def are_as_long(self, rids: Sequence[str], lens: Sequence[int]) -> None:
        """Tokens of running requests, the one being decoded included: what steps beyond them drafted was not kept."""
        for rid, length in zip(rids, lens, strict=True):
            attachment = self.get(rid)
            if attachment is not None:
                attachment.steps.keep(max(0, length - attachment.prompt_len))

    def take_forgotten(self) -> list[Attachment]:
        """Attachments whose requests SGLang forgot since the last call without saying that they ended: with a slot, or
        while they waited behind a retraction.
        """
        out = []
        while self._forgotten:
            if self._leave(attachment := self._forgotten.popleft()) or attachment.waits_with:
                out.append(attachment)
        return out

    def get(self, rid: str) -> Attachment | None:
        """The attachment of the request of this id that has a slot."""
        running = self._running.get(rid)
        return running[-1] if running else None

    def of(self, request: Hashable) -> Attachment | None:
        """The attachment of this very request object, if it was admitted."""
        return self._attachments.get(request)

    def leave(self, request: Hashable, *, finished: bool) -> None:
        """A request gives its slot back; a finished one is forgotten now, without waiting for its collection."""
        attachment = self._attachments.pop(request) if finished else self._attachments[request]
        self._leave(attachment)

    def _leave(self, attachment: Attachment) -> bool:
        running = self._running.get(attachment.rid, [])
        if attachment not in running:
            return False
        running.remove(attachment)
        if not running:
            del self._running[attachment.rid]
        return True

    def has_slot(self, attachment: Attachment) -> bool:
        """Whether its request has one."""
        return attachment in self._running.get(attachment.rid, ())

    def running(self) -> Iterator[Attachment]:
        """Of the requests that have a slot."""
        return itertools.chain.from_iterable(self._running.values())

    def __len__(self) -> int:
        """Requests that have a slot."""
        return sum(map(len, self._running.values()))


class Guarded(Protocol):
    """Indexes that the quality guard keeps away from requests."""

    def blocks(self, digest: str, created: float, *, may_end: bool = True) -> bool:
        """Whether an index that was made then is unused now; `may_end`: whether asking may end that."""


class Readiness:
    """Looks at requests' indexes. Used by the scheduler's thread only.

    Attributes:
        stale: why no index is of the weights that are served now; None while they are.
        refused: named reason for which no step goes by an index any more; None while some may.
        off: whether an operator has turned indexes off; requests keep what they hold meanwhile.

    Args:
        config: what a step does while an index is loading.
        requests: the live ones.
        counters: receives reasons, once for each request.
        ranks: of this process.
        release: takes back what a request holds.
        guarded: what the quality guard wants unused.
    """

    def __init__(
        self,
        config: SparseAttnConfig,
        requests: RequestTable,
        counters: Counters,
        ranks: Ranks,
        release: Callable[[Attachment], None],
        guarded: Guarded | None,
    ) -> None:
        self._config = config
        self._requests = requests
        self._counters = counters
        self._release = release
        self._guarded = guarded
        self._agreement = Agreement(ranks, _dense("index_mismatch")) if ranks.size > 1 else None
        self.stale: str | None = None
        self.refused: str | None = None
        self.off = False

    # -- one step ------------------------------------------------------------------------------------------

    def settle(self, rids: Sequence[str], *, refused: bool) -> str | None:
        """All ranks agree on a decode batch, before anything is decided for it. Nothing with one rank.

        Args:
            rids: of the batch.
            refused: whether this rank serves no step in groups any more.

        Returns:
            Why no rank may serve a step in groups from now on; None where all may.
        """
        if self._agreement is None:
            return None
        agreed, problem = self._agreement.settle(rids, self._word, refused=refused)
        for rid, word in agreed.items():
            attachment = self._requests.get(rid)
            if attachment is None:
                continue
            if not word.shares and attachment.reason not in ALONE:
                self.give_up(attachment, "unsupported_mode")
            elif word.state not in (LOADING, READY) and attachment.index is not None:
                self.give_up(attachment, REASONS[-word.state])
        return problem

    def give_up(self, attachment: Attachment, reason: str) -> None:
        """A request decodes dense from now on: take its index back."""
        attachment.reason = reason
        self._release(attachment)

    def _word(self, rid: str) -> Word:
        """What this rank says of a request. Never raises an `Exception`: others wait for the word."""
        try:
            attachment = self._requests.get(rid)
            if attachment is None:
                return Word(_dense("unsupported_mode"), shares=False)
            index, reason = self._look(attachment, votes=True)
            shares = attachment.reason not in ALONE
            if attachment.index is None or (index is None and reason != "index_loading"):
                return Word(_dense(reason or "no_index"), shares)
            state = LOADING if index is None else READY
            return Word(state, shares, attachment.index.entry.digest)
        except Exception:
            logger.exception("sparse attention: request %s cannot be looked at and stays dense", rid)
            return Word(_dense("unsupported_mode"), shares=False)

    def took(self, path: str, rows: int) -> None:
        """A decode step of so many rows goes this way, here and, as agreed, on all ranks."""
        if self._agreement is not None:
            self._agreement.took(path, rows)

    def forget(self, rid: str) -> None:
        """A request gave its slot back."""
        if self._agreement is not None:
            self._agreement.forget(rid)

    def snapshot(self) -> dict[str, Any]:
        """Votes and the checksum of all paths; 0 with one rank."""
        one = self._agreement
        return {"votes": one.votes if one else 0, "history": one.history if one else 0}

    def step_failed(self, rids: Sequence[str], error: Exception) -> list[int]:
        """A decode step of these requests could not be attended here: give all of them up; their serials."""
        logger.error("sparse attention: a decode step of %d requests failed", len(rids), exc_info=error)
        given_up = [attachment for rid in rids if (attachment := self._requests.get(rid)) is not None]
        for attachment in given_up:
            self.give_up(attachment, "unsupported_mode")
            attachment.count("unsupported_mode", self._counters)
        return [attachment.serial for attachment in given_up]

    # -- one request ---------------------------------------------------------------------------------------

    def usable(self, attachment: Attachment | None, *, waits: bool = True) -> ResidentIndex | None:
        """The ready index of a request in this step; without one, the reason is counted.

        Args:
            attachment: of the request, if it was admitted.
            waits: for an index that is loading, as the settings say.
        """
        if attachment is None:
            return None
        if self.off:  # before all that ranks may not have in common
            if attachment.reason is not None or attachment.entry is not None:
                attachment.count(attachment.reason or "by_operator", self._counters)
            if self._agreement is not None and self._agreement.ready(attachment.rid):
                self._look(attachment, waits=False)  # what the guard blocks is given up while no clock has ended that
            return None
        index: ResidentIndex | None = None
        reason: str | None = "index_loading"
        if self._agreement is None or not self._agreement.loading(attachment.rid):
            index, reason = self._look(attachment, waits=waits)
            if self._agreement is not None and not self._agreement.ready(attachment.rid):
                index = None  # whatever this rank holds by now
        if index is None and reason is not None:
            attachment.count(reason, self._counters)
        return index

    def serving(self, rids: Sequence[str]) -> list[Attachment | None]:
        """Of a batch; None where not all ranks may use the index that they hold for the request."""

        def ready(one: Attachment) -> bool:
            agreed = self._agreement is None or self._agreement.ready(one.rid)
            return agreed and one.index is not None and one.index.state is State.READY

        return [one if one is not None and ready(one) else None for one in map(self._requests.get, rids)]

    def _look(
        self, attachment: Attachment, *, waits: bool = True, votes: bool = False
    ) -> tuple[ResidentIndex | None, str | None]:
        """The index that is ready on this rank, or the reason why there is none. With several ranks only a vote ends
        the time that the guard keeps an index away, as their clocks differ.
        """
        if self.stale or self.refused:
            return None, "index_mismatch" if self.stale else self.refused
        index = attachment.index
        may_end = votes or self._agreement is None
        if (
            index is not None
            and self._guarded is not None
            and self._guarded.blocks(index.entry.digest, index.entry.created, may_end=may_end)
        ):
            self.give_up(attachment, "quality_guard")
            index = None
        if index is None:
            return None, attachment.reason
        if waits and index.state is State.LOADING:
            self._wait(index)
        if index.state is State.READY:
            return index, None
        if index.state is State.FAILED:
            self.give_up(attachment, index.reason)
        return None, attachment.reason or "index_loading"

    def _wait(self, index: ResidentIndex) -> None:
        left = index.begun + self._config.waits_s - time.monotonic()
        if left <= 0 or index.loaded is None:
            return
        try:
            index.loaded.result(min(left, threading.TIMEOUT_MAX))
        except (TimeoutError, concurrent.futures.TimeoutError):  # two classes before Python 3.11
            pass
        except Exception as error:  # the request decodes dense; a fallback is counted for it
            logger.error("sparse attention: loading an index ended unexpectedly", exc_info=error)


def _dense(reason: str) -> int:
    """What ranks exchange for a named reason."""
    return -REASONS.index(reason)
