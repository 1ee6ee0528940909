"""The kernels' benchmark, small: rows, gates that can turn red, resuming and tables.

What runs kernels does so in processes of its own: Triton's interpreter must be chosen before Triton is imported.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from prefix_kernels.grouped_attention import AttentionShape
from tests.benchmarks.results import BENCHMARKS, rows_of


def command(*arguments: str | Path, code: str | None = None, status: int = 0) -> subprocess.CompletedProcess[str]:
    what = [str(BENCHMARKS / "kernel_bench.py")] if code is None else ["-c", code]
    words, environment = [sys.executable, *what, *map(str, arguments)], {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, cwd=BENCHMARKS)
    assert ran.returncode == status, ran.stdout + ran.stderr
    return ran


# -- runs ------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_every_case_gives_a_green_row_with_its_provenance_once(tmp_path):
    out = tmp_path / "rows.jsonl"
    for part in (["attention"], ["selection"], ["operators", "--batches", "3", "--groups", "2x1"]):
        command(*part, "--smoke", "--out", out)
    rows = rows_of(out)
    found = {(row["bench"], row["case"], row["batch"]) for row in rows}
    attention = {("attention", case, batch) for case in ("exact", "sparse", "suffix") for batch in (1, 3)}
    assert found >= attention | {("attention", "exact", 4), ("attention", "sparse", 4)}
    names = {"token_index", "ab_sparse", "csattention", "two_level", "union"}
    assert found >= {("selection", name, batch) for name in names for batch in (1, 3, 4)}
    parts = {f"{name}_{part}" for name in ("two_level", "two_level_tokens") for part in ("ahead", "behind")}
    methods = {"token_index", "ab_sparse", "two_level", *parts}
    assert {one for one in found if one[0] == "operators"} == {("operators", n, b) for n in methods for b in (2, 3)}
    provenance = {"device", "driver", "torch", "triton", "flashinfer", "commit", "date", "config", "null_us"}
    for row in rows:
        assert (row["green"], row["meaningful"]) == (True, False)
        assert 0 <= row["gate_share"] <= 1
        assert row["us_min"] <= row["us_p10"] <= row["us"] <= row["us_p90"]
        assert provenance <= row.keys()
    row = next(r for r in rows if (r["case"], r["batch"], r.get("groups")) == ("exact", 3, 1))
    assert row["bytes"] == (192 + 3 * 21) * 2 * (32 + 32) * 4, "each key and value once"
    assert row["share"] == round(row["bytes"] / (row["us"] * 1e-6) / 4.3e12, 4)
    assert command("selection", "--smoke", "--out", out).stdout == ""
    assert rows_of(out) == rows, "rows that are there are not measured again"
    assert "these times mean nothing" in command("--table", out).stdout


BREAK = """
import sys
sys.path.insert(0, "")
import kernel_bench, kernel_selection, torch
from prefix_kernels.grouped_attention.runner import GroupedAttention
from sglang_ext.methods.two_level.decode_op import TwoLevelOp
select, behind = kernel_selection.Ours.run, TwoLevelOp.run_behind

def unwritten(self, *arguments, **options):
    pass

def raising(self, *arguments, **options):
    raise RuntimeError("no such instruction")

def unsorted(self):
    select(self)
    for found in (self._lists.positions, self._lists.slots):
        found[:2] = found[:2].flip(0)

def lists_moved(self):
    select(self)
    self._lists.positions[:8] += 8

def unranked_candidates(self, *arguments):
    # Of 64 entries and 2 KV heads 25 each, 28 apart: the first ones, and the window.
    self._of_all.positions[:56].view(2, 28)[:, :21] = torch.arange(21)
    behind(self, *arguments)

selections = dict.fromkeys(("unsorted", "lists_moved"), kernel_selection.Ours)
if sys.argv[2] == "unranked_candidates":
    TwoLevelOp.run_behind = unranked_candidates
else:
    selections.get(sys.argv[2], GroupedAttention).run = globals()[sys.argv[2]]
sys.exit(kernel_bench.main([*sys.argv[3:], "--smoke", "--out", sys.argv[1]]))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("unwritten", ["attention", "--contexts", "192", "--batches", "2", "--only", "exact"]),
        ("raising", ["attention", "--contexts", "192", "--batches", "2", "--only", "sparse"]),
        ("unwritten", ["operators", "--batches", "1", "--only", "token_index"]),
        ("unsorted", ["selection", "--batches", "1", "--only", "token_index"]),
        ("lists_moved", ["selection", "--batches", "1", "--only", "token_index"]),
        ("unranked_candidates", ["operators", "--contexts", "1024", "--batches", "1", "--only", "two_level"]),
    ],
)
def test_a_broken_kernel_is_red_has_no_time_and_is_measured_again(how, words, tmp_path):
    out = tmp_path / "rows.jsonl"
    ran = command(out, how, *words, "--groups", code=BREAK, status=1)
    assert ran.stdout.count("FAILED") == 1
    (row,) = rows_of(out)
    assert not row["green"]
    assert not {"us", "share", "bytes_per_s", "ratio"} & row.keys()
    assert ("error" in row) == (how == "raising")
    command(*words, "--groups", "--smoke", "--out", out)
    assert [row["green"] for row in rows_of(out)] == [False, True]
    assert "FAILED" not in command("--table", out).stdout


# -- in this process -------------------------------------------------------------------------------------------


def made_row(case: str, us: float, context: int = 131072, batch: int = 1, groups: int = 1, **more: Any) -> dict:
    row = {"bench": "attention", "case": case, "context": context, "batch": batch, "groups": groups, "suffix": 64}
    row |= {"page": 16, "keep": 0.05, "shape": [32, 8, 128], "dtype": "bfloat16"}
    row |= {"tuned": None, "green": True, "gate": {"out": 1e-3}, "gate_share": 0.1, "meaningful": True, "us": us}
    row |= {"us_p10": us, "us_p90": us, "us_min": us, "repeats": 9, "bytes": 537_000_000, "device": "H200"}
    row |= {"share": round(537e6 / us * 1e6 / 4.3e12, 4), "torch": "2.11", "triton": "3.6", "flashinfer": "0.6"}
    return row | more


def test_the_table_has_the_last_row_of_each_case_and_no_time_of_a_red_one(bench, tmp_path):
    rows = [made_row("exact", 999.0), made_row("flashinfer", 144.0), made_row("flashinfer", 450.0, batch=8)]
    rows += [made_row("exact", 130.0, ratio={"flashinfer": 1.108}), made_row("exact", 300.0, batch=32, groups=8)]
    rows.append(made_row("token_index", 30.0, bench="selection"))
    del rows[-1]["suffix"]
    same = {"bench": "operators", "floor_us": 7.0, "context": 32768}
    rows.append(made_row("flashinfer", 180.0, budget=None, **same))
    rows.append(made_row("token_index", 30.0, budget=2048, ratio={"flashinfer": 6.3}, **same))
    red = made_row("sparse", 1.0, batch=8, green=False)
    for name in ("us", "us_p10", "us_p90", "us_min", "share", "repeats"):
        red.pop(name)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [*rows, red])) + "\n")
    text = bench.kernel_tables.tables(bench.kernel_tables.last_rows([tmp_path / "rows.jsonl"]))
    for line in (
        "| case | tokens | batch 1 | batch 8 | 8 groups of 4 |",
        "| flashinfer | 131072 | 144.0 (144.0-144.0; 86.7%) | 450.0 (450.0-450.0; 27.8%) | - |",
        "| exact | 131072 | 130.0 (130.0-130.0; 96.1%; 1.11 x) | - | 300.0 (300.0-300.0; 41.6%) |",
        "| K and V once, at 4.3 TB/s | 131072 | 124.9 | - | 124.9 |",
        "**FAILED**: sparse, 131072 tokens, batch 8: gate {'out': 0.001}; no time.",
        "| token_index | 131072 | 30.0 (30.0-30.0) |",
        "| flashinfer | 32768 | 180.0 (7.0) |",
        "| token_index, 2,048 | 32768 | 30.0 (7.0; 6.30 x) |",
    ):
        assert line in text.splitlines()


def test_a_gate_is_as_tight_as_one_of_many_keys(bench):
    """A lost beacon of 64 in 4,096 keys is far outside bf16's limit; rounding to bf16 is inside."""
    shape = AttentionShape(4, 2, 32, 32, torch.bfloat16, torch.bfloat16)
    sizes = bench.kernel_problem.Sizes(4096, 2, 1, 16, 16)
    problem = bench.kernel_problem.make_problem(shape, sizes, 0.05, torch.device("cpu"))
    assert problem.positions.shape[2] == math.ceil(round(0.05 * 4096) * math.sqrt(2))
    wanted = problem.oracle("all")
    assert problem.gate(wanted.out.bfloat16(), wanted.lse, "all").green
    assert not problem.gate(wanted.out.bfloat16(), wanted.lse + 2e-3, "all").green
    for lost in (problem.prefix_slots[:, 1:], problem.prefix_slots[:, :-1]):
        lists = [torch.cat([lost, own[None]], dim=1) for own in problem.suffix_slots]
        state = bench.kernel_problem.oracle(problem.q, problem.kv, lists, problem.sm_scale)
        assert problem.gate(state.out, None, "all").error > 2
    assert bool(torch.isnan(problem.kv.k_cache).any())
    with pytest.raises(ValueError, match="expected a batch that is a multiple of the groups"):
        bench.kernel_problem.Sizes(4096, 3, 2, 16, 16)


def test_a_candidate_that_ties_at_the_edge_is_no_error_and_all_others_are(bench):
    """A swapped block of 16 moves the sample that sums are of; lists are right for the candidates that were named."""
    own, size = bench.kernel_selection, 16
    shape = AttentionShape(4, 1, 64, 64, torch.float32, torch.float32)
    sizes = bench.kernel_problem.Sizes(131072, 8, 1, 16, 16)
    problem = bench.kernel_problem.make_problem(shape, sizes, 0.01, torch.device("cpu"), seed=14)
    queries = torch.randn(1, 256, 64, generator=torch.Generator().manual_seed(0))
    spec = own.SPECS["two_level"]
    arrays = own.build_arrays(spec, problem.kv.k_cache[problem.prefix_slots[0].long()], queries)
    prefixes = own.Prefixes(spec, shape, problem.q, [arrays], problem.prefix_slots, 2048)
    named = prefixes.selector.candidates(arrays, problem.q, prefixes.args)
    keys = prefixes.ranked[0][0].floor()
    blocks = keys.long(), named.view(-1, size)
    last = int(blocks[0][blocks[1].all(dim=1)][4:-4].min())

    def swapped(lost: int, won: int) -> torch.Tensor:
        """The first named block of a key, for the last one of another key that is not named."""
        other, (key, there) = named.clone(), blocks
        at = int((there.all(dim=1) & (key == lost)).nonzero()[4]), int((~there.any(dim=1) & (key == won)).nonzero()[-1])
        for block, value in zip(at, (False, True), strict=True):
            other[0, block * size : (block + 1) * size] = value
        return other

    def gate(candidates: torch.Tensor, among: torch.Tensor, rows: int = 8) -> Any:
        listed = prefixes.selector.select_among(arrays, problem.q[:rows], prefixes.args, among)
        return prefixes.gate([listed.positions], [candidates.nonzero()[:, 1].view(1, -1).int()])

    tied, low = swapped(last + 1, last), swapped(last + 1, last - 6)
    assert gate(tied, tied).figures == {"wrong_candidates": 0.0, "wrong_share": 0.0}
    assert gate(tied, named).error > 1, "sums of another sample"
    assert gate(tied, tied, rows=7).error > 1, "a request that was not asked"
    assert gate(low, low).figures == {"wrong_candidates": size / named.sum()}, "a block of another rank"
    assert not gate(low, low).green


def test_pages_of_the_control_are_bounded_by_their_keys(bench):
    gen = torch.Generator().manual_seed(0)
    keys, q = (torch.randn(*size, 32, generator=gen) for size in ((256, 2), (6, 4)))  # 3 requests, 2 KV heads, 4 each
    pages = torch.randperm(256, generator=gen)[:240].view(3, 5, 16)
    scores = bench.kernel_cases.PageBounds(keys, pages).scores(q)
    products = torch.einsum("bpthd,bhqd->bhpqt", keys[pages], q.view(3, 2, 4, 32)).amax((3, 4)).flatten(0, 1)
    assert (scores > products).all()
    alone = bench.kernel_cases.PageBounds(keys, pages[:, :, :1]).scores(q)
    first = torch.einsum("bphd,bhqd->bhpq", keys[pages[:, :, 0]], q.view(3, 2, 4, 32)).amax(3).flatten(0, 1)
    torch.testing.assert_close(alone, first)
