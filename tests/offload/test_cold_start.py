"""Requests whose prefix lies in a file: who waits for it, for how long, and what a flush or new weights leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_ext.config import config_from_dict
from sglang_ext.offload.kv_files import KVFiles, kv_file_name, of_pages
from sglang_ext.prefix.requests import Attachment
from tests.offload.slow_file import slow
from tests.offload.test_offloading import PREFIX, SLOTS, Request, Served, attachment
from tests.serving.admitting import Clock, eventually


def stored(folder: Path, policy: str, num_pages: int = 12, **config: float) -> tuple[Served, Path]:
    """Offload with the file of a prefix."""
    waits_s = config_from_dict({"prefetch_policy": policy, **config}).waits_s
    served = Served(folder=str(folder / "kv"), waits_s=waits_s, num_pages=num_pages)
    offload = served.offloading.directory.begin("a", PREFIX, ())
    assert not isinstance(offload, str)
    for layer in range(2):
        served.pools.layer(layer).normal_()
    files = KVFiles(served.options, served.view)
    files.write("a", PREFIX, of_pages(served.pools, offload.pages))
    served.offloading.drop()
    return served, files.path("a")


def loaded(served: Served) -> None:
    """Until no move is under way."""
    assert eventually(lambda: not served.offloading.snapshot()["users"])


def happens(served: Served, event: str) -> None:
    """Until it has."""
    assert eventually(lambda: served.offloading.snapshot()["events"].get(event, 0) > 0)


def waiting() -> list[tuple[Request, object]]:
    one = attachment()
    one.prompt_len = PREFIX + 1
    return [(Request(), one)]


@pytest.mark.parametrize("policy", ["best_effort", "timeout", "wait_complete"])
def test_a_request_waits_for_its_file_by_its_policy(tmp_path: Path, clock: Clock, policy: str) -> None:
    served, file = stored(tmp_path, policy, prefetch_timeout_s=0.4)
    queue = waiting()
    with slow(file):
        held = served.offloading.before_batch(queue, SLOTS)
        assert bool(held) == (policy != "best_effort")
        assert served.offloading.snapshot()["prefixes"] == {"loading": 1}, "it is read in any case"
        clock.now += 0.5
        held = served.offloading.before_batch(queue, SLOTS)
        assert bool(held) == (policy == "wait_complete")
        assert served.offloading.wanted(*queue[0], PREFIX) is None
    loaded(served)
    assert served.offloading.before_batch(queue, SLOTS) == []
    assert served.offloading.wanted(*queue[0], PREFIX) is not None


def test_a_held_request_waits_for_its_index_too(tmp_path: Path, clock: Clock) -> None:
    served, _ = stored(tmp_path, "timeout", prefetch_timeout_s=2.0)
    queue = waiting()
    served.offloading.loading = lambda digest: digest == "a"
    served.offloading.before_batch(queue, SLOTS)
    loaded(served)
    assert served.offloading.before_batch(queue, SLOTS) == [queue[0][0]]
    clock.now += 2.0
    assert served.offloading.before_batch(queue, SLOTS) == [], "nobody waits for ever"
    served.offloading.loading = lambda digest: False
    assert served.offloading.before_batch(waiting(), SLOTS) == []


@pytest.mark.parametrize("forever", [False, True])
def test_what_is_forgotten_while_it_is_read_leaves_nothing(tmp_path: Path, forever: bool) -> None:
    """By a flush it may be read again, by new weights never."""
    served, file = stored(tmp_path, "wait_complete")
    queue = waiting()
    with slow(file):
        assert served.offloading.before_batch(queue, SLOTS)
        served.offloading.drop(forever=forever)
        state = served.offloading.snapshot()
        assert (state["prefixes"], state["free_pages"]) == ({}, 12 - PREFIX // 16), "a thread writes there"
        assert bool(served.offloading.before_batch(queue, SLOTS)) != forever
    loaded(served)
    state = served.offloading.snapshot()
    assert state["problem"] is None
    assert state["free_pages"] == (12 if forever else 12 - PREFIX // 16)
    assert state["events"] == ({} if forever else {"loaded": 1})
    assert (served.offloading.wanted(*queue[0], PREFIX) is None) == forever


@pytest.mark.usefixtures("by_pieces")
def test_a_copy_that_nobody_ends_gives_way_to_its_file(tmp_path: Path) -> None:
    served, file = stored(tmp_path, "wait_complete")
    served.slots(0, 0, PREFIX)
    content = file.read_bytes()
    file.unlink()
    served.decode(0, attachment())
    served.offloading._agreed._looked.clear()  # as a second later
    file.write_bytes(content)
    assert served.offloading.before_batch(waiting(), SLOTS) == [], "it is copied out still"
    assert served.offloading.snapshot()["prefixes"] == {"copying": 1}
    served.offloading.slot_freed(0)
    served.runs.clear()
    assert served.offloading.before_batch(waiting(), SLOTS)
    loaded(served)
    assert served.offloading.front(attachment(), PREFIX) == (PREFIX, True)
    assert served.offloading.snapshot()["problem"] is None


@pytest.mark.usefixtures("by_pieces")
@pytest.mark.parametrize("filed", [True, False])
def test_copies_and_reads_do_not_take_turns(tmp_path: Path, filed: bool) -> None:
    """Where there is room for one of two prefixes: who came first has it until its requests have ended."""
    served, _ = stored(tmp_path, "wait_complete", num_pages=8)
    for row in range(4):
        served.slots(row, 0, PREFIX)
    queue, events = waiting(), served.offloading.directory.events
    if filed:  # read for a request that waits still, as others have no room yet
        assert served.offloading.before_batch(queue, SLOTS)
        loaded(served)
        kept, ended = "a", queue
    else:  # copied out for one that runs
        served.decode(0, attachment("b"))
        kept, ended = "b", served.runs
    for row in range(4):
        others = attachment("b")
        for _ in range(3):
            served.offloading.before_batch(queue, SLOTS)
            served.decode(row, others)
            assert served.offloading.directory.get(kept) is not None
            assert events["evicted"] == 0
    ended.clear()
    loaded(served)
    if filed:
        served.offloading.before_batch([], SLOTS)
        served.decode(0, attachment("b"))
        assert served.offloading.directory.get("b") is not None
    else:
        assert served.offloading.before_batch(queue, SLOTS)
        loaded(served)
        assert served.offloading.wanted(*queue[0], PREFIX) is not None
    assert events["evicted"] == 1
    assert served.offloading.snapshot()["problem"] is None


def test_a_file_that_another_server_removed_is_looked_for_again(tmp_path: Path) -> None:
    """Not a minute later, as one that cannot be read: another server may write it anew."""
    served, file = stored(tmp_path, "wait_complete")
    queue, away = waiting(), file.with_suffix(".away")
    served.offloading._agreed.settle([queue[0][1]])
    file.rename(away)
    assert served.offloading.before_batch(queue, SLOTS), "it was there a moment ago"
    happens(served, "load_failed")
    away.rename(file)
    events = served.offloading.directory.events
    assert eventually(lambda: (served.offloading.before_batch(queue, SLOTS), events["loaded"])[1] == 1)


def test_a_file_that_cannot_be_read_is_not_tried_again_at_once(tmp_path: Path) -> None:
    served, file = stored(tmp_path, "wait_complete")
    file.unlink()
    file.mkdir()
    assert served.offloading.before_batch(waiting(), SLOTS)
    happens(served, "load_failed")
    assert served.offloading.before_batch(waiting(), SLOTS) == []


def test_the_file_of_a_prefix_that_is_served_from_host_memory_does_not_leave_first(tmp_path: Path) -> None:
    """It was read or written long ago, and used a moment ago."""
    folder, two = tmp_path / "kv", 2 * (4096 + PREFIX * 2 * 2 * 2 * 8 * 4)
    served = Served(folder=str(folder), folder_bytes=two, num_pages=24)
    for row, digest in enumerate("abc"):
        served.slots(row, 0, PREFIX)
        served.decode(row, attachment(digest))
        loaded(served)
        if digest == "b":
            served.behind(4, attachment("a"), Request())
            served.offloading.slot_freed(4)
    assert sorted(path.name for path in folder.iterdir()) == [kv_file_name("a"), kv_file_name("c")]


class Long:
    """A prompt that has no room without its prefix, in the queue behind others."""

    def __init__(self, served: Served, digest: str = "a") -> None:
        self.served, self.one = served, attachment(digest)
        self.one.prompt_len = PREFIX + 1

    def waits(self, *others: Attachment) -> bool | str:
        """At the next look at the queue; why it does not, in words; False: its prefix is there."""
        for one in others:
            one.prompt_len = one.prompt_len or PREFIX
        offloading = self.served.offloading
        offloading.before_batch([(Request(), one) for one in (*others, self.one)], PREFIX + 1)
        tokens, ready = offloading.front(self.one, PREFIX)
        assert tokens == PREFIX
        return offloading.overdue(self.one) or not ready


@pytest.mark.parametrize(("policy", "seconds"), [("best_effort", 60), ("timeout", 7), ("wait_complete", 60)])
def test_a_file_that_is_not_read_holds_no_long_prompt(tmp_path: Path, clock: Clock, policy: str, seconds: int) -> None:
    served, file = stored(tmp_path, policy, prefetch_timeout_s=7.0)
    long = Long(served)
    with slow(file):
        assert long.waits() is True
        clock.now += seconds - 1
        assert long.waits() is True
        served.offloading._agreed.moves[0].progress = clock.now
        clock.now += seconds - 1
        assert long.waits() is True, "it goes on"
        clock.now += 1
        assert long.waits() == f"no more of its file was read within {seconds} s"
        assert Long(served).waits() == f"no more of its file was read within {seconds} s", "nor the next one"
    loaded(served)
    assert Long(served).waits() is False
    assert served.offloading.snapshot()["problem"] is None


def test_a_long_prompt_waits_for_reads_before_its_own_and_for_room(tmp_path: Path, clock: Clock) -> None:
    """As long as reads end. Behind one that does not nothing else is read, and there is no room."""
    served, file = stored(tmp_path, "wait_complete")
    for digest in ("b", "c"):
        file.with_name(kv_file_name(digest)).write_bytes(file.read_bytes())
    first, second, third = (Long(served, digest) for digest in "abc")
    with slow(file.with_name(kv_file_name("b"))):
        with slow(file):
            assert [one.waits() for one in (first, second, third)] == [True] * 3
            assert served.offloading.snapshot()["prefixes"] == {"loading": 2}, "the host has room for two"
            clock.now += 59
        happens(served, "loaded")
        clock.now += 59
        assert first.waits(second.one, third.one) is False
        assert second.waits(first.one, third.one) is True, "its turn came when the read before it ended"
        assert third.waits(first.one, second.one) is True
        clock.now += 1
        assert second.waits(first.one) == "no more of its file was read within 60 s"
        assert "is read or written for more than 60 s" in str(third.waits(first.one, second.one))
    loaded(served)
    assert served.offloading.snapshot()["events"]["load_failed"] == 1, "it is a file of another prefix"
    assert served.offloading.snapshot()["problem"] is None


@pytest.mark.usefixtures("by_pieces")
def test_a_pause_ends_no_long_prompt(tmp_path: Path, clock: Clock) -> None:
    """Nobody looks at the queue meanwhile. What reads files goes on; copies go on behind it."""
    served, file = stored(tmp_path, "timeout", prefetch_timeout_s=7.0)
    with slow(file):
        assert Long(served).waits() is True
    assert eventually(lambda: not served.offloading._agreed._mover._done.empty())
    clock.now += 3600
    assert Long(served).waits() is False
    served.offloading.drop()
    file.unlink()
    served.offloading._agreed._looked.clear()
    runs = attachment()
    served.slots(0, 0, PREFIX)
    served.decode(0, runs)
    assert Long(served).waits() is True
    clock.now += 3600
    assert Long(served).waits() is True, "the one that has it copied out runs on: in_place"
    served.offloading.slot_freed(0)
    served.runs.clear()
    clock.now += 3600
    assert Long(served).waits(runs) is True, "or waits, and will run again: retract"
    assert Long(served).waits() == "the requests that had it copied out have ended", "it was aborted"
    for _ in range(2):
        served.decode(0, runs)
    assert Long(served).waits() is False
