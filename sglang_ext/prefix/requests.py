"""What is known of each live request."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_ext.prefix.private_index import PrivateIndex
from sglang_ext.prefix.residency import ResidentIndex

if TYPE_CHECKING:
    from prefix_index import IndexEntry
    from sglang_ext.prefill.recorder import Admission

_serials = itertools.count()

ALONE = ("by_request", "unsupported_mode")
"""Reasons for which a request shares nothing."""


@dataclass(eq=False)
class Attachment:
    """What is known of one request, from admission to its end.

    Attributes:
        rid: request id.
        prompt_len: tokens of the prompt.
        index: what serves it; held while it has a slot, and no longer. None with a reason, and without a slot.
        reason: named reason for dense decode.
        detail: the same for people.
        entry: of the index that its look-up found.
        admission: what those that record prompts are told when it gets a slot; None for nothing.
        runs_again: it had a slot before, and was retracted.
        deadline: monotonic time until which decode steps wait for the index; set at the first wait.
        private: index of its own tokens behind the prefix; None where all of them are attended in full.
        serial: unlike any other attachment's, also of a later request with the same id.
        reported: reasons that were already counted for this request.
    """

    rid: str
    prompt_len: int
    index: ResidentIndex | None
    reason: str | None
    detail: str | None = None
    entry: IndexEntry | None = None
    admission: Admission | None = None
    runs_again: bool = False
    deadline: float | None = None
    private: PrivateIndex | None = None
    serial: int = field(default_factory=_serials.__next__)

    def __post_init__(self) -> None:
        self.reported: set[str] = set()

    def start_over(self) -> None:
        """Its slots are given back, so nothing is known of its own tokens."""
        self.private, self.runs_again = None, True


class RequestTable:
    """Attachments of requests: by object from admission on, by id only while they have a slot.

    Holds requests weakly: one that SGLang forgets disappears here too. One that is aborted while it waits SGLang may
    never forget (its `custom_params` name the request itself), and nobody is told: such a request must hold nothing.
    """

    def __init__(self) -> None:
        self._attachments: weakref.WeakKeyDictionary[Hashable, Attachment] = weakref.WeakKeyDictionary()
        self._running: dict[str, list[Attachment]] = {}
        self._forgotten: deque[Attachment] = deque()

    def known(self, request: Hashable) -> bool:
        """Whether this very request object was admitted before."""
        return request in self._attachments

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
        running = self._running.setdefault(attachment.rid, [])
        running.append(attachment)
        twins = running if len(running) > 1 else []
        for twin in twins:
            twin.reason, twin.detail = "unsupported_mode", "two requests with one id"
        if not attachment.runs_again:
            # A net: SGLang says when a request gives its slot back, but for a streaming session's. Only queues: it may
            # run in any thread, in the middle of anything.
            weakref.finalize(request, self._forgotten.append, attachment).atexit = False
        return list(twins)

    def take_forgotten(self) -> list[Attachment]:
        """Attachments whose requests SGLang forgot since the last call without saying that they ended."""
        out = []
        while self._forgotten:
            if self._leave(attachment := self._forgotten.popleft()):
                out.append(attachment)
        return out

    def get(self, rid: str) -> Attachment | None:
        """The attachment of the request of this id that has a slot."""
        running = self._running.get(rid)
        return running[-1] if running else None

    def of(self, request: Hashable) -> Attachment | None:
        """The attachment of a request object."""
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

    def __len__(self) -> int:
        """Requests that have a slot."""
        return sum(map(len, self._running.values()))
