"""Requests whose prefix lies in a file: who waits for it, for how long, and what a flush or new weights leave."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sglang_ext.config import config_from_dict
from sglang_ext.offload.kv_files import KVFiles, of_pages
from tests.offload.slow_file import slow
from tests.offload.test_offloading import DIM, PREFIX, Request, Served, attachment


def stored(folder: Path, policy: str, **config: float) -> tuple[Served, Path]:
    """Offload with the file of a prefix."""
    waits_s = config_from_dict({"prefetch_policy": policy, **config}).waits_s
    served = Served(folder=str(folder / "kv"), waits_s=waits_s)
    offload = served.offloading.directory.begin("a", PREFIX)
    assert not isinstance(offload, str)
    for layer in range(2):
        served.pools.layer(layer).normal_()
    files = KVFiles(served.options, served.view)
    files.write("a", PREFIX, of_pages(served.pools, offload.pages))
    served.offloading.drop()
    return served, files.path("a")


def loaded(served: Served) -> None:
    """Until no move is under way."""
    deadline = time.monotonic() + 30
    while served.offloading.snapshot()["users"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def waiting() -> list[tuple[Request, object]]:
    one = attachment()
    one.prompt_len = PREFIX + 1
    return [(Request(), one)]


@pytest.mark.parametrize("policy", ["best_effort", "timeout", "wait_complete"])
def test_a_request_waits_for_its_file_by_its_policy(tmp_path: Path, policy: str) -> None:
    served, file = stored(tmp_path, policy, prefetch_timeout_s=0.4)
    queue = waiting()
    with slow(file):
        held = served.offloading.before_batch(queue)  # type: ignore[arg-type]
        assert bool(held) == (policy != "best_effort")
        assert served.offloading.snapshot()["prefixes"] == {"loading": 1}, "it is read in any case"
        time.sleep(0.5)
        held = served.offloading.before_batch(queue)  # type: ignore[arg-type]
        assert bool(held) == (policy == "wait_complete")
        assert served.offloading.wanted(*queue[0], PREFIX) is None  # type: ignore[arg-type]
    loaded(served)
    assert served.offloading.before_batch(queue) == []  # type: ignore[arg-type]
    assert served.offloading.wanted(*queue[0], PREFIX) is not None  # type: ignore[arg-type]


def test_a_held_request_waits_for_its_index_too(tmp_path: Path) -> None:
    served, _ = stored(tmp_path, "timeout", prefetch_timeout_s=2.0)
    queue = waiting()
    served.offloading.loading = lambda digest: digest == "a"
    served.offloading.before_batch(queue)  # type: ignore[arg-type]
    loaded(served)
    assert served.offloading.before_batch(queue) == [queue[0][0]]  # type: ignore[arg-type]
    time.sleep(2.0)
    assert served.offloading.before_batch(queue) == [], "nobody waits for ever"  # type: ignore[arg-type]
    served.offloading.loading = lambda digest: False
    assert served.offloading.before_batch(waiting()) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("forever", [False, True])
def test_what_is_forgotten_while_it_is_read_leaves_nothing(tmp_path: Path, forever: bool) -> None:
    """By a flush it may be read again, by new weights never."""
    served, file = stored(tmp_path, "wait_complete")
    queue = waiting()
    with slow(file):
        assert served.offloading.before_batch(queue)  # type: ignore[arg-type]
        served.offloading.drop(forever=forever)
        state = served.offloading.snapshot()
        assert (state["prefixes"], state["free_pages"]) == ({}, 12 - PREFIX // 16), "a thread writes there"
        assert bool(served.offloading.before_batch(queue)) != forever  # type: ignore[arg-type]
    loaded(served)
    state = served.offloading.snapshot()
    assert state["problem"] is None
    assert state["free_pages"] == (12 if forever else 12 - PREFIX // 16)
    assert state["events"] == ({} if forever else {"loaded": 1})
    assert (served.offloading.wanted(*queue[0], PREFIX) is None) == forever  # type: ignore[arg-type]


def test_a_copy_that_nobody_ends_gives_way_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_ext.offload.offloading.COPY_BYTES", 40 * 2 * 2 * 2 * DIM * 4)
    served, file = stored(tmp_path, "wait_complete")
    one, content = attachment(), file.read_bytes()
    file.unlink()
    served.slots(0, 0, PREFIX)
    served.decode(0, one)
    served.offloading.slot_freed(0)
    assert served.offloading.front(one, PREFIX) == (PREFIX, False), "the next piece is on its way, as far as is known"
    assert served.offloading.before_batch(waiting()) == []  # type: ignore[arg-type]
    monkeypatch.setattr("sglang_ext.offload.offloading._COPIES_S", 0.0)
    assert served.offloading.front(one, PREFIX) == (0, False)
    file.write_bytes(content)
    served.offloading._looked.clear()  # as a second later
    assert served.offloading.front(one, PREFIX) == (PREFIX, False)
    assert served.offloading.before_batch(waiting())  # type: ignore[arg-type]
    loaded(served)
    assert served.offloading.front(one, PREFIX) == (PREFIX, True)
    assert served.offloading.snapshot()["problem"] is None
