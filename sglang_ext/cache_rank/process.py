"""The cache rank's process: `python -m sglang_ext.cache_rank.process ADDRESS`. The inference rank starts it."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

import msgspec
import torch
import zmq

from sglang_ext.cache_rank.mailbox import make_peer
from sglang_ext.cache_rank.messages import (
    Drop,
    Load,
    Plan,
    Planned,
    Problem,
    Ready,
    Reply,
    Setup,
    Timed,
    Told,
    same_order,
    unpacked,
)
from sglang_ext.decode.select_op import AheadOp, make_op

logger = logging.getLogger(__name__)

_LOOK_S, _SPIN_S, _REST_S, _TELL_S = 2e-4, 0.02, 1e-4, 0.5
"""Between two looks for a message; after a question, before rests begin; a rest; between two reports."""


class LoadedIndex:
    """What the inference rank sent of an index.

    Attributes:
        prefix_len: tokens.
        layers: each layer's arrays that name candidates.
    """

    def __init__(self, message: Load, device: torch.device) -> None:
        self.prefix_len = message.prefix_len
        self.layers = [unpacked(layer, device) for layer in message.layers]


class CacheRankProcess:
    """Answers questions until the process that started it has ended.

    Args:
        socket: to that process; the first message has come.
        setup: that message.
    """

    def __init__(self, socket: zmq.Socket[bytes], setup: Setup) -> None:
        self._socket, self._parent = socket, os.getppid()
        spec, context = setup.made_for()
        if context.device.type == "cuda":
            torch.cuda.set_device(context.device)
        op = make_op(spec, context, captured=setup.captured)
        assert isinstance(op, AheadOp)
        self._op, self._device = op, context.device
        self._peer = make_peer(setup.address, op, context)
        self._known: dict[int, LoadedIndex] = {}
        self._plan, self._asked = 0, int(self._peer.words[0])
        self._answers = self._nanoseconds = 0
        self._send(Ready())

    def _send(self, reply: Reply) -> None:
        self._socket.send(msgspec.msgpack.encode(reply))

    def follow(self, content: bytes) -> None:
        """One message. What cannot be followed is answered by why, and changes nothing but that no plan is in force."""
        try:
            message: Any = msgspec.msgpack.decode(content, type=Told)
            if isinstance(message, Load):
                self._known[message.number] = LoadedIndex(message, self._device)
            elif isinstance(message, Drop):
                self._known.pop(message.number, None)
            elif isinstance(message, Plan):
                self._plan = 0
                indexes = same_order(message.indexes, self._known)
                self._op.plan_ahead(message.size, message.rows, message.groups, indexes)
                self._peer.plan(message.size, message.groups, message.sm_scale)
                self._plan = message.number
                self._send(Planned(message.number))
        except (msgspec.MsgspecError, ValueError, RuntimeError, KeyError, AttributeError, IndexError) as error:
            logger.warning("cache rank: a message was not followed: %s", error)
            self._send(Problem(f"{type(error).__name__}: {error}"))

    def serve(self) -> None:
        """Answer questions, of the plan in force only, and follow messages between them."""
        looked = busy = told = time.monotonic()
        while True:
            asked = int(self._peer.words[0])
            if asked != self._asked:
                self._asked = asked
                if self._plan and asked >> 32 == self._plan:
                    begin = time.perf_counter_ns()
                    self._peer.answer(asked)
                    self._nanoseconds += time.perf_counter_ns() - begin
                    self._answers += 1
                busy = time.monotonic()
                continue
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                if self._socket.poll(0):
                    self.follow(self._socket.recv())
                if now - told > _TELL_S:
                    told = now
                    if os.getppid() != self._parent:
                        return
                    self._send(Timed(self._answers, self._nanoseconds))
            if now - busy > _SPIN_S:
                time.sleep(_REST_S)


def main() -> None:
    """Serve the process that listens at the address in the arguments."""
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s")
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.linger = 0
    socket.connect(sys.argv[1])
    while not socket.poll(1000):
        if os.getppid() == 1:
            return
    CacheRankProcess(socket, msgspec.msgpack.decode(socket.recv(), type=Setup)).serve()


if __name__ == "__main__":
    main()
