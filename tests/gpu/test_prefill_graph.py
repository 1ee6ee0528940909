"""On a GPU: recording works under SGLang's default prefill graph backend, and refuses where Python does not run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from prefix_index import FileStore, namespace_digest
from tests.gpu.serving import PLAIN

pytestmark = pytest.mark.gpu

MODEL = str(Path(__file__).parents[2] / "models" / "needle")
FLAGS = [*PLAIN, "--max-total-tokens", "100000", "--context-length", "40960", "--chunked-prefill-size", "2048"]

_BUILD = """
import json, sys
from sglang_ext.compat.engine import OfflineEngine
from scripts.needle.tasks import make_document
if __name__ == "__main__":
    engine = OfflineEngine(json.loads(sys.argv[1]))
    engine.open()
    try:
        ids = engine.tokens.of_text(make_document("many_keys", seed=3, num_tokens=8192, num_questions=16).text)
        engine.prefill("doc", ids, None, None)
        print("STATE " + json.dumps(engine.state()))
    finally:
        engine.close()
"""


def build(store: Path, script: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    store.mkdir(exist_ok=True)
    script.write_text(_BUILD)
    flags = ["--model-path", MODEL, "--log-level", "error", *FLAGS, *extra, "--disable-decode-cuda-graph"]
    flags += ["--disable-radix-cache", "--sparse-attn", "--sparse-attn-store", str(store)]
    flags += ["--sparse-attn-config", '{"build": "prefill"}']
    command = [sys.executable, str(script), json.dumps(flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_recording_under_the_default_prefill_graph_equals_recording_without_graphs(tmp_path: Path) -> None:
    states = {}
    for name, extra in (("graph", ()), ("eager", ("--disable-prefill-cuda-graph",))):
        done = build(tmp_path / name, tmp_path / "build.py", *extra)
        lines = [line for line in done.stdout.splitlines() if line.startswith("STATE ")]
        assert lines, done.stderr[-3000:]
        states[name] = json.loads(lines[0].removeprefix("STATE "))
    assert states["graph"]["recorded_graph_steps"] == states["graph"]["recorded_steps"] == 4
    assert states["eager"]["recorded_graph_steps"] == 0
    recalls = []
    for name in ("graph", "eager"):
        store = FileStore(tmp_path / name)
        store.open()
        (entry,) = store.list()
        assert entry.identity.num_tokens == 8192
        assert entry.identity.namespace == namespace_digest({})
        with store.get(entry.identity) as file:
            file.verify()
            recalls.append(file.stats["recall"])
    for method, recall in recalls[0].items():
        assert recall == pytest.approx(recalls[1][method], abs=0.02)


def test_a_full_prefill_graph_is_refused_while_building(tmp_path: Path) -> None:
    done = build(tmp_path / "store", tmp_path / "build.py", "--cuda-graph-backend-prefill", "full")
    assert done.returncode != 0
    assert "expected the prefill graph backend 'breakable'" in done.stderr + done.stdout


def test_decode_cuda_graphs_are_refused_while_prompts_are_captured(tmp_path: Path) -> None:
    """Elsewhere they are welcome: `tests/compat/test_decode_graphs.py`."""
    config = json.dumps({"build": "capture", "capture_folder": str(tmp_path)})
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", MODEL, *FLAGS, "--sparse-attn"]
    command += ["--sparse-attn-store", str(tmp_path), "--sparse-attn-config", config, "--cuda-graph-bs-decode", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "add --disable-decode-cuda-graph" in done.stderr + done.stdout
