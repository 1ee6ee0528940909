"""A service that hangs (SIGSTOP) and a folder that answers late: the scheduler's thread waits for neither, and gets
back what it was promised.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prefix_index import FileStore, IndexCorrupt, StoreFolderError
from sglang_ext.config import Settings, config_from_dict
from sglang_ext.prefill.builds import ClaimDesk
from sglang_ext.runtime import SparseRuntime
from tests.serving.admitting import Runtime
from tests.serving.test_runtime import LAYERS, NAMESPACE, PROMPT, Model, Request, _decode_batch, _prefill, planned
from tests.serving.test_store_in_serving import Service
from tests.serving.traffic import eventually

OTHER = list(range(2000, 2064))


@pytest.fixture
def service(make_bench: Any, tmp_path: Path) -> Iterator[Service]:
    """A running service whose folder holds an index of PROMPT."""
    bench = make_bench()
    bench.put(PROMPT)
    served = Service(bench.store.folder, tmp_path / "s")
    served.start()
    yield served
    served.close()


@pytest.fixture
def start(make_bench: Any, tmp_path: Path) -> Iterator[Callable[..., SparseRuntime]]:
    """Runtimes that build, and report to `tmp_path / "report"`."""
    started: list[SparseRuntime] = []

    def make(store: object, **fields: Any) -> SparseRuntime:
        fields = {
            "method": "exact",
            "methods": {"exact": {}},
            "min_sparse_prompt_len": 16,
            "build_align": 16,
            "keep_ratio": 1.0,
            "layer_plan": ["anchor"] * LAYERS,
            "store_timeout_s": 120.0,  # whoever waits for a service that hangs is seen to
            "build": "prefill",
            "build_report": str(tmp_path / "report"),
            **fields,
        }
        settings = Settings(config=config_from_dict(fields), store=str(store))
        started.append(Runtime(settings, Model(make_bench().model)))
        return started[-1]

    yield make
    for runtime in started:
        runtime.close()


def _report(folder: Path) -> list[dict[str, Any]]:
    path = folder / "report"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _seconds(work: Callable[[], object]) -> float:
    begun = time.monotonic()
    work()
    return time.monotonic() - begun


@contextmanager
def late(runtime: SparseRuntime) -> Iterator[threading.Event]:
    """The store answers for leases and questions once the event is set, or at the end of the block."""
    answer, store = threading.Event(), runtime.store
    real = {name: getattr(store, name) for name in ("lease", "contains")}
    for name, call in real.items():
        setattr(store, name, lambda key, call=call: (answer.wait(60), call(key))[1])
    try:
        yield answer
    finally:
        answer.set()


def test_neither_a_snapshot_nor_an_admission_waits_for_a_service_that_hangs(service: Service, start: Any) -> None:
    runtime = start(service.url)
    assert runtime.snapshot()["indexes_in_store"] == 1
    service.signal(signal.SIGSTOP)
    requests = [Request() for _ in range(4)]
    admissions = [
        _seconds(lambda n=n, r=r: runtime.admit(r, str(n), [*OTHER[n:], n], NAMESPACE)) for n, r in enumerate(requests)
    ]
    snapshots = [_seconds(runtime.snapshot) for _ in range(3)]
    assert max(admissions) < 60, admissions
    assert max(snapshots) < 60, snapshots
    assert runtime.snapshot()["indexes_in_store"] == 1
    service.signal(signal.SIGCONT)
    assert eventually(lambda: runtime.snapshot()["store_problems"] == [])


def test_what_is_admitted_while_the_store_hangs_is_built_once_it_answers(
    service: Service, start: Any, tmp_path: Path
) -> None:
    runtime, request = start(service.folder, store_remote="memory:///"), Request()
    with late(runtime):
        runtime.admit(request, "a", [*OTHER, 7], NAMESPACE)
        assert _report(tmp_path) == []
        _prefill(runtime, "a", 65)
    runtime.slot_freed(request, 0, finished=True)
    assert [line["status"] for line in _report(tmp_path)] == ["built"]
    with FileStore(service.folder) as store:
        assert len(store.list()) == 2


def test_what_turns_out_to_be_stored_is_recorded_no_longer(service: Service, start: Any, tmp_path: Path) -> None:
    runtime, request = start(service.folder, store_remote="memory:///"), Request()
    builds = runtime.builds
    assert builds is not None
    with late(runtime):
        runtime.admit(request, "a", [*PROMPT, 7], NAMESPACE)
        assert len(builds) == 1
    assert eventually(lambda: (builds.settle(), len(builds) == 0)[1])
    assert [line["status"] for line in _report(tmp_path)] == ["exists"]
    assert builds.recorder.take("a") is None


def test_a_lease_that_comes_after_its_request_went_is_given_back(service: Service, start: Any) -> None:
    runtime, request = start(service.folder, store_remote="memory:///"), Request()
    builds = runtime.builds
    assert builds is not None
    with late(runtime):
        runtime.admit(request, "a", [*OTHER, 7], NAMESPACE)
        identity = builds._pending["a"].identity
        builds.discard("a")

    def free() -> bool:
        with FileStore(service.folder) as store:
            lease = store.lease(identity)
            return lease is not None and (lease.release(), True)[1]

    assert eventually(free)


def test_a_request_in_the_queue_of_an_idle_server_holds_no_lease(make_bench: Any, start: Any) -> None:
    runtime, request = start(make_bench().store.folder), Request()
    builds = runtime.builds
    assert builds is not None
    runtime.wait(request, "a", [*OTHER, 7], NAMESPACE)
    assert len(builds) == 0, "it may be aborted there, and nobody says so"
    runtime.slot_taken(request)
    identity = builds._pending["a"].identity
    with FileStore(runtime.store.folder) as other:
        assert other.lease(identity) is None
        runtime.slot_freed(request, 0, finished=False)
        assert other.lease(identity) is not None, "it waits again"


def test_an_error_in_the_second_look_gives_the_lease_back(make_bench: Any) -> None:
    """The store fails between the lease and the last check: as any error, and the lease does not stay."""
    bench = make_bench()
    answers = [False]

    class Failing(FileStore):
        def contains(self, key: Any) -> bool:
            if answers:
                return answers.pop()
            raise StoreFolderError("index store", expected="a folder", found="none", remedy="look")

    with Failing(bench.store.folder) as store:
        desk = ClaimDesk(store)
        claim = desk.claim(bench.identity(OTHER))
        assert isinstance(claim.refusal, StoreFolderError)
        assert bench.store.lease(claim.identity) is not None
        desk.close()


@pytest.mark.parametrize("fault", ["damaged, and the report fails", "unknown"])
def test_a_load_that_fails_is_a_fallback_and_is_tried_again(
    make_bench: Any, start: Any, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    bench = make_bench()
    bench.put(PROMPT)
    runtime = start(bench.store.folder, build="off", build_report=None, prefetch_policy="wait_complete")

    def failing(error: Exception) -> Callable[..., None]:
        def call(*_: Any) -> None:
            raise error

        return call

    if fault == "unknown":
        monkeypatch.setattr(runtime.residency, "_load", failing(RuntimeError("the loader's own defect")))
    else:
        read_only = {"expected": "a usable folder", "found": "Read-only file system", "remedy": "r"}
        damaged = IndexCorrupt("checksum", expected="a", found="b", remedy="c")
        monkeypatch.setattr(runtime.store, "get", failing(damaged))
        monkeypatch.setattr(runtime.store, "report", failing(StoreFolderError("index store", **read_only)))
    first, second = Request(), Request()
    runtime.admit(first, "a", [*PROMPT, 7], NAMESPACE)
    assert not planned(runtime, _decode_batch(runtime, ["a"], [66]))
    assert runtime.counters.fallbacks == {"index_loading" if fault == "unknown" else "index_corrupt": 1}
    runtime.slot_freed(first, 0, finished=True)
    monkeypatch.undo()
    runtime.admit(second, "b", [*PROMPT, 8], NAMESPACE)
    assert planned(runtime, _decode_batch(runtime, ["b"], [66])), "loaded anew"
