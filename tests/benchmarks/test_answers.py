"""The answers benchmark: scores, paired differences, and the tables of its rows."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_ext.calibration.judge import Z95
from sglang_ext.methods.profile import Profile
from sglang_ext.options import SparseAttnConfig
from tests.benchmarks.results import RESULTS, ROOT, document, documented_table, prose, rows_of

METHODS = {
    "default": "token_index",
    "INT4, 25%": "",
    "two_level of means of 16": "",
    "INT2, 63%": "",
    "union": "union",
    "two_level": "two_level",
    "csattention": "csattention",
    "ab_sparse min/max of 16": "",
    "ab_sparse means of 16": "ab_sparse",
    "adaptive, 30%": "",
    "uniform 32, 30%": "",
    "adaptive, means, 30%": "",
    "uniform 32, means, 30%": "",
}
"""Configurations in the order of the table; the method of which a step was timed."""


@pytest.mark.parametrize(
    ("rule", "expected", "answer", "score"),
    [
        ("all", ("12", "34"), " 12, and then", 0.5),
        ("all", ("Abc",), "it is aBC.", 1.0),
        ("any", ("no", "yes it is"), "Yes it is", 1.0),
        ("any", ("blue",), "red", 0.0),
        ("verbatim", ("went up the hill",), " went\nup the hill again", 1.0),
        ("verbatim", ("went up the hill",), "she went up the hill", 0.0),
    ],
)
def test_answers_are_scored_by_their_rule(
    bench: Any, rule: str, expected: tuple[str, ...], answer: str, score: float
) -> None:
    question = bench.answers_data.Question("task", "?", "", expected, rule, 8)
    assert question.score(answer) == score


def test_the_needle_models_tasks_score_their_answers(bench: Any) -> None:
    (document,) = bench.answers_data.own_documents("multi_value", 2048, 1, seed=3)
    assert len(document.text.split()) == 2048
    (asked,) = document.conversations[0]
    words = list(asked.expected)
    swapped = [*words[-2:], *words[:-2]]
    assert asked.score(" ".join(swapped)) == asked.score(" ".join([*words, "<end>", "more"])) == 1.0
    assert asked.score(" ".join(words[:-2])) == asked.score(" ".join([*words, *words[:2]])) == 0.0
    assert asked.max_new_tokens == len(words) + 1


def row(config: str, task: str, scores: list[float], documents: list[int], **own: Any) -> dict[str, Any]:
    counted = {"sparse_rows": 90, "dense_rows": 10, "keep_ratio": 0.1}
    fixed = {
        "suite": "documents",
        "cell": "",
        "length": 8192,
        "in_flight": 16,
        "seed": 0,
        "model": "m",
        "settings": {},
        "device": "d",
    }
    return {**fixed, "config": config, "task": task, "scores": scores, "documents": documents, **counted, **own}


def test_differences_are_paired_clustered_and_of_cells_that_count(bench: Any) -> None:
    documents = [0, 0, 1, 1]
    rows = [
        row("dense", "needle", [1, 1, 1, 0], documents),
        row("dense", "copy", [0, 0, 0, 0.5], documents),  # dense scores under a fifth
        row("dense", "free", [1, 0, 1, 0], documents),
        row("ours", "needle", [1, 0, 1, 1], documents),
        row("ours", "copy", [1, 1, 1, 1], documents),
        row("ours", "free", [0.5, 0, 1, 0], documents),
        row("ours", "needle", [1, 1, 1, 1], documents, in_flight=1),  # dense was not asked so
    ]
    ((group, (said, _)),) = bench.answers_table.differences(rows).items()
    assert group == ("documents", "ours", 16)
    assert (said.questions, said.cells, said.lost, said.won) == (8, (2, 3), 2, 1)
    assert (said.dense, said.other) == (5 / 8, 4.5 / 8)
    assert said.difference == -0.5 / 8
    assert said.worst == (-0.125, "free", 8192)
    # Documents lose 1.5 and win 1 of 4 questions each: what is beside the mean, summed by document.
    spread = (-1.5 + 4 * 0.0625) ** 2 + (1 + 4 * 0.0625) ** 2
    half = 1.959964 * math.sqrt(spread * 2) / 8
    assert (said.low, said.high) == pytest.approx((said.difference - half, said.difference + half))
    (line,) = bench.answers_table.answers_table(rows).splitlines()[2:]
    assert "| -6.25 [" in line
    assert "| 2, 1 | -12.50 free 8192 | 10.0% | 90.0% |" in line


def test_rows_of_other_questions_are_not_paired(bench: Any) -> None:
    rows = [row("dense", "free", [1, 1], [0, 1]), row("ours", "free", [1, 1], [0, 0])]
    with pytest.raises(ValueError, match="expected the same questions in both rows of free"):
        bench.answers_table.differences(rows)


def test_a_table_mixes_no_models_and_no_settings_of_one_name(bench: Any) -> None:
    rows = [row("dense", "free", [1, 1], [0, 1]), row("ours", "free", [1, 1], [0, 1])]
    assert "| ours |" in bench.answers.table(rows)
    for other in ({"model": "n"}, {"settings": {"keep_ratio": 0.2}}):
        with pytest.raises(ValueError, match="expected rows of one model, device and settings by name"):
            bench.answers.table([*rows, row("ours", "copy", [1, 1], [0, 1], **other)])


@pytest.mark.parametrize(("sparse", "dense", "good"), [(95, 5, True), (94, 6, False), (0, 0, False)])
def test_rows_that_were_not_selected_are_refused(bench: Any, sparse: int, dense: int, good: bool) -> None:
    counts = {"sparse_rows": sparse, "dense_rows": dense}
    bench.answers.check_selected({"decode_path": "cascade"}, counts)
    if good:
        bench.answers.check_selected({"decode_path": "sparse"}, counts)
        return
    with pytest.raises(RuntimeError, match="expected 95% of the rows to be decoded by selection, got"):
        bench.answers.check_selected({"decode_path": "sparse"}, counts)


def test_the_command_takes_configurations_by_name_or_json(bench: Any, capsys: Any) -> None:
    args = bench.answers.parse(["--config", "dense", "--config", 'tenth={"keep_ratio": 0.1}'])
    assert args.config == [("dense", {}), ("tenth", {"keep_ratio": 0.1})]
    for wrong in ("tenth", "tenth={"):
        with pytest.raises(SystemExit):
            bench.answers.parse(["--config", wrong])
        assert "NAME=JSON" in capsys.readouterr().err
    for words in (["--in-flight", "32"], ["--", "--tp-size", "2"]):
        with pytest.raises(SystemExit):
            bench.answers.parse(words)
        assert "for forced" in capsys.readouterr().err


@pytest.fixture(scope="module")
def committed() -> list[dict[str, Any]]:
    return [row for name in ("", "-judged") for row in rows_of(RESULTS / f"answers-h200{name}.jsonl.xz")]


def test_the_documented_table_is_the_printed_one(bench: Any, committed: list[dict[str, Any]]) -> None:
    shown = bench.answers.table([row for row in committed if row["in_flight"] == 16])
    printed = shown.split("\n\n")[0].splitlines()
    table = [line for line in document("benchmarks").splitlines() if line.startswith(("| suite |", "| documents |"))]
    assert table[0] == printed[0]
    assert len(table) == 9
    assert set(table) <= set(printed)


def test_the_default_plan_is_within_the_bounds_and_plans_of_few_layers_are_not(
    bench: Any, committed: list[dict[str, Any]]
) -> None:
    found = {key[1:]: said for key, (said, _) in bench.answers_table.differences(committed).items()}
    for config in ("5%", "10%", "5% sqrt", "10% sqrt"):
        for in_flight in (16, 8) if "sqrt" in config else (16, 8, 1):
            said = found[config, in_flight]
            assert said.cells == (18, 18)
            assert said.questions >= 2000
            assert said.difference >= -0.0075, (config, in_flight)
            assert said.low >= -0.015, (config, in_flight)
    assert found["judged", 16].difference >= -0.0075
    assert found["judged", 16].low >= -0.015
    for config in ("8 layers 5%", "8 layers 5% sqrt", "4 layers 5%", "4 layers 5% sqrt"):
        assert found[config, 16].difference < -0.0075, config


def test_the_documented_bounds_are_those_of_the_default_plans_rows(bench: Any, committed: list[dict[str, Any]]) -> None:
    rows = bench.answers_table.forced(committed)
    bounds = [1.25 * full["kl"] for full in rows["5%", 16][1]]
    first, second, third = (f"{bound:.4f}" for bound in bounds)
    text = prose("benchmarks")
    assert f"KL at most {first}, {second} and {third}, a quarter more" in text
    noise = [full["kl"] for key, (_, full) in rows.items() if key[0] == "dense" for full in full]
    assert (f"{min(noise):.4f}", f"{max(noise):.4f}") == ("0.0001", "0.0002")
    dense = {key[2]: f"{ms:.2f}" for key, ms in bench.answers_table.times(committed).items() if key[0] == "dense"}
    assert f"take {dense[1]}, {dense[8]} and {dense[16]} ms at 1, 8 and 16 in flight" in text
    ms = bench.answers_table.times(committed)
    one_run = bench.answers_table.times([row for row in committed if row["commit"] == "75426e9"])
    judged, default = ([f"{one_run[name, 30720, n]:.2f}" for n in (1, 8, 16)] for name in ("judged", "5%"))
    said = (
        f"`judged` takes {judged[0]}, {judged[1]} and {judged[2]} ms, `5%` {default[0]}, {default[1]} and {default[2]}"
    )
    assert said in text
    shares = [one_run["judged", 30720, n] / one_run["5%", 30720, n] for n in (1, 8, 16)]
    lost = -100 * next(
        said.difference for key, (said, _) in bench.answers_table.differences(committed).items() if key[1] == "judged"
    )
    said = f"takes {min(shares):.2f} to {max(shares):.2f} of the default's step and loses {lost:.2f} points"
    assert said in prose("calibration")
    for in_flight in (8, 16):  # "exact decode is the fastest at 8 and 16"
        own = {key[0]: one for key, one in ms.items() if key[2] == in_flight}
        assert min(own, key=lambda name: own[name]) == "cascade"


def test_the_sentences_about_real_answers_are_the_rows(bench: Any, committed: list[dict[str, Any]]) -> None:
    found = {key[1:]: said for key, (said, _) in bench.answers_table.differences(committed).items()}
    readme = prose("README")
    few = found["4 layers 5% sqrt", 16]
    assert f"lost {-100 * few.difference:.2f} points" in readme
    apart = 100 * (found["calibrated 5%", 16].difference - found["4 layers 5%", 16].difference)
    assert f"{apart:.0f} points lie between plans of 17 and of 4 selecting layers" in prose("calibration")
    text = prose("benchmarks")
    assert f"loses {-100 * found['8 layers 5% sqrt', 16].difference:.2f} points" in text
    fewer = [said for (config, in_flight), said in found.items() if in_flight < 16]
    moves = [-100 * said.difference for said in fewer]
    assert f"loses {min(moves):.2f} to {max(moves):.2f} points" in text
    assert f"the least lower end is {100 * min(said.low for said in fewer):.2f}" in text
    kl = {key: [one["kl"] for one in full] for key, (_, full) in bench.answers_table.forced(committed).items()}
    bounds = [1.25 * one for one in kl["5%", 16]]
    within = {key[0] for key, own in kl.items() if all(a <= b for a, b in zip(own, bounds, strict=False))}
    assert "8 layers 5% sqrt" in within
    assert not {"8 layers 5%", "4 layers 5%", "4 layers 5% sqrt"} & within
    least = min(
        sum(row["scores"]) / len(row["scores"]) for row in committed if row["config"] == "dense" and "scores" in row
    )
    assert f"Dense scores {math.floor(1000 * least) / 10}% or more" in text


def test_the_needle_models_documented_answers_are_the_rows() -> None:
    rows = rows_of(RESULTS / "answers-h100-needle.jsonl.xz")
    right = {name: sum(sum(row["scores"]) for row in rows if row["config"] == name) for name in ("dense", "default")}
    (questions,) = {sum(len(row["scores"]) for row in rows if row["config"] == name) for name in right}
    assert right == dict.fromkeys(right, questions)
    lengths, tasks = ({row[key] for row in rows} for key in ("length", "task"))
    assert (lengths, len(tasks)) == ({65_536, 131_072}, 7)
    assert all(row["dense_rows"] == 0 for row in rows if row["config"] == "default")
    ((commit, in_flight),) = {(row["commit"], row["in_flight"]) for row in rows}
    text = prose("benchmarks")
    assert f"65,536 and 131,072 tokens: all {questions} answers of its seven tasks are right" in text
    assert f"({in_flight} in flight; H100, 2026-11-28, commit {commit}, `answers-h100-needle.jsonl.xz`)" in text


def test_the_pooling_table_is_the_rows(bench: Any, committed: list[dict[str, Any]]) -> None:
    rows = [row for name in ("judged", "pooling") for row in rows_of(RESULTS / f"answers-h200-{name}.jsonl.xz")]
    shown = bench.answers_table.forced(rows) | {("5%", 16): bench.answers_table.forced(committed)["5%", 16]}

    def kl(config: str) -> str:
        own = [f"{one['kl']:.4f}" for one in shown[config, 16][1]]
        return ", ".join([*own, *["-"] * (3 - len(own))])

    assert f"the mean gives KL of {kl('5% mean').removesuffix(', -').replace(', ', ' and ')} behind" in prose(
        "benchmarks"
    )
    named = {row["profile"] for row in rows if row["settings"].get("profile")}
    digests = {hashlib.sha256(as_measured(path)).hexdigest() for path in RESULTS.glob("answers-h200-*.json")}
    assert named <= digests
    # "No difference is beyond chance"
    for one, other in (
        ("5%", "exact"),
        ("5%", "5% mean"),
        ("exact", "exact mean"),
        ("8 layers, maps by attention", "8 layers, maps as served"),
    ):
        for a, b in zip(shown[one, 16][0], shown[other, 16][0], strict=False):
            assert a["length"] == b["length"]
            moves = [x - y for x, y in zip(a["kl_documents"], b["kl_documents"], strict=True)]
            assert abs(statistics.fmean(moves)) < Z95 * statistics.stdev(moves) / math.sqrt(len(moves)), (one, other)


CANDIDATES = {
    ("5%", 16): "none: INT4, 75% of the channels",
    ("50%, 1024", 16): "**none: INT4, 50% of the channels, `top_k` 1,024, the default at this length**",
    ("two levels, each row, x4", 16): "blocks of 16, mean, each row, x 4",
    ("minmax 64, each row, x4", 16): "blocks of 64, min/max, each row, x 4",
    ("tables .02, each row, x4", 16): "CSAttention's lists of 2%, each row, x 4",
    ("INT2 50%, each row, x8", 16): "**INT2, 50% of the channels, each row, x 8**",
}


def test_the_table_of_candidates_is_the_rows() -> None:
    rows = rows_of(RESULTS / "answers-cpu-candidates.jsonl.xz")
    lines = [[cell.strip() for cell in line.split("|")] for line in document("selection").splitlines()]
    shown = {line[1]: line[3:5] for line in lines if len(line) == 6}
    for row in rows:
        label = CANDIDATES.get((row["config"], row["in_flight"]))
        if label:
            assert shown[label] == [f"{row['all']['kl']:.4f}", f"{row['all']['top1']:.1%}"], label
            assert row["all"]["steps"] == 368
    kl = {(row["config"], row["in_flight"]): row["all"]["kl"] for row in rows}
    coarse = [key for key, label in CANDIDATES.items() if key[1] == 16 and ("blocks" in label or "lists" in label)]
    cheap = [kl[key] / kl["5%", 16] for key in coarse]
    assert f"have {min(cheap):.0f} to {max(cheap):.0f} times the KL of the first row" in prose("selection")
    assert set(CANDIDATES) <= {(row["config"], row["in_flight"]) for row in rows}


def test_the_table_of_the_default_is_the_rows(bench: Any) -> None:
    """Within the bounds, where 1,024 tokens are not."""
    rows = rows_of(RESULTS / "answers-h100-default.jsonl.xz")
    points = {key[1]: said for key, (said, _) in bench.answers_table.differences(rows).items()}
    default = points["default"]
    moves = (100 * move for move in (default.difference, default.low, default.high))
    assert "{:+.1f} points [{:+.1f}, {:+.1f}] over {:,} questions".format(*moves, default.questions) in prose("README")
    kl = {key[0]: [one["kl"] for one in full] for key, (_, full) in bench.answers_table.forced(rows).items()}
    shown = documented_table("selection", "| tokens attended behind")
    for (tokens, _, said, nats), name in zip(shown, ("default", "75%", "top_k 1024", "10% 75%", "5%"), strict=True):
        assert said == (points[name].points if name in points else "")
        assert nats == ", ".join(f"{one:.4f}" for one in kl[name])
        if name == "default":
            budgets = [msgspec.convert({}, SparseAttnConfig).budget(length) for length in (8192, 16384, 30720)]
            assert ", ".join(f"{budget:,}" for budget in budgets) in tokens
    assert all(one <= most for one, most in zip(kl["default"], (0.0133, 0.0139, 0.0181), strict=True))
    assert default.low > -0.015
    assert default.difference > -0.0075
    assert points["top_k 1024"].difference < -0.0075


def test_the_figure_of_csattention_without_its_fault_is_the_rows(bench: Any) -> None:
    rows = rows_of(RESULTS / "answers-h200-csattention.jsonl.xz")
    (kl,) = (one["kl"] for key, (_, (one,)) in bench.answers_table.forced(rows).items() if key[0] == "csattention")
    assert f"Without that fault its KL is {kl:.4f}" in prose("selection")


def test_the_figures_of_candidates_ahead_are_the_rows(bench: Any) -> None:
    rows = rows_of(RESULTS / "answers-h100-ahead.jsonl.xz")
    ahead, in_line, tokens = "two_level, ahead", "two_level, in line", "tokens ahead"
    moves = {key[1]: one for key, (one, _) in bench.answers_table.differences(rows, in_line).items()}
    kl = {key[0]: f"{full['kl']:.4f}" for key, (_, (full,)) in bench.answers_table.forced(rows).items()}
    said = f"{moves[ahead].points} points against naming in line, KL {kl[ahead]} for {kl[in_line]}"
    assert said in prose("selection")
    assert f"Named by `token_index`, {moves[tokens].points} and {kl[tokens]} (" in prose("selection")


def test_the_table_of_methods_in_graphs_is_the_rows(bench: Any) -> None:
    rows = rows_of(RESULTS / "answers-h100-methods.jsonl.xz")
    differences = bench.answers_table.differences
    points = {key[1]: said for key, (said, _) in differences(rows).items()}
    kl = {key[0]: one["kl"] for key, (_, (one,)) in bench.answers_table.forced(rows).items()}
    ms: dict[str, dict[int, str]] = {}
    for row in rows_of(RESULTS / "decode-h100-methods.jsonl"):
        name = row["engine"] if row["engine"] == "flashinfer" else row["config"].get("method", "token_index")
        ms.setdefault(name, {})[row["batch"]] = f"{row['ms']:.2f}"
    shown = documented_table("selection", "| method | points [95%] | KL | ms |")
    assert len(shown) == len(METHODS) == len(points)
    for (_, said, nats, times), name in zip(shown, METHODS, strict=True):
        assert said == points[name].points
        assert nats == f"{kl[name]:.4f}", name
        if times:
            own_ms = ms.pop(METHODS[name])
            assert times == ", ".join(own_ms[batch] for batch in (1, 8, 32))
    text = " ".join(document("selection").split())
    (dense,) = ms.values()
    assert f"(flashinfer: {', '.join(dense[batch] for batch in (1, 8, 32))} ms)" in text
    for one, other in (("uniform 32, 30%", "adaptive, 30%"), ("uniform 32, means, 30%", "adaptive, means, 30%")):
        said, _ = differences(rows, against=one)["documents", other, 16]
        assert said.points in text


def as_measured(path: Path) -> bytes:
    """A profile as rows name it: with a key of its recommendation that this version no longer has."""
    return path.read_bytes().replace(b'   "bits": 4\n', b'   "bits": 4,\n   "symmetric": false\n')


@pytest.mark.parametrize("path", sorted(RESULTS.glob("answers-h*.json")), ids=lambda path: path.stem)
def test_the_committed_profiles_can_be_served(path: Path) -> None:
    profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    assert profile.recommended is not None
    assert profile.recommended.index_spec().method == profile.recommended.method


def test_the_rows_name_the_profiles_that_are_there(committed: list[dict[str, Any]]) -> None:
    named = {(row["settings"]["profile"], row["profile"]) for row in committed if row["settings"].get("profile")}
    assert len(named) == 4
    text = document("benchmarks")
    for path, digest in named:
        profile = json.loads((ROOT / path).read_bytes())
        roles = profile["layer_plan"]["layers"]
        modes = ["reuse" if isinstance(role, dict) else role for role in roles]
        selecting, reusing, dense = (modes.count(mode) for mode in ("anchor", "reuse", "dense"))
        said = f"{selecting} select, {reusing} reuse, {dense} {'is' if dense == 1 else 'are'} dense"
        assert said in text, path
        assert hashlib.sha256(as_measured(ROOT / path)).hexdigest() == digest


def test_the_documented_drafts_that_a_model_kept_are_the_rows() -> None:
    rows = rows_of(RESULTS / "answers-cpu-lossless.jsonl.xz")
    kept: dict[str, list[int]] = {}
    for row in rows:
        counts = kept.setdefault(row["config"], [0, 0])
        kept[row["config"]] = [one + more for one, more in zip(counts, row["drafts"], strict=True)]
    (drafted, accepted), (seldom, less), (drawn, alike) = kept.values()
    assert {(row["model"], row["length"]) for row in rows} == {("qwen2.5-coder-0.5b-instruct", 4096)}
    text = prose("lossless")
    assert f"kept {accepted} of {drafted} drafts behind 4,096 tokens, {less} of {seldom} with one selection" in text
    assert f"{alike} of {drawn} at temperature 1;" in text
