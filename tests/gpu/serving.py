"""Stores and servers of the GPU tests: `sglang-ext prebuild`, then a server on what it built."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.server.harness import MODEL, Server

BACKEND = os.environ.get("SPARSE_ATTN_TEST_BACKEND", "triton")
PLAIN = ["--attention-backend", BACKEND, "--sampling-backend", "pytorch", "--grammar-backend", "none"]
PAGED = [*PLAIN, "--context-length", "16384", "--page-size", "16"]


def prebuilt(
    folder: Path, prompts: Sequence[dict[str, Any]], config: dict[str, Any], flags: Sequence[str], model: Path = MODEL
) -> Path:
    """A store with the indexes of some prompts."""
    file, store = folder / "prompts.jsonl", folder / "store"
    file.write_text("".join(json.dumps(line) + "\n" for line in prompts))
    command = [sys.executable, "-m", "sglang_ext.cli", "prebuild", "--model-path", str(model), "--store", str(store)]
    command += ["--prompts", str(file), "--sparse-attn-config", json.dumps(config), "--", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return store


@contextmanager
def served(
    store: Path,
    config: dict[str, Any],
    flags: Sequence[str],
    folder: Path,
    model: Path = MODEL,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A server, ready; its log is in the folder."""
    ours = ["--sparse-attn", "--sparse-attn-store", str(store), "--sparse-attn-config", json.dumps(config)]
    server = Server([*flags, *ours], dict(environment or {}), folder / "server.log", model)
    try:
        server.wait()
        yield server
    finally:
        server.stop()
