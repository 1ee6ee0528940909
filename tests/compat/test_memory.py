"""Memory of the plugin is promised before SGLang sizes its KV pool."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_ext.compat.memory import BUFFER_BYTES, BUILD_BYTES, COMBINED_BYTES, after_profile_available_bytes
from sglang_ext.compat.server_args import ATTRIBUTE
from sglang_ext.config import make_settings
from sglang_ext.decode.buffers import KEPT_BYTES

GIB = 1 << 30


def configurator(tmp_path: Path, config: str | None, **fields: Any) -> Any:
    """As SGLang's, with settings of this configuration; None: without `--sparse-attn`."""
    text = "" if config is None else make_settings(config, str(tmp_path)).dump()
    record = SimpleNamespace(**{ATTRIBUTE: text})
    return SimpleNamespace(**{"device": "cuda", "is_draft_worker": False, "server_args": record, **fields})


@pytest.mark.parametrize(
    ("config", "promised"),
    [
        ("{}", 4 * GIB + BUFFER_BYTES),
        ('{"index_gpu_bytes": 1000}', 1000 + BUFFER_BYTES),
        ('{"decode_path": "cascade"}', BUFFER_BYTES),
        ('{"decode_path": "stock"}', 0),
        ('{"build": "capture", "capture_folder": "x"}', 0),
        ('{"build": "prefill", "decode_path": "stock"}', 0),
        ('{"build": "shared"}', 4 * GIB + BUFFER_BYTES + BUILD_BYTES),
        ('{"share_prefixes": false}', 0),
        ('{"method": "csattention"}', 4 * GIB + BUFFER_BYTES),
        ('{"method": "union"}', 4 * GIB + BUFFER_BYTES + COMBINED_BYTES),
        ('{"method": "exact"}', BUFFER_BYTES),
        ('{"search_period": 4}', 4 * GIB + BUFFER_BYTES + KEPT_BYTES),
        ('{"search_period": 4, "decode_path": "cascade"}', BUFFER_BYTES),
        ('{"trace_folder": "traces"}', 4 * GIB + BUFFER_BYTES + KEPT_BYTES),
        ('{"suffix_dense_tokens": 4096, "suffix_index_bytes": 3000}', 4 * GIB + 3000 + BUFFER_BYTES),
        (None, 0),
    ],
)
def test_the_pool_gets_what_is_left(tmp_path: Path, config: str | None, promised: int) -> None:
    assert after_profile_available_bytes(20 * GIB, configurator(tmp_path, config), 80) == 20 * GIB - promised


def test_without_decode_graphs_any_index_may_be_used(tmp_path: Path) -> None:
    promised = {
        '{"share_prefixes": false}': 4 * GIB + BUFFER_BYTES,
        '{"method": "union"}': 4 * GIB + BUFFER_BYTES,
        '{"decode_path": "stock"}': 0,
        '{"decode_path": "cascade"}': BUFFER_BYTES,
        '{"layer_plan": ["anchor", "anchor", {"reuse": 0}]}': 4 * GIB + BUFFER_BYTES + KEPT_BYTES,
    }
    for config, expected in promised.items():
        server = configurator(tmp_path, config)
        server.server_args.disable_decode_cuda_graph = True
        assert after_profile_available_bytes(20 * GIB, server) == 20 * GIB - expected, config


def test_neither_a_cpu_nor_a_draft_worker_gives_any(tmp_path: Path) -> None:
    for fields in ({"device": "cpu"}, {"is_draft_worker": True}):
        assert after_profile_available_bytes(GIB, configurator(tmp_path, "{}", **fields)) == GIB


def test_a_start_that_leaves_no_pool_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"index_gpu_bytes 4294967296.*got 1073741824.*Lower index_gpu_bytes"):
        after_profile_available_bytes(GIB, configurator(tmp_path, "{}"))
    own = configurator(tmp_path, '{"suffix_dense_tokens": 512, "suffix_index_bytes": 7000}')
    with pytest.raises(ValueError, match=r"suffix_index_bytes 7000\).*Lower index_gpu_bytes or suffix_index_bytes in"):
        after_profile_available_bytes(GIB, own)
