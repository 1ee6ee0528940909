"""The runtime on a shared folder, on a service that dies and comes back, and beside a remote store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefix_index import FileStore, StoreUnavailable
from sglang_ext.config import Settings, config_from_dict
from sglang_ext.runtime import SparseRuntime
from sglang_ext.storage import configured_store
from tests.serving.admitting import Runtime
from tests.serving.test_runtime import LAYERS, NAMESPACE, PROMPT, Model, Request, _decode_batch, _prefill, _step

OTHER = list(range(2000, 2064))


@pytest.fixture
def start(make_bench: Callable[..., Any]) -> Iterator[Callable[..., SparseRuntime]]:
    """Runtimes of one configuration; each names its store."""
    started: list[SparseRuntime] = []

    def make(store: object, **fields: Any) -> SparseRuntime:
        fields = {
            "method": "exact",
            "methods": {"exact": {}},
            "min_sparse_prompt_len": 16,
            "keep_ratio": 1.0,
            "layer_plan": ["anchor"] * LAYERS,
            "prefetch_policy": "wait_complete",
            "store_timeout_s": 120.0,  # whoever waits for a store that does not answer is seen to
            **fields,
        }
        bench = make_bench()
        runtime = Runtime(Settings(config=config_from_dict(fields), store=str(store)), Model(bench.model))
        started.append(runtime)
        return runtime

    yield make
    for runtime in started:
        runtime.close()


def _report(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# -- one build at a time -----------------------------------------------------------------------------------------------


@pytest.fixture
def builders(start: Callable[..., SparseRuntime], tmp_path: Path) -> Any:
    """(two runtimes that build into one folder, their reports)."""
    folder = tmp_path / "shared"
    folder.mkdir()
    reports = [tmp_path / f"report-{number}.jsonl" for number in range(2)]
    runtimes = [start(folder, build="prefill", build_report=str(report), build_align=16) for report in reports]
    return runtimes, reports


def test_of_two_servers_one_builds_and_the_other_says_so(builders: Any) -> None:
    (one, two), reports = builders
    first, second, third = Request(), Request(), Request()
    one.admit(first, "a", [*PROMPT, 7], NAMESPACE)
    two.admit(second, "b", [*PROMPT, 8], NAMESPACE)
    (line,) = _report(reports[1])
    assert (line["status"], line["reason"]) == ("skipped", "building_elsewhere")
    assert len(line["digest"]) == 64
    assert two.builds is not None
    assert len(two.builds) == 0, "nothing is recorded for it"
    _prefill(one, "a", 65)
    one.slot_freed(first, 0, finished=True)
    assert [row["status"] for row in _report(reports[0])] == ["built"]
    two.admit(third, "c", [*PROMPT, 9], NAMESPACE)
    assert _report(reports[1])[-1]["status"] == "exists"
    two.slot_freed(second, 0, finished=True)
    assert len(_report(reports[1])) == 2


@pytest.mark.parametrize("how", ["forgotten", "rejected", "weights"])
def test_a_build_that_comes_to_nothing_gives_its_lease_back(how: str, builders: Any) -> None:
    (one, two), reports = builders
    first, second = Request(), Request()
    one.admit(first, "a", [*PROMPT, 7], NAMESPACE)
    if how == "rejected":
        one.slot_freed(first, 0, finished=True)
        assert _report(reports[0])[0]["reason"] == "capture_rejected"
    elif how == "weights":
        one.weights_updated(replaced=True)
    else:
        del first
        one._sweep()
    two.admit(second, "b", [*PROMPT, 8], NAMESPACE)
    _prefill(two, "b", 65)
    two.slot_freed(second, 0, finished=True)
    assert [row["status"] for row in _report(reports[1])] == ["built"]


def test_two_requests_of_one_server_build_once(builders: Any) -> None:
    (one, _), reports = builders
    requests = [Request(), Request()]
    for number, request in enumerate(requests):
        one.admit(request, str(number), [*PROMPT, number], NAMESPACE)
    assert _report(reports[0])[0]["reason"] == "building_elsewhere"
    _prefill(one, "0", 65)
    for number, request in enumerate(requests):
        one.slot_freed(request, number, finished=True)
    assert [row["status"] for row in _report(reports[0])] == ["skipped", "built"]


def test_a_folder_that_goes_away_does_not_end_a_building_server(builders: Any) -> None:
    import shutil

    (one, _), reports = builders
    shutil.rmtree(one.store.folder)
    request = Request()
    one.admit(request, "a", [*PROMPT, 7], NAMESPACE)
    (line,) = _report(reports[0])
    assert (line["status"], line["reason"]) == ("failed", "StoreFolderError")


# -- a service ---------------------------------------------------------------------------------------------------------


class Service:
    """`sglang-ext store serve` as a process."""

    def __init__(self, folder: Path, socket: Path) -> None:
        self.folder, self.url = folder, f"ipc://{socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ["store", "serve", "--dir", str(self.folder), "--endpoint", self.url]
        self._process = subprocess.Popen([sys.executable, "-m", "sglang_ext.cli", *words], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                configured_store(self.url, config_from_dict({"store_timeout_s": 1.0})).close()
                return
            except StoreUnavailable:
                assert time.monotonic() < deadline
                assert self._process.poll() is None, "the service ended"
                time.sleep(0.05)

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)
        if number == signal.SIGSTOP:
            os.waitpid(self._process.pid, os.WUNTRACED)  # until it stands still
        if number == signal.SIGKILL:
            self._process.wait(60)
            self._process = None

    def close(self) -> None:
        if self._process is not None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)


@pytest.fixture
def service(make_bench: Callable[..., Any], tmp_path: Path) -> Iterator[Service]:
    """A running service whose folder holds an index of PROMPT."""
    bench = make_bench()
    bench.put(PROMPT)
    served = Service(bench.store.folder, tmp_path / "s")
    served.start()
    yield served
    served.close()


def _decodes_sparsely(runtime: SparseRuntime, rid: str, prompt: list[int]) -> bool:
    request = Request()
    runtime.admit(request, rid, [*prompt, 7], NAMESPACE)
    sparse = all(out is not None for out in _step(runtime, _decode_batch(runtime, [rid], [66])))
    runtime.slot_freed(request, 0, finished=True)
    return sparse


def _eventually(check: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if check():
            return True
        time.sleep(0.1)
    return False


def test_a_server_on_a_service_lives_on_when_that_dies_and_finds_it_again(
    service: Service, start: Callable[..., SparseRuntime], make_bench: Callable[..., Any]
) -> None:
    runtime = start(service.url)
    assert _decodes_sparsely(runtime, "a", PROMPT)
    service.signal(signal.SIGKILL)
    for number in range(3):
        begun = time.monotonic()
        assert not _decodes_sparsely(runtime, f"gone-{number}", OTHER)
        assert time.monotonic() - begun < 60, "the scheduler does not wait for the service"
    assert _decodes_sparsely(runtime, "still", PROMPT), "resident, or read from the folder"
    state = runtime.snapshot()
    assert state["fallbacks"] == {"no_index": 3}
    assert any("store" in problem for problem in state["store_problems"])
    service.start()
    bench = make_bench()
    with FileStore(service.folder) as store, bench.store.get(bench.put(OTHER).digest) as index:
        store.put(index.payload())
    assert _eventually(lambda: _decodes_sparsely(runtime, f"again-{time.monotonic()}", OTHER))


def test_a_service_that_hangs_does_not_hold_up_admission(service: Service, start: Callable[..., SparseRuntime]) -> None:
    runtime = start(service.url, prefetch_policy="best_effort")
    service.signal(signal.SIGSTOP)
    longest = 0.0
    requests = [Request() for _ in range(8)]
    for number, request in enumerate(requests):
        begun = time.monotonic()
        runtime.admit(request, str(number), [*OTHER, number], NAMESPACE)
        longest = max(longest, time.monotonic() - begun)
        time.sleep(0.1)
    assert longest < 60, "a rescan takes until store_timeout_s, on a thread of its own"
    service.signal(signal.SIGCONT)


def test_a_service_that_is_not_there_stops_the_start(tmp_path: Path, start: Callable[..., SparseRuntime]) -> None:
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"expected .*, found .*; "):
        start(f"ipc://{tmp_path}/none", store_timeout_s=1.0)
    assert time.monotonic() - begun < 60


def test_an_index_whose_store_does_not_answer_is_a_fallback_by_name_and_comes_back(
    service: Service, start: Callable[..., SparseRuntime]
) -> None:
    runtime = start(service.url)
    real = runtime.store.get

    def unavailable(key: Any) -> Any:
        raise StoreUnavailable("service", expected="an answer", found="none", remedy="wait")

    runtime.store.get = unavailable
    assert not _decodes_sparsely(runtime, "a", PROMPT)
    assert runtime.counters.fallbacks == {"store_unavailable": 1}
    runtime.store.get = real
    assert _decodes_sparsely(runtime, "b", PROMPT), "not taken out of the offer: nothing is wrong with it"


# -- a remote store to share with -------------------------------------------------------------------------------------


@pytest.mark.parametrize("remote", ["memory:///", "an empty shared folder"])
def test_a_folder_keeps_and_serves_its_own_beside_an_empty_remote_store(
    make_bench: Callable[..., Any], start: Callable[..., SparseRuntime], tmp_path: Path, remote: str
) -> None:
    bench = make_bench()
    entry = bench.put(PROMPT)
    (tmp_path / "empty").mkdir()
    runtime = start(bench.store.folder, store_remote=remote if "://" in remote else f"file://{tmp_path}/empty")
    runtime.store.rescan(full=True)
    assert _decodes_sparsely(runtime, "a", PROMPT)
    assert Path(entry.path).exists()


@pytest.mark.parametrize("remote", ["s3://no-such-bucket-0/x", "file:///no/such/folder", "mooncake://127.0.0.1:1"])
def test_a_remote_store_that_is_not_there_does_not_stop_the_start(
    make_bench: Callable[..., Any], start: Callable[..., SparseRuntime], remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ENDPOINT_URL", "http://127.0.0.1:1"), ("REGION", "r"), ("ALLOW_HTTP", "true")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    bench = make_bench()
    bench.put(PROMPT)
    begun = time.monotonic()
    runtime = start(bench.store.folder, store_remote=remote, store_timeout_s=1.0)
    assert time.monotonic() - begun < 60
    assert _decodes_sparsely(runtime, "a", PROMPT)
    # A snapshot that the store did not answer in time says so in one problem more.
    assert _eventually(lambda: len(runtime.snapshot()["store_problems"]) == 1)


def test_an_index_of_a_shared_folder_is_served_and_kept_on_this_machine(
    make_bench: Callable[..., Any],
    start: Callable[..., SparseRuntime],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = make_bench()
    entry = bench.put(PROMPT)
    (tmp_path / "mine").mkdir()
    shared = f"file://{bench.store.folder}"
    runtime = start(tmp_path / "mine", store_remote=shared, store_wait="wait_complete")
    assert "store_wait='wait_complete' has no effect any more" in caplog.text
    assert _decodes_sparsely(runtime, "a", PROMPT)
    copy = tmp_path / "mine" / Path(entry.path).relative_to(bench.store.folder)
    assert copy.read_bytes() == Path(entry.path).read_bytes()
    assert runtime.snapshot()["store_counters"]["fetched"] == 1


def test_what_is_built_goes_to_the_remote_store_and_is_read_back(
    start: Callable[..., SparseRuntime], tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    report = tmp_path / "report.jsonl"
    runtime = start(
        tmp_path / "mine", store_remote="memory:///", build="prefill", build_report=str(report), build_align=16
    )
    request = Request()
    runtime.admit(request, "a", [*PROMPT, 7], NAMESPACE)
    _prefill(runtime, "a", 65)
    runtime.slot_freed(request, 0, finished=True)
    assert _report(report)[0]["status"] == "built"
    assert _decodes_sparsely(runtime, "b", PROMPT)
    assert runtime.store.flush(60)
    assert len(runtime.store.remotes[0].list()) == 1
    states: list[dict[str, Any]] = []

    def in_time() -> bool:
        states.append(json.loads(json.dumps(runtime.snapshot())))
        return states[-1]["store_problems"] == []  # else the store was slow, and what is shown is as last known

    assert _eventually(in_time)
    state = states[-1]
    assert (state["indexes_in_store"], state["store_bytes"] > 0) == (1, True)
    counters = state["store_counters"]
    assert (counters["published"], counters["hits_remote"]) == (1, 0)
    assert counters["hits_local"] > 0
