"""`benchmarks/serving.py`: its command lines, rows and table, and once a real server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.results import BENCHMARKS, RESULTS, cells, document, rows_of
from tests.server.jobs import run_job


def row(engine: str, throughput: float, tpot_p99: float, **more: Any) -> dict[str, Any]:
    figures = {"output_throughput": throughput, "ttft_ms": 80.0, "ttft_ms_p99": 200.0, "itl_ms_p99": 40.0}
    figures |= {"tpot_ms": tpot_p99 / 2, "tpot_ms_p99": tpot_p99, "cascade_steps": 9, "sparse_steps": 2}
    origin = {"device": "GPU", "shape": "tiny", "page": 16, "plan": "kascade", "config": {}, "flags": [], "start": 0}
    return {**origin, "engine": engine, "run": "groups", "sizes": {"groups": 2}, **figures, **more}


def test_sizes_can_be_changed_one_by_one(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    args = bench.serving.parse(["--runs", "groups", "agent", "--set", "groups.prefix=4096", "groups.zipf=1.5"])
    groups, agent = ({**bench.serving.RUNS[name]} for name in ("groups", "agent"))
    assert args.sizes == {"groups": {**groups, "prefix": 4096, "zipf": 1.5}, "agent": agent}
    for wrong, message in (
        ("groups.length=3", "expected RUN.SIZE=NUMBER"),
        ("all.prefix=3", "expected RUN.SIZE=NUMBER"),
        ("groups.requests=7", "expected requests to be a multiple of groups, got 7 and 4"),
    ):
        with pytest.raises(SystemExit):
            bench.serving.parse(["--set", wrong])
        assert message in capsys.readouterr().err


def test_flags_of_the_engines(bench: Any) -> None:
    for engine in bench.serving.ENGINES:
        args = bench.serving.parse(["--runs", "groups", "--", "--x", "1"])
        args.cpu = False
        listed = bench.serving.server_flags(args, engine, Path("model"), Path("store"))
        value = dict(zip(listed, [*listed[1:], ""], strict=True))
        stock = engine in ("flashinfer", "triton")
        assert ("--sparse-attn" in listed) is not stock
        assert value["--attention-backend"] == (engine if stock else "flashinfer")
        assert not {"--skip-tokenizer-init", "--disable-radix-cache"} & value.keys()
        graphs = listed[listed.index("--cuda-graph-bs-decode") + 1 :][:8]
        assert graphs == ["1", "2", "4", "8", "12", "16", "24", "32"]
        assert value["--max-running-requests"] == "32"
        assert int(value["--context-length"]) >= 65536 + 128 + 512
        config = json.loads(value.get("--sparse-attn-config", "{}"))
        wanted = (engine, "prefill") if engine in ("sparse", "auto") else (None, None)
        if engine != "building":
            assert (config.get("decode_path"), config.get("build")) == wanted
        assert listed[-2:] == ["--x", "1"]


def result(**more: Any) -> dict[str, Any]:
    """What `bench_serving` writes of four requests."""
    found: dict[str, Any] = {"completed": 4, "output_lens": [3] * 4, "errors": [""] * 4, "duration": 2.0}
    found |= {"total_output_tokens": 12, "output_throughput": 6.0, "input_lens": [70] * 4}
    found |= {"cached_tokens": [64, 80, 64, 80]}
    found |= {f"{of}_{name}_ms": 1.0 for name in ("ttft", "tpot", "itl") for of in ("median", "p99")}
    state = {"cascade_steps": 9, "sparse_steps": 2, "hits": 1, "suffix_keep_ratio": 0.25}
    return {**found, "server_info": {"internal_states": [{"sparse_attn": state}]}, **more}


def test_a_row_is_what_the_measured_pass_found(bench: Any) -> None:
    sizes = {"prefix": 70, "question": 2}
    before = {"server_info": {"internal_states": [{"sparse_attn": {"cascade_steps": 4, "sparse_steps": 2}}]}}
    found = bench.serving.figures([{}, before, result()], sizes, 16)
    assert (found["cascade_steps"], found["sparse_steps"], found["hits"]) == (5, 0, 1)
    assert found["suffix_keep_ratio"] == 0.25
    assert (found["prompt_tokens"], found["cached_tokens"]) == ([70, 70], [64, 80])
    stock = {"server_info": {"internal_states": [{}]}}
    found = bench.serving.figures([stock, result(**stock)], sizes, 16)
    assert (found["cascade_steps"], found["suffix_keep_ratio"]) == (0, None)


def test_a_row_that_would_not_be_what_it_says_is_none(bench: Any) -> None:
    with pytest.raises(RuntimeError, match="expected 80 tokens of each request in the prefix cache, got 64"):
        bench.serving.figures([result(), result()], {"prefix": 80}, 16)
    with pytest.raises(RuntimeError, match=r"expected every request to be answered, got 3 and \['gone'\]"):
        bench.serving.figures([result(), result(completed=3, errors=["", "gone", "", ""])], {"prefix": 64}, 16)


def test_what_is_there_is_not_measured_again(bench: Any, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    args = bench.serving.parse(["--out", str(out), "--shape", "tiny", "--runs", "groups", "agent"])
    first, _ = bench.serving.missing(args, "shared", 0)
    out.write_text(json.dumps(first) + "\n")
    assert [one["run"] for one in bench.serving.missing(args, "shared", 0)] == ["agent"]
    assert len(bench.serving.missing(args, "shared", 1)) == len(bench.serving.missing(args, "auto", 0)) == 2
    args.sizes["groups"] = {**args.sizes["groups"], "output": 3}
    assert len(bench.serving.missing(args, "shared", 0)) == 2


def test_the_table_has_medians_and_shares_of_the_best_stock_engine_of_the_same_settings(bench: Any) -> None:
    rows = [row("shared", throughput, 20.0, start=n) for n, throughput in enumerate((900.0, 300.0, 600.0))]
    rows += [row("flashinfer", 300.0, 40.0), row("triton", 200.0, 50.0), row("auto", 400.0, 10.0, run="long")]
    rows += [row("shared", 450.0, 9.0, config={"x": 1}), row("shared", 500.0, 9.0, sizes={"groups": 3})]
    rows += [row("flashinfer", 150.0, 9.0, flags=["--y"]), row("shared", 450.0, 9.0, flags=["--y"])]
    header, _, *found = cells(bench.serving.table(rows))
    assert sorted(one[1:4] for one in found) == [
        ["groups", "flashinfer", "300"],
        ["groups", "shared", "500"],
        ["groups", "shared", "600, 2.000"],
        ["groups", 'shared, {"x": 1}', "450, 1.500"],
        ["groups", "triton", "200"],
        ["groups --y", "flashinfer", "150"],
        ["groups --y", "shared", "450, 3.000"],
        ["long", "auto, kascade", "400"],
    ]
    assert dict(zip(header, next(one for one in found if one[3] == "600, 2.000"), strict=True)) == {
        "device, shape, page": "GPU, tiny, 16",
        "run": "groups",
        "engine": "shared",
        "output, tokens/s": "600, 2.000",
        "TTFT p50, p99, ms": "80, 200",
        "TPOT p50, ms": "10.00, 0.500",
        "TPOT p99, ms": "20.00, 0.500",
        "ITL p99, ms": "40.00, 1.000",
        "steps shared, sparse": "9, 2",
    }


@pytest.mark.full
@pytest.mark.server
@pytest.mark.timeout(1800)
def test_with_a_real_server(bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs of the plugin through HTTP, by SGLang's own `bench_serving`. No time in them means anything."""
    out = tmp_path / "rows.jsonl"
    of_groups = {"groups": 2, "prefix": 512, "question": 16, "output": 64, "requests": 8, "concurrency": 4}
    of_agent = {"groups": 2, "prefix": 512, "question": 16, "output": 64, "conversations": 4, "concurrency": 4}
    sizes = {f"groups.{name}": size for name, size in of_groups.items()}
    sizes |= {f"agent.{name}": size for name, size in {**of_agent, "turns": 2}.items()}
    command = [sys.executable, str(BENCHMARKS / "serving.py"), "--out", str(out), "--shape", "tiny", "--page", "16"]
    command += ["--engines", "shared", "--runs", "groups", "agent", "--config", '{"min_shared_tokens": 256}']
    command += ["--logs", str(tmp_path / "logs"), "--set", *(f"{name}={size}" for name, size in sizes.items())]
    status, output = run_job(command, tmp_path / "job.log")
    assert status == 0, output[-6000:]
    groups, agent = rows_of(out)
    assert (groups["run"], groups["requests"], groups["output_tokens"]) == ("groups", 8, 8 * 64)
    assert (groups["prompt_tokens"], groups["cached_tokens"]) == ([512 + 16] * 2, [512] * 2)
    assert (agent["run"], agent["requests"]) == ("agent", 4 * 2)
    first, last = 512 + 16, 512 + 16 + 64 + 16
    assert agent["prompt_tokens"] in ([first, first], [first, last])  # 0.5.16 counts each conversation's first turn
    assert agent["cached_tokens"] == [512, 576], "behind the first turn also its question and answer, by pages"
    for one in (groups, agent):
        assert one["cascade_steps"] > 0
        assert (one["sparse_steps"], one["hits"]) == (0, 0)
        assert 0 < one["tpot_ms"] <= one["tpot_ms_p99"]
        assert 0 < one["ttft_ms"] <= one["ttft_ms_p99"]
        assert one.keys() >= {"device", "sglang", "torch", "commit", "date", "config", "flags", "seed", "sizes"}
    assert bench.serving.main(command[2:]) == 0
    assert capsys.readouterr().out == "", "rows that are there are not measured again"


def test_the_table_in_the_documents_is_that_of_the_rows_and_limits_are_met(bench: Any) -> None:
    rows = bench.serving.engines.read([str(RESULTS / "serving-h200.jsonl")])
    assert bench.serving.table([row for row in rows if row["run"] == "groups"]) in document("benchmarks")
    (found,) = [of for (_, _, _, run, _), of in bench.serving.medians(rows).items() if run == "groups"]
    stock = found["flashinfer"]
    for name in ("shared", "auto, kascade"):
        assert found[name]["output_throughput"] >= 2 * stock["output_throughput"], name
        assert found[name]["tpot_ms_p99"] <= stock["tpot_ms_p99"], name
    assert {row["engine"] for row in rows if row["run"] == "groups"} == {"flashinfer", "shared", "auto", "building"}
    # Building beside traffic costs at most a twentieth of the p99.
    rows = bench.serving.engines.read([str(RESULTS / "serving-h200-building.jsonl")])
    tpot = {(row["run"], row["engine"]): row["tpot_ms_p99"] for row in rows}
    assert all(tpot[run, "building"] <= 1.05 * tpot[run, "shared"] for run in ("groups", "agent"))
