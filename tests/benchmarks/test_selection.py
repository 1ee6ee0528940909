"""The selection benchmark, small: rows with all figures, the oracle above all, resuming, rivals against loops."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from prefix_kernels.pooling import Pooling
from prefix_kernels.testing import PlantedConfig, planted_prefix
from sglang_ext.calibration.prompt_capture import PromptCapture, load_capture, save_capture
from sglang_ext.calibration.selection_quality import joined_selections
from sglang_ext.methods import make_selector
from sglang_ext.methods.base import NO_PROFILE
from tests.token_sources import word_lengths

PREFIX, LAYERS = 768, 2
CONFIG = PlantedConfig(
    prefix_len=PREFIX, gqa=2, num_rows=3, num_samples=256, num_topics=4, hits_per_topic=16, margin=64, rope_base=1e7
)


@pytest.fixture(scope="module")
def bench(load):
    return load("selection", "selection_data", "selection_methods")


def make_capture(folder: Path) -> Path:
    """Two equal layers of planted queries and keys, as a capture file."""
    made = planted_prefix(CONFIG)
    sampled = made.samples.view(2, -1, 2, 64).transpose(0, 1).flatten(1, 2)
    queries = torch.cat([sampled, made.queries])
    count = sampled.shape[0]
    capture = PromptCapture(
        queries=queries.expand(LAYERS, *queries.shape),
        positions=torch.cat([torch.arange(count), PREFIX + torch.arange(3)]),
        sampled=torch.arange(count + 3) < count,
        keys=made.keys.expand(LAYERS, *made.keys.shape),
        values=made.values.expand(LAYERS, *made.values.shape),
        importance=torch.zeros(LAYERS, count + 3),
        prompt_len=PREFIX,
        sm_scale=made.sm_scale,
    )
    path = folder / f"copy_span_{PREFIX}_0.safetensors"
    save_capture(capture, path)
    return path


WINDOWS = ["--num-sink", "4", "--num-recent", "8", "--keep", "0.05", "0.2"]


@pytest.fixture(scope="module")
def measured(bench, tmp_path_factory):
    """Rows of all methods on one capture, selections pooled by the mean."""
    folder = tmp_path_factory.mktemp("captures")
    make_capture(folder)
    out = folder / "rows.jsonl"
    arguments = ["--captures", str(folder), "--out", str(out), "--pooling", "mean", *WINDOWS]
    assert bench.selection.main(arguments) == 0
    return SimpleNamespace(out=out, arguments=arguments, rows=bench.selection.read_rows(out))


def by_name(rows):
    return {row["method"]: row for row in rows}


def test_every_method_has_a_row_with_all_figures_and_a_line_in_the_table(bench, measured, capsys):
    rows = by_name(measured.rows)
    names = [method.name for method in bench.selection_methods.make_methods(None, 0)]
    assert sorted(rows) == sorted(names)
    for row in rows.values():
        assert list(row["points"]) == ["0.05", "0.2"]
        for point in row["points"].values():
            assert 0 < point["recall"] <= 1.00001
            assert 0 <= point["overlap"] <= 1
            assert 0 < point["error"] < 10
            assert point["kv_bytes"] == point["budget"] * 2 * 64 * 2
            assert point["read_share"] == pytest.approx((point["index_bytes"] + point["kv_bytes"]) / (PREFIX * 256))
            assert set(point["layer0"]) == {"recall", "oracle_recall", "error"}
        assert row["stored_share"] == pytest.approx(row["stored_bytes_per_token"] / 256)
        assert {"device", "torch", "commit", "date", "spec", "build_seconds", "pooling"} <= row.keys()
    assert bench.selection.main(["--table", str(measured.out), "--at", "0.05", "0.2"]) == 0
    text = capsys.readouterr().out
    assert text.count("| quest | rival |") == 2
    assert "Least time where 1/8 of the layers select: **" in text


def test_nothing_beats_the_oracle_and_chance_keeps_its_ratio(measured):
    rows = by_name(measured.rows)
    for keep in ("0.05", "0.2"):
        best = rows["oracle"]["points"][keep]
        assert best["recall"] == pytest.approx(best["oracle_recall"], abs=1e-6)
        assert best["overlap"] > 0.99
        for row in rows.values():
            assert row["points"][keep]["recall"] <= best["recall"] + 1e-5
        assert rows["random"]["points"][keep]["overlap"] == pytest.approx(float(keep), abs=0.06)
        assert rows["tokens int4"]["points"][keep]["oracle_ratio"] > 0.95
        assert rows["random"]["points"][keep]["oracle_ratio"] < 0.5


def test_a_second_run_measures_only_what_is_missing(bench, measured, tmp_path, capsys):
    lines = measured.out.read_text().splitlines(keepends=True)
    copy = tmp_path / "rows.jsonl"
    # Without the row of quest, and with the last line cut off in the middle.
    kept = [line for line in lines if json.loads(line)["method"] != "quest"]
    copy.write_text("".join(kept[:-1]) + kept[-1][:50])
    arguments = [str(copy) if argument == str(measured.out) else argument for argument in measured.arguments]
    assert bench.selection.main(arguments) == 0
    assert "2 new rows" in capsys.readouterr().out
    assert sorted(by_name(bench.selection.read_rows(copy))) == sorted(by_name(measured.rows))
    assert bench.selection.main(arguments) == 0
    assert "0 new rows" in capsys.readouterr().out


def test_captures_are_made_for_what_is_missing_behind_the_document(bench, tmp_path, monkeypatch):
    asked = []

    class Session:
        def __init__(self, model_path, sglang_flags):
            assert (model_path, list(sglang_flags)) == ("model", ["--device", "cpu"])

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            asked.append("closed")

        tokens = word_lengths()

        def capture(self, name, input_ids, *, prefix_len, decode_steps):
            asked.append((name, len(input_ids) > prefix_len, prefix_len, decode_steps > 0))
            count = len(input_ids)
            zeros = torch.zeros(1, count, 1, 8)
            kept = torch.arange(count)
            return PromptCapture(zeros, kept, kept < prefix_len, zeros, zeros, torch.zeros(1, count), count, 1.0)

    module = ModuleType("sglang_ext.cli.capturing")
    module.CaptureSession = Session
    monkeypatch.setitem(sys.modules, module.__name__, module)
    command = ["--make-captures", "--captures", str(tmp_path), "--model-path", "model", "--lengths", "1024"]
    command += ["--tasks", "many_keys", "--questions", "2", "--", "--device", "cpu"]
    assert bench.selection.main(command) == 0
    names = [f"many_keys_1024_{i}" for i in range(2)]
    assert asked == [*((name, True, 1024, True) for name in names), "closed"]
    capture = load_capture(tmp_path / f"{names[0]}.safetensors")
    assert (capture.prefix_len, capture.keys.dtype) == (1024, torch.bfloat16)
    (tmp_path / f"{names[0]}.safetensors").unlink()
    assert bench.selection.main(command) == 0
    assert [entry[0] for entry in asked[3:]] == [names[0], "c"]


def test_planted_rows_carry_their_generator_and_easy_data_are_refused(bench, tmp_path):
    out = tmp_path / "rows.jsonl"
    names = ["oracle", "tokens int4", "random", "streaming_llm"]
    arguments = ["--planted", "4096", "--kinds", "clustered", "--out", str(out), *WINDOWS, "--methods", *names]
    assert bench.selection.main(arguments) == 0
    rows = bench.selection.read_rows(out)
    assert {row["data"] for row in rows} == {"clustered", "clustered_rope"}
    assert rows[0]["generator"]["span"] == 16
    for row in rows:
        spoiled = json.loads(json.dumps(row))
        spoiled["points"]["0.2"]["recall"] = 0.6
        if row["method"] in ("random", "streaming_llm", "oracle"):
            word = "flat" if row["method"] == "oracle" else "easy"
            with pytest.raises(RuntimeError, match=f"too {word}: {row['method']} recalls 0.60 at 0.2"):
                bench.selection.check_difficulty([spoiled])
            bench.selection.check_difficulty([{**spoiled, "source": "captured"}])


def test_a_samples_sums_have_rows_of_their_own(bench, tmp_path):
    out = tmp_path / "rows.jsonl"
    names = [bench.selection_methods.DEFAULT, f"{bench.selection_methods.DEFAULT}, sums 1/16"]
    arguments = ["--planted", "8192", "--kinds", "scattered", "--methods", *names, "--keep", "0.05", "--out", str(out)]
    assert bench.selection.main(arguments) == 0
    rows = bench.selection.read_rows(out)
    every, sampled = ([row for row in rows if row["method"] == name] for name in names)
    for one, other in zip(every, sampled, strict=True):
        assert one["spec"] == other["spec"]
        assert (one.get("sum_every"), one["sum_step"]) == (None, 1)
        assert (other["sum_every"], other["sum_step"]) == (16, 4)
        assert one["points"]["0.05"]["error"] != other["points"]["0.05"]["error"]
        assert other["points"]["0.05"]["recall"] == pytest.approx(one["points"]["0.05"]["recall"], rel=0.02)


def test_all_tokens_in_one_call_select_what_each_token_alone_does(bench):
    made = planted_prefix(CONFIG)
    methods = bench.selection_methods
    budgets = bench.selection.budgets_for(PREFIX, (0.02, 0.1, 0.3), 4, 16)
    step = methods.Step(PREFIX, made.sm_scale, Pooling.MAX, budgets)
    given = methods.LayerInput(made.keys, made.samples, NO_PROFILE)
    names = ["csa", "csa paper layout", "ab minmax int4", "tokens int4 48ch", "csa > tokens48 .25"]
    for method in methods.make_methods([*names, "csa > tokens48 .5", "csa + ab"], 0):
        arrays, seconds = method.build(given)
        assert seconds > 0
        tiled, tokens = methods.as_heads(arrays, made.queries)
        for budget, chosen in zip(budgets, method.select(tiled, tokens, 6, step), strict=True):
            chosen.check_integrity(PREFIX)
            select = make_selector(method.way).select
            alone = joined_selections([select(arrays, q[None], step.args(budget)) for q in made.queries])
            # Blocks: the last one is cut at other tokens. Others: near ties by rounding.
            spare = getattr(method.way, "block_size", 2) - 1
            for mine, theirs in zip(chosen.positions.tolist(), alone.positions.tolist(), strict=True):
                assert len(set(mine) & set(theirs)) >= budget.tokens - spare, method.name


def test_double_sparsity_has_the_channels_of_an_offline_calibration(bench):
    made = planted_prefix(CONFIG)
    (method,) = bench.selection_methods.make_methods(["double sparsity int4"], 0)
    layer = bench.selection_data.Layer(made.queries, made.keys, made.values, made.samples)
    offline = bench.selection_data.own_channels(layer)
    arrays, _ = method.build(bench.selection_methods.LayerInput(made.keys, made.samples, offline))
    largest = (made.samples.abs().amax(1) * made.keys.abs().amax(0)).argsort(dim=1, descending=True)
    assert arrays["channels"].shape == (2, 16)
    for own, ranked in zip(arrays["channels"].tolist(), largest.tolist(), strict=True):
        assert own == sorted(own)
        assert len(set(own) & set(ranked[:24])) > 8


def test_capture_files_are_found_by_name_and_others_refused(bench, tmp_path):
    with pytest.raises(FileNotFoundError, match="make them with --make-captures"):
        bench.selection_data.capture_files(tmp_path)
    path = make_capture(tmp_path)
    assert bench.selection_data.capture_files(tmp_path) == [("copy_span", PREFIX, 0, path)]
    (tmp_path / "odd.safetensors").touch()
    with pytest.raises(ValueError, match=r"got odd\.safetensors"):
        bench.selection_data.capture_files(tmp_path)
    with pytest.raises(ValueError, match=r"expected methods among oracle, .*, got 'quset'"):
        bench.selection_methods.make_methods(["quset"], 0)


def test_decode_steps_are_measured_and_the_prompts_end_only_without_them(bench, tmp_path):
    path = make_capture(tmp_path)
    capture = load_capture(path)
    # Three steps were decoded; or the last one only; or none, and the prompt's last two tokens are asked for.
    for prompt_len, tail, measured in ((PREFIX, 8, 3), (PREFIX + 2, 8, 1), (PREFIX + 9, 2, 2)):
        one = dataclasses.replace(capture, prompt_len=prompt_len)
        layers, _ = bench.selection_data.capture_layers(one, tail, path)
        assert torch.equal(layers[1].q, capture.queries[1, -measured:])
    nothing = dataclasses.replace(capture, positions=torch.arange(capture.positions.numel()))
    with pytest.raises(ValueError, match="expected tokens behind the prefix"):
        bench.selection_data.capture_layers(nothing, 8, path)
