"""A cache rank beside decode steps: a process of its own, on a CPU, or on a second GPU."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from sglang_ext.decode.cache_rank import client
from sglang_ext.decode.cache_rank.client import CacheRank, check_device
from sglang_ext.decode.cache_rank.mailbox import make_mailbox
from sglang_ext.decode.cache_rank.messages import Load, Plan, Planned, Problem, Ready, Reply, Setup, packed
from sglang_ext.decode.select_op import AheadOp, OpContext
from sglang_ext.methods.base import parse_spec
from tests.sparse_server import LAYERS, Server, join_four, searches

CPU = torch.device("cpu")
SPEC = parse_spec({"method": "two_level"})
ALL = parse_spec({"method": "two_level", "candidate_ratio": 1.0})
"""Whatever names them, all tokens are candidates: the step's own query decides."""


def within(seconds: float, holds: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


class Ranked(Server):
    """A server whose candidates another process names."""

    def __init__(self, spec: Any, device: str = "cpu", other: str = "cpu") -> None:
        own = torch.device(device)
        super().__init__(own, kernels=own != CPU, spec=spec, select_ahead=True, cache_device=other)
        op = self.sparse.op
        assert isinstance(op, AheadOp)
        self.context = OpContext(self.shape, self.config, LAYERS, self.sparse.sizes, own)
        self.rank = self.sparse.cache_rank = CacheRank(spec, self.context, op, other, captured=own != CPU)

    @property
    def state(self) -> dict[str, Any]:
        return self.rank.snapshot()

    def until_served(self, serials: list[int]) -> None:
        """Steps until the other process answers them."""
        served = self.state["served"]

        def steps() -> bool:
            self.step(serials)
            return int(self.state["served"]) > served + 2

        within(120, steps)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_AGAIN_S", 0.2)
    monkeypatch.setattr(client, "_MISSES", 4)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def server(request: pytest.FixtureRequest, soon: None) -> Iterator[Ranked]:
    """Whose answers depend on what is named."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    made = Ranked(SPEC, *(("cpu", "cpu") if request.param == "cpu" else ("cuda:0", "cuda:1")))
    yield made
    made.rank.close()


def test_candidates_are_those_that_a_step_would_name_itself(server: Ranked) -> None:
    """Each step is compared with one whose candidates the queries of the step before name."""
    join_four(server)
    server.until_served([1, 2, 3, 4])
    before = server.state
    assert searches(server, [1, 2, 3, 4], 6) == [False] * 6
    after = server.state
    assert after["served"] - before["served"] == 6
    assert (after["missed"], after["problems"], after["started"]) == (before["missed"], 0, 1)
    server.leave(1)
    assert searches(server, [3, 2, 4], 1) == [True], "others are in the group now"
    server.until_served([3, 2, 4])
    within(30, lambda: server.state["answers"] > 0)
    assert server.state["answer_us"] > 0


def test_a_process_that_ends_is_started_again_and_steps_go_on(server: Ranked) -> None:
    join_four(server)
    server.until_served([1, 2, 3, 4])
    os.kill(server.state["pid"], signal.SIGKILL)
    within(30, lambda: server.state["started"] == 2)
    assert searches(server, [1, 2, 3, 4], 2)[-1], "it knows nothing yet"
    server.until_served([1, 2, 3, 4])
    assert server.state["state"] == "serving"


def test_a_process_that_hangs_costs_a_wait_and_then_its_life(soon: None) -> None:
    """A step whose answer does not come has older candidates; the one behind it names its own."""
    server = Ranked(ALL)
    join_four(server)
    server.until_served([1, 2, 3, 4])
    os.kill(server.state["pid"], signal.SIGSTOP)
    found = searches(server, [1, 2, 3, 4], 6)
    assert found[:2] in ([False, True], [False, False]), "a step may have had its answer before"
    assert not any(one and two for one, two in pairwise(found)), "each miss costs one search"
    assert server.state["missed"] >= 2

    def replaced() -> bool:
        server.step([1, 2, 3, 4])
        return int(server.state["started"]) == 2

    within(60, replaced)
    server.until_served([1, 2, 3, 4])
    server.rank.close()


def test_a_process_that_says_nothing_is_started_again(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no question waits for it."""
    monkeypatch.setattr(client, "_SILENT_S", 2.0)
    server = Ranked(ALL)
    within(60, lambda: server.state["state"] == "serving")
    os.kill(server.state["pid"], signal.SIGSTOP)
    within(60, lambda: (server.state["started"], server.state["state"]) == (2, "serving"))
    server.rank.close()


def test_words_that_no_one_said_are_no_answers(soon: None) -> None:
    """Whatever stands in the memory of both, steps are right, and the process goes on or is started again."""
    server = Ranked(ALL)
    join_four(server)
    server.until_served([1, 2, 3, 4])
    gen = torch.Generator().manual_seed(1)
    for _ in range(10):
        words = server.rank._mailbox.words
        words[0] = int(torch.randint(1 << 62, (), generator=gen))
        words[3] = int(torch.randint(1 << 62, (), generator=gen))
        server.step([1, 2, 3, 4])
    server.until_served([1, 2, 3, 4])
    server.rank.close()


def test_the_process_follows_what_it_can_and_says_what_it_cannot(tmp_path: Path) -> None:
    """Garbage, arrays whose bytes are missing, a plan with an index that it was never given; then a whole one."""
    server = Ranked(SPEC)
    server.rank.close()
    mailbox = make_mailbox(server.sparse.op, server.context)
    setup = Setup.of(SPEC, server.context, "cpu", mailbox.address, captured=False)
    _, index = server.prefix(200)
    arrays = [packed({name: one for name, one in layer.items() if "first." in name}) for layer in index.layers]
    short = {name: (dtype, shape, content[:-1]) for name, (dtype, shape, content) in arrays[0].items()}
    plan = Plan(1, 1, [(0,)], server.sparse.packed([(200, 40, 0)]), [7], 0.1)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.linger = 0
        socket.bind(f"ipc://{tmp_path}/socket")
        command = [*client._COMMAND, f"ipc://{tmp_path}/socket", str(os.getpid())]
        process = subprocess.Popen(command, pass_fds=(mailbox.descriptor,))
        with process:
            try:

                def said(message: Any) -> Any:
                    socket.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))
                    while socket.poll(60_000):
                        reply: Any = msgspec.msgpack.decode(socket.recv(), type=Reply)
                        if isinstance(reply, (Ready, Planned, Problem)):
                            return reply
                    raise AssertionError("no reply")

                assert said(setup) == Ready()
                assert "MsgspecError" in said(b"\xc1 no message").text or "DecodeError" in said(b"\xc1").text
                problem = said(Load(7, 200, 0, short))
                assert ("RuntimeError" in problem.text, problem.lacks) == (True, [7])
                for layer, one in enumerate(arrays):
                    problem = said(plan)
                    assert "expected indexes that were loaded, got numbers [7]" in problem.text
                    assert problem.lacks == [7]
                    socket.send(msgspec.msgpack.encode(Load(7, 200, layer, one)))
                assert said(plan) == Planned(1)
                assert process.poll() is None
            finally:
                process.kill()
                mailbox.close()


Spoken = Callable[[str], Ranked]


@pytest.fixture
def spoken(soon: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spoken]:
    """Makes a server whose other process, once it has its first message, does what some lines of Python say."""
    made: list[Ranked] = []

    def start(lines: str) -> Ranked:
        begin = "import sys, time, msgspec, zmq; from sglang_ext.decode.cache_rank.messages import *\n"
        begin += "socket = zmq.Context.instance().socket(zmq.PAIR); socket.connect(sys.argv[1]); socket.recv()\n"
        monkeypatch.setattr(client, "_COMMAND", [sys.executable, "-c", begin + lines])
        made.append(Ranked(SPEC))
        join_four(made[0])
        return made[0]

    yield start
    made[0].rank.close()


def test_replies_that_are_none_are_counted(spoken: Spoken) -> None:
    """Of a process that says garbage before it ends."""
    server = spoken("socket.send(b'garbage'); time.sleep(0.5)")
    within(60, lambda: (server.step([1, 2, 3, 4]), server.state["problems"] >= 1 and server.state["started"] >= 2)[1])
    assert server.state["served"] == 0


def test_a_process_that_follows_nothing_is_started_again(spoken: Spoken, caplog: pytest.LogCaptureFixture) -> None:
    """As where its device has no memory: it lives, and no question comes to it."""
    server = spoken(
        "reply = Ready()\n"
        "while True:\n"
        "    socket.send(msgspec.msgpack.encode(reply))\n"
        "    socket.recv()\n"
        "    reply = Problem('OutOfMemoryError: none is left', [1])\n"
    )

    def replaced() -> bool:
        server.leave(4)
        server.join(4, server.slots(31), None, 3)
        server.step([1, 2, 3, 4])
        return int(server.state["started"]) >= 2

    within(60, replaced)
    assert "messages, one after the other, were not followed: OutOfMemoryError" in caplog.text


def test_what_it_has_of_an_index_that_it_could_not_take_is_let_go_of_with_it(spoken: Spoken) -> None:
    """As where its device has no memory for a layer: those before it are there, also where no plan asks again."""
    server = spoken(
        "def say(reply): socket.send(msgspec.msgpack.encode(reply))\n"
        "say(Ready())\n"
        "short = 0\n"
        "while True:\n"
        "    message = msgspec.msgpack.decode(socket.recv(), type=Told)\n"
        "    if isinstance(message, Load) and not short:\n"
        "        short = message.number\n"
        "        say(Problem('OutOfMemoryError: none is left', [short]))\n"
        "    if isinstance(message, Drop) and message.number == short:\n"
        "        say(Timed(1, 1000))\n"
    )
    searches(server, [1, 2, 3, 4], 6)  # the last plan is that of all further steps
    within(60, lambda: server.state["problems"] == 1)
    for serial in (1, 2, 3, 4):
        server.leave(serial)
    server.groups, server.before = [], []
    gc.collect()
    within(30, lambda: server.state["answers"] == 1)


def test_a_process_that_cannot_start_is_tried_again_less_and_less(
    soon: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends before it has taken a message. Steps and the end of the server wait for none."""
    monkeypatch.setattr(client, "_COMMAND", [sys.executable, "-c", "raise SystemExit(3)"])
    server = Ranked(SPEC)
    join_four(server)
    assert searches(server, [1, 2, 3, 4], 4) == [True] * 4
    within(60, lambda: server.state["started"] >= 3)
    server.rank.close()
    said = [line for line in caplog.messages if "ended with status 3. Steps name their own candidates" in line]
    assert len(said) >= 2
    assert "started again in 0 s" in said[0]


def test_a_request_that_selects_nothing_changes_what_is_asked(server: Ranked) -> None:
    """Queries of several layers lie as many apart as the batch has, also where groups stay."""
    join_four(server)
    server.until_served([1, 2, 3, 4])
    server.join(5, server.slots(31), None, 3)
    assert searches(server, [1, 2, 3, 4, 5], 1) == [True]
    server.until_served([1, 2, 3, 4, 5])
    server.leave(5)
    assert searches(server, [1, 2, 3, 4], 1) == [True]
    server.until_served([1, 2, 3, 4])


def test_steps_that_search_are_charged_whole_while_no_one_answers(server: Ranked) -> None:
    join_four(server)
    server.until_served([1, 2, 3, 4])
    turns = server.sparse._turns
    steps = turns._steps
    assert searches(server, [1, 2, 3, 4], 3) == [False] * 3
    assert turns._steps == steps + 3
    server.rank._planned = 0
    searches(server, [1, 2, 3, 4], 2)
    assert turns._steps == steps + 5, "each counts once"


def test_a_device_that_shares_no_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="got cpu beside cuda:0; name a GPU beside a GPU, or null"):
        check_device(CPU, torch.device("cuda:0"))
    check_device(CPU, CPU)
