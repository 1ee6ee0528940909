"""The store service's messages: what is refused, what crosses, and errors as their classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from prefix_index.service import messages
from tests.prefix_index.served_stores import served


@pytest.mark.parametrize("digest", ["../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n", ""])
def test_what_is_no_digest_is_no_message(digest: str) -> None:
    with pytest.raises(messages.BadMessageError):
        messages.decode_request(messages.encode({"type": "Used", "digest": digest}))


def test_a_client_of_another_protocol_version_is_told(tmp_path: Path) -> None:
    with served(tmp_path) as endpoint:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(endpoint)

        def told(body: bytes) -> messages.Failed:
            socket.send(b"12345678" + body)
            assert socket.poll(60_000)
            answer = socket.recv()
            assert answer[:8] == b"12345678"
            failed = messages.decode_answer(answer[8:])
            assert isinstance(failed, messages.Failed)
            return failed

        try:
            failed = told(messages.encode(messages.Hello(version=99, pid=1)))
            assert (failed.expected, failed.found) == (f"protocol version {messages.PROTOCOL}", "version 99")
            failed = told(messages.encode({"type": "Changes", "epoch": "", "since": 0}))  # of version 1
            assert "one frame of an id and a message of protocol version" in failed.expected
            assert "from a client of this version" in failed.expected
        finally:
            socket.close(linger=0)
