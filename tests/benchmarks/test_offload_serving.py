"""`benchmarks/offload_serving.py`: what is replayed, what is counted, tables, and once real engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefix_kernels.types import PagedKV, SelectionGroup, new_lists, pack_lists
from sglang_ext.decode.swap import HostKV, SwapIn
from sglang_ext.decode.types import HostPrefix
from sglang_ext.methods.layer_plan import LayerPlan
from sglang_ext.runtime import SparseRuntime
from tests.benchmarks.results import BENCHMARKS, rows_of
from tests.server.jobs import run_job

#: Lists of three groups of two KV heads, of which the second has its prefix on the device, over a trace and back.
COMPARED = """
from types import SimpleNamespace
import torch
from offload_serving_replay import Replay, positions_of
from prefix_kernels.types import SelectionGroup, pack_lists

positions = positions_of(None, 0.25, 40, 112)[:, :, :5]
groups = pack_lists([SelectionGroup(length, 40) for length in (112, 160, 208)], 3)
hosts = [SimpleNamespace(pages=torch.tensor([page])) for page in (3, 0, 8)]
hosts[1] = None
made = [Replay(positions, 112, 6, 4, torch.device("cpu")) for _ in range(2)]
seen = []
for step in range(17):
    arenas = []
    for replay, kernel in zip(made, (False, True), strict=True):
        replay.plan(groups, hosts)
        lists = SimpleNamespace(positions=torch.full((400,), -1, dtype=torch.int32), counts=torch.zeros(4, 3))
        for number in range(6):
            replay.run(number, lists, kernel=kernel)
        arenas.append(lists.positions)
    assert torch.equal(*arenas)
    assert (groups[1].lists_in(arenas[0], 3) == -1).all()
    seen.append(groups[2].lists_in(arenas[0], 3).tolist())
assert all((torch.tensor(one).diff(dim=1) > 0).all() for one in seen)
assert seen[:8] == seen[8:16]
print("compared", len({str(one) for one in seen}))
"""


def test_the_kernel_writes_what_the_reference_does_forth_and_back() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    words = [sys.executable, "-c", COMPARED]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, cwd=BENCHMARKS)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "compared 5\n", "five steps of the trace"


def test_lists_of_layers_that_select_are_replaced_before_their_tokens_are_fetched(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the server's own `SwapIn`: a dense layer, one that selects and one that reuses it, another one."""
    settings = {"path": None, "churn": 0.25, "budget": 16, "prefix_len": 64}
    monkeypatch.setenv(bench.offload_serving_replay.SETTINGS, json.dumps(settings))
    for owner, name in ((SwapIn, "__init__"), (SwapIn, "plan"), (SwapIn, "before"), (SparseRuntime, "snapshot")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    bench.offload_serving_replay.register()
    gen, device, heads = torch.Generator().manual_seed(0), torch.device("cpu"), 2
    kept = torch.randn(4, heads, 16, 2 * 8, generator=gen)
    roles = {"layers": ["dense", "anchor", {"reuse": 1, "head_map": [1, 0]}, "anchor"]}
    plan = LayerPlan.from_dict(roles, num_layers=4, num_kv_heads=heads)
    swap = SwapIn(HostKV(4, lambda _: kept, 0, 32), plan, heads, 1, 64, device)
    (group,) = pack_lists([SelectionGroup(64, 16)], heads)
    swap.plan([group], [HostPrefix(torch.arange(4))])
    pools = [PagedKV(torch.zeros(32, heads, 8), torch.zeros(32, heads, 8)) for _ in range(4)]
    wanted = bench.offload_serving_replay.positions_of(**settings)
    for step in range(1, 3):
        lists = new_lists(64, (1, heads), device, with_slots=True)
        for layer, trace in ((0, None), (1, 0), (2, 0), (3, len(wanted) - 1)):
            lists.counts.fill_(16)
            swap.before(layer, lists, pools[layer])
            if trace is not None:
                found = group.lists_in(lists.positions, heads)
                assert torch.equal(found, wanted[trace, :, step])
                rows, order = kept.transpose(1, 2).flatten(0, 1), [1, 0] if layer == 2 else [0, 1]
                for head, of in enumerate(order):
                    keys = pools[layer].k_cache[group.lists_in(lists.slots, heads)[of].long(), head]
                    assert torch.equal(keys, rows[found[of].long(), head, :8])


def test_a_trace_keeps_its_churn_on_a_longer_prefix(bench: Any, tmp_path: Path) -> None:
    replay = bench.offload_serving_replay
    short, length = replay.trace_of(None, 0.25, 16, 64)
    np.savez(tmp_path / "trace.npz", positions=short.astype(np.uint16), prefix_len=length)
    long = replay.positions_of(str(tmp_path / "trace.npz"), 0.0, 48, 200).numpy()
    for small, large in zip(short.reshape(-1, 64, 16), long.reshape(-1, 64, 48), strict=True):
        for step in range(1, 64):
            assert len({*small[step]} - {*small[step - 1]}) == 4
            assert len({*large[step]} - {*large[step - 1]}) == 12
    with pytest.raises(
        ValueError, match="expected a trace of 2 steps or more, whose budget times a whole number is 40"
    ):
        replay.positions_of(str(tmp_path / "trace.npz"), 0.0, 40, 200)


def test_tokens_are_counted_that_came_in_the_time(bench: Any) -> None:
    one = bench.engines.Streamed([], {}, 1.0, [(1, 3.0), (3, 4.0), (4, 9.0)])
    early = bench.engines.Streamed([], {}, 0.0, [(1, 1.0), (2, 2.5)])
    found = bench.offload_serving.within([one, early], 2.0, 8.0)
    assert found["tokens_per_s"] == pytest.approx((1 + 2 + 1) / 6)
    assert (found["begun"], found["requests"]) == (1, 2)
    assert found["ttft_ms"] == 2000
    assert found["itl_ms"] == 1000, "of two tokens in one second, and of one in 1.5"


def test_a_table_compares_with_the_other_engine_and_the_link(bench: Any) -> None:
    origin = {"answer": None, "start": "host"}
    rows: list[dict[str, Any]] = [
        {**origin, "measure": "throughput", "engine": "ours", "answer": 128, "tokens_per_s": 900.0},
        {**origin, "measure": "throughput", "engine": "stock", "answer": 128, "tokens_per_s": 200.0},
        {**origin, "measure": "step", "engine": "hbm", "ms": 8.0},
        {**origin, "measure": "step", "engine": "host", "ms": 10.0, "link_ms": 5.0},
    ]
    rows[0]["bytes"] = {"pool": 1000, "indexes": 500, "indexes_at_most": 600}
    lines = bench.offload_serving.table(rows).splitlines()
    assert "| throughput, answers of 128: tokens_per_s | 900.0 tokens/s | 200.0 tokens/s | 4.50 |" in lines
    assert "| step | 10.00 ms | 8.00 ms | 1.25 |" in lines
    assert "| step, and its link | 10.00 ms | 5.00 ms | 2.00 |" in lines
    assert "throughput ours: 1,500 bytes: pool 1,000, indexes 500" in lines


def test_the_stock_pool_has_the_bytes_that_ours_has(bench: Any, tmp_path: Path) -> None:
    row = {"start": "ours", "shape": "llama-3.1-8b", "bytes": {"pool": 1 << 32, "indexes": 10 << 30}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    args = bench.offload_serving.parse(["--out", str(tmp_path / "rows.jsonl"), "--work", str(tmp_path)])
    args.cpu = False
    flags = bench.offload_serving.engine_flags(args, "stock")
    assert flags[flags.index("--max-total-tokens") + 1] == str((14 << 30) // (128 << 10))
    assert flags[flags.index("--hicache-size") + 1] == "81"
    assert "--sparse-attn" not in flags
    ours = bench.offload_serving.engine_flags(args, "ours")
    assert int(ours[ours.index("--max-total-tokens") + 1]) < 98304


@pytest.mark.full
def test_real_engines_serve_prompts_that_are_longer_than_their_pool(bench: Any, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(BENCHMARKS / "offload_serving.py"), "--shape", "tiny", "--page", "16"]
    command += ["--trace", "none", "--work", str(tmp_path / "work"), "--out", str(out)]
    status, output = run_job(command, tmp_path / "log")
    assert status == 0, output[-6000:]
    rows = {(row["measure"], row["engine"], row["answer"]): row for row in rows_of(out)}
    assert len(rows) == 11, output
    for name, row in rows.items():
        if "wanted" in row:
            assert (row["dense_rows"], row["failed"] if name[0] == "throughput" else 0) == (0, 0)
            assert 0 < row["transferred"] < row["wanted"]
    assert rows["distinct", "ours", None]["moved_share"] == pytest.approx(0.3, abs=0.05)
