"""docs/selection.md: what methods lost, and what a sample's sums change, are the committed rows."""

from __future__ import annotations

import json
import lzma
from statistics import fmean

from tests.benchmarks.results import RESULTS, document, documented_table, rows_of

RECIPES = {
    "`token_index`, INT4, 75% of the channels": ("token_index", ["accuracy-h200-token_index"]),
    "`two_level` (CSAttention names, tokens rank)": ("two_level", ["accuracy-h200-default"]),
    "`ab_sparse`, min/max blocks of 16": ("ab_sparse", ["accuracy-h200-ab_sparse", "methods-h200-ab_sparse"]),
}


def test_the_documented_losses_are_those_of_the_worst_cells() -> None:
    table = documented_table("selection", "| recipe | kept | worst loss of answers [95%] |")
    for recipe, kept, loss, cell in table:
        method, files = RECIPES[recipe]
        rows = [row for file in files for row in rows_of(RESULTS / f"{file}.jsonl")]
        own = [row for row in rows if row["config"]["method"] == method and f"{row['keep_ratio']:.0%}" == kept]
        worst = min(own, key=lambda row: (row["difference"], row["low"]))
        move, low, high = (f"{100 * worst[name]:+.1f}" for name in ("difference", "low", "high"))
        assert (loss, cell) == (f"{move} [{low}, {high}]", f"{worst['task']}, {worst['num_tokens']:,}"), (recipe, kept)
    assert len(table) == 7


def test_the_documented_errors_of_a_samples_sums() -> None:
    with lzma.open(RESULTS / "selection-sums-cpu.jsonl.xz", "rt") as file:
        rows = [json.loads(line) for line in file]
    errors = {
        step: fmean(
            row["points"]["0.05"]["error"]
            for row in rows
            if (row["source"], row["num_tokens"], row["sum_step"]) == ("planted", 131_072, step)
        )
        for step in (1, 16)
    }
    text = " ".join(document("selection").split())
    assert f"{errors[16]:.3f} with 16 and {errors[1]:.3f} with all tokens" in text


def test_the_documented_times_of_selection_on_an_h100() -> None:
    rows = [row for name in ("-before", "") for row in rows_of(RESULTS / f"kernels-h100-selection{name}.jsonl")]
    assert all(row["green"] for row in rows)
    us = {(row["commit"], row["context"], row["batch"]): f"{row['us']:.1f}" for row in rows}
    for label, tokens, *times in documented_table("kernels", "| from queries to lists | tokens |"):
        commit = "cd0e17a" if label.startswith("before") else "3cc28f9"
        assert times == [us[commit, int(tokens.replace(",", "")), batch] for batch in (1, 8, 32)], (label, tokens)
    moved = [row["gate"]["log_prob"] for row in rows]
    assert f"by {min(moved):.3f} to {max(moved):.3f} nats" in document("kernels")
