"""Which index a request's next decode step may use: loaded on this rank, waited for if so configured, on all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from sglang_ext.config import PrefetchPolicy, SparseAttnConfig
from sglang_ext.metrics import REASONS, Counters
from sglang_ext.prefix.agreement import LOADING, READY, Agreement, Word, dense
from sglang_ext.prefix.requests import ALONE, Attachment, RequestTable
from sglang_ext.prefix.residency import ResidentIndex, State
from sglang_ext.ranks import Ranks

logger = logging.getLogger(__name__)

_ANOTHER = "so another tensor-parallel rank says"


def _dense(reason: str) -> int:
    return dense(REASONS.index(reason))


class Readiness:
    """Looks at requests' indexes. Used by the scheduler's thread only.

    Attributes:
        stale: why no index is of the weights that are served now; None while they are.

    Args:
        config: what a step does while an index is loading.
        requests: the live ones.
        counters: receives reasons, once for each request.
        ranks: of this process.
        release: takes back what a request holds.
    """

    def __init__(
        self,
        config: SparseAttnConfig,
        requests: RequestTable,
        counters: Counters,
        ranks: Ranks,
        release: Callable[[Attachment], None],
    ) -> None:
        self._config = config
        self._requests = requests
        self._counters = counters
        self._release = release
        self._agreement = Agreement(ranks, _dense("index_mismatch")) if ranks.size > 1 else None
        self.stale: str | None = None

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
                self.give_up(attachment, "unsupported_mode", _ANOTHER)
            elif word.state not in (LOADING, READY) and attachment.index is not None:
                self.give_up(attachment, REASONS[-word.state], _ANOTHER)
        return problem

    def give_up(self, attachment: Attachment, reason: str, detail: str) -> None:
        """A request decodes dense from now on: take its index back."""
        attachment.reason, attachment.detail = reason, detail
        self._release(attachment)

    def _word(self, rid: str) -> Word:
        """What this rank says of a request. Never raises an `Exception`: others wait for the word."""
        try:
            attachment = self._requests.get(rid)
            if attachment is None:
                return Word(_dense("unsupported_mode"), shares=False)
            index, reason = self._look(attachment)
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
            self.give_up(attachment, "unsupported_mode", f"{type(error).__name__}: {error}")
            self.count(attachment, attachment.reason)
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
        index: ResidentIndex | None = None
        reason: str | None = "index_loading"
        if self._agreement is None or not self._agreement.loading(attachment.rid):
            index, reason = self._look(attachment, waits=waits)
            if self._agreement is not None and not self._agreement.ready(attachment.rid):
                index = None  # whatever this rank holds by now
        if index is None:
            self.count(attachment, reason)
        return index

    def _look(self, attachment: Attachment, *, waits: bool = True) -> tuple[ResidentIndex | None, str | None]:
        """The index that is ready on this rank, or the reason why there is none."""
        if self.stale:
            return None, "index_mismatch"
        index = attachment.index
        if index is None:
            return None, attachment.reason
        if waits and index.state is State.LOADING and index.loaded is not None:
            self._wait(attachment, index)
        if index.state is State.READY:
            return index, None
        if index.state is State.FAILED:
            self.give_up(attachment, index.reason, index.detail)
        return None, attachment.reason or "index_loading"

    def _wait(self, attachment: Attachment, index: ResidentIndex) -> None:
        policy = self._config.prefetch_policy
        if policy is PrefetchPolicy.BEST_EFFORT or index.loaded is None:
            return
        timeout = None
        if policy is PrefetchPolicy.TIMEOUT:
            now = time.monotonic()
            if attachment.deadline is None:
                attachment.deadline = now + self._config.prefetch_timeout_s
            timeout = max(0.0, attachment.deadline - now)
        try:
            index.loaded.result(timeout)
        except FutureTimeout:
            return
        except Exception as error:  # the request decodes dense; a fallback is counted for it
            logger.error("sparse attention: loading an index ended unexpectedly", exc_info=error)

    def count(self, attachment: Attachment | None, reason: str | None) -> None:
        """Count a request that decodes dense, once per reason."""
        if attachment is not None and reason is not None and reason not in attachment.reported:
            attachment.reported.add(reason)
            self._counters.count_fallback(reason)
