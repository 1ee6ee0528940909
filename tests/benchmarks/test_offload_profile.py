"""`benchmarks/offload_profile.py`: figures, table and picture of traces of the form that torch writes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROW = {
    "measure": "step",
    "engine": "host",
    "start": "host",
    "ms": 0.15,
    "shape": "tiny",
    "device": "GPU",
    "commit": "c",
}
LAYER = (
    ("score_items_sm90_kernel", 0, 10, 7),
    ("list_kernel", 8, 14, 7),  # comes while the one before still runs
    ("look_up_kernel", 14, 18, 7),
    ("fetch_kernel", 18, 30, 21),  # on a stream of its own
    ("attend_items_sm90_kernel", 20, 36, 7),
    ("void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*, int)", 36, 37, 7),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", 38, 46, 7),
)
"""Begin and end in us; 1 us nothing runs."""


def event(name: str, begin: float, end: float, stream: int, launch: int, category: str = "kernel") -> dict[str, Any]:
    args = {"device": 0, "context": 1, "stream": stream, "correlation": launch, "graph id": 2, "grid": [1, 1, 1]}
    times = {"ts": begin, "dur": end - begin}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, **times, "args": args}


@pytest.fixture
def bench(load: Any) -> SimpleNamespace:
    return load("offload_profile").offload_profile  # type: ignore[no-any-return]


@pytest.fixture
def trace() -> dict[str, Any]:
    """Six replays of two layers, 92 us, every 120 us; a copy of 3 us between them, 8 us before the next one."""
    found = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}]
    for step in range(6):
        begin = 120.0 * step
        found.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": begin - 9, "dur": 5.0})
        for at in (begin, begin + 46):
            found += [event(name, at + first, at + last, stream, 100 + step) for name, first, last, stream in LAYER]
        copy = "Memcpy HtoD (Pinned -> Device)"
        found.append(event(copy, begin + 109, begin + 112, 7, 500 + step, "gpu_memcpy"))
    return {"schemaVersion": 1, "traceEvents": found[::-1], "row": ROW}


def test_kernels_and_pauses_add_up_to_the_step(bench: SimpleNamespace, trace: dict[str, Any]) -> None:
    found = bench.profile(trace)
    assert (found["steps"], found["step_us"]) == (3, 120)
    kernels = {name: figures for name, _, *figures in found["kernels"]}
    assert kernels["score_items_sm90_kernel"] == [2, 20, 20]
    assert kernels["list_kernel"] == [2, 8, 12], "4 us of it the scores took"
    assert kernels["attend_items_sm90_kernel"] == [2, 12, 32], "behind the fetch that it ran beside"
    assert kernels["Memcpy HtoD (Pinned -> Device)"] == [1, 3, 3]
    assert "norm::RMSNormKernel" in kernels
    kinds = {"fetch": 24, "residents": 8, "replay": 0, "selection": 28, "attention": 12, "products": 16, "others": 5}
    assert found["kinds"] == kinds
    assert (found["idle_us"], found["between_us"]) == (2, 120 - 92 - 3)
    assert sum(kinds.values()) + found["idle_us"] + found["between_us"] == found["step_us"]
    assert found["beside_us"] == {"attention + fetch": 20}
    assert found["overlapped_us"] == 4


def test_names_tell_kinds(bench: SimpleNamespace) -> None:
    names = {
        "void at::native::(anonymous namespace)::fused<int>(int)": ("native::fused", "others"),
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(int)": ("gemvx::kernel", "products"),
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<1>()": (
            "flashinfer::BatchPrefillWithPagedKVCacheKernel",
            "attention",
        ),
        "merge_kernel": ("merge_kernel", "selection"),
        "merge_items_kernel": ("merge_items_kernel", "attention"),
        "_fwd_grouped_kernel_stage1": ("_fwd_grouped_kernel_stage1", "attention"),
        "replay_kernel": ("replay_kernel", "replay"),
        "place_kernel": ("place_kernel", "residents"),
    }
    for name, expected in names.items():
        kernel = bench.Kernel(bench.short(name), 0, 1, 7, 1)
        assert (kernel.name, kernel.kind) == expected


def test_a_trace_without_graphs_is_refused(bench: SimpleNamespace, trace: dict[str, Any]) -> None:
    events = [one for one in trace["traceEvents"] if one.get("args", {}).get("correlation", 0) in (100, 101, 102)]
    with pytest.raises(ValueError, match="expected 4 replays of a decode graph or more, got 3 among 42 kernels"):
        bench.profile({"traceEvents": events})
    for number, one in enumerate(events):
        one["args"]["correlation"] = number
    with pytest.raises(ValueError, match="got 0 among 42 kernels; record on a GPU, with SGLang's decode graphs"):
        bench.profile({"traceEvents": events})


def test_two_traces_become_rows_a_table_and_a_timeline(
    bench: SimpleNamespace, trace: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [one for one in trace["traceEvents"] if one["name"] not in ("fetch_kernel", "look_up_kernel")]
    other = {"traceEvents": events, "row": ROW | {"engine": "hbm"}}
    paths = [tmp_path / f"{name}.trace.json.gz" for name in ("host", "hbm")]
    for path, one in zip(paths, (trace, other), strict=True):
        path.write_bytes(gzip.compress(json.dumps(one).encode()))
    out, svg = tmp_path / "rows.jsonl", tmp_path / "timeline.svg"
    assert bench.main([*map(str, paths), "--out", str(out), "--picture", str(svg)]) == 0
    printed = capsys.readouterr().out
    assert bench.main(["--table", str(out)]) == 0
    assert capsys.readouterr().out == printed
    assert "step host: 120 us a step of 3, 150 us without the profiler; GPU, commit c" in printed
    assert "| fetch_kernel | fetch | 2.0 | 24.0 | 20.0% | 24.0 |" in printed
    assert "| attend_items_sm90_kernel | attention | 2.0 | 32.0 | 26.7% | 32.0 |" in printed, "nothing beside it"
    assert "beside each other on two streams: attention + fetch 20.0 us" in printed
    drawn = svg.read_text()
    assert (drawn.count(">stream 7<"), drawn.count(">stream 21<"), drawn.count(">fetch_kernel<")) == (2, 1, 1)
    begin, end, kernels = bench.shown(trace, 4)
    assert (begin, end) == (4 * 120 + 46, 4 * 120 + 92), "two of four layers, from the second selection"
    assert [one.name for one in kernels] == [bench.short(name) for name, *_ in LAYER]
