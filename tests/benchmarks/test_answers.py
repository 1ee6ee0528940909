"""The answers benchmark: scores, paired differences, and the tables of its rows."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang_ext.calibration.judge import Z95
from sglang_ext.methods.profile import Profile
from sglang_ext.options import SparseAttnConfig
from tests.benchmarks.results import RESULTS, ROOT, document, documented_table, prose, rows_of

METHODS = {"default": "token_index", "INT4, 25%": "", "two_level of means of 16": "", "INT2, 63%": "", "union": "union"}
METHODS |= {"two_level": "two_level", "csattention": "csattention", "ab_sparse min/max of 16": ""}
METHODS |= {"ab_sparse means of 16": "ab_sparse", "adaptive, 30%": "", "uniform 32, 30%": ""}
METHODS |= {"adaptive, means, 30%": "", "uniform 32, means, 30%": ""}
"""Configurations in the order of the table; the method of which a step was timed."""


def points(bench: Any, rows: list[dict[str, Any]], against: str = "dense") -> dict[Any, Any]:
    """Differences by configuration and requests in flight; where all have as many, by configuration."""
    found = {key[1:]: said for key, (said, _) in bench.answers_table.differences(rows, against).items()}
    return found if len({key[1] for key in found}) > 1 else {key[0]: said for key, said in found.items()}


def kls(bench: Any, rows: list[dict[str, Any]]) -> dict[tuple[str, int], list[float]]:
    """KL of each length, by configuration and requests in flight."""
    return {key: [one["kl"] for one in full] for key, (_, full) in bench.answers_table.forced(rows).items()}


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
    fixed = {"suite": "documents", "cell": "", "length": 8192, "in_flight": 16, "seed": 0, "model": "m", "settings": {}}
    counted = {"sparse_rows": 90, "dense_rows": 10, "keep_ratio": 0.1, "device": "d"}
    return {**fixed, **counted, "config": config, "task": task, "scores": scores, "documents": documents, **own}


def test_differences_are_paired_and_of_cells_that_count(bench: Any) -> None:
    documents = [0, 0, 1, 1]
    rows = [
        row("dense", "needle", [1, 1, 1, 0], documents),
        row("dense", "copy", [0, 0, 0, 0.5], documents),  # dense scores under a fifth
        row("ours", "needle", [1, 0, 1, 1], documents),
        row("ours", "copy", [1, 1, 1, 1], documents),
        row("ours", "needle", [1, 1, 1, 1], documents, in_flight=1),  # dense was not asked so
    ]
    ((group, (said, _)),) = bench.answers_table.differences(rows).items()
    assert group == ("documents", "ours", 16)
    assert (said.questions, said.cells, said.lost, said.won) == (4, (1, 2), 1, 1)
    rows[2]["documents"] = [0, 0, 0, 1]
    with pytest.raises(ValueError, match="expected the same questions in both rows of needle"):
        bench.answers_table.differences(rows)


def test_rows_have_which_drafts_each_question_kept_where_responses_say_it(bench: Any) -> None:
    def asked(told: list[dict[str, Any]]) -> list[Any]:
        found = iter([(1.0, 5, one) for one in told])
        served = SimpleNamespace(state=dict, converse=lambda _, turns: [next(found) for _ in turns])
        first, second = (bench.answers_data.Question(task, "?", "", (), "all", 8) for task in ("needle", "copy"))
        documents = [SimpleNamespace(conversations=[[first, second], [first]])]
        rows = bench.answers.ask(served, documents, 1, lambda: None)
        return [(row["task"], row["drafts"], row.get("kept")) for row in rows]

    told = [{"drafted": 7, "accepted": 2, "kept": "110"}, {"kept": ""}, {"drafted": 1, "accepted": 1, "kept": "1"}]
    assert asked(told) == [("needle", [8, 3], ["110", "1"]), ("copy", [0, 0], [""])]
    assert asked([{}, {}, {}]) == [("needle", [0, 0], None), ("copy", [0, 0], None)]


def test_a_table_mixes_no_models_and_no_settings_of_one_name(bench: Any) -> None:
    rows = [row("dense", "free", [1, 1], [0, 1]), row("ours", "free", [1, 1], [0, 1])]
    assert "| ours |" in bench.answers.table(rows)
    for other in ({"model": "n"}, {"settings": {"keep_ratio": 0.2}}):
        with pytest.raises(ValueError, match="expected rows of one model, device and settings by name"):
            bench.answers.table([*rows, row("ours", "copy", [1, 1], [0, 1], **other)])


def test_rows_that_were_not_selected_are_refused(bench: Any) -> None:
    def check(path: str, sparse: int, dense: int) -> None:
        bench.answers.check_selected({"decode_path": path}, {"sparse_rows": sparse, "dense_rows": dense})

    check("sparse", 95, 5)
    for counts in ((94, 6), (0, 0)):
        check("cascade", *counts)
        with pytest.raises(RuntimeError, match="expected 95% of the rows to be decoded by selection, got"):
            check("sparse", *counts)


def test_the_command_takes_configurations_by_name_or_json(bench: Any, capsys: Any) -> None:
    args = bench.answers.parse(["--config", "dense", "--config", 'tenth={"keep_ratio": 0.1}'])
    assert args.config == [("dense", {}), ("tenth", {"keep_ratio": 0.1})]
    refused = {"--config tenth": "NAME=JSON", "--config tenth={": "NAME=JSON", "--in-flight 32": "for forced"}
    refused |= {f"-- {flag} 2": "for forced" for flag in ("--tp-size", "--tp", "--tensor-parallel-size")}
    for words, message in refused.items():
        with pytest.raises(SystemExit):
            bench.answers.parse(words.split())
        assert message in capsys.readouterr().err
    assert bench.answers.parse(["--", "--tp", "1"]).sglang_flags == ["--tp", "1"]


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
    found = points(bench, committed)
    wanted = [(config, in_flight) for config in ("5%", "10%", "5% sqrt", "10% sqrt") for in_flight in (16, 8)]
    for key in (*wanted, ("5%", 1), ("10%", 1)):
        assert found[key].cells == (18, 18)
        assert found[key].questions >= 2000
    for key in (*wanted, ("5%", 1), ("10%", 1), ("judged", 16)):
        assert found[key].difference >= -0.0075, key
        assert found[key].low >= -0.015, key
    for config in ("8 layers 5%", "8 layers 5% sqrt", "4 layers 5%", "4 layers 5% sqrt"):
        assert found[config, 16].difference < -0.0075, config


def test_the_documented_bounds_are_those_of_the_default_plans_rows(bench: Any, committed: list[dict[str, Any]]) -> None:
    kl, times = kls(bench, committed), bench.answers_table.times
    text = prose("benchmarks")
    assert "KL at most {:.4f}, {:.4f} and {:.4f}, a quarter more".format(*(1.25 * one for one in kl["5%", 16])) in text
    noise = [one for key, own in kl.items() if key[0] == "dense" for one in own]
    assert (f"{min(noise):.4f}", f"{max(noise):.4f}") == ("0.0001", "0.0002")
    ms = times(committed)
    dense = {key[2]: one for key, one in ms.items() if key[0] == "dense"}
    said = "take {:.2f}, {:.2f} and {:.2f} ms at 1, 8 and 16 in flight"
    assert said.format(*(dense[n] for n in (1, 8, 16))) in text
    one_run = times([row for row in committed if row["commit"] == "75426e9"])
    judged, default = ([one_run[name, 30720, n] for n in (1, 8, 16)] for name in ("judged", "5%"))
    said = "`judged` takes {:.2f}, {:.2f} and {:.2f} ms, `5%` {:.2f}, {:.2f} and {:.2f}"
    assert said.format(*judged, *default) in text
    shares = [one / other for one, other in zip(judged, default, strict=True)]
    lost = -100 * points(bench, committed)["judged", 16].difference
    said = f"takes {min(shares):.2f} to {max(shares):.2f} of the default's step and loses {lost:.2f} points"
    assert said in prose("calibration")
    for in_flight in (8, 16):  # "exact decode is the fastest at 8 and 16"
        own = {key[0]: one for key, one in ms.items() if key[2] == in_flight}
        assert min(own, key=lambda name: own[name]) == "cascade"


def test_the_sentences_about_real_answers_are_the_rows(bench: Any, committed: list[dict[str, Any]]) -> None:
    found, kl = points(bench, committed), kls(bench, committed)
    lost = {key: -100 * said.difference for key, said in found.items()}
    assert f"lost {lost['4 layers 5% sqrt', 16]:.2f} points" in prose("README")
    apart = lost["4 layers 5%", 16] - lost["calibrated 5%", 16]
    assert f"{apart:.0f} points lie between plans of 17 and of 4 selecting layers" in prose("calibration")
    text = prose("benchmarks")
    assert f"loses {lost['8 layers 5% sqrt', 16]:.2f} points" in text
    fewer = {key: said for key, said in found.items() if key[1] < 16}
    moves = [lost[key] for key in fewer]
    assert f"loses {min(moves):.2f} to {max(moves):.2f} points" in text
    assert f"the least lower end is {100 * min(said.low for said in fewer.values()):.2f}" in text
    bounds = [1.25 * one for one in kl["5%", 16]]
    within = {key[0] for key, own in kl.items() if all(a <= b for a, b in zip(own, bounds, strict=False))}
    assert "8 layers 5% sqrt" in within
    assert not {"8 layers 5%", "4 layers 5%", "4 layers 5% sqrt"} & within
    least = min(statistics.fmean(row["scores"]) for row in committed if row["config"] == "dense" and "scores" in row)
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
    mean = " and ".join(f"{one['kl']:.4f}" for one in shown["5% mean", 16][1])
    assert f"the mean gives KL of {mean} behind" in prose("benchmarks")
    named = {row["profile"] for row in rows if row["settings"].get("profile")}
    assert named <= {hashlib.sha256(as_measured(path)).hexdigest() for path in RESULTS.glob("answers-h200-*.json")}
    same = [("5%", "exact"), ("5%", "5% mean"), ("exact", "exact mean")]  # "No difference is beyond chance"
    for one, other in (*same, ("8 layers, maps by attention", "8 layers, maps as served")):
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
    found = {
        (row["config"], row["in_flight"]): row["all"] for row in rows_of(RESULTS / "answers-cpu-candidates.jsonl.xz")
    }
    lines = [[cell.strip() for cell in line.split("|")] for line in document("selection").splitlines()]
    shown = {line[1]: line[3:5] for line in lines if len(line) == 6}
    for key, label in CANDIDATES.items():
        assert shown[label] == [f"{found[key]['kl']:.4f}", f"{found[key]['top1']:.1%}"], label
        assert found[key]["steps"] == 368
    coarse = [key for key, label in CANDIDATES.items() if "blocks" in label or "lists" in label]
    cheap = [found[key]["kl"] / found["5%", 16]["kl"] for key in coarse]
    assert f"have {min(cheap):.0f} to {max(cheap):.0f} times the KL of the first row" in prose("selection")


def test_the_table_of_the_default_is_the_rows(bench: Any) -> None:
    """Within the bounds, where 1,024 tokens are not."""
    rows = rows_of(RESULTS / "answers-h100-default.jsonl.xz")
    found, kl = points(bench, rows), {key[0]: own for key, own in kls(bench, rows).items()}
    default = found["default"]
    moves = (100 * move for move in (default.difference, default.low, default.high))
    assert "{:+.1f} points [{:+.1f}, {:+.1f}] over {:,} questions".format(*moves, default.questions) in prose("README")
    shown = documented_table("selection", "| tokens attended behind")
    for (_, _, said, nats), name in zip(shown, ("default", "75%", "top_k 1024", "10% 75%", "5%"), strict=True):
        assert said == (found[name].points if name in found else "")
        assert nats == ", ".join(f"{one:.4f}" for one in kl[name])
    budgets = [SparseAttnConfig().budget(length) for length in (8192, 16384, 30720)]
    assert ", ".join(f"{budget:,}" for budget in budgets) in shown[0][0]
    assert all(one <= most for one, most in zip(kl["default"], (0.0133, 0.0139, 0.0181), strict=True))
    assert default.low > -0.015
    assert default.difference > -0.0075
    assert found["top_k 1024"].difference < -0.0075


def test_the_figures_of_csattention_and_of_candidates_ahead_are_the_rows(bench: Any) -> None:
    text = prose("selection")
    ((kl,),) = (
        own
        for key, own in kls(bench, rows_of(RESULTS / "answers-h200-csattention.jsonl.xz")).items()
        if key[0] == "csattention"
    )
    assert f"Without that fault its KL is {kl:.4f}" in text
    rows = rows_of(RESULTS / "answers-h100-ahead.jsonl.xz")
    ahead, in_line, tokens = "two_level, ahead", "two_level, in line", "tokens ahead"
    moves, nats = points(bench, rows, in_line), {key[0]: f"{one:.4f}" for key, (one,) in kls(bench, rows).items()}
    said = f"{moves[ahead].points} points against naming in line, KL {nats[ahead]} for {nats[in_line]}"
    assert said in text
    assert f"Named by `token_index`, {moves[tokens].points} and {nats[tokens]} (" in text


def test_the_table_of_methods_in_graphs_is_the_rows(bench: Any) -> None:
    rows = rows_of(RESULTS / "answers-h100-methods.jsonl.xz")
    found, kl = points(bench, rows), {key[0]: one for key, (one,) in kls(bench, rows).items()}
    ms: dict[str, dict[int, str]] = {}
    for row in rows_of(RESULTS / "decode-h100-methods.jsonl"):
        name = row["engine"] if row["engine"] == "flashinfer" else row["config"].get("method", "token_index")
        ms.setdefault(name, {})[row["batch"]] = f"{row['ms']:.2f}"
    shown = documented_table("selection", "| method | points [95%] | KL | ms |")
    assert len(shown) == len(METHODS) == len(found)
    for (_, said, nats, times), name in zip(shown, METHODS, strict=True):
        assert (said, nats) == (found[name].points, f"{kl[name]:.4f}")
        if times:
            own_ms = ms.pop(METHODS[name])
            assert times == ", ".join(own_ms[batch] for batch in (1, 8, 32))
    (dense,) = ms.values()
    text = prose("selection")
    assert f"(flashinfer: {', '.join(dense[batch] for batch in (1, 8, 32))} ms)" in text
    for one, other in (("uniform 32, 30%", "adaptive, 30%"), ("uniform 32, means, 30%", "adaptive, means, 30%")):
        assert points(bench, rows, one)[other].points in text


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
    assert {(row["model"], row["length"]) for row in rows} == {("qwen2.5-coder-0.5b-instruct", 4096)}
    each, a_round, drawn, sixteen, four = (f"{accepted} of {drafted}" for drafted, accepted in kept.values())
    text = prose("lossless")
    assert f"kept {each} drafts behind 4,096 tokens where each searches, {a_round} with one search a round" in text
    assert f"{four} and {sixteen} with one for 4 and 16 drafts, {drawn} at temperature 1;" in text


def test_the_answers_behind_prefills_that_select_are_the_rows(bench: Any) -> None:
    rows = rows_of(RESULTS / "answers-cpu-prefills.jsonl.xz")
    found = points(bench, rows, "behind host memory")["prefills select"]
    assert f"exact prefills: {found.points} points of {found.questions} questions behind 8,192 tokens" in prose(
        "offload"
    )
