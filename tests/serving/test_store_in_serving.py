"""The runtime on a shared folder, on a service that hangs (SIGSTOP) and comes back, and beside a remote store: look-ups
wait for none of them, and whoever builds gets back what was promised.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefix_index import FileStore, StoreFolderError, StoreUnavailable
from sglang_ext.prefill.builder import IndexFactory
from sglang_ext.runtime import SparseRuntime
from tests.index_faults import replaced
from tests.prefix_index.tiers import Service
from tests.serving.admitting import OTHER, PROMPT, Runtime, check_books, eventually, ours, planned, prefill, report

#: Whoever waits for a store that does not answer is seen to.
PATIENT = {"store_timeout_s": 120.0}
BUILDING = {**PATIENT, "build": "prefill"}


def seconds(work: Callable[[], object]) -> float:
    begun = time.monotonic()
    work()
    return time.monotonic() - begun


@pytest.fixture
def folder(make_bench: Callable[..., Any]) -> Path:
    """A store that holds an index of PROMPT."""
    bench = make_bench()
    bench.put(PROMPT)
    return Path(bench.store.folder)


def statuses(runtime: SparseRuntime) -> list[str]:
    return [line["status"] for line in report(runtime)]


@pytest.fixture
def builders(start: Any, tmp_path: Path) -> tuple[Runtime, Runtime]:
    """Two runtimes that build into one folder."""
    folder = tmp_path / "shared"
    folder.mkdir()
    return start(store=folder, **BUILDING), start(store=folder, **BUILDING)


def test_of_two_servers_one_builds_and_the_other_says_so(builders: Any) -> None:
    one, two = builders
    first, second = one.came("a"), two.came("b", [*PROMPT, 8])
    (line,) = report(two)
    assert (line["status"], line["reason"]) == ("skipped", "building_elsewhere")
    assert len(line["digest"]) == 64
    assert len(two.builds) == 0, "nothing is recorded for it"
    prefill(one, "a", 65)
    one.slot_freed(first, 0, finished=True)
    assert statuses(one) == ["built"]
    two.came("c", [*PROMPT, 9])
    two.slot_freed(second, 0, finished=True)
    assert statuses(two) == ["skipped", "exists"]


@pytest.mark.parametrize("how", ["forgotten", "rejected", "retracted", "weights"])
def test_a_build_that_comes_to_nothing_gives_its_lease_back(how: str, builders: Any) -> None:
    one, two = builders
    first = one.came("a")
    if how == "rejected":
        one.slot_freed(first, 0, finished=True)
        assert report(one)[0]["reason"] == "capture_rejected"
    elif how == "retracted":
        one.slot_freed(first, 0, finished=False)
    elif how == "weights":
        one.weights_updated()
    else:
        del first
        one.held.clear()
        one._sweep()
    second = two.came("b", [*PROMPT, 8])
    prefill(two, "b", 65)
    two.slot_freed(second, 0, finished=True)
    assert statuses(two) == ["built"]


def test_a_folder_that_goes_away_does_not_end_a_building_server(builders: Any) -> None:
    one, _ = builders
    shutil.rmtree(one.store.folder)
    one.came("a")
    (line,) = report(one)
    assert (line["status"], line["reason"]) == ("failed", "StoreFolderError")


@pytest.fixture
def service(folder: Path, tmp_path: Path) -> Iterator[Service]:
    """A running service of a copy of that folder."""
    shutil.copytree(folder, tmp_path / "served" / "store")
    with Service(tmp_path / "served") as served:
        yield served


def decodes_sparsely(runtime: Runtime, rid: str, prompt: list[int]) -> bool:
    request = runtime.came(rid, [*prompt, 7])
    sparse = ours(runtime, [rid], [66])
    runtime.slot_freed(request, 0, finished=True)
    return sparse


def test_neither_a_snapshot_nor_an_admission_waits_for_a_service_that_hangs(service: Service, start: Any) -> None:
    """A rescan takes until store_timeout_s, on a thread of its own."""
    runtime = start(store=service.endpoint, **BUILDING)
    assert runtime.snapshot()["indexes_in_store"] == 1
    os.kill(service.pid, signal.SIGSTOP)
    os.waitpid(service.pid, os.WUNTRACED)  # until it stands still
    for number in range(4):
        assert seconds(lambda n=number: runtime.came(str(n), [*OTHER[n:], n])) < 60
        time.sleep(0.25)
    assert decodes_sparsely(runtime, "indexed", PROMPT), "read from the folder"
    assert max(seconds(runtime.snapshot) for _ in range(3)) < 60
    assert runtime.snapshot()["indexes_in_store"] == 1
    os.kill(service.pid, signal.SIGCONT)
    assert eventually(lambda: runtime.snapshot()["store_problems"] == [])


def test_a_service_that_is_not_there_stops_the_start(tmp_path: Path, start: Any) -> None:
    with pytest.raises(StoreUnavailable, match=r"expected .*, found .*; "):
        start(store=f"ipc://{tmp_path}/none", store_timeout_s=0.2)


def test_an_index_whose_store_does_not_answer_is_a_fallback_by_name_and_comes_back(start: Any) -> None:
    runtime = start([PROMPT])
    real = runtime.store.get

    def unavailable(key: Any) -> Any:
        raise StoreUnavailable("service", expected="an answer", found="none", remedy="wait")

    runtime.store.get = unavailable
    assert not decodes_sparsely(runtime, "a", PROMPT)
    assert runtime.counters.fallbacks == {"store_unavailable": 1}
    runtime.store.get = real
    assert decodes_sparsely(runtime, "b", PROMPT), "not taken out of the offer: nothing is wrong with it"


def test_an_error_in_the_second_look_gives_the_lease_back(make_bench: Callable[..., Any]) -> None:
    """The store fails between the lease and the last check: as any error, and the lease does not stay."""
    bench = make_bench()
    answers = [False]

    class Failing(FileStore):
        def contains(self, key: Any) -> bool:
            if answers:
                return answers.pop()
            raise StoreFolderError("index store", expected="a folder", found="none", remedy="look")

    identity = bench.identity(OTHER)
    with Failing(bench.store.folder) as store, pytest.raises(StoreFolderError):
        IndexFactory(store, bench.config).take_lease(identity)
    assert bench.store.lease(identity) is not None


def test_a_load_that_ends_without_a_word_is_a_fallback_and_the_next_request_tries_again(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = start([PROMPT])

    def fails(*_: Any) -> None:
        raise RuntimeError("the loader's own defect")

    with monkeypatch.context() as patched:
        patched.setattr(runtime.residency, "_load", fails)
        first = runtime.came("a")
        assert not planned(runtime, ["a"], [66])
    assert runtime.counters.fallbacks == {"index_loading": 1}
    runtime.slot_freed(first, 0, finished=True)
    runtime.came("b", [*PROMPT, 8])
    assert planned(runtime, ["b"], [66])


@pytest.mark.parametrize("remote", ["s3://no-such-bucket-0/x", "file:///no/such/folder", "mooncake://127.0.0.1:1"])
def test_a_remote_store_that_is_not_there_does_not_stop_the_start(
    start: Any, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws = {"ENDPOINT_URL": "http://127.0.0.1:1", "REGION": "r", "ALLOW_HTTP": "true"}
    for name, value in {**aws, "ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    begun = time.monotonic()
    runtime = start([PROMPT], store_remote=remote, store_timeout_s=1.0)
    assert time.monotonic() - begun < 60
    assert decodes_sparsely(runtime, "a", PROMPT)
    # A snapshot that the store did not answer in time says so in one problem more.
    assert eventually(lambda: len(runtime.snapshot()["store_problems"]) == 1)


def test_an_index_of_a_shared_folder_is_served_and_kept_on_this_machine(
    folder: Path, start: Any, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    runtime = start(store=mine, store_remote=f"file://{folder}", **PATIENT)
    assert decodes_sparsely(runtime, "a", PROMPT)
    (index,) = folder.rglob("*.pfxindex")
    assert (mine / index.relative_to(folder)).read_bytes() == index.read_bytes()
    assert runtime.snapshot()["store_counters"]["fetched"] == 1


def test_an_index_that_was_built_again_is_loaded_once_nobody_uses_the_former_build(start: Any) -> None:
    """The quality guard would try a bad build again and again, however often it is built anew."""
    runtime = start([PROMPT])
    [entry] = runtime.store.list()
    first = runtime.came("a")
    former = runtime.residency.resident()[entry.digest]
    assert planned(runtime, ["a"], [66])
    newer = replaced(runtime.store, entry.digest, lambda arrays: None, created=entry.created + 5)
    runtime.directory.rescan()
    second = runtime.came("b", [*PROMPT, 8])
    assert runtime.residency.resident() == {entry.digest: former}, "a request has it"
    for request, row in ((first, 0), (second, 1)):
        runtime.slot_freed(request, row, finished=True)
    runtime.came("c", [*PROMPT, 9])
    index = runtime.residency.resident()[entry.digest]
    assert (index is former, index.entry) == (False, newer)
    assert planned(runtime, ["c"], [66])
    assert index.before is None
    check_books(runtime.residency)
    runtime.residency.release(runtime.residency.acquire(entry))
    assert runtime.residency.resident() == {entry.digest: index}, "an older look-up changes nothing"
