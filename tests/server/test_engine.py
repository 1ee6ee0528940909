"""`sglang.Engine`: no command line, settings through `plugin.server_args`, as the documents show it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.servers import free_port
from tests.server.harness import EXACT_CONFIG, MODEL, ROOT
from tests.server.jobs import run_job

pytestmark = pytest.mark.full

#: Behind the document's own question.
_ASKED = """
    import json
    greedy = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    dense = engine.generate(PROMPT, {**greedy, "custom_params": {"sparse_attn": False}})
    sparse = engine.generate(PROMPT, greedy)
    state = engine.get_server_info()["internal_states"][0]["sparse_attn"]
    print("RESULT", json.dumps([dense["output_ids"], sparse["output_ids"], state["sparse_rows"], state["fallbacks"]]))
"""


def test_the_engine_of_the_documents_decodes_sparsely_and_equals_dense(
    serve: Any, store: Path, texts: Any, tmp_path: Path
) -> None:
    serve.close()
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "using.md").read_text(), re.S)
    kwargs: dict[str, Any] = {"device": "cpu", "dtype": "float32", "page_size": 16, "nccl_port": free_port()}
    kwargs |= {"attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none"}
    kwargs |= {"disable_overlap_schedule": True, "disable_cuda_graph": True}
    kwargs |= {"max_total_tokens": 8192, "max_running_requests": 4, "context_length": 4096}
    for theirs, ours in {
        '"MODEL"': repr(str(MODEL)),
        'attention_backend="flashinfer"': f"**{kwargs!r}",
        '"./store"': repr(str(store)),
        '{"keep_ratio": 0.1}': repr(EXACT_CONFIG),
        "    engine.shutdown()": _ASKED.replace("PROMPT", repr(texts.ask(texts.first, 0))) + "    engine.shutdown()",
    }.items():
        assert block.count(theirs) == 1, theirs
        block = block.replace(theirs, ours)
    script = tmp_path / "engine.py"
    script.write_text(block)
    env = {"SGLANG_EXT_CPU_SHORT_EXTEND": "1"}
    status, output = run_job([sys.executable, str(script)], tmp_path / "engine.log", env=env)
    result = re.search(r"RESULT (\[.*\])", output)
    assert result, output[-6000:]
    dense, sparse, rows, fallbacks = json.loads(result[1])
    assert sparse == dense
    assert rows == 11
    assert fallbacks == {"by_request": 1}
    assert (status, "Traceback" in output) == (0, False)
