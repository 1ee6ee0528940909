"""From a request's own prompt to the longest stored index of it, within its namespace."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prefix_index import (
    IndexEntry,
    IndexIdentity,
    IndexStore,
    IndexStoreError,
    ModelFingerprint,
    namespace_digest,
    page_hashes,
)
from sglang_ext.config import PAGE_TOKENS

logger = logging.getLogger(__name__)


def misfit(identity: IndexIdentity, model: ModelFingerprint, profile_digest: str) -> str | None:
    """Why an index can serve no request of a server, in few words; None where it can."""
    if identity.model != model:
        return "of another model"
    return "built with other settings" if identity.profile_digest != profile_digest else None


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
    """Look-ups by chained page hash. Used by the scheduler thread only; the store is open and not owned.

    Args:
        store: where indexes live.
        model: fingerprint of the model served.
        profile_digest: digest of how this server expects indexes to be built.
        min_prefix_len: tokens; shorter prefixes are `short_prefix`.
        rescan_seconds: how often, at most, a look-up that found nothing looks for files of other processes.
        rescan: how it looks, without blocking for long; the store's own `rescan` when None.
    """

    def __init__(
        self,
        store: IndexStore,
        model: ModelFingerprint,
        profile_digest: str,
        min_prefix_len: int,
        rescan_seconds: float = 0.2,
        rescan: Callable[[], None] | None = None,
    ) -> None:
        self._store = store
        self._look_again = rescan or store.rescan
        self._model = model
        self._profile_digest = profile_digest
        self._min_prefix_len = min_prefix_len
        self._rescan_seconds = rescan_seconds
        self._next_rescan = 0.0
        self._rescan_error = ""

    def lookup(self, namespace_fields: Mapping[str, str | None], prompt: Sequence[int]) -> Lookup:
        """Find the longest index whose tokens all stand at the start of this prompt.

        Args:
            namespace_fields: everything in SGLang's RadixKey that is not tokens.
            prompt: [num_tokens] token ids of the request's own prompt, without generated tokens.
        """
        if len(prompt) < self._min_prefix_len:
            return Lookup(None, "short_prefix" if len(prompt) >= PAGE_TOKENS else None)
        namespace = namespace_digest(namespace_fields)
        hashes = page_hashes(prompt, PAGE_TOKENS)
        self._rescan()
        entry = self._store.longest(namespace, hashes, self._model, self._profile_digest)
        if entry is None:
            why = self._store.near_miss(namespace, hashes, self._model, self._profile_digest)
            return Lookup(None, "index_mismatch" if why else "no_index", why or None, hashes)
        if entry.identity.num_tokens < self._min_prefix_len:
            return Lookup(None, "short_prefix", None, hashes)
        return Lookup(entry, hashes=hashes)

    def _rescan(self) -> None:
        now = time.monotonic()
        if now < self._next_rescan:
            return
        self._next_rescan = now + self._rescan_seconds
        try:
            self._look_again()
        except IndexStoreError as error:  # the folder has gone: what is known stays known, the server lives on
            if str(error) != self._rescan_error:
                logger.error("sparse attention: the index store cannot be scanned for new indexes: %s", error)
            self._rescan_error = str(error)
        else:
            self._rescan_error = ""
