"""Servers as scripts, benchmarks and tests use them: free ports for one, questions to one. Needs no SGLang."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PORTS = range(11000, 22000)
"""Below those that systems usually hand out to whoever asks for any (Linux: from 32768 on)."""


@dataclass(frozen=True)
class Reply:
    """One answer of a server. `seconds` is the whole request, as the client saw it."""

    text: str
    cached_tokens: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float


def free_ports(count: int) -> list[int]:
    """Different ports of 11000 to 21999 that nobody listens on now.

    Raises:
        RuntimeError: not so many among a hundred.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(
        f"expected {count} free ports in {_PORTS[0]} to {_PORTS[-1]}, found {len(found)} in 100 attempts"
    )


def free_port() -> int:
    """One of `free_ports`."""
    return free_ports(1)[0]


@contextlib.contextmanager
def process_group(command: Sequence[Any], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, its output in `log`; the group is gone afterwards. `options`: of `Popen`."""
    with log.open("wb") as out:
        given = {"stdout": out, "stderr": out, "start_new_session": True, **options}
        process = subprocess.Popen(command, **given)
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(20)


def post(url: str, path: str, body: dict[str, Any], timeout: float = 600.0, key: str | None = None) -> Any:
    """POST JSON, get JSON; None where no JSON comes back. `key`: of the server.

    Raises:
        OSError: no connection, or an HTTP error status; the server's text is in the message.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url.rstrip("/") + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            text = response.read()
    except urllib.error.HTTPError as error:
        raise OSError(f"{path}: HTTP {error.code}: {error.read()[:500].decode(errors='replace')}") from error
    return json.loads(text) if text.strip().startswith((b"{", b"[")) else None


def ask_many(
    url: str,
    prompts: Sequence[str],
    *,
    sparse: bool,
    concurrency: int = 8,
    max_new_tokens: int = 64,
    on_reply: Callable[[], None] | None = None,
) -> list[Reply]:
    """Greedy answers in the order of the prompts.

    Args:
        url: of the server.
        prompts: texts.
        sparse: False makes these requests decode dense on a server with --sparse-attn.
        concurrency: requests in flight.
        max_new_tokens: of an answer, at most.
        on_reply: called behind each.
    """
    sampling: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": max_new_tokens}
    if not sparse:
        sampling["custom_params"] = {"sparse_attn": False}

    def one(prompt: str) -> Reply:
        begun = time.perf_counter()
        reply = post(url, "/generate", {"text": prompt, "sampling_params": sampling})
        meta = reply["meta_info"]
        seconds = time.perf_counter() - begun
        if on_reply:
            on_reply()
        cached = meta.get("cached_tokens", 0)
        return Reply(reply["text"], cached, meta["prompt_tokens"], meta["completion_tokens"], seconds)

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, prompts))


def server_state(url: str) -> dict[str, Any]:
    """The plugin's counters of a running server (`SparseRuntime.snapshot`).

    Raises:
        OSError: no connection.
        RuntimeError: the server runs without --sparse-attn.
    """
    with urllib.request.urlopen(url.rstrip("/") + "/get_server_info", timeout=60) as response:
        info = json.load(response)
    state: dict[str, Any] | None = info["internal_states"][0].get("sparse_attn")
    if state is None:
        raise RuntimeError(
            f"expected a server with --sparse-attn at {url}, found one without; restart it with the flag"
        )
    return state


def keep_ratio_between(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """Mean over all layers of prefix tokens attended over prefix tokens, between two states of one server."""
    ratios = [
        (a1 - a0) / (p1 - p0)
        for a0, a1, p0, p1 in zip(
            before["attended_tokens_per_layer"],
            after["attended_tokens_per_layer"],
            before["prefix_tokens_per_layer"],
            after["prefix_tokens_per_layer"],
            strict=True,
        )
        if p1 > p0
    ]
    return sum(ratios) / len(ratios) if ratios else None
