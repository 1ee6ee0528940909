"""The method of `tests/toy_method.py`, of which the sources know nothing, served by a real SGLang: an entry point of
its own registers it in each process. On a GPU its operation runs inside decode graphs, else its reference does.

python -m tests.toy_method_served [--model-path models/needle] [-- SGLANG FLAGS]
"""

import argparse
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.needle.tasks import make_document
from tests.server.harness import CPU_FLAGS, DISK, MODEL, ROOT, Server

GPU_FLAGS = ["--attention-backend", "flashinfer", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
GPU_FLAGS += ["--cuda-graph-bs-decode", "1", "4", "--max-running-requests", "4", "--disable-prefill-cuda-graph"]
# Documents begin alike: with smaller pages the second one's prefill would find tokens in the cache, and not be indexed.
FLAGS = ["--page-size", "64", "--max-total-tokens", "32768", "--decode-log-interval", "1", "--sparse-attn"]
ALL_KEPT, QUESTIONS = 1280, 8
CONFIG: dict[str, Any] = {"method": "every_nth", "profile": "none", "build": "prefill", "decode_path": "sparse"}
CONFIG |= {"share_prefixes": True, "prefetch_policy": "wait_complete", "min_top_k": ALL_KEPT, "guard_every": 0, **DISK}


def register() -> None:
    """The entry point, which SGLang calls in each of its processes."""
    from sglang_ext.methods.registry import METHODS, Method
    from tests.toy_method import EveryNthBuilder, EveryNthSelector, EveryNthSpec

    toy: Any = Method(EveryNthSpec, EveryNthBuilder, EveryNthSelector, "tests.toy_method:EveryNthOp")
    METHODS["every_nth"] = toy


def environment(folder: Path) -> dict[str, str]:
    """Of processes that find a distribution with the entry point in that folder."""
    info = folder / "toy_method-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-method\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\ntoy_method = tests.toy_method_served:register\n")
    path = os.pathsep.join(filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "SGLANG_EXT_CPU_SHORT_EXTEND": "1"}


def serve(model: str = str(MODEL), more: Sequence[str] = ()) -> dict[str, int]:
    """Serve it and ask; raises AssertionError where a decode step was not its own, or on a GPU outside of graphs."""
    graphs = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "store").mkdir()
        flags = ["--model-path", model, *(GPU_FLAGS if graphs else CPU_FLAGS), *FLAGS]
        flags += ["--sparse-attn-store", str(folder / "store"), "--sparse-attn-config", json.dumps(CONFIG), *more]
        server = Server(flags, environment(folder), folder / "log")
        try:
            server.wait()
            counted = {"decode_graphs": int(graphs)} | ask(server)
            steps = set(re.findall(r"Decode batch.* graph: (\w+)", server.log.read_text()))
            assert steps == {str(graphs)}, f"expected decode steps with graph: {graphs}, got {steps}\n{server.tail()}"
        finally:
            server.stop()
    return counted


def ask(server: Server) -> dict[str, int]:
    """Questions behind a document of which all tokens are kept, where answers are dense's, and behind a longer one."""
    counted: dict[str, int] = {}
    for name, tokens in (("all kept", 1024), ("some kept", 4096)):
        document = make_document("many_keys", seed=tokens, num_tokens=tokens, num_questions=QUESTIONS)
        server.generate(document.text, 1)  # its prefill builds the index
        result, delta, replies = server.asked_twice([(document.text, question) for question in document.questions])
        elsewhere = (delta.after["method"], delta.dense_rows, delta.cascade_rows, delta.fallbacks)
        assert elsewhere == ("every_nth", 0, 0, {}), f"{name}: expected sparse rows alone, got {elsewhere}"
        rows = server.rows(sum(reply.completion_tokens - 1 for reply in replies), QUESTIONS)
        assert delta.sparse_rows in rows, f"{name}: expected {rows} sparse rows, got {delta.sparse_rows}"
        assert (result.difference < 0) == (tokens > ALL_KEPT), f"{name}: {result}"  # it leaves out what is asked for
        counted[f"sparse_rows, {name}"] = delta.sparse_rows
    return counted


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", default=str(MODEL))
    parser.add_argument("sglang_flags", nargs="*", metavar="-- SGLANG FLAGS")
    given = parser.parse_args()
    print(json.dumps(serve(given.model_path, given.sglang_flags)))
