"""The store service's messages: what is refused, what crosses, and errors as their classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from prefix_index import IndexCorrupt, IndexStoreError, StoreUnavailable, errors
from prefix_index.service import messages
from tests.prefix_index.served_stores import served

KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, IndexStoreError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_comes_back_as_its_class(kind: type[IndexStoreError]) -> None:
    error = kind("w", expected="e", found="f", remedy="r")
    raw = messages.encode(messages.Failed(error=messages.error_text(error)))
    back = messages.error_of(messages.decode_answer(raw).error)  # type: ignore[union-attr]
    assert (type(back), str(back)) == (kind, str(error))


def test_an_unknown_error_comes_back_as_the_base_class() -> None:
    for kind in ("FromTheFuture", "os", "IndexStoreError", "Path", ""):
        text = messages.ErrorText(kind=kind, what="w", expected="e", found="f", remedy="r")
        assert type(messages.error_of(text)) is IndexStoreError


def test_text_that_crosses_is_printable_and_bounded() -> None:
    error = IndexCorrupt("w" * 10_000, expected="e\n\x1b", found="/a/\udcff", remedy="r")
    back = messages.error_of(messages.error_text(error))
    assert (back.expected, back.found) == (r"e\n\x1b", r"/a/\xff")
    assert len(back.what) == messages.MAX_TEXT


@pytest.mark.parametrize("digest", ["../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n", ""])
def test_what_is_no_digest_is_no_message(digest: str) -> None:
    with pytest.raises(messages.BadMessageError):
        messages.decode_request(messages.encode({"type": "Used", "digest": digest}))


def test_a_client_of_another_protocol_version_is_told(tmp_path: Path) -> None:
    with served(tmp_path) as endpoint:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(endpoint)

        def told(body: bytes) -> IndexStoreError:
            socket.send(b"12345678" + body)
            assert socket.poll(60_000)
            answer = socket.recv()
            assert answer[:8] == b"12345678"
            failed = messages.decode_answer(answer[8:])
            assert isinstance(failed, messages.Failed)
            return messages.error_of(failed.error)

        try:
            error = told(messages.encode(messages.Hello(version=99, pid=1)))
            assert isinstance(error, StoreUnavailable)
            assert f"expected protocol version {messages.PROTOCOL}, found version 99" in str(error)
            error = told(messages.encode({"type": "Changes", "epoch": "", "since": 0}))  # of version 1
            assert "service message: expected one frame of an id and a message of protocol version" in str(error)
            assert "use a client of the service's version" in str(error)
        finally:
            socket.close(linger=0)
