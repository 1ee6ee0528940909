"""Memory of the plugin is promised before SGLang sizes its KV pool."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.compat.memory import (
    BUFFER_BYTES,
    BUILD_BYTES,
    COMBINED_BYTES,
    after_profile_available_bytes,
    kv_bytes,
)
from sglang_ext.compat.server_args import ATTRIBUTE, settings_of
from sglang_ext.config import make_settings
from sglang_ext.decode.buffers import KEPT_BYTES

GIB = 1 << 30


def configurator(tmp_path: Path, config: str | None, **fields: Any) -> Any:
    """As SGLang's, with settings of this configuration; None: without `--sparse-attn`."""
    text = "" if config is None else make_settings(config, str(tmp_path)).dump()
    record = SimpleNamespace(**{ATTRIBUTE: text})
    return SimpleNamespace(**{"device": "cuda", "is_draft_worker": False, "server_args": record, **fields})


def indexes_of(fixed: int) -> int:
    """A twentieth of the pool that is left beside other promises and beside the indexes themselves."""
    return (20 * GIB - fixed) // 21


@pytest.mark.parametrize(
    ("config", "fixed", "indexes"),
    [
        ("{}", BUFFER_BYTES, True),
        ('{"index_gpu_bytes": 1000}', 1000 + BUFFER_BYTES, False),
        ('{"decode_path": "cascade"}', BUFFER_BYTES, False),
        ('{"decode_path": "stock"}', 0, False),
        ('{"build": "capture", "capture_folder": "x"}', 0, False),
        ('{"build": "prefill", "decode_path": "stock"}', 0, False),
        ('{"build": "shared"}', BUFFER_BYTES + BUILD_BYTES, True),
        ('{"share_prefixes": false}', 0, False),
        ('{"method": "csattention"}', BUFFER_BYTES, True),
        ('{"method": "union"}', BUFFER_BYTES + COMBINED_BYTES, True),
        ('{"method": "exact"}', BUFFER_BYTES, False),
        ('{"search_period": 4}', BUFFER_BYTES + KEPT_BYTES, True),
        ('{"exactness": "verify"}', BUFFER_BYTES + KEPT_BYTES, True),
        ('{"method": "two_level", "select_ahead": true}', BUFFER_BYTES + COMBINED_BYTES + KEPT_BYTES, True),
        ('{"search_period": 4, "decode_path": "cascade"}', BUFFER_BYTES, False),
        ('{"trace_folder": "traces"}', BUFFER_BYTES + KEPT_BYTES, True),
        ('{"suffix_dense_tokens": 4096, "suffix_index_bytes": 3000}', 3000 + BUFFER_BYTES, True),
        (None, 0, False),
    ],
)
def test_the_pool_gets_what_is_left(tmp_path: Path, config: str | None, fixed: int, indexes: bool) -> None:
    promised = fixed + (indexes_of(fixed) if indexes else 0)
    assert after_profile_available_bytes(20 * GIB, configurator(tmp_path, config), 80) == 20 * GIB - promised


def test_what_a_cache_rank_reads_and_writes_is_promised(tmp_path: Path) -> None:
    """Queries of all layers of 128 requests, and lists."""
    numbers = {"num_hidden_layers": 63, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    model_config = SimpleNamespace(**numbers, dtype=torch.bfloat16)
    wanted = '{"method": "two_level", "select_ahead": true, "cache_device": "cuda:1"}'
    pools = [
        after_profile_available_bytes(20 * GIB, configurator(tmp_path, config, model_config=model_config))
        for config in (wanted.replace('"cuda:1"', "null"), wanted)
    ]
    queries = 63 * 128 * 64 * 128 * 2
    assert pools[0] - pools[1] == pytest.approx((COMBINED_BYTES + queries) * 20 / 21, abs=2)


def test_indexes_may_have_a_twentieth_of_the_pool_or_what_was_said(tmp_path: Path) -> None:
    """What residency keeps within is what was promised; on a CPU, which promises nothing, the same share."""
    for config, device, given in (("{}", "cuda", None), ("{}", "cpu", None), ('{"index_gpu_bytes": 7}', "cuda", 7)):
        server = configurator(tmp_path, config, device=device)
        pool = after_profile_available_bytes(50 * GIB, server)
        assert kv_bytes() == pool
        kept = settings_of(server.server_args).config.index_bytes(kv_bytes())
        assert kept == (given or pool // 20)
        assert pool + BUFFER_BYTES + kept - 50 * GIB in ((0, 1) if device == "cuda" else (BUFFER_BYTES + kept,))


def test_without_decode_graphs_any_index_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever flag turns them off: SGLang's own word counts."""
    asked = "sglang.srt.model_executor.cuda_graph_config.check_cuda_graph_backend"
    monkeypatch.setattr(asked, lambda *of: of == ("decode", "disabled"))
    fixed = {
        '{"share_prefixes": false}': BUFFER_BYTES,
        '{"method": "union"}': BUFFER_BYTES,
        '{"layer_plan": ["anchor", "anchor", {"reuse": 0}]}': BUFFER_BYTES + KEPT_BYTES,
    }
    promised = {config: own + indexes_of(own) for config, own in fixed.items()}
    for config, expected in {
        **promised,
        '{"decode_path": "stock"}': 0,
        '{"decode_path": "cascade"}': BUFFER_BYTES,
    }.items():
        server = configurator(tmp_path, config)
        assert after_profile_available_bytes(20 * GIB, server) == 20 * GIB - expected, config


def test_neither_a_cpu_nor_a_draft_worker_gives_any(tmp_path: Path) -> None:
    for fields in ({"device": "cpu"}, {"is_draft_worker": True}):
        assert after_profile_available_bytes(GIB, configurator(tmp_path, "{}", **fields)) == GIB


def test_a_start_that_leaves_no_pool_is_refused_by_name(tmp_path: Path) -> None:
    cases = {
        "{}": rf"more than {BUFFER_BYTES} bytes .* for buffers and indexes; got 1048576. Set decode_path to cascade",
        '{"index_gpu_bytes": 9}': r"indexes, index_gpu_bytes 9; got 1048576. Lower index_gpu_bytes in",
        '{"index_gpu_bytes": 9, "suffix_dense_tokens": 512, "suffix_index_bytes": 7000}': (
            r"index_gpu_bytes 9, suffix_index_bytes 7000; got.*Lower index_gpu_bytes or suffix_index_bytes in"
        ),
    }
    for config, said in cases.items():
        with pytest.raises(ValueError, match=said):
            after_profile_available_bytes(1 << 20, configurator(tmp_path, config))
