"""The cache rank's process: `python -m sglang_ext.decode.cache_rank.process ADDRESS PID`.

The inference rank, which is process PID, starts the process. The process ends with the inference rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, cast

import msgspec
import torch
import zmq
from torch import Tensor

from sglang_ext.decode.cache_rank.mailbox import make_peer
from sglang_ext.decode.cache_rank.messages import (
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
    unpacked,
)
from sglang_ext.decode.select_op import AheadOp, Selecting, make_op

_LOOK_S, _SPIN_S, _TELL_S = 2e-4, 0.02, 0.5
"""Between two looks for a message; after a question, before rests begin; between two reports."""
_RESTS = ((0.5, 1e-4), (float("inf"), 2e-3))
"""Seconds since the last question -> of a rest: the first question behind a long one may wait for it."""


class LoadedIndex:
    """What the inference rank sent of an index.

    Attributes:
        prefix_len: tokens.
        layers: each layer's arrays that name candidates.
    """

    def __init__(self, prefix_len: int) -> None:
        self.prefix_len = prefix_len
        self.layers: list[dict[str, Tensor]] = []


class CacheRankProcess:
    """Answers questions until the process that started it has ended.

    Args:
        socket: to that process; the first message has come.
        setup: that message.
        parent: its number.
    """

    def __init__(self, socket: zmq.Socket[bytes], setup: Setup, parent: int) -> None:
        self._socket, self._parent = socket, parent
        spec, context = setup.made_for()
        if context.device.type == "cuda":
            torch.cuda.set_device(context.device)
        op = make_op(spec, context, captured=setup.captured)
        assert isinstance(op, AheadOp)
        self._op, self._device, self._num_layers = op, context.device, context.num_layers
        self._peer = make_peer(setup.address, op, context)
        self._known: dict[int, LoadedIndex] = {}
        self._plan, self._asked = 0, int(self._peer.words[0])
        self._answers = self._nanoseconds = 0
        self._send(Ready())

    def _send(self, reply: Reply) -> None:
        self._socket.send(msgspec.msgpack.encode(reply))

    def follow(self, content: bytes) -> None:
        """One message. What cannot be followed is answered by why, and changes nothing but that no plan is in force."""
        lacks: list[int] = []
        try:
            message: Any = msgspec.msgpack.decode(content, type=Told)
            if isinstance(message, Load):
                lacks = [message.number]
                self._load(message)
            elif isinstance(message, Drop):
                self._known.pop(message.number, None)
            elif isinstance(message, Plan):
                self._plan = 0
                whole = {n for n, index in self._known.items() if len(index.layers) == self._num_layers}
                lacks = [number for number in message.indexes if number not in whole]
                if lacks:
                    raise ValueError(f"expected indexes that were loaded, got numbers {lacks}")
                indexes = [self._known[number] for number in message.indexes]
                self._op.plan_ahead(Selecting(message.size, message.rows, message.groups), cast(Any, indexes))
                self._peer.plan(message.size, message.groups, message.sm_scale)
                self._plan = message.number
                self._send(Planned(message.number))
        except Exception as error:  # of bytes, of memory, of kernels: the next message may be another one
            self._send(Problem(f"{type(error).__name__}: {error}", lacks))

    def _load(self, message: Load) -> None:
        """A layer of an index; where one is missing the index is none."""
        index = self._known.get(message.number)
        if index is None or message.layer == 0:
            index = self._known[message.number] = LoadedIndex(message.prefix_len)
        if message.layer == len(index.layers):
            index.layers.append(unpacked(message.arrays, self._device))

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
                time.sleep(next(rest for since, rest in _RESTS if now - busy < since))


def main() -> None:
    """Serve the process that listens at the address in the arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    address, parent = sys.argv[1], int(sys.argv[2])
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.linger = 0
    socket.connect(address)
    while not socket.poll(1000):
        if os.getppid() != parent:
            return
    CacheRankProcess(socket, msgspec.msgpack.decode(socket.recv(), type=Setup), parent).serve()


if __name__ == "__main__":
    main()
