"""A real SGLang server with dummy weights of a known shape, and the time to the first token of new prompts.

For `build.py` and `serving.py`. Only the configuration of the model is written: SGLang makes the weights
(`--load-format dummy`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.quality.ports import free_ports

Row = dict[str, Any]

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
}


def _shape(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, dim: int, vocab: int, dtype: str) -> Row:
    return _LLAMA | {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": vocab,
        "max_position_embeddings": 262144,
        "torch_dtype": dtype,
    }


#: config.json of the models timed. `tiny` is for trying this script, not for figures.
SHAPES = {
    "llama-3.1-8b": _shape(4096, 14336, 32, 32, 8, 128, 128256, "bfloat16"),
    "tiny": _shape(256, 512, 2, 8, 2, 64, 1024, "float32"),
}

_COMMON_FLAGS = ["--load-format", "dummy", "--skip-tokenizer-init", "--random-seed", "0", "--disable-radix-cache"]
_COMMON_FLAGS += ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--max-running-requests", "4"]
GPU_FLAGS = ["--attention-backend", "flashinfer", "--disable-decode-cuda-graph", "--page-size", "64"]
CPU_FLAGS = ["--device", "cpu", "--attention-backend", "torch_native", "--page-size", "16"]
CPU_FLAGS += ["--disable-overlap-schedule", "--disable-cuda-graph"]

#: Prefill graphs are captured up to the chunk size. Beyond this they take minutes to capture and save nothing.
GRAPH_TOKENS = 8192

READY = "The server is fired up and ready to roll!"


def write_model(folder: Path, shape: str) -> Path:
    """A model folder for `--load-format dummy`: the configuration alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    return folder


# -- the server ------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """A running server; `events` is where a building one reports."""

    url: str
    log: Path
    events: Path | None = None
    sent: int = 0
    vocab: int = 1024
    seed: int = 0
    chunk: int | None = None

    def prompt(self, num_tokens: int) -> tuple[str, list[int]]:
        """A request id, and random tokens that no other request of this server has."""
        self.sent += 1
        rng = random.Random(f"{self.seed}-{self.sent}")
        return f"build-{self.sent}", rng.choices(range(16, self.vocab), k=num_tokens)

    def event(self, rid: str, timeout: float = 60.0) -> Row:
        """What the scheduler process reported of a request's index."""
        assert self.events is not None
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for text in self.events.read_text().splitlines() if self.events.exists() else []:
                with suppress(json.JSONDecodeError):  # a line that is being written
                    event: Row = json.loads(text)
                    if event["rid"] == rid:
                        return event
            time.sleep(0.02)
        raise RuntimeError(f"expected a report of request {rid} within {timeout:.0f} s, got none:\n{tail(self.log)}")


def tail(log: Path, size: int = 4000) -> str:
    return log.read_text(errors="replace")[-size:]


def server_flags(args: argparse.Namespace, model: Path, chunk: str) -> list[str]:
    """SGLang's flags; those after `--` come last and win."""
    longest = max(args.lengths)
    flags = ["--model-path", str(model), "--dtype", SHAPES[args.shape]["torch_dtype"], *_COMMON_FLAGS]
    flags += ["--context-length", str(longest + 64), "--max-total-tokens", str(longest + 8192)]
    if chunk != "default":
        flags += ["--chunked-prefill-size", chunk]
    if args.cpu:
        flags += CPU_FLAGS
    else:
        flags += GPU_FLAGS
        if chunk != "default" and int(chunk) > GRAPH_TOKENS:
            flags += ["--cuda-graph-max-bs-prefill", str(GRAPH_TOKENS)]
    return flags + args.sglang_flags


@contextmanager
def running_server(args: argparse.Namespace, folder: Path, chunk: str, *, building: bool) -> Iterator[Server]:
    """A server on a free port, stock or building; ends with its whole process group."""
    flags = server_flags(args, write_model(folder / "model", args.shape), chunk)
    name = "building" if building else f"stock-{chunk}"
    log, events = folder / f"{name}.log", folder / "events.jsonl"
    if building:
        store = folder / "store"
        store.mkdir(exist_ok=True)
        config = {**json.loads(args.config), "build": "prefill", "build_report": str(events)}
        flags += ["--sparse-attn", "--sparse-attn-store", str(store), "--sparse-attn-config", json.dumps(config)]
    begun = time.monotonic()
    with launched(flags, log, args.start_seconds) as url:
        vocab = SHAPES[args.shape]["vocab_size"]
        with urllib.request.urlopen(f"{url}/get_server_info", timeout=60) as reply:
            actual = json.load(reply).get("chunked_prefill_size")
        server = Server(url, log, events if building else None, vocab=vocab, seed=args.seed, chunk=actual)
        print(f"{name}: started in {time.monotonic() - begun:.0f} s", flush=True)
        yield server


@contextmanager
def launched(flags: Sequence[str], log: Path, seconds: float, port: int | None = None) -> Iterator[str]:
    """URL of an SGLang server on loopback; ends with its whole process group.

    Args:
        flags: SGLang's, without ports.
        log: what the server writes.
        seconds: how long it may take to start.
        port: that it listens on; None for any that is free.

    Raises:
        RuntimeError: it stopped, or was not ready in that time.
    """
    free = free_ports(2)
    port = free[0] if port is None else port
    command = [sys.executable, "-m", "sglang.launch_server", *flags, "--port", str(port), "--nccl-port", str(free[1])]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait(process, log, seconds)
        yield f"http://127.0.0.1:{port}"
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(20)


def _wait(process: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while READY not in tail(log, 20_000):
        if process.poll() is not None:
            raise RuntimeError(f"the server stopped; the end of its log:\n{tail(log)}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server was not ready within {seconds:.0f} s; the end of its log:\n{tail(log)}")
        time.sleep(0.25)


# -- one request -----------------------------------------------------------------------------------------------


_TRIES = 20
"""Prompts that are timed in vain, at most: on a busy machine two tokens often come together."""


@dataclass(frozen=True)
class Timing:
    """Of one request, seconds since it was sent: its first token, and its end, by when an index was stored."""

    rid: str
    first: float
    end: float


def prefill(server: Server, num_tokens: int, *, recorded: bool | None) -> Timing:
    """Time a new prompt. Two tokens are generated: the build comes with the last one, so the first is before it.

    Args:
        recorded: on a building server, whether this prompt is recorded and indexed; None on a stock one.

    Raises:
        RuntimeError: SGLang refused the request, or the first token came together with the second every time.
    """
    for _ in range(_TRIES):
        rid, ids = server.prompt(num_tokens)
        sampling: Row = {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True}
        if recorded is False:
            sampling["custom_params"] = {"sparse_attn": False}
        body = {"rid": rid, "input_ids": ids, "sampling_params": sampling, "stream": True}
        seconds, counts = _stream(server, json.dumps(body).encode())
        if counts[0] == 1 and counts[-1] == 2:
            return Timing(rid, seconds[0], seconds[-1])
    raise RuntimeError(f"expected the first token before the second one, got tokens in steps of {counts}")


def _stream(server: Server, body: bytes) -> tuple[list[float], list[int]]:
    """When each piece of a streamed answer came, and how many tokens there were by then."""
    request = urllib.request.Request(f"{server.url}/generate", body, {"Content-Type": "application/json"})
    seconds, counts = [], []
    begun = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            for line in reply:
                now = time.perf_counter() - begun
                if not line.startswith(b"data:") or b"[DONE]" in line:
                    continue
                piece = json.loads(line[5:])
                if "meta_info" not in piece:
                    raise RuntimeError(f"SGLang refused the request: {line.decode()[:500]}")
                if piece["meta_info"].get("cached_tokens"):
                    raise RuntimeError(f"expected no cached token, got {piece['meta_info']['cached_tokens']}")
                seconds.append(now)
                counts.append(int(piece["meta_info"]["completion_tokens"]))
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"HTTP {error.code}: {error.read()[:500].decode(errors='replace')}") from error
    except OSError as error:
        raise RuntimeError(f"the server broke off ({error}); the end of its log:\n{tail(server.log)}") from error
    if not counts:
        raise RuntimeError(f"expected tokens, got none; the end of the server's log:\n{tail(server.log)}")
    return seconds, counts
