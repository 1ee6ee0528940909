"""The inference rank's side of a cache rank: its process, the indexes it has, questions and answers."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
import zmq
from torch import Tensor

from sglang_ext.decode.cache_rank.mailbox import make_mailbox
from sglang_ext.decode.cache_rank.messages import (
    Array,
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
    packed,
)
from sglang_ext.decode.select_op import FIRST_PART, AheadOp, OpContext, Selecting, SelectOp
from sglang_ext.decode.types import Index
from sglang_ext.methods.base import IndexSpec

logger = logging.getLogger(__name__)

_MISSES = 8
"""Answers that did not come one after the other, or messages that it did not follow: the process is ended, as it hangs,
is too slow or has no memory."""
_START_S, _SILENT_S = 180.0, 60.0
"""For the process to make its operation; without a word of it, as it may be while it compiles for a first plan."""
_AGAIN_S, _RARELY_S = 10.0, 300.0
"""Until it is started again; each time twice as long, up to so many, until it has answered."""
_SOON_S, _LATER_S = 5e-4, 0.02
"""Between two looks for its replies, while one is waited for, and while none is."""


_COMMAND = [sys.executable, "-m", "sglang_ext.decode.cache_rank.process"]
"""Of the process; the address to connect to comes behind."""
_numbers = itertools.count(1)


class _Asked:
    """A plan that the process is to know: of its indexes what it lacks is sent before."""

    def __init__(self, plan: Plan, indexes: Sequence[Index]) -> None:
        self.plan, self.indexes = plan, list(map(weakref.ref, indexes))


class CacheRank:
    """Has another process name the candidates of each next step.

    Everything that may wait for that process is done by a thread; the steps' own calls are launches. A step may be a
    `StepPath.KEPT` one only where `serves` says so.

    Args:
        spec: of the method.
        context: that the operation was made for.
        op: it.
        device: of the other process.
        captured: whether decode steps replay graphs.

    Raises:
        ValueError: no such device, the operation's own, or none that it shares memory with.
    """

    def __init__(self, spec: IndexSpec, context: OpContext, op: AheadOp, device: str, *, captured: bool) -> None:
        check_device(torch.device(device), context.device)
        self._op, self._context, self._layers = op, context, len(context.sizes.ahead)
        self._mailbox = make_mailbox(op, context)
        self._setup = Setup.of(spec, context, device, self._mailbox.address, captured=captured)
        self._numbers: weakref.WeakKeyDictionary[Index, int] = weakref.WeakKeyDictionary()
        self._wanted: queue.SimpleQueue[_Asked | Drop | None] = queue.SimpleQueue()
        self._latest: _Asked | None = None
        self._plan = self._planned = 0
        self._scale = 0.0
        self._seen_missed = 0
        self._state, self._starts, self._problems, self._problem = "starting", 0, 0, ""
        self._not_followed = 0
        self._sent: set[int] = set()
        self._timed = Timed(0, 0)
        cuda = context.device.type == "cuda"
        self._stream = torch.cuda.Stream(context.device) if cuda else None  # type: ignore[no-untyped-call]
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cache-rank", daemon=True)
        self._thread.start()

    # -- a step ----------------------------------------------------------------------------------------------

    def plan(self, step: Selecting, indexes: Sequence[Index]) -> None:
        """What the next steps select, behind `SelectOp.plan`, with its arguments. Until the other process knows of it,
        `serves` says no.
        """
        self._plan = self._plan % 0x7FFFFFFF + 1
        self._mailbox.plan(self._plan, step.groups)
        numbers = list(map(self._number_of, indexes))
        plan = Plan(self._plan, step.size, list(step.rows), list(step.groups), numbers, self._scale)
        self._latest = _Asked(plan, indexes)
        if step.groups and self._scale:
            self._wanted.put(self._latest)

    def _number_of(self, index: Index) -> int:
        if index not in self._numbers:
            self._numbers[index] = number = next(_numbers)
            weakref.finalize(index, self._wanted.put, Drop(number))
        return self._numbers[index]

    @property
    def knows_plan(self) -> bool:
        """Whether the process answers questions about what steps select now."""
        return self._planned == self._plan

    @property
    def nbytes(self) -> int:
        """Device memory, of this process's device."""
        return self._mailbox.nbytes

    def serves(self) -> bool:
        """Whether the next step may have its candidates of the other process. Not where an answer did not come since
        this was asked before: the step names its own then. The host learns of that a step late where it plans one
        while another one runs.
        """
        missed = int(self._mailbox.words[2])
        came, self._seen_missed = missed == self._seen_missed, missed
        return came and self.knows_plan

    def ask(self, size: int, queries: Sequence[Tensor]) -> None:
        """Behind a step's last anchor layer: its queries, of each anchor layer, as of `AheadOp.look_ahead`."""
        of_layers = self._mailbox.queries[: self._layers * size].view(self._layers, size, *queries[0].shape[1:])
        torch.stack([q[:size] for q in queries], out=of_layers[:, : len(queries[0])])
        self._mailbox.ask()

    def forget(self, sm_scale: float) -> None:
        """Behind a step that named its own, by queries of that scale."""
        self._mailbox.forget()
        if sm_scale != self._scale:
            self._scale = sm_scale
            if self._latest is not None:
                self._latest.plan = msgspec.structs.replace(self._latest.plan, sm_scale=sm_scale)
                self._wanted.put(self._latest)

    def take(self) -> None:
        """Before the first anchor layer of a `StepPath.KEPT` step: what comes is what `run_behind` reads; where nothing
        comes in time, that of the step before.
        """
        self._mailbox.take(self._op.named_ahead())

    def snapshot(self) -> dict[str, Any]:
        """State and counters as plain values."""
        answers, mean = self._timed.answers, self._timed.nanoseconds / 1000 / max(1, self._timed.answers)
        process = self._process  # the thread may let go of it
        pid = None if process is None else process.pid
        told = {"problems": self._problems, "answers": answers, "answer_us": round(mean, 1)}
        return {"state": self._state, "pid": pid, **self.counted(), **told}

    def counted(self) -> dict[str, int]:
        """Answers that came, and that did not; starts of the process. In any thread."""
        _, served, missed, *_ = self._mailbox.words.tolist()
        return {"served": served, "missed": missed, "started": self._starts}

    def stop(self) -> None:
        """End the process for good. Graphs that were captured may still be replayed."""
        self._closed.set()
        self._wanted.put(None)
        self._thread.join()

    def close(self) -> None:
        """`stop`, and let go of what captured graphs write."""
        self.stop()
        self._mailbox.close()

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        wait = _AGAIN_S
        while not self._closed.is_set():
            before, why = int(self._mailbox.words[1]), ""
            try:
                with tempfile.TemporaryDirectory(prefix="sglang-ext-cache-rank-") as folder:
                    why = self._lives(folder)
            except Exception as error:  # of the other process, of sockets, of memory, of disks: steps go on without
                why = f"{type(error).__name__}: {error}"
            finally:
                self._end()
            wait = _AGAIN_S if int(self._mailbox.words[1]) > before else wait
            self._planned, self._state = 0, "lost"
            if not self._closed.is_set():
                logger.warning(
                    "sparse attention: the cache rank on %s is lost: %s. Steps name their own candidates; it is "
                    "started again in %.0f s",
                    self._setup.device,
                    why,
                    wait,
                )
            self._closed.wait(wait)
            wait = min(2 * wait, _RARELY_S)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _lives(self, folder: str) -> str:
        """Start the process, which connects to a socket in the folder, and keep it informed; why that ended."""
        address = f"ipc://{folder}/socket"
        self._starts += 1
        self._state, self._planned, self._sent, self._not_followed = "starting", 0, set(), 0
        with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
            socket.linger = 0
            socket.bind(address)
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            command, files = [*_COMMAND, address, str(os.getpid())], (self._mailbox.descriptor,)
            self._process = subprocess.Popen(command, env=environment, pass_fds=files)
            self._send(socket, self._setup)
            shutil.rmtree(folder)  # it is connected; nothing is left when this process is killed
            if self._latest is not None:
                self._wanted.put(self._latest)
            return self._serve(socket)

    def _serve(self, socket: zmq.Socket[bytes]) -> str:
        """Keep the process informed until it ends, hangs or is too late; which of these."""
        begin = heard = time.monotonic()
        _, served, before, *_ = self._mailbox.words.tolist()
        while not self._closed.is_set():
            wanted = self._next()
            assert self._process is not None
            if self._process.poll() is not None:
                return f"its process ended with status {self._process.returncode}"
            while socket.poll(0):
                self._read(socket.recv())
                heard = time.monotonic()
            now = time.monotonic()
            if self._state == "starting" and now - begin > _START_S:
                return f"it was not ready within {_START_S:.0f} s"
            if self._state == "serving" and now - heard > _SILENT_S:
                return f"it said nothing for {_SILENT_S:.0f} s"
            if isinstance(wanted, Drop):  # of an index that it could not take, too: it may have some layers
                self._sent.discard(wanted.number)
                self._send(socket, wanted)
            elif isinstance(wanted, _Asked) and wanted is self._latest:
                self._tell(socket, wanted)
                heard = time.monotonic()
            _, came, missed, *_ = self._mailbox.words.tolist()
            if came != served:
                served, before = came, missed
            if self._not_followed >= _MISSES:
                return f"{self._not_followed} messages, one after the other, were not followed: {self._problem}"
            if missed - before >= _MISSES:
                return f"{missed - before} answers, one after the other, did not come in time"
        return "it was closed"

    def _send(self, socket: zmq.Socket[bytes], message: Told) -> None:
        """Raises RuntimeError where the process ends, or takes nothing for too long."""
        until = time.monotonic() + _START_S
        assert self._process is not None
        while not socket.poll(50, zmq.POLLOUT):
            if self._process.poll() is not None:
                raise RuntimeError(f"its process ended with status {self._process.returncode}")
            if self._closed.is_set() or time.monotonic() > until:
                raise RuntimeError(f"it took no message within {_START_S:.0f} s, or was closed")
        socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)

    def _next(self) -> _Asked | Drop | None:
        try:
            return self._wanted.get(timeout=_LATER_S if self.knows_plan or not self._scale else _SOON_S)
        except queue.Empty:
            return None

    def _tell(self, socket: zmq.Socket[bytes], asked: _Asked) -> None:
        """A plan, and before it what the process lacks of its indexes, a layer at a time: residency may let them go."""
        for number, held in zip(asked.plan.indexes, asked.indexes, strict=True):
            if number in self._sent:
                continue
            for layer in range(self._context.num_layers):
                index = held()
                if index is None or len(index.layers) != self._context.num_layers:
                    return
                self._send(socket, Load(number, index.prefix_len, layer, self._first(index.layers[layer])))
            self._sent.add(number)
        self._send(socket, asked.plan)

    def _first(self, arrays: Mapping[str, Tensor]) -> dict[str, Array]:
        """The arrays that name candidates, as they travel, copied beside the steps."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            return packed({name: array for name, array in arrays.items() if name.startswith(FIRST_PART)})

    def _read(self, content: bytes) -> None:
        try:
            reply: Any = msgspec.msgpack.decode(content, type=Reply)
        except msgspec.MsgspecError as error:
            self._problems += 1
            logger.warning("sparse attention: the cache rank said what is no reply: %s", error)
            return
        if isinstance(reply, Ready):
            self._state = "serving"
            logger.info("sparse attention: the cache rank on %s is ready", self._setup.device)
        elif isinstance(reply, Planned):
            self._planned, self._not_followed = reply.number, 0
        elif isinstance(reply, Timed):
            self._timed = reply
        elif isinstance(reply, Problem):
            self._problems += 1
            self._not_followed += 1
            self._sent.difference_update(reply.lacks)  # the next plan has them sent again
            if reply.text != self._problem:
                logger.warning("sparse attention: the cache rank did not follow a message: %s", reply.text)
            self._problem = reply.text


def cache_rank_for(spec: IndexSpec, context: OpContext, op: SelectOp, *, captured: bool) -> CacheRank | None:
    """What `cache_device` asks for; None where nothing is named ahead. Arguments and errors as of `CacheRank`."""
    device = context.config.cache_device
    held = captured or context.device.type == "cpu"
    if device is None or not held or not context.sizes.ahead or not isinstance(op, AheadOp):
        return None
    return CacheRank(spec, context, op, device, captured=captured)


def check_device(device: torch.device, own: torch.device) -> None:
    """Raise ValueError unless a process on that device can read and write the memory of our own."""
    expected, count = "expected cache_device as another GPU that this one shares memory with", torch.cuda.device_count()
    if device.type != own.type:
        raise ValueError(f"{expected}, got {device} beside {own}; name a GPU beside a GPU, or null")
    if own.type == "cpu":
        return
    number = torch.cuda.current_device() if own.index is None else own.index
    if device.index >= count or device.index == number:
        raise ValueError(f"{expected}, got {device} of {count} GPUs beside cuda:{number}; name another one, or null")
    if not torch.cuda.can_device_access_peer(device.index, number):
        raise ValueError(f"{expected}, got {device}, which cannot reach cuda:{number}; name another one, or null")
