"""Fixtures of the server tests; what they are made of stands in `harness`."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.needle.tasks import make_document
from tests.server.harness import ADMIN_KEY, EXACT_CONFIG, PRODUCTION, Pool, Server, Texts
from tests.server.jobs import Prebuilt, run_prebuild


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("logs"))
    yield pool
    pool.close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """A failed test shows the end of its server's log."""
    outcome = yield
    report = outcome.get_result()
    pool = getattr(item, "funcargs", {}).get("serve")
    if report.failed and isinstance(pool, Pool) and pool.server is not None:
        report.sections.append((f"end of {pool.server.log}", pool.server.tail()))


@pytest.fixture(scope="session")
def texts() -> Texts:
    return Texts(
        first=make_document("many_keys", seed=71, num_tokens=1536, num_questions=12),
        second=make_document("many_keys", seed=72, num_tokens=1280, num_questions=12),
        tail=make_document("multi_query", seed=73, num_tokens=1024, num_questions=8),
        unindexed=make_document("many_keys", seed=74, num_tokens=1152, num_questions=8),
        elsewhere=make_document("many_keys", seed=75, num_tokens=1088, num_questions=8),
        large=make_document("many_keys", seed=501, num_tokens=5120, num_questions=24),
        damaged=make_document("many_keys", seed=77, num_tokens=1024, num_questions=2),
    )


@pytest.fixture(scope="session")
def prebuild() -> Callable[..., Prebuilt]:
    return run_prebuild


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, texts: Texts, serve: Pool) -> Prebuilt:
    """The main store's prebuild job, which all processes of a run share."""
    serve.close()
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "stocked"
    folder.mkdir(exist_ok=True)
    done = folder / "job.pickle"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            done.write_bytes(pickle.dumps(_stocked(folder, texts)))
    job: Prebuilt = pickle.loads(done.read_bytes())
    return job


def _stocked(folder: Path, texts: Texts) -> Prebuilt:
    """Indexes by a chunked prefill, refused prompts among them, a short one."""
    prompts = [
        {"id": "first", "text": texts.first.text},
        {"id": "second", "text": texts.second.text},
        {"id": "long", "text": texts.long},
        {"id": "second-named", "text": texts.second.text, "extra_key": "tenant-b"},
        {"id": "large", "text": texts.large.text},
        {"id": "damaged", "text": texts.damaged.text},
        {"id": "negative", "input_ids": [5] * 1087 + [-1]},
        {"id": "outside", "input_ids": [5] * 1087 + [1 << 20]},
        {"id": "too-long", "input_ids": [5] * 12288},
        {"id": "short", "text": texts.first.questions[0].text},
    ]
    config = {**EXACT_CONFIG, "offload": {"host_bytes": 16, "folder": str(folder / "kv")}}
    job = run_prebuild(folder, prompts, config=config, chunked_prefill_size="512")
    assert {line["id"] for line in job.report} == {prompt["id"] for prompt in prompts}, job.output[-4000:]
    return job


@pytest.fixture(scope="session")
def damaged(built: Prebuilt, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a copy of the main store, in it the index of `damaged`, which has a wrong byte in an array)."""
    store = Path(shutil.copytree(built.store, tmp_path_factory.mktemp("damaged") / "store"))
    wrong = store / Path(built.line("damaged")["path"]).relative_to(built.store)
    raw = bytearray(wrong.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    wrong.write_bytes(raw)
    return store, wrong


@pytest.fixture
def production(serve: Pool, damaged: tuple[Path, Path]) -> Server:
    """The server of most tests: as people serve, on a store of which an index is damaged. The model has no chat
    template of its own.
    """
    flags = {"disable_overlap_schedule": None, "admin_api_key": ADMIN_KEY, "chat_template": "chatml"}
    return serve(damaged[0], PRODUCTION, **flags)


@pytest.fixture
def store(built: Prebuilt) -> Path:
    """The main store, to read only: tests that change files copy it."""
    return built.store


def _boot(item: pytest.Item) -> str:
    """Whose server a test asks: tests of one name share one."""
    mark = item.get_closest_marker("boot")
    return mark.args[0] if mark else Path(str(item.path)).stem


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one server stand together, and those that start servers come first: they take longest.

    Every one may have to wait for a job and a server before its own turn.
    """
    here = Path(__file__).parent
    ours = [item for item in items if here in Path(str(item.path)).parents]
    others = [item for item in items if here not in Path(str(item.path)).parents]
    order = list(dict.fromkeys(["production", *map(_boot, ours)]))
    for item in ours:
        item.add_marker(pytest.mark.server)
        item.add_marker(pytest.mark.timeout(1800))
        item.add_marker(pytest.mark.xdist_group(f"server-{_boot(item)}"))
    items[:] = [*sorted(ours, key=lambda item: order.index(_boot(item))), *others]
