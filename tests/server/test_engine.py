"""`sglang.Engine`: no command line, settings through `plugin.server_args` or the environment."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.servers import free_port
from tests.server.harness import EXACT_CONFIG, MODEL
from tests.server.jobs import run_job

pytestmark = pytest.mark.full

_ENGINE = """
import json, sys

def main():
    given = json.loads(sys.argv[1])
    import sglang
    from sglang_ext.plugin import server_args
    engine = sglang.Engine(server_args=server_args(config=given["config"], store=given["store"], **given["kwargs"]))
    greedy = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    dense = engine.generate(given["prompt"], {**greedy, "custom_params": {"sparse_attn": False}})
    sparse = engine.generate(given["prompt"], greedy)
    state = engine.get_server_info()["internal_states"][0]["sparse_attn"]
    engine.shutdown()
    print("RESULT", json.dumps([dense["output_ids"], sparse["output_ids"], state["sparse_rows"], state["fallbacks"]]))

if __name__ == "__main__":
    main()
"""


def test_an_engine_made_by_server_args_decodes_sparsely_and_equals_dense(
    serve: Any, store: Path, texts: Any, tmp_path: Path
) -> None:
    serve.close()
    kwargs: dict[str, Any] = {"model_path": str(MODEL), "device": "cpu", "dtype": "float32", "page_size": 16}
    kwargs |= {"attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none"}
    kwargs |= {"disable_overlap_schedule": True, "disable_cuda_graph": True, "nccl_port": free_port()}
    kwargs |= {"max_total_tokens": 8192, "max_running_requests": 4, "context_length": 4096}
    given = {"config": EXACT_CONFIG, "store": str(store), "kwargs": kwargs, "prompt": texts.ask(texts.first, 0)}
    script = tmp_path / "engine.py"
    script.write_text(_ENGINE)
    command = [sys.executable, str(script), json.dumps(given)]
    _, output = run_job(command, tmp_path / "engine.log", env={"SGLANG_EXT_CPU_SHORT_EXTEND": "1"})
    result = re.search(r"RESULT (\[.*\])", output)
    assert result, output[-6000:]
    dense, sparse, rows, fallbacks = json.loads(result[1])
    assert sparse == dense
    assert rows == 11
    assert fallbacks == {"by_request": 1}
