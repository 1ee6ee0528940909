"""A real SGLang server, and models of a known shape with dummy weights.

Only the configuration of such a model is written: SGLang makes the weights (`--load-format dummy`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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

READY = "The server is fired up and ready to roll!"


def write_model(folder: Path, shape: str) -> Path:
    """A model folder for `--load-format dummy`: the configuration alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    return folder


def tail(log: Path, size: int = 4000) -> str:
    return log.read_text(errors="replace")[-size:]


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
