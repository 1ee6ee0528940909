"""What goes wrong with host memory and its files in a real server: answers stay those without, and nothing leaks."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_ext.offload.kv_files import kv_file_name
from tests.offload.slow_file import slow
from tests.server.harness import EXACT_CONFIG, MODEL, STOP_SECONDS, Answer, Pool, Server, flags_of
from tests.server.jobs import Prebuilt
from tests.server.test_offload import BYTES_OF_TOKEN, CONFIG, FIRST, FLAGS, SECOND, TOKENS, offload


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    return {**CONFIG, "offload": {**CONFIG["offload"], "folder": str(folder), **changes}}


class Asked:
    """A prompt behind one document, its answer without indexes, and the document's file."""

    def __init__(self, server: Server, prompt: str, prefix: int, file: Path) -> None:
        self.server, self.prompt, self.prefix, self.file = server, prompt, prefix, file
        self.dense = server.generate(prompt, TOKENS, sparse=False).ids
        server.flush()

    def right(self, *, hosted: bool) -> None:
        """Its answer is the one without; whether its prefix was in host memory."""
        answer: Answer = self.server.generate(self.prompt, TOKENS)
        assert answer.ids == self.dense
        assert (answer.cached_tokens >= self.prefix) == hosted

    def happens(self, event: str, times: int) -> None:
        """Until it has happened so often."""
        self.server.until(lambda state: state["offload"]["events"].get(event, 0) >= times)
        assert self.server.state()["offload"]["events"][event] == times

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
        """A request that waits for its file is aborted, which ends it; within the block the file is read still."""
        with slow(self.file), ThreadPoolExecutor(1) as pool:
            future = pool.submit(self.server.generate, self.prompt, TOKENS, rid="held")
            self.server.until(lambda state: state["offload"]["prefixes"].get("loading") == 1)
            self.server.post("/abort_request", {"rid": "held"})
            future.exception(20)
            yield

    def flushed_while_read(self) -> None:
        """What is read then is of no use, and its memory is given back."""
        self.server.flush()
        with self.held():
            self.server.flush()
            assert self.server.state()["offload"]["prefixes"] == {}
        self.balanced()


@pytest.mark.boot("offload-faults")
def test_damaged_slow_and_missing_files(serve: Pool, built: Prebuilt, store: Path, texts: Any, tmp_path: Path) -> None:
    """One server's life, until it is told to end while it reads a file; then that of the next ones."""
    folder = Path(shutil.copytree(built.kv, tmp_path / "kv"))
    server = serve(store, config_of(folder), fresh=True, **FLAGS)
    first, second = (folder / kv_file_name(built.line(name)["digest"]) for name in ("first", "second"))
    one = Asked(server, texts.ask(texts.second, 0), SECOND, second)
    one.right(hosted=True)
    loads = 1
    for number, damage in enumerate((_corrupt, _short, _other_layout, lambda _: shutil.copy(first, second))):
        server.flush()
        damage(second)
        one.right(hosted=False)
        one.happens("load_failed", number + 1)
        one.happens("saved", number + 1)
        assert second.stat().st_size == 4096 + SECOND * BYTES_OF_TOKEN
    one.right(hosted=True)
    one.balanced(host=1)
    # Aborted while it waits: the file is read to the end, and serves the next one.
    server.flush()
    with one.held():
        one.happens("loaded", loads)
    loads += 1
    one.happens("loaded", loads)
    one.right(hosted=True)
    one.flushed_while_read()
    one.right(hosted=True)
    loads += 1
    one.happens("loaded", loads)
    _flush_under_use(server, one.prompt)
    one.balanced(host=1)
    _no_room_on_disk(server, one)
    server.flush()
    one.balanced()
    other = Asked(server, texts.ask(texts.first, 0), FIRST, first)
    with other.held():
        _told_to_end(server)
    # The next server reads that file, and is told to end while it writes one.
    flags = {**FLAGS, "environment": {**FLAGS["environment"], "SGL_FORCE_SHUTDOWN": "1"}}
    server = serve(store, config_of(folder), fresh=True, **flags)
    other.server = one.server = server
    other.right(hosted=True)
    other.balanced(host=1)
    _told_to_end_while_it_writes(one, killed=True)
    assert not second.exists()
    assert list(folder.glob(f".{second.name}.partial-*"))
    server = serve(store, config_of(folder), fresh=True, **flags)
    other.server = one.server = server
    one.right(hosted=False)
    one.happens("saved", 1)
    one.right(hosted=True)
    one.balanced(host=1)
    other.right(hosted=True)
    assert "load_failed" not in server.state()["offload"]["events"]
    server.flush()
    other.balanced()
    _told_to_end_while_it_writes(one, killed=False)
    assert not second.exists() or second.stat().st_size == 4096 + SECOND * BYTES_OF_TOKEN


def _told_to_end(server: Server) -> None:
    """It ends in SGLang's usual time, and no process of it is left."""
    server.process.terminate()
    server.process.wait(STOP_SECONDS)
    _gone(server)
    assert not re.search("Fatal Python error|Segmentation fault|core dumped", server.tail(20000))


def _told_to_end_while_it_writes(one: Asked, *, killed: bool) -> None:
    """Between the first byte of the file and its name its scheduler stands still. Then it is told to end, and goes on;
    or is killed, as SGLang kills one that does not end.
    """
    server, partial = one.server, f".{one.file.name}.partial-*"
    schedulers = _schedulers(server)
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


def _short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4096])


def _other_layout(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"dtype": "float32"', b'"dtype": "float16"', 1))
    assert file.read_bytes() != content


def _flush_under_use(server: Server, prompt: str) -> None:
    """SGLang refuses it while a request runs; the answer is right in any case."""
    dense = server.generate(prompt, 200, sparse=False).ids
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate, prompt, 200)
        server.until(lambda state: state["offload"]["rows"] == 1)
        request = urllib.request.Request(f"{server.url}/flush_cache", b"", method="POST")
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=30):
            pass
        assert running.result(120).ids == dense


def _no_room_on_disk(server: Server, one: Asked) -> None:
    """A file that cannot be written to its end, or at all: host memory serves on."""
    folder, schedulers = one.file.parent, _schedulers(server)
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


def _schedulers(server: Server) -> list[psutil.Process]:
    found = [psutil.Process(pid) for pid in _group(server)]
    found = [one for one in found if any("scheduler" in word for word in (one.name(), *one.cmdline()))]
    assert found
    return found


def _gone(server: Server) -> None:
    """No process of it is left."""
    deadline = time.monotonic() + STOP_SECONDS
    while _group(server):
        assert time.monotonic() < deadline, _group(server)
        time.sleep(0.1)


def _group(server: Server) -> list[int]:
    """Processes that the server has, or has left."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if process.status() != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == server.process.pid:
                found.append(process.pid)
    return found


@pytest.mark.full
@pytest.mark.boot("offload-two")
def test_two_servers_share_a_folder(serve: Pool, built: Prebuilt, store: Path, texts: Any, tmp_path: Path) -> None:
    """Both write one prefix; one makes room with a file that the other reads. Then one's weights are replaced."""
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
    one = Asked(server, texts.ask(texts.first, 0), FIRST, files["first"])
    with one.held():
        server.post("/update_weights_from_disk", {"model_path": str(MODEL)})
        assert server.state()["offload"]["prefixes"] == {}
    one.balanced()
    one.right(hosted=False)
    one.happens("loaded", 1)


@pytest.mark.full
@pytest.mark.boot("offload-prebuild")
def test_prebuild_writes_the_file_of_an_index_that_exists(
    serve: Pool, built: Prebuilt, own_store: Path, texts: Any, prebuild: Any, tmp_path: Path
) -> None:
    serve.close()
    (tmp_path / "kv").mkdir()
    names = [kv_file_name(built.line(name)["digest"]) for name in ("first", "second")]
    shutil.copy(built.kv / names[0], tmp_path / "kv")
    prompts = [{"id": name, "text": getattr(texts, name).text} for name in ("first", "second")]
    config = {**EXACT_CONFIG, "offload": {"host_bytes": 16, "folder": str(tmp_path / "kv")}}
    job = prebuild(tmp_path, prompts, store=own_store, config=config, chunked_prefill_size="512")
    assert job.status == 0, job.output[-3000:]
    assert [line["status"] for line in job.report] == ["exists", "exists"]
    assert [line.get("kv_file") for line in job.report] == [None, str(tmp_path / "kv" / names[1])]
    assert "2 exists" in job.output
    assert ", 1 files of KV; " in job.output
    for name in names:
        assert (tmp_path / "kv" / name).read_bytes() == (built.kv / name).read_bytes()
