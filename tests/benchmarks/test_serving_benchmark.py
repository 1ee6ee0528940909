"""`benchmarks/serving.py`: its command lines, rows and table, and once a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.results import RESULTS, cells, document


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
    """What `tests/benchmarks/test_decode_benchmark.py` does not see of them."""
    args = bench.serving.parse(["--runs", "groups", "--", "--x", "1"])
    args.cpu = False
    for engine in bench.serving.ENGINES:
        listed = bench.serving.server_flags(args, engine, Path("model"), Path("store"))
        assert not {"--skip-tokenizer-init", "--disable-radix-cache"} & {*listed}
        assert listed[listed.index("--cuda-graph-bs-decode") + 1 :][:8] == ["1", "2", "4", "8", "12", "16", "24", "32"]
        assert int(listed[listed.index("--context-length") + 1]) >= 65536 + 128 + 512
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


def test_the_table_has_medians_and_shares_of_the_best_stock_engine_of_the_same_flags(bench: Any) -> None:
    def row(engine: str, figure: float, *flags: str) -> dict[str, Any]:
        figures = dict.fromkeys(bench.serving._FIGURES + bench.serving._STEPS, figure)
        origin = {"device": "GPU", "shape": "tiny", "page": 16, "config": {}, "run": "groups", "sizes": {}}
        return {**origin, **figures, "engine": engine, "flags": flags}

    rows = [row("shared", figure) for figure in (9.0, 3.0, 6.0)] + [row("flashinfer", 3.0), row("triton", 2.0)]
    _, _, *found = cells(bench.serving.table([*rows, row("shared", 4.0, "--y")]))
    assert [one[1:6] for one in found if one[2] == "shared"] == [
        ["groups", "shared", "6, 2.000", "6, 6", "6.00, 3.000"],
        ["groups --y", "shared", "4", "4, 4", "4.00"],
    ]


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
