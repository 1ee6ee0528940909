"""What is known of each live request: its index, and whether its slots are provably the shared ones."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from prefix_kernels.types import Selection
from sglang_ext.prefix.residency import ResidentIndex

if TYPE_CHECKING:
    from sglang_ext.attention.private_index import PrivateIndex

_serials = itertools.count()

ALONE = ("by_request", "unsupported_mode")
"""Reasons for which a request shares nothing."""


@dataclass(eq=False)
class Search:
    """What one search of a group found, for the steps until the next one (CSAttention, 4.3: search period).

    Attributes:
        members: serials of the requests whose queries were searched for; nobody else may use it.
        selections: per anchor layer; filled by the step that searches.
        steps: decode steps that have used it, the searching one included.
    """

    members: frozenset[int]
    selections: dict[int, Selection] = field(default_factory=dict)
    steps: int = 1


@dataclass(eq=False)
class SharedSlots:
    """A position-to-slot table that several requests were shown to have in common.

    Attributes:
        slots: [prefix_len] int64 on the device; our own copy, so that SGLang may reuse the row it came from.
            The slots themselves stay allocated while one member lives: each member locks its tree path.
        members: live requests that use it.
        search: the group's last search; None before the first one, and once a member has left.
    """

    slots: Tensor
    members: int = 0
    search: Search | None = None

    def leave(self) -> None:
        """One member less. What was searched for it does not outlive it."""
        self.members -= 1
        self.search = None


@dataclass(eq=False)
class Attachment:
    """One request's index, from admission to the end of the request.

    Attributes:
        rid: request id.
        prompt_len: tokens of the prompt.
        index: what serves it; None with a reason.
        reason: named reason for dense decode.
        detail: the same for people.
        steps: decode steps seen since the request got its slot; 0 right after allocation.
        shared: set once its slots were compared and found equal to a group's (or start a new one).
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
    steps: int = 0
    shared: SharedSlots | None = None
    deadline: float | None = None
    private: PrivateIndex | None = None
    serial: int = field(default_factory=_serials.__next__)

    def __post_init__(self) -> None:
        self.reported: set[str] = set()

    def start_over(self) -> None:
        """Its slots are given back: it leaves its group, and nothing is known of its own tokens."""
        if self.shared is not None:
            self.shared.leave()
        self.shared, self.private, self.steps = None, None, 0


class RequestTable:
    """Attachments by request id. Holds requests weakly: one that SGLang forgets disappears here too."""

    def __init__(self) -> None:
        self._requests: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
        self._named: dict[str, weakref.WeakSet[Hashable]] = {}
        self._attachments: weakref.WeakKeyDictionary[Hashable, Attachment] = weakref.WeakKeyDictionary()
        self._forgotten: deque[Attachment] = deque()

    def known(self, request: Hashable) -> bool:
        """Whether this very request object was admitted before."""
        return request in self._attachments

    def add(self, request: Hashable, attachment: Attachment) -> list[Attachment]:
        """Admit a request.

        Returns:
            Attachments that must not keep their index: a second live request of the same id makes its own and
            the others' ambiguous. Their reason is set; the caller takes the index back.
        """
        others = [one for one in self._named.get(attachment.rid, ()) if one is not request and self.known(one)]
        twins = [*(self._attachments[one] for one in others), attachment] if others else []
        for twin in twins:
            twin.reason, twin.detail = "unsupported_mode", "two requests with one id"
        self._requests[attachment.rid] = request
        self._attachments[request] = attachment
        self._named.setdefault(attachment.rid, weakref.WeakSet()).add(request)
        # A request aborted while it waits never gets a slot, so nobody says that it ended; its collection does.
        # The finalizer only queues: it may run in any thread, in the middle of anything.
        weakref.finalize(request, self._forgotten.append, attachment).atexit = False
        return twins

    def take_forgotten(self) -> list[Attachment]:
        """Attachments whose requests SGLang forgot since the last call; most of them ended properly before."""
        out = []
        while self._forgotten:
            out.append(self._forgotten.popleft())
            self._tidy(out[-1].rid)
        return out

    def get(self, rid: str) -> Attachment | None:
        """The attachment of a live request id."""
        request = self._requests.get(rid)
        return self._attachments.get(request) if request is not None else None

    def of(self, request: Hashable) -> Attachment | None:
        """The attachment of a request object."""
        return self._attachments.get(request)

    def drop(self, request: Hashable) -> None:
        """Forget a finished request now, without waiting for its collection."""
        attachment = self._attachments.pop(request, None)
        if attachment is not None:
            self._named.get(attachment.rid, weakref.WeakSet()).discard(request)
            self._tidy(attachment.rid)

    def _tidy(self, rid: str) -> None:
        if not self._named.get(rid, True):
            del self._named[rid]

    def __len__(self) -> int:
        return len(self._attachments)
