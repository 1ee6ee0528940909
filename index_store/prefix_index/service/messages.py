"""What the service and its clients say to each other: tagged msgspec messages, and their limits.

A request is one frame: an id (8 bytes, the client's choice), then a message; its answer begins with the same id.
Never more frames than one: libzmq ends the process (``assert !_more``, fq.cpp) whose peer goes away while it is
between two of them. Bytes of indexes never cross, and no message changes an index: clients use the folder themselves.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from ..errors import StoreUnavailable

PROTOCOL: Final = 3
ID_NBYTES: Final = 8
MAX_REQUEST_NBYTES: Final = 4 << 10
"""libzmq ends the connection of whoever sends more; likewise of answers."""
MAX_ANSWER_NBYTES: Final = 1 << 20
MAX_TEXT: Final = 4096

Digest: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z", min_length=64, max_length=64)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]


class _Message(msgspec.Struct, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all: ``type`` is the class's name, unknown fields are errors."""


class Hello(_Message):
    """First message of a connection. ``name`` says in the status who this is. Answer: Welcome, or Failed."""

    version: int
    pid: Count
    name: Annotated[str, Meta(max_length=64)] = ""


class Used(_Message):
    """An index was read, from its copy in DRAM or not; or (None) was put, and is about to be read. No answer."""

    digest: Digest
    copy: bool | None = False


class GetStatus(_Message):
    """Answer: Status."""


Request: TypeAlias = Hello | Used | GetStatus


class Welcome(_Message):
    """The folders, and the limits that hold for whoever writes into the durable one. ``eviction`` is for clients of
    before, who had a choice: nobody here reads it.
    """

    version: int
    folder: str
    memory: str | None
    max_bytes: Count | None
    min_free_bytes: Count
    eviction: Text = "lru"


class TierStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tier. ``hits`` of clients, and ``evicted`` by whomever, since the service started; None: not counted (copies
    cost nothing). What expired counts among the evicted.
    """

    name: str
    folder: str
    indexes: int
    nbytes: int
    max_bytes: int | None
    hits: int
    evicted: int | None
    error: str | None = None


class Status(_Message):
    """The service as it was when it looked at its folders last. Counts are since it started.

    ``connections`` are those of this moment, ``clients`` those that it heard from last, also of some that left.
    """

    pid: int
    uptime_s: float
    endpoint: str
    tiers: list[TierStatus]
    indexes: int
    problems: int
    connections: int
    clients: list[str]
    reserved_bytes: int
    reservations: int
    leases: list[str]
    promoted: int
    counts: dict[str, int]


class Failed(_Message):
    """Refused: what was expected, and what was found."""

    expected: Text
    found: Text


Answer: TypeAlias = Welcome | Status | Failed

encode = msgspec.msgpack.Encoder().encode
_requests: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer)


class BadMessageError(ValueError):
    """Bytes that are no message of this protocol."""


def decode_request(raw: bytes) -> Request:
    """Raises BadMessageError, whatever the bytes are."""
    return _decode(raw, _requests)  # type: ignore[no-any-return]


def decode_answer(raw: bytes) -> Answer:
    """Raises BadMessageError, whatever the bytes are."""
    return _decode(raw, _answers)  # type: ignore[no-any-return]


def _decode(raw: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, MemoryError) as err:
        raise BadMessageError(str(err)[:200]) from None


def unavailable(found: str, *, expected: str = "an answer of the service", path: str | None = None) -> StoreUnavailable:
    remedy = "start `sglang-ext store serve` of this version, or see its log; the call may be repeated"
    return StoreUnavailable("store service", expected, found, remedy, path)
