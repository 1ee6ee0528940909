"""`benchmarks/offload.py`: gates that can turn red, what is counted of a decode, and tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.results import BENCHMARKS, rows_of

ENVIRONMENT = {**os.environ, "TRITON_INTERPRET": "1"}
SMALL = ("swap", "--smoke", "--groups", "1x1", "--only", "exact", "--steps", "2", "--budget", "32")
#: Argument: where rows go. One page is not copied; or one is copied, and not counted.
SPOILED = """
import sys
import offload, offload_swap
from prefix_kernels.residents import Residents

class Spoiled(Residents):
    def run(self, *arguments):
        super().run(*arguments)
        if sys.argv[2] == "bytes":
            arguments[4].v_cache[-1, -1, -1] += 1
        else:
            self.state.counters[0, 0, 1] -= 1

offload_swap.Residents = Spoiled
sys.exit(offload.main([*sys.argv[3:], "--only", "exact", "--out", sys.argv[1]]))
"""


def command(*arguments: str | Path, code: str | None = None, status: int = 0) -> str:
    what = [str(BENCHMARKS / "offload.py")] if code is None else ["-c", code]
    words = [sys.executable, *what, *map(str, arguments)]
    ran = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, cwd=BENCHMARKS)
    assert ran.returncode == status, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


#: Argument: where rows go. A piece is attended twice.
TWICE = """
import sys
import offload
from prefix_kernels.prefill_attention import PrefillAttention

fold = PrefillAttention.fold

def twice(self, *arguments):
    fold(self, *arguments)
    if arguments[4].start == arguments[4].stop - 128:
        fold(self, *arguments)

PrefillAttention.fold = twice
sys.exit(offload.main([*sys.argv[2:], "--out", sys.argv[1]]))
"""


@pytest.fixture(scope="module")
def counting(load: Any) -> Any:
    return load("offload_churn").offload_churn


@pytest.fixture(scope="module")
def bench(load: Any) -> Any:
    return load("offload").offload


def test_small_rows_are_green_and_their_table_has_the_links_floor(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command(*SMALL, "--out", out)
    (exact,) = rows_of(out)
    assert exact["green"]
    assert exact["bytes"] == 2 * 8 * 2 * 16 * 2  # KV heads, tokens, K and V, channels, bytes
    assert exact["floor_us"] == round(exact["bytes"] / 51e3, 2)
    assert command(*SMALL, "--out", out) == ""
    assert f"| exact 25% | {exact['us']:,.1f} (link {exact['floor_us']:.1f}) |" in command("--table", out)


@pytest.mark.full
def test_every_part_is_green(tmp_path: Path) -> None:
    command("swap", "--smoke", "--out", tmp_path / "rows.jsonl")
    assert [row["case"] for row in rows_of(tmp_path / "rows.jsonl")] == ["exact 25%", "reuse 25%", "lagged 25%"] * 2


@pytest.mark.full
@pytest.mark.parametrize("what", ["bytes", "counts"])
def test_wrong_residents_are_red_and_have_no_time(what: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command(out, what, *SMALL[:4], "--steps", "2", "--budget", "32", code=SPOILED, status=1)
    (row,) = rows_of(out)
    assert not row["green"]
    assert "us" not in row
    assert (row["gate"]["wrong_rows"] > 0) == (what == "bytes")


def test_prefill_rows_are_green_and_their_table_has_the_links_floor(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    small = ("prefill", "--smoke", "--requests", "2", "--contexts", "304")
    command(*small, "--out", out)
    (row,) = rows_of(out)
    assert row["green"]
    assert row["bytes"] == 2 * 2 * 304 * 2 * 16 * 2  # K and V, layers, tokens, KV heads, channels, bytes
    assert row["floor_us"] == round(row["bytes"] / 51e3, 2)
    assert command(*small, "--out", out) == ""
    cell = f"{row['us'] / 1e3:,.2f} (link {row['floor_us'] / 1e3:,.2f})"
    assert f"| 5 new tokens each | {cell} |" in command("--table", out)


@pytest.mark.full
def test_a_piece_that_is_attended_twice_is_red(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command(out, "prefill", "--smoke", "--requests", "1", "--contexts", "304", code=TWICE, status=1)
    (row,) = rows_of(out)
    assert not row["green"]
    assert "us" not in row


def test_churn_is_that_of_the_sets_of_pages(counting: Any) -> None:
    steps = [[[0, 1, 2, 40]], [[0, 17, 40, 41]], [[0, 17, 40, 41]], [[16, 33, 70, 71]]]
    positions = [torch.tensor(one, dtype=torch.int32) for one in steps]
    # {0, 2}, {0, 1, 2}, {0, 1, 2}, {1, 2, 4} of 5 pages
    wanted, changed = counting.churn(positions, 5)
    assert wanted == pytest.approx(9 / 15)
    assert changed == pytest.approx(2 / 9)
    assert counting.replay(positions, 80, 5) == [9, 2, 0]
    # Page 1 finds no cell twice, and takes that of page 0; then page 4 finds none.
    assert counting.replay(positions, 80, 2) == [9, 1, 3]


def test_a_layers_selection_is_that_of_its_true_queries(counting: Any, load: Any) -> None:
    capture = load("query_capture").query_capture
    gen = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 2, 519, 8, generator=gen)
    queries = torch.randn(9, 2, 4, 8, generator=gen)
    # Step 5 asks for one token.
    keys[1, 1, 300], queries[5, 1, 2] = 9.0, 9.0
    answer = capture.Answered("task", queries, keys[:, :, :0], keys[:, :, :0], "")
    captured = capture.Captured("name", keys, keys, [answer], torch.ones(4))
    rows = list(counting.rows(captured, answer, [0.25], [0.5, 1.0]))
    shared = [(row["selected"], row["layer"], row["budget"], row["prefix_len"]) for row in rows]
    assert shared == [("tokens", 1, 128, 512), ("blocks", 1, 128, 512)]
    assert rows[1]["wanted"] == 0.25, "whole pages"
    assert 0 < rows[0]["transferred"]["1.0"] < rows[0]["churn"] < 1
    assert rows[0]["missed"] == {"0.5": pytest.approx(rows[0]["missed"]["0.5"]), "1.0": 0.0}
    (found,) = counting.selected(captured, answer, 1, [128])
    assert 300 in found[5][1]
    assert {*range(16), *range(455, 519)} <= set(found[5][0].tolist())


def test_a_command_line_without_a_part_says_what_is_expected(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse([])
    assert "expected swap, prefill, churn or --table" in capsys.readouterr().err
