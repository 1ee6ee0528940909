"""What the service and its clients say to each other: tagged msgspec messages, their limits, errors on the wire.

A request is one frame: an id (8 bytes, the client's choice), then a message; its answer begins with the same id.
Never more frames than one: libzmq ends the process (``assert !_more``, fq.cpp) whose peer goes away while it is
between two of them. Bytes of indexes never cross: a message names a tier by its number, and a file by a digest or a
checked partial name.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from .. import errors
from ..errors import IndexStoreError, StoreUnavailable
from ..keys import IndexIdentity
from ..store import IndexEntry, Problem, Retention
from ..text import printable

PROTOCOL: Final = 1
ID_NBYTES: Final = 8
MAX_REQUEST_NBYTES: Final = 64 << 10
MAX_ANSWER_NBYTES: Final = 1 << 20
PAGE_NBYTES: Final = 128 << 10
"""A listing is cut into answers of about this many bytes."""
MAX_TIERS: Final = 8
MAX_TEXT: Final = 4096
PARTIAL_PATTERN: Final = r"\A\.partial-[0-9]{1,10}-[0-9a-f]{16}\Z"

Digest: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z", min_length=64, max_length=64)]
PartialName: TypeAlias = Annotated[str, Meta(pattern=PARTIAL_PATTERN, max_length=64)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]
Tier: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_TIERS)]


class _Message(msgspec.Struct, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all: ``type`` is the class's name, unknown fields are errors."""


class ErrorText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An IndexStoreError on its way; ``kind`` is the name of its class."""

    kind: Text
    what: Text
    expected: Text
    found: Text
    remedy: Text
    path: Text | None = None


class TierEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An ``IndexEntry``; the path follows from the tier's folder and the digest."""

    identity: IndexIdentity
    nbytes: Count
    created: float
    build_seconds: float
    retention: Retention


# ---- requests ----


class Hello(_Message):
    """First message of a connection. ``name`` says in the status who this is."""

    version: int
    pid: Count
    name: Annotated[str, Meta(max_length=64)] = ""


class Ping(_Message):
    """Is the service alive, and the one that I know? With ``work``: has it a worker left? Answer: Done."""

    work: bool = False


class Locate(_Message):
    """Which tier to open. ``skip`` is a bit per tier that was tried in vain. Answer: Located.

    ``touch`` counts it as a use (for eviction, for promotion to the first tier).
    """

    digest: Digest
    skip: Annotated[int, Meta(ge=0, lt=1 << MAX_TIERS)] = 0
    touch: bool = True


class Changes(_Message):
    """What changed in the listing after ``since``. Answer: Delta."""

    epoch: Annotated[str, Meta(max_length=64)]
    since: Count


class Reserve(_Message):
    """Room for an index of ``nbytes``, to be written into the last tier. Answer: Reserved."""

    digest: Digest
    nbytes: Count


class Commit(_Message):
    """The partial file is complete and synced: give it its name. Says twice the same as once. Answer: Stored."""

    digest: Digest
    partial: PartialName
    nbytes: Count
    inode: Annotated[int, Meta(ge=0)]
    retention: Retention | None = None


class Release(_Message):
    """The writer gave up. Answer: Done."""

    digest: Digest
    partial: PartialName


class Delete(_Message):
    """Answer: Done, with whether there was one."""

    digest: Digest


class Retain(_Message):
    """Answer: Stored."""

    digest: Digest
    retention: Retention


class Report(_Message):
    """Reading failed, in ``tier`` if the client knows which. Answer: Done, with whether another copy is offered, or
    this one still, since the service has read it whole and found nothing.
    """

    digest: Digest
    error: ErrorText
    tier: Tier | None = None


class Prefetch(_Message):
    """Answer: Done, before anything was done."""

    digest: Digest


class Collect(_Message):
    """Answer: Removed. ``token`` names this collection, which is done once, however often it is asked for; what was
    removed is told from number ``start`` on.
    """

    token: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z", max_length=16)]
    start: Count = 0


class Rescan(_Message):
    """Look into the folders now. Answer: Done."""

    full: bool = False


class Problems(_Message):
    """From the problem number ``start`` on. Answer: ProblemPage."""

    start: Count = 0


class Check(_Message):
    """``check_integrity()`` of the service's own books. Answer: Checked."""


class GetStatus(_Message):
    """Answer: Status."""


Request: TypeAlias = (
    Hello
    | Ping
    | Locate
    | Changes
    | Reserve
    | Commit
    | Release
    | Delete
    | Retain
    | Report
    | Prefetch
    | Collect
    | Rescan
    | Problems
    | Check
    | GetStatus
)

# ---- answers ----


class Welcome(_Message):
    """``epoch`` is new with every start of the service. Folders of the tiers, fastest first; the last is durable."""

    version: int
    epoch: str
    folders: list[str]


class HelloFirst(_Message):
    """The service does not know this connection (it was restarted): say Hello, then ask again."""


class Done(_Message):
    value: bool = True


class Located(_Message):
    tier: Tier


class Delta(_Message):
    """``entries`` came or changed, ``removed`` went; ``seq`` is what to ask after next, at once while ``more``.

    ``reset``: forget everything first; this is the first page of the whole listing.
    """

    epoch: str
    seq: Count
    entries: list[TierEntry]
    removed: list[Digest]
    more: bool = False
    reset: bool = False


class Reserved(_Message):
    partial: PartialName
    file_mode: int


class Stored(_Message):
    entry: TierEntry


class Removed(_Message):
    """``next`` is where the next page starts; None on the last."""

    entries: list[TierEntry]
    next: Count | None = None


class ProblemPage(_Message):
    """``next`` is where the next page starts; None on the last."""

    problems: list[tuple[str, ErrorText]]
    next: Count | None = None


class Checked(_Message):
    """The books balance; the listing has ``count`` indexes of ``nbytes`` bytes at ``seq``."""

    seq: Count
    count: Count
    nbytes: Count


class TierStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tier. ``hits`` and ``evicted`` since the service started; None: not counted (copies cost nothing)."""

    name: str
    folder: str
    indexes: int
    nbytes: int
    max_bytes: int | None
    hits: int
    evicted: int | None
    error: str | None = None


class Status(_Message):
    """The service as it is now. Counts are since it started; seconds are since then or until now."""

    pid: int
    epoch: str
    uptime_s: float
    endpoint: str
    tiers: list[TierStatus]
    indexes: int
    problems: int
    clients: list[str]
    reserved_bytes: int
    reservations: int
    leases: list[str]
    promoted: int
    counts: dict[str, int]


class Failed(_Message):
    error: ErrorText


Answer: TypeAlias = (
    Welcome
    | HelloFirst
    | Done
    | Located
    | Delta
    | Reserved
    | Stored
    | Removed
    | ProblemPage
    | Checked
    | Status
    | Failed
)

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer)
encode = _encoder.encode


class BadMessageError(ValueError):
    """Bytes that are no message of this protocol."""


def decode_request(raw: bytes) -> Request:
    """Raises BadMessageError, whatever the bytes are."""
    return _decode(raw, _requests, MAX_REQUEST_NBYTES)  # type: ignore[no-any-return]


def decode_answer(raw: bytes) -> Answer:
    """Raises BadMessageError, whatever the bytes are."""
    return _decode(raw, _answers, MAX_ANSWER_NBYTES)  # type: ignore[no-any-return]


def _decode(raw: bytes, decoder: msgspec.msgpack.Decoder[Any], limit: int) -> Any:
    if len(raw) > limit:
        raise BadMessageError(f"a message of {len(raw)} bytes, at most {limit} are allowed")
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, MemoryError) as err:
        raise BadMessageError(str(err)[:200]) from None


def error_text(error: BaseException) -> ErrorText:
    """Any error as what crosses the wire; what is no IndexStoreError is told as a defect of the service."""
    if isinstance(error, IndexStoreError):
        parts = (error.what, error.expected, error.found, error.remedy)
        path = None if error.path is None else _said(error.path)
        return ErrorText(
            kind=type(error).__name__,
            what=_said(parts[0]),
            expected=_said(parts[1]),
            found=_said(parts[2]),
            remedy=_said(parts[3]),
            path=path,
        )
    found = _said(f"{type(error).__name__}: {error}")[:400]
    remedy = "this is a defect of the service: see its log"
    return ErrorText(kind="IndexStoreError", what="store service", expected="an answer", found=found, remedy=remedy)


def error_of(text: ErrorText) -> IndexStoreError:
    """The error again, of the same class; of a class that this side does not know, an IndexStoreError."""
    kind = getattr(errors, text.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, IndexStoreError)):
        kind = IndexStoreError
    error: IndexStoreError = kind(
        text.what, expected=text.expected, found=text.found, remedy=text.remedy, path=text.path
    )
    return error


def _said(text: str) -> str:
    """Text that may cross the wire, and be shown where it arrives: printable, within the limit."""
    return printable(text)[:MAX_TEXT]


def entry_out(entry: IndexEntry) -> TierEntry:
    return TierEntry(
        identity=entry.identity,
        nbytes=entry.nbytes,
        created=entry.created,
        build_seconds=entry.build_seconds,
        retention=entry.retention,
    )


def problem_out(problem: Problem) -> tuple[str, ErrorText]:
    return _said(problem.path), error_text(problem.error)


def unavailable(found: str, *, expected: str = "an answer of the service", path: str | None = None) -> StoreUnavailable:
    remedy = "start `sglang-ext store serve`, or see its log; the call may be repeated"
    return StoreUnavailable("store service", expected=expected, found=found, remedy=remedy, path=path)
