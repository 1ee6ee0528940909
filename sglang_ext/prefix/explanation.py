"""Why one prompt has the index that it has, or none: compared with every index of a store, token by token.

Look-ups go by hashes of pages, which say yes or no. Here the token ids that each index keeps are read from its file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefix_index import (
    IndexEntry,
    IndexIdentity,
    IndexStoreError,
    ModelFingerprint,
    Removal,
    namespace_digest,
    page_hashes,
    printable,
    read_removals,
)
from prefix_index.connect import locate
from prefix_index.copies import digest_in
from prefix_index.reader import open_in
from sglang_ext.config import PAGE_TOKENS, Settings
from sglang_ext.methods import method_specs
from sglang_ext.prefill.builder import TOKENS, profile_digest
from sglang_ext.prefix.mismatch import Specs, differences
from sglang_ext.storage import configured_store

MOST_READ = 256
"""Indexes whose tokens are read, at most: those of the prompt's own pages first, then the newest."""
MOST_PROBLEMS = 5
_AROUND = 8
"""Tokens that are shown before the first one that differs, and behind it half of them."""
_LEAST_SHIFTED = PAGE_TOKENS
"""Tokens that must agree behind a first one that one side alone has, or has twice."""


class _Asked(NamedTuple):
    """What is explained, and the server that it is for: see `explain_prompt`."""

    ids: NDArray[np.int64]
    namespace: Mapping[str, str | None]
    model: ModelFingerprint
    profile_digest: str
    specs: Specs
    least: int
    text: Callable[[Sequence[int]], str]

    def differs(self, identity: IndexIdentity, built: Specs | None) -> list[str]:
        """Fields of an index's identity; without what it was `built` by, methods are compared by their digest alone."""
        found = differences(identity, built, self.model, self.profile_digest, self.specs)
        if namespace_digest(self.namespace) == identity.namespace:
            return found
        given = ", ".join(f"{name} {value!r}" for name, value in self.namespace.items() if value is not None)
        other = f"another one, of which only the digest is kept ({identity.namespace[:12]})"
        if identity.namespace == namespace_digest({}):
            other = "none"
        return [f"extra_key or cache_salt: expected {given or 'none'}, found {other}", *found]


class Side(msgspec.Struct, frozen=True):
    """One side of the first difference: its token, None at its end, and the text around."""

    token: int | None
    token_text: str
    around: str


class Candidate(msgspec.Struct, frozen=True):
    """One index beside the prompt.

    Attributes:
        digest, name, tokens: of the index.
        common: leading tokens that both have; None: the index keeps no tokens, and not all of them are the prompt's.
        differs: fields of the identity that are not the server's or the request's, as `name: expected A, found B`.
        verdict: in a sentence, what that means.
        shifted: tokens common to both without the first one of one side, a second BOS as a rule; 0: hardly any.
        at, prompt, index: the first token that differs; None where all tokens of the index are the prompt's.
    """

    digest: str
    name: str | None
    tokens: int
    common: int | None
    differs: list[str]
    verdict: str
    shifted: int = 0
    at: int | None = None
    prompt: Side | None = None
    index: Side | None = None

    @property
    def serves(self) -> bool:
        """Whether the prompt's requests could use it."""
        return self.common == self.tokens and not self.differs


class Gone(msgspec.Struct, frozen=True):
    """An index of the prompt's tokens that has left the store; `removed` in seconds since the Unix epoch."""

    digest: str
    name: str | None
    tokens: int
    removed: float
    why: str
    differs: list[str]


class Explanation(msgspec.Struct, frozen=True):
    """Of one prompt.

    Attributes:
        tokens: of the prompt.
        index: digest of the index that would serve it; None for none.
        reason: word of the fallback list; None with an index.
        summary: the reason in a sentence.
        candidates: the longest common prefix first.
        gone: that left the store, the newest first.
        unread: indexes that were not looked at (`MOST_READ`).
        problems: of the first files that are no usable index, whatever they are of: damaged, or of a newer version.
    """

    tokens: int
    index: str | None
    reason: str | None
    summary: str
    candidates: list[Candidate]
    gone: list[Gone]
    unread: int
    problems: list[str]


def explain_prompt(
    settings: Settings,
    model: ModelFingerprint,
    ids: Sequence[int],
    namespace: Mapping[str, str | None],
    text: Callable[[Sequence[int]], str],
) -> Explanation:
    """Compare a prompt with the indexes of the store that a server's settings name, and with what has left its folder.
    Reads files.

    Args:
        settings, model: of the server.
        ids: token ids of the prompt, as the server makes them.
        namespace: what of the request is not tokens: `extra_key`, `cache_salt`.
        text: of token ids.

    Raises:
        IndexStoreError: the store cannot be opened.
    """
    config = settings.config
    specs = {name: spec.to_dict() for name, spec in method_specs(config).items()}
    built_by = profile_digest(config, settings.profile)
    tokens = np.asarray(ids, dtype=np.int64)
    asked = _Asked(tokens, namespace, model, built_by, specs, config.min_sparse_prompt_len, text)
    hashes = {one.hex(): number for number, one in enumerate(page_hashes(tokens, PAGE_TOKENS), start=1)}
    with contextlib.closing(configured_store(settings.store, config, write=False, publish=False)) as store:
        entries = sorted(
            store.list(),
            key=lambda one: (not _is_whole(one.identity, hashes), len(asked.differs(one.identity, None)), -one.created),
        )
        candidates = [_candidate(asked, entry, hashes) for entry in entries[:MOST_READ]]
        unusable = store.problems()
        problems = [printable(str(error.at(path))) for path, error in unusable[:MOST_PROBLEMS]]
    candidates.sort(key=lambda one: (-max(one.common or 0, one.shifted), len(one.differs), -one.tokens, one.digest))
    known = {entry.digest for entry in entries} | {digest_in(path) for path, _ in unusable}
    gone = []
    for one in _removals_of(settings.store):
        of = one.identity
        if of.digest not in known and _is_whole(of, hashes):
            gone.append(Gone(of.digest, one.name, of.num_tokens, one.removed, one.why, asked.differs(of, None)))
    index, reason, summary = _outcome(asked, candidates, gone)
    return Explanation(len(ids), index, reason, summary, candidates, gone, max(0, len(entries) - MOST_READ), problems)


def _removals_of(address: str) -> Sequence[Removal]:
    """What has left the folder of a store, or of the service that has it, the newest first; none where there is no such
    record.
    """
    kind, value, _ = locate(address)
    if kind == "file":
        return read_removals(value)
    if kind == "service":
        from prefix_index.service import service_status

        with contextlib.suppress(IndexStoreError):
            return read_removals(service_status(value).tiers[-1].folder)  # the last tier is the durable one
    return ()


def _is_whole(identity: IndexIdentity, hashes: Mapping[str, int]) -> bool:
    """Whether all tokens of an index stand at the start of the prompt."""
    pages = identity.num_tokens // PAGE_TOKENS
    return hashes.get(identity.prefix_hash) == pages and identity.page_tokens == PAGE_TOKENS


def _candidate(asked: _Asked, entry: IndexEntry, hashes: Mapping[str, int]) -> Candidate:
    identity = entry.identity
    whole = _is_whole(identity, hashes)
    built, tokens = _read(entry)
    differs = asked.differs(identity, built)
    common: int | None = identity.num_tokens if whole else None
    if tokens is not None and not whole:
        common = _common(asked.ids, tokens)
    shifted, verdict = _verdict(asked, tokens, common, differs, identity.num_tokens)
    sides: dict[str, Any] = {"shifted": shifted}
    if tokens is not None and common is not None and not whole:
        sides |= {"at": common, "prompt": _side(asked, asked.ids, common), "index": _side(asked, tokens, common)}
    return Candidate(entry.digest, entry.retention.name, identity.num_tokens, common, differs, verdict, **sides)


def _read(entry: IndexEntry) -> tuple[Specs | None, NDArray[np.int64] | None]:
    """What an index was built by, and its tokens; None for what its file does not have, or is not given now."""
    with contextlib.suppress(IndexStoreError), open_in(Path(entry.path or "").parent.parent, entry.digest) as file:
        if TOKENS not in file.keys:
            return file.spec, None
        tokens = file.array(*TOKENS).astype(np.int64)
        same = tokens.ndim == 1 and page_hashes(tokens)[-1:] == [bytes.fromhex(entry.identity.prefix_hash)]
        return file.spec, tokens if same else None
    return None, None


def _common(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Leading tokens that are the same."""
    short = min(len(a), len(b))
    other = np.flatnonzero(a[:short] != b[:short])
    return int(other[0]) if len(other) else short


def _side(asked: _Asked, ids: NDArray[np.int64], at: int) -> Side:
    own = [int(one) for one in ids[at : at + 1]]
    around = [int(one) for one in ids[max(0, at - _AROUND) : at + 1 + _AROUND // 2]]
    return Side(own[0] if own else None, asked.text(own) if own else "", asked.text(around) if around else "")


def _verdict(
    asked: _Asked,
    tokens: NDArray[np.int64] | None,
    common: int | None,
    differs: Sequence[str],
    length: int,
) -> tuple[int, str]:
    """(`shifted` of the candidate, what keeps the index from serving the prompt: the nearest cause first)."""
    if common == length:
        return 0, "serves this prompt" if not differs else "all its tokens are the prompt's, but other fields differ"
    if tokens is None or common is None:
        return (
            0,
            "not all its tokens are the prompt's; which is not known, as its file keeps none or is not here",
        )
    for longer, shorter, whose in ((asked.ids, tokens, "the prompt"), (tokens, asked.ids, "the index")):
        shifted = _common(longer[1:], shorter)
        if shifted >= max(_LEAST_SHIFTED, common + 1):
            first, twice = int(longer[0]), " twice" * bool(longer[0] == longer[1])
            return shifted, (
                f"{whose} begins with token {first} ({asked.text([first])!r}){twice}: without it {shifted} tokens are "
                'common. A BOS is added to a text that has one: give messages, or "add_special_tokens": false where '
                "the prompt is built"
            )
    if common == len(asked.ids):
        return (
            0,
            f"the prompt ends after {common} of its {length} tokens; an index serves prompts that have them all",
        )
    return 0, f"token {common} differs"


def _outcome(
    asked: _Asked, candidates: Sequence[Candidate], gone: Sequence[Gone]
) -> tuple[str | None, str | None, str]:
    """(index, reason, summary), by the rules of a look-up."""
    if len(asked.ids) < asked.least:
        said = f"the prompt has {len(asked.ids)} tokens, indexes serve from {asked.least} on (min_sparse_prompt_len)"
        return None, "short_prefix", said
    serving = next((one for one in candidates if one.serves), None)
    if serving is not None and serving.tokens < asked.least:
        return None, "short_prefix", f"its index has {serving.tokens} tokens, they serve from {asked.least} on"
    if serving is not None:
        return serving.digest, None, f"served by {serving.name or serving.digest[:12]}, {serving.tokens} tokens"
    left = next((one for one in gone if not one.differs), None)
    if left is not None:
        how = {"evicted": "was evicted, as others needed its bytes", "expired": "expired"}.get(left.why, "was removed")
        said = f"its index {left.name or left.digest[:12]} {how}; build it again, pin it, or raise store_max_bytes"
        return None, "no_index", said
    other = next((one for one in candidates if one.common == one.tokens), None)
    if other is not None:
        by_namespace = any(field.startswith("extra_key") for field in other.differs)
        said = f"{other.name or other.digest[:12]} has its tokens, but {'; '.join(other.differs)}"
        return None, "no_index" if by_namespace else "index_mismatch", said
    near = next((one for one in candidates if one.common or one.shifted), None)
    if near is None:
        return None, "no_index", "no index shares a token with this prompt" if candidates else "the store has no index"
    said = f"nearest is {near.name or near.digest[:12]} with {near.common} of {near.tokens} tokens: {near.verdict}"
    return None, "no_index", said
