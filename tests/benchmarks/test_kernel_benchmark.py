"""The kernels' benchmark, small: rows, gates that can turn red, resuming, tuning and tables.

What runs kernels does so in processes of its own: Triton's interpreter must be chosen before Triton is imported.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from prefix_kernels.grouped_attention import TunedConfigs
from prefix_kernels.grouped_attention.tuned import TileKey

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ENVIRONMENT = {**os.environ, "TRITON_INTERPRET": "1"}
NARROW = ["--contexts", "192", "--groups", "--plain-contexts"]


def command(*arguments: str | Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    what = [str(BENCHMARKS / "kernel_bench.py")] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *what, *map(str, arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=BENCHMARKS,
    )


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def bench():
    """The modules that run no kernel."""
    sys.path.insert(0, str(BENCHMARKS))
    names = ("kernel_bench", "kernel_tables", "kernel_timing")
    try:
        yield SimpleNamespace(**{name.removeprefix("kernel_"): importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> SimpleNamespace:
    """One run of attention and one of selection."""
    out = tmp_path_factory.mktemp("kernels") / "rows.jsonl"
    for part in ("attention", "selection"):
        ran = command(part, "--smoke", "--out", out)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    return SimpleNamespace(out=out, rows=rows_of(out), printed=ran.stdout)


@pytest.mark.full
def test_every_case_gives_a_green_row_with_its_provenance(smoke):
    attention = [row for row in smoke.rows if row["bench"] == "attention"]
    found = {(row["case"], row["batch"], row["groups"]) for row in attention}
    assert found >= {(case, batch, 1) for case in ("exact", "sparse", "suffix") for batch in (1, 3)}
    assert found >= {("exact", 4, 2), ("sparse", 4, 2), ("plain", 2, 2)}
    selection = {(row["case"], row["batch"]) for row in smoke.rows if row["bench"] == "selection"}
    names = ("token_index", "token_index_sums16", "token_index_torch")
    assert selection == {(name, batch) for name in names for batch in (1, 3)}
    for row in smoke.rows:
        assert row["green"]
        assert 0 <= row["gate_share"] <= 1
        assert row["us_min"] <= row["us_p10"] <= row["us"] <= row["us_p90"]
        assert not row["meaningful"]
        assert {
            "device",
            "driver",
            "torch",
            "triton",
            "flashinfer",
            "commit",
            "date",
            "config",
            "null_us",
        } <= row.keys()


@pytest.mark.full
def test_bytes_count_each_key_and_value_once(smoke):
    row = next(r for r in smoke.rows if (r["case"], r["batch"], r["groups"]) == ("exact", 3, 1))
    assert row["bytes"] == (192 + 3 * 21) * 2 * (32 + 32) * 4
    assert row["share"] == round(row["bytes"] / (row["us"] * 1e-6) / 4.3e12, 4)
    plain = next(r for r in smoke.rows if r["case"] == "plain")
    assert plain["bytes"] == 2 * 80 * 2 * (32 + 32) * 4


@pytest.mark.full
def test_layers_of_one_graph_are_rows_of_their_own(bench, tmp_path):
    out = tmp_path / "rows.jsonl"
    few = [*NARROW, "--batches", "2", "--only", "exact", "--out", out]
    for layers in ("1", "3"):
        assert command("attention", "--smoke", *few, "--layers", layers).returncode == 0
    one, three = rows_of(out)
    assert (one["layers"], three["layers"]) == (1, 3)
    assert one["green"]
    assert three["green"]
    assert three["bytes"] == one["bytes"]
    table = bench.tables.tables(bench.tables.read([out]))
    assert "3 layers a graph, times of one" in table
    times = bench.timing.Times(40.0, 30.0, 50.0, 20.0, 9)
    assert times.over(4) == bench.timing.Times(10.0, 7.5, 12.5, 5.0, 9)


@pytest.mark.full
def test_rows_that_are_there_are_not_measured_again(smoke):
    ran = command("selection", "--smoke", "--out", smoke.out)
    assert ran.returncode == 0
    assert ran.stdout == ""
    assert rows_of(smoke.out) == smoke.rows


BREAK = """
import dataclasses, sys
import torch
sys.path.insert(0, "")
import kernel_bench, kernel_selection
from prefix_kernels.grouped_attention import GroupedAttention
run, plan = GroupedAttention.run, GroupedAttention.plan

def last_key_lost(self, *passes):
    plan(self, *([dataclasses.replace(s, length=s.length - 1) for s in own] for own in passes))

def unwritten(self, *arguments, **options):
    pass

def heads_swapped(self, q, kv, slots, sm_scale, out, lse, **options):
    run(self, q, kv, slots, sm_scale, out, lse, **options)
    out[:, :2] = out[:, :2].flip(1)

def lse_to_base_2(self, q, kv, slots, sm_scale, out, lse, **options):
    run(self, q, kv, slots, sm_scale, out, lse, **options)
    lse.mul_(1.4427)

def raising(self, *arguments, **options):
    raise RuntimeError("no such instruction")

def unsorted(self):
    sound(self)
    self.positions[0] = self.positions[0].flip(0)

def another(self):
    sound(self)
    taken = set(self.positions[1].tolist())
    self.positions[1, 16] = min(set(range(16, 128)) - taken)
    self.positions[1] = self.positions[1].sort().values

def scores_moved(self, inputs, scores, lists, **options):
    select(self, inputs, scores, lists, **options)
    scores[scores.argmax()] += 0.01

out, how = sys.argv[1:3]
arguments = sys.argv[3:]
if how in ("unsorted", "another"):
    sound = kernel_selection.Torch.run
    kernel_selection.Torch.run = globals()[how]
elif how == "scores_moved":
    select = kernel_selection.AnchorSelection.run
    kernel_selection.AnchorSelection.run = scores_moved
elif how == "last_key_lost":
    GroupedAttention.plan = last_key_lost
else:
    GroupedAttention.run = globals()[how]
sys.exit(kernel_bench.main([*arguments, "--smoke", "--out", out]))
"""


@pytest.mark.full
@pytest.mark.parametrize("how", ["last_key_lost", "unwritten", "heads_swapped", "lse_to_base_2", "raising"])
def test_a_broken_kernel_is_red_and_has_no_time(how, tmp_path):
    out = tmp_path / "rows.jsonl"
    ran = command(out, how, "attention", *NARROW, "--batches", "2", "--only", "exact", "sparse", code=BREAK)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert ran.stdout.count("FAILED") == 2
    assert "2 rows FAILED" in ran.stderr
    for row in rows_of(out):
        assert not row["green"]
        assert not {"us", "share", "bytes_per_s", "ratio"} & row.keys()
        assert ("error" in row) == (how == "raising")


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "case"),
    [("unsorted", "token_index_torch"), ("another", "token_index_torch"), ("scores_moved", "token_index")],
)
def test_a_broken_selection_is_red(how, case, tmp_path):
    out = tmp_path / "rows.jsonl"
    ran = command(out, how, "selection", "--batches", "1", "--only", case, code=BREAK)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    (row,) = rows_of(out)
    assert row["gate_share"] > 1
    assert "us" not in row


@pytest.mark.full
def test_a_red_row_is_measured_again(tmp_path):
    out = tmp_path / "rows.jsonl"
    narrow = ["attention", *NARROW, "--batches", "1", "--only", "exact"]
    assert command(out, "unwritten", *narrow, code=BREAK).returncode == 1
    ran = command(*narrow, "--smoke", "--out", out)
    assert ran.returncode == 0, ran.stderr
    assert [row["green"] for row in rows_of(out)] == [False, True]
    assert "FAILED" not in command("--table", out).stdout


@pytest.mark.full
def test_tuning_writes_the_best_and_goes_on_where_it_stopped(bench, tmp_path):
    out, tuned = tmp_path / "rows.jsonl", tmp_path / "tuned.json"
    arguments = ["attention", "--smoke", "--tune", tuned, "--out", out]
    ran = command(*arguments)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = rows_of(out)
    assert {(row["case"], row["launch"]["block_n"]) for row in rows} == {
        (case, n) for case in ("exact", "sparse", "plain") for n in (16, 32)
    }
    (entry,) = TunedConfigs.read(tuned).entries
    table = command("--table", out).stdout
    assert "; sweep, 16 rows" in table
    launches = {json.dumps(row["launch"]) for row in rows if row["case"] == "exact"}
    assert table.count("| exact, block_m 16, block_n ") == len(launches)
    assert entry.key == TileKey(16, 32, 32, "float32", "float32")
    config = dataclasses.asdict(entry.config)
    assert config in [row["launch"] for row in rows]
    assert set(entry.us_by_case) == {"exact 192 x 1 + 21", "sparse 192 x 1 + 21", "plain 64 x 2"}
    before = tuned.read_text()
    again = command(*arguments)
    assert again.returncode == 0
    assert rows_of(out) == rows
    assert tuned.read_text() == before
    arguments = ["attention", *NARROW, "--batches", "1", "--only", "exact", "--smoke", "--tuned", tuned]
    ran = command(*arguments, "--out", out)
    assert ran.returncode == 0, ran.stderr
    assert len(rows_of(out)) == len(rows) + 1
    assert rows_of(out)[-1]["config"]["passes"][0] == config
    assert rows_of(out)[-1]["tuned"] == "tuned.json"


def made_row(case: str, us: float, context: int = 131072, batch: int = 1, groups: int = 1, **more) -> dict:
    row = {"bench": "attention", "case": case, "context": context, "batch": batch, "groups": groups, "suffix": 64}
    row |= {
        "page": 16,
        "keep": 0.05,
        "shape": [32, 8, 128],
        "dtype": "bfloat16",
    }
    row |= {"tuned": None, "green": True, "gate": {"out": 1e-3}, "gate_share": 0.1, "meaningful": True, "us": us}
    row |= {"us_p10": us, "us_p90": us, "us_min": us, "repeats": 9, "bytes": 537_000_000, "device": "H200"}
    row |= {"share": round(537e6 / us * 1e6 / 4.3e12, 4), "torch": "2.11", "triton": "3.6", "flashinfer": "0.6"}
    return row | more


def test_the_table_has_a_line_per_case_and_a_column_per_batch(bench, tmp_path):
    rows = [made_row("flashinfer", 144.0), made_row("flashinfer", 450.0, batch=8)]
    rows += [made_row("exact", 130.0, ratio={"flashinfer": 1.108}), made_row("exact", 300.0, batch=32, groups=8)]
    rows += [made_row("plain", 104.0, 8192, 8, 8, suffix=0), made_row("flashinfer", 100.0, 8192, 8, 8, suffix=0)]
    rows += [made_row("token_index", 30.0, bench="selection"), made_row("anchor/blocks", 50.0, bench="selection")]
    red = made_row("sparse", 1.0, batch=8, green=False)
    for name in ("us", "us_p10", "us_p90", "us_min", "share", "repeats"):
        red.pop(name)
    for row in rows:
        if row["bench"] == "selection":
            row.pop("suffix")
    path = tmp_path / "rows.jsonl"
    stale = made_row("exact", 999.0)
    path.write_text("\n".join(json.dumps(row) for row in [stale, *rows, red]) + "\n")
    text = bench.tables.tables(bench.tables.read([path]))
    assert "999" not in text
    assert "| case | tokens | batch 1 | batch 8 | 8 groups of 4 |" in text
    assert "| flashinfer | 131072 | 144.0 (144.0-144.0; 86.7%) | 450.0 (450.0-450.0; 27.8%) | - |" in text
    assert "| exact | 131072 | 130.0 (130.0-130.0; 96.1%; 1.11 x) | - | 300.0 (300.0-300.0; 41.6%) |" in text
    assert "| K and V once, at 4.3 TB/s | 131072 | 124.9 | - | 124.9 |" in text
    assert "| plain | 8192 | - | 104.0 (" in text
    assert "| flashinfer, plain | 8192 | - | 100.0 (" in text
    assert "**FAILED**: sparse, 131072 tokens, batch 8: gate {'out': 0.001}; no time." in text
    assert "| token_index | 131072 | 30.0 (30.0-30.0) |" in text
    assert "| anchor/blocks | 131072 | 50.0 (50.0-50.0) |" in text


@pytest.mark.full
def test_smoke_rows_are_called_meaningless(smoke):
    ran = command("--table", smoke.out)
    assert ran.returncode == 0, ran.stderr
    assert "these times mean nothing" in ran.stdout
    assert "token_index_torch" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected attention, selection or --table"),
        (["selection", "--tune", "x.json"], "expected --tune with attention"),
        (["attention", "--groups", "8"], "expected GROUPSxREQUESTS such as 8x4, got '8'"),
        (["attention", "--rivals", "none", "flashinfer"], "expected --rivals none alone"),
        (["attention", "--layers", "0"], "expected --layers of 1 or more, got 0"),
        (["selection", "--layers", "2"], "expected --layers with attention, without --tune"),
    ],
)
def test_wrong_arguments_say_what_is_right(bench, arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.bench.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_unknown_cases_are_named(tmp_path):
    ran = command("attention", "--smoke", "--only", "exactly", "--out", tmp_path / "rows.jsonl")
    assert ran.returncode == 1
    assert "expected --only among flashinfer, flashinfer_cascade, exact" in ran.stderr
    assert "got exactly" in ran.stderr


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="FlashInfer is here")
def test_a_missing_rival_says_how_to_go_on(tmp_path):
    ran = command("attention", "--smoke", *NARROW, "--rivals", "flashinfer", "--out", tmp_path / "rows.jsonl")
    assert ran.returncode == 1
    assert "measure without it: --rivals none" in ran.stderr


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so(tmp_path):
    ran = command("attention", "--out", tmp_path / "rows.jsonl")
    assert ran.returncode == 1
    assert "expected a CUDA device, got none; run on a GPU, or try --smoke" in ran.stderr


def test_every_argument_has_help(bench):
    help_text = command("--help").stdout
    assert "correctness first" in help_text
    for part in ("--contexts", "--batches", "--groups", "--tune", "--tuned", "--table", "--smoke"):
        assert part in help_text
    parser = bench.bench.make_parser()
    assert all(action.help for action in parser._actions)
