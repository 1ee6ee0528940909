"""What goes wrong with host memory and its files in a real server: answers stay those without, and nothing leaks."""

from __future__ import annotations

import contextlib
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.offload.kv_files import kv_file_name
from tests.offload.slow_file import slow
from tests.server.harness import EXACT_CONFIG, STOP_SECONDS, Answer, Pool, Server, flags_of
from tests.server.jobs import Prebuilt, processes
from tests.server.test_offload import BYTES_OF_TOKEN, CONFIG, FIRST, FLAGS, SECOND, TOKENS, offload, served

LONG = 60
"""Tokens of an answer that is to run still when something happens."""


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    return {**CONFIG, "offload": {**CONFIG["offload"], "folder": str(folder), **changes}}


class Asked:
    """A prompt behind one document, its answer without indexes, and the document's file."""

    def __init__(self, server: Server, prompt: str, prefix: int, file: Path) -> None:
        self.prompt, self.prefix, self.file = prompt, prefix, file
        self.on(server)
        self.dense = server.generate(prompt, TOKENS, sparse=False).ids
        server.flush()

    def on(self, server: Server) -> None:
        """Ask this server from now on, and count what happens there."""
        self.server, self.before = server, offload(server)["events"]

    def right(self, *, hosted: bool) -> Answer:
        """Its answer is the one without; whether its prefix was in host memory."""
        answer: Answer = self.server.generate(self.prompt, TOKENS)
        assert answer.ids == self.dense
        assert (answer.cached_tokens >= self.prefix) == hosted
        return answer

    def happens(self, event: str, times: int) -> None:
        """Until it has happened so often."""
        count = self.before.get(event, 0) + times
        self.server.until(lambda state: state["offload"]["events"].get(event, 0) >= count)
        assert self.server.state()["offload"]["events"].get(event, 0) == count

    def balanced(self, **prefixes: int) -> None:
        """What lies in host memory; everything else of it is free, as is SGLang's pool but for what it may evict. What
        its allocator and its cache have it compares itself, and ends where the sum is wrong.
        """
        self.server.until(lambda state: state["offload"]["users"] == 0)
        self.server.until(lambda _: self.server.get("/v1/loads")["loads"][0]["num_used_tokens"] == 0, 20)
        state = offload(self.server)
        assert (state["prefixes"], state["problem"]) == (prefixes, None)
        assert state["pages"] - state["free_pages"] == sum(prefixes.values()) * self.prefix // 16

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """See the function."""
        with held(self.server, self.prompt, self.file):
            yield

    def flushed_while_read(self) -> None:
        """What is read then is of no use, and its memory is given back."""
        self.server.flush()
        with self.held():
            self.server.flush()
            assert self.server.state()["offload"]["prefixes"] == {}
        self.balanced()


@contextlib.contextmanager
def held(server: Server, prompt: str, file: Path) -> Iterator[None]:
    """A request that waits for its file is aborted, which ends it; within the block the file is read still."""
    with slow(file), ThreadPoolExecutor(1) as pool:
        future = pool.submit(server.generate, prompt, TOKENS, rid="held")
        server.until(lambda state: state["offload"]["prefixes"].get("loading") == 1)
        server.post("/abort_request", {"rid": "held"})
        future.exception(20)
        yield


@pytest.fixture(scope="module")
def folder(built: Prebuilt, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the prebuild wrote, for servers one after another."""
    return Path(shutil.copytree(built.kv, tmp_path_factory.mktemp("files") / "kv"))


@pytest.fixture(scope="module")
def files(folder: Path, built: Prebuilt) -> list[Path]:
    """Those of `first` and `second`."""
    return [folder / kv_file_name(built.line(name)["digest"]) for name in ("first", "second")]


@pytest.fixture(scope="module")
def filed(serve: Pool, built: Prebuilt, folder: Path) -> Callable[[], Server]:
    """The server of these tests, which ends soon when it is told to. Its first layer attends all."""
    config = {**config_of(folder), "layer_plan": ["dense", *["anchor"] * 5]}
    flags = {**FLAGS, "environment": {**FLAGS["environment"], "SGL_FORCE_SHUTDOWN": "1"}}
    return lambda: serve(built.store, config, enable_metrics="", **flags)


@pytest.fixture(scope="module")
def expected(filed: Callable[[], Server], texts: Any) -> dict[str, tuple[int, ...]]:
    """Prompts behind both documents, and what dense decode answers."""
    server, prompts = filed(), [texts.ask(one, n) for one in (texts.first, texts.second) for n in range(2)]
    found = {prompt: server.generate(prompt, LONG, sparse=False).ids for prompt in prompts}
    server.flush()
    return found


@pytest.mark.usefixtures("expected")  # of this server
@pytest.mark.boot("offload-files")
def test_a_server_that_starts_anew_needs_no_prefill(filed: Callable[[], Server], files: list[Path], texts: Any) -> None:
    """From its file, which the prebuild wrote, a prefix is read while its request waits; a file that is damaged or gone
    is written anew.
    """
    server, prompts = filed(), [texts.ask(texts.second, n) for n in range(3)]
    one = Asked(server, prompts[0], SECOND, files[1])
    one.right(hosted=True)
    one.happens("loaded", 1)
    served(server, prompts, SECOND)
    for number, damage in enumerate((one.file.unlink, lambda: _corrupt(one.file), lambda: _other_layout(one.file))):
        server.flush()
        damage()
        assert one.right(hosted=False).cached_tokens == 0
        one.happens("load_failed", number)
        one.happens("saved", number + 1)
        assert one.file.stat().st_size == 4096 + SECOND * BYTES_OF_TOKEN
    counted = {"loaded": 1, "load_failed": 2, "saved": 3, "copied": 3, "translated": 1 + 2 * len(prompts)}
    server.until(lambda _state: {n: c for n, c in server.metrics()["offload"].items() if c} == counted)
    one.right(hosted=True)
    one.balanced(host=1)


@pytest.mark.boot("offload-files")
def test_slow_files_and_servers_that_end(
    filed: Callable[[], Server], folder: Path, files: list[Path], texts: Any
) -> None:
    """One server's life, until it is killed while it writes a file; then that of the next one."""
    server, (first, second) = filed(), files
    one = Asked(server, texts.ask(texts.second, 0), SECOND, second)
    # Aborted while it waits: the file is read to the end, and serves the next one.
    with one.held():
        one.happens("loaded", 0)
    one.happens("loaded", 1)
    one.right(hosted=True)
    one.flushed_while_read()
    one.right(hosted=True)
    one.happens("loaded", 2)
    _flush_under_use(server, one.prompt)
    one.balanced(host=1)
    _no_room_on_disk(server, one)
    server.flush()
    one.balanced()
    other = Asked(server, texts.ask(texts.first, 0), FIRST, first)
    _told_to_end_while_it_writes(one, killed=True)
    assert not second.exists()
    assert list(folder.glob(f".{second.name}.partial-*"))
    server = filed()
    other.on(server)
    one.on(server)
    one.right(hosted=False)
    one.happens("saved", 1)
    one.right(hosted=True)
    one.balanced(host=1)
    other.right(hosted=True)
    assert "load_failed" not in server.state()["offload"]["events"]
    _selects_a_part(server, [texts.ask(texts.first, n) for n in range(3)], first)
    server.flush()
    other.balanced()
    _told_to_end_while_it_writes(one, killed=False)
    assert not second.exists() or second.stat().st_size == 4096 + SECOND * BYTES_OF_TOKEN


def _selects_a_part(server: Server, prompts: list[str], file: Path) -> None:
    """But for the first layer, on the device and behind host memory."""
    server.post("/sparse_attn/budget", {"top_k": 256})
    for prompt in prompts:
        server.flush()
        file.unlink()
        on_device, found = (server.generate(prompt, TOKENS) for _ in range(2))
        assert found.ids == on_device.ids
        assert (on_device.cached_tokens, found.cached_tokens >= FIRST) == (0, True)
        assert found.told["selected_tokens"] == on_device.told["selected_tokens"] == 256
        assert found.told["steps"]["sparse"] == TOKENS - 1
        server.until(lambda _: file.exists())
    residents = offload(server)["residents"]
    assert 0 < residents["transferred"] < residents["wanted"]


def _told_to_end(server: Server) -> None:
    """It ends in SGLang's usual time, and no process of it is left."""
    server.process.terminate()
    server.process.wait(STOP_SECONDS)
    deadline = time.monotonic() + STOP_SECONDS
    while left := processes(server.process.pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert not re.search("Fatal Python error|Segmentation fault|core dumped", server.tail(20000))


def _told_to_end_while_it_writes(one: Asked, *, killed: bool) -> None:
    """Between the first byte of the file and its name its scheduler stands still. Then it is told to end, and goes on;
    or is killed, as SGLang kills one that does not end.
    """
    server, partial = one.server, f".{one.file.name}.partial-*"
    schedulers = processes(server.process.pid, "scheduler")
    for _attempt in range(30):
        server.flush()
        one.file.unlink(missing_ok=True)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.generate, one.prompt, 2, timeout=10)  # it holds the server otherwise
            deadline = time.monotonic() + 60
            while not (one.file.exists() or any(one.file.parent.glob(partial))):
                assert time.monotonic() < deadline, "nothing is written"
            for process in schedulers:
                process.suspend()
            stopped = any(one.file.parent.glob(partial)) and not one.file.exists()
            if stopped:
                server.process.terminate()
                while "Force exiting" not in server.tail(20000):
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            for process in schedulers:
                process.kill() if stopped and killed else process.resume()
            answer.exception(120)
        if stopped:
            _told_to_end(server)
            return
    pytest.fail("the file was written before the scheduler could be stopped, each time")


def _corrupt(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 2
    file.write_bytes(content)


def _other_layout(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"dtype": "float32"', b'"dtype": "float16"', 1))
    assert file.read_bytes() != content


def _flush_under_use(server: Server, prompt: str) -> None:
    """SGLang refuses it while a request runs; the answer is right in any case."""
    dense = server.generate(prompt, LONG, sparse=False).ids
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate, prompt, LONG)
        server.until(lambda state: state["offload"]["rows"] == 1)
        with contextlib.suppress(OSError):
            server.post("/flush_cache", {}, 30)
        assert running.result(120).ids == dense


def _no_room_on_disk(server: Server, one: Asked) -> None:
    """A file that cannot be written to its end, or at all: host memory serves on."""
    folder, schedulers = one.file.parent, processes(server.process.pid, "scheduler")
    one.file.unlink()
    server.flush()
    files = sorted(folder.iterdir())
    for process in schedulers:
        process.rlimit(resource.RLIMIT_FSIZE, (4 << 20, -1))
    one.right(hosted=False)
    one.happens("save_failed", 1)
    assert sorted(folder.iterdir()) == files
    one.right(hosted=True)
    for process in schedulers:
        process.rlimit(resource.RLIMIT_FSIZE, (-1, -1))
    gone = folder.rename(folder.with_name("gone"))
    server.flush()
    one.right(hosted=False)
    one.happens("save_failed", 2)
    one.right(hosted=True)
    gone.rename(folder)
    one.balanced(host=1)


@pytest.mark.boot("offload-files")
def test_prompts_that_are_longer_than_the_pool(
    serve: Pool, built: Prebuilt, store: Path, texts: Any, tmp_path: Path, expected: dict[str, tuple[int, ...]]
) -> None:
    """They need room for what stands behind their prefix. A prompt whose prefix is in no file is refused, and one whose
    file is not read in time; a pause lets them wait.
    """
    prompts = list(expected)
    config = config_of(shutil.copytree(built.kv, tmp_path / "kv"))
    config |= {"prefetch_policy": "timeout", "prefetch_timeout_s": 3.0}
    server = serve(store, config, fresh=True, max_total_tokens="1024", **FLAGS)
    for places in ((0, 1), (2, 3), (0, 2)):  # the host has room for one of the two documents
        asked = [prompts[n] for n in places]
        answers = server.together([lambda p=prompt: server.generate(p, TOKENS) for prompt in asked])
        assert [answer.ids for answer in answers] == [expected[prompt][:TOKENS] for prompt in asked]
    state = offload(server)
    assert state["events"]["loaded"] == state["events"]["evicted"] + 1
    assert state["events"]["loaded"] in (3, 4), "who of the last two comes first is not said"
    assert state["translated"] == 6
    with pytest.raises(OSError, match=r"HTTP 400.* exceeds the maximum allowed length"):
        server.generate(texts.ask(texts.unindexed, 0))
    file = tmp_path / "kv" / kv_file_name(built.line("first")["digest"])
    _not_read(server, file, prompts[0], expected)
    for mode in ("in_place", "retract"):
        _paused(server, file, mode, (prompts[0], prompts[2]), expected)
    server.flush()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(OSError, match=r"HTTP 400.* in host memory or a file; it is in neither"):
        server.generate(prompts[0])
    assert server.generate(prompts[2], TOKENS).ids == expected[prompts[2]][:TOKENS]
    server.flush()
    with held(server, prompts[2], tmp_path / "kv" / kv_file_name(built.line("second")["digest"])):
        _told_to_end(server)


def _not_read(server: Server, file: Path, prompt: str, expected: dict[str, tuple[int, ...]]) -> None:
    """Its request ends with an error; others are served, and a later one with it."""
    server.flush()
    with slow(file):
        with pytest.raises(OSError, match=r"HTTP 400.* no more of its file was read within 3 s"):
            server.generate(prompt)
        assert len(server.generate("Others are served.", 4).ids) == 4
    server.until(lambda state: state["offload"]["users"] == 0)
    assert server.generate(prompt, TOKENS).ids == expected[prompt][:TOKENS]
    assert offload(server)["problem"] is None


def _paused(
    server: Server, file: Path, mode: str, prompts: tuple[str, str], expected: dict[str, tuple[int, ...]]
) -> None:
    """While one waits for its file, and while one runs and one waits for its room; for longer than a file may take."""
    for running in (False, True):
        server.flush()
        tokens = LONG if running else TOKENS
        with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as block:
            if not running:
                block.enter_context(slow(file))
            answers = [pool.submit(server.generate, prompts[0], tokens)]
            wanted = ("rows", 1) if running else ("users", 1)
            server.until(lambda state, w=wanted: state["offload"][w[0]] == w[1])
            if running:
                answers.append(pool.submit(server.generate, prompts[1], TOKENS))
                server.until(lambda state: state["requests"] == 1)
            server.post("/pause_generation", {"mode": mode})
            block.close()
            time.sleep(3.5 if mode == "in_place" and not running else 0.5)
            server.post("/continue_generation", {})
            for prompt, answer, count in zip(prompts, answers, (tokens, TOKENS), strict=False):
                assert answer.result(60).ids == expected[prompt][:count]
    assert offload(server)["problem"] is None


@pytest.mark.full
@pytest.mark.boot("offload-two")
def test_two_servers_share_a_folder(serve: Pool, built: Prebuilt, store: Path, texts: Any, tmp_path: Path) -> None:
    """Both write one prefix; one makes room with a file that the other reads."""
    folder, prompt = tmp_path / "kv", texts.ask(texts.second, 0)
    files = {name: folder / kv_file_name(built.line(name)["digest"]) for name in ("first", "second")}
    least = config_of(folder, folder_bytes=4096 + FIRST * BYTES_OF_TOKEN)
    server = serve(store, config_of(folder), fresh=True, **FLAGS)
    changes = {f"--{name.replace('_', '-')}": value for name, value in FLAGS.items() if name != "environment"}
    other = Server(flags_of(store, least, changes), FLAGS["environment"], tmp_path / "other.log")
    try:
        other.wait()
        both = [Asked(each, prompt, SECOND, files["second"]) for each in (server, other)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda one: one.right(hosted=False), both))
        for one in both:
            one.happens("saved", 1)
        assert list(folder.iterdir()) == [files["second"]]
        server.flush()
        with ThreadPoolExecutor(1) as pool:
            with slow(files["second"]):
                answer = pool.submit(server.generate, prompt, TOKENS)
                server.until(lambda state: state["offload"]["prefixes"].get("loading") == 1)
                other.generate(texts.ask(texts.first, 0), TOKENS)
                both[1].happens("saved", 2)
                assert list(folder.iterdir()) == [files["first"]]
            assert answer.result(60).ids == both[0].dense
        both[0].happens("loaded", 1)
        both[0].balanced(host=1)
    finally:
        other.stop()


@pytest.mark.full
@pytest.mark.boot("offload-prebuild")
def test_prebuild_writes_the_file_of_an_index_that_exists(
    serve: Pool, built: Prebuilt, texts: Any, prebuild: Any, tmp_path: Path
) -> None:
    serve.close()
    shutil.copytree(built.store, tmp_path / "store")
    (tmp_path / "kv").mkdir()
    names = [kv_file_name(built.line(name)["digest"]) for name in ("first", "second")]
    shutil.copy(built.kv / names[0], tmp_path / "kv")
    prompts = [{"id": name, "text": getattr(texts, name).text} for name in ("first", "second")]
    config = {**EXACT_CONFIG, "offload": {"host_bytes": 16, "folder": str(tmp_path / "kv")}}
    job = prebuild(tmp_path, prompts, config=config, chunked_prefill_size="512")
    assert job.status == 0, job.output[-3000:]
    assert [line["status"] for line in job.report] == ["exists", "exists"]
    assert [line.get("kv_file") for line in job.report] == [None, str(tmp_path / "kv" / names[1])]
    assert "2 exists" in job.output
    assert ", 1 files of KV; " in job.output
    for name in names:
        assert (tmp_path / "kv" / name).read_bytes() == (built.kv / name).read_bytes()
