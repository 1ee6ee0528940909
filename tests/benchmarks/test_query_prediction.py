"""`benchmarks/query_prediction.py`: the predictors' mathematics, what is captured of a model, and the figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from scripts.needle_network import load as load_network
from scripts.needle_network import rotate
from sglang_ext.methods.base import SelectArgs
from sglang_ext.methods.layer_plan import LayerPlan
from tests.benchmarks.results import RESULTS, ROOT, documented_table, prose

SHIPPED = ROOT / "models" / "needle"
FREQUENCIES = 1e6 ** (-torch.arange(32, dtype=torch.float64) / 32)
EPSILON = 0.01


@pytest.fixture(scope="module")
def predicting(load: Any) -> Any:
    return load("query_predictors").query_predictors


@pytest.fixture(scope="module")
def benchmark(load: Any) -> Any:
    return load("query_prediction").query_prediction


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def of_lstsq(queries: np.ndarray[Any, Any], window: int) -> np.ndarray[Any, Any]:
    """w of the ridge regression of the newest query by the `window` before, as least squares of a taller problem."""
    newest, before = queries[0], queries[1 : window + 1]
    ridge = EPSILON * np.square(queries[1:]).sum(1).mean()
    tall = np.concatenate([before.T, np.sqrt(ridge) * np.eye(window)])
    return np.linalg.lstsq(tall, np.concatenate([newest, np.zeros(window)]), rcond=None)[0]


def test_ridge_solves_every_window_as_least_squares_does(predicting: Any) -> None:
    queries = drawn(9, 64)
    found = predicting.Ridge(8, EPSILON).solutions(queries)
    for window in range(1, 9):
        np.testing.assert_allclose(found[window - 1, :window], of_lstsq(queries.numpy(), window), rtol=1e-9)
        assert not found[window - 1, window:].any()


@pytest.mark.parametrize("held", [1, 2, 3, 6, 9])
def test_ridge_is_the_mean_over_the_windows_that_are_filled(predicting: Any, held: int) -> None:
    queries = drawn(9, 64, seed=1)
    expected = []
    for window in range(1, max(held - 1, 1) + 1):
        # One query alone is weighed by 1, whatever regresses it.
        w = of_lstsq(queries[:held].numpy(), window) if held > 1 else np.zeros(1)
        shares = np.exp(w) / np.exp(w).sum()
        expected.append(shares @ queries[:window].numpy())
    queries[held:] = torch.tensor([torch.nan, 1e6]).repeat(5)[: 9 - held, None]
    found = predicting.Ridge(8, EPSILON).predict(queries, torch.tensor(held))
    np.testing.assert_allclose(found, np.mean(expected, axis=0), rtol=1e-9)


def test_ridge_weighs_most_what_regressed_the_newest_query(predicting: Any) -> None:
    queries = drawn(6, 64, seed=2)
    queries[0] = queries[3]  # The query before the newest but two: its successor is lag 3.
    weights = predicting.Ridge(5, EPSILON).solutions(queries)[-1].softmax(-1)
    assert int(weights.argmax()) == 2


def test_the_weights_of_short_windows(predicting: Any) -> None:
    queries, held = drawn(4, 8, seed=3), torch.tensor(2)
    one, two = queries[0], queries[1]
    queries[2], queries[3] = torch.nan, 1e6
    for predictor, expected in (
        (predicting.Lag(1), one),
        (predicting.Lag(4), two),
        (predicting.Mean(4), (one + two) / 2),
        (predicting.Exponential(4), (one + 0.6 * two) / 1.6),
        (predicting.Linear(4), 2 * one - two),
        (predicting.Linear(2), 2 * one - two),
    ):
        torch.testing.assert_close(predictor.predict(queries, held), expected)
        torch.testing.assert_close(predictor.predict(queries, torch.tensor(1)), one)


@pytest.mark.parametrize("window", [2, 3, 16])
def test_a_line_is_extrapolated_through_rope(predicting: Any, window: int) -> None:
    begin, slope = drawn(64, seed=4), drawn(64, seed=5)
    positions = torch.arange(100, 100 + window + 1, dtype=torch.float64)
    angle = positions[:, None] * FREQUENCIES
    line = (begin + positions[:, None] * slope)[:, None]
    queries = rotate(line.float(), angle.cos().float(), angle.sin().float())[:, 0].double()
    predictor = predicting.Rotated(predicting.Linear(window), FREQUENCIES)
    found = predictor.predict(queries[:-1].flip(0), torch.tensor(window))
    torch.testing.assert_close(found, queries[-1], rtol=1e-3, atol=1e-3)
    assert float((predicting.Linear(window).predict(queries[:-1].flip(0), torch.tensor(window)) - found).norm()) > 1


def test_rope_is_undone_and_redone(predicting: Any) -> None:
    vectors, positions = drawn(5, 64, seed=6), torch.tensor([0, 1, 7, 4000, 131_071])
    back = predicting.turned(predicting.turned(vectors, positions, FREQUENCIES), -positions, FREQUENCIES)
    torch.testing.assert_close(back, vectors)


def test_layers_rows_and_heads_do_not_know_each_other(benchmark: Any) -> None:
    queries, held = drawn(3, 4, 2, 40, 64, seed=7), torch.tensor([1, 2, 20, 40])[:, None]
    for name, predictor in benchmark.predictors(FREQUENCIES).items():
        together = predictor.predict(queries, held)
        alone = predictor.predict(queries[2, 1, 1, : predictor.reach], torch.tensor(2))
        torch.testing.assert_close(together[2, 1, 1], alone, msg=name)


def test_a_window_of_nothing_is_refused(predicting: Any) -> None:
    with pytest.raises(ValueError, match="expected a window of at least 1 query, got 0"):
        predicting.Mean(0)


@pytest.fixture(scope="module")
def captured(load: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The shipped model's answers to two questions behind one document; it has no chat template of its own."""
    from transformers import AutoTokenizer

    modules, model = load("query_capture", "answers_data"), tmp_path_factory.mktemp("model")
    capture, data = modules.query_capture, modules.answers_data
    for path in SHIPPED.iterdir():
        (model / path.name).symlink_to(path)
    (model / "chat_template.jinja").write_text("{% for one in messages %}{{ one.content }} {% endfor %}")
    tokenizer = AutoTokenizer.from_pretrained(model)
    text, chat = tokenizer.decode(torch.arange(3, 900).repeat(2).tolist()), data.Chat(tokenizer)
    asked = [data.Question(str(n), f"ASK {n}", "", (), "all", 0) for n in range(2)]
    document = data.Document("planted", text, tuple((one,) for one in asked))
    return chat, document, capture.Capturing(str(model), chat, torch.device("cpu")).capture(document, 6)


def test_what_is_captured_is_what_the_models_own_network_computes(captured: Any, load: Any, tmp_path: Any) -> None:
    chat, document, found = captured
    path = tmp_path / "planted.pt"
    found.save(path)
    found = type(found).load(path, torch.device("cpu"))
    network = load_network(SHIPPED, torch.float32, "cpu")
    plan = LayerPlan.from_dict({"layers": ["anchor"] * 6}, num_layers=6, num_kv_heads=2)
    prefix = chat.prefix(document.text)
    assert found.keys.shape == found.values.shape == (6, 2, len(prefix), 64)
    replayer = load("replay_model").replay_model.Replayer(network, plan, max_len=len(prefix) + 100)
    for (question,), answer in zip(document.conversations, found.answers, strict=True):
        prompt = prefix + chat.question(question, first=True)
        tokens = list[int]()
        for _ in range(len(answer.queries)):
            out = replayer.run(prompt, tokens, [None] * len(tokens))
            tokens.append(int(out.logits[-1].argmax()))
        out = replayer.run(prompt, tokens, [None] * len(tokens))
        assert chat.text(tokens) == answer.text
        for layer in range(6):
            torch.testing.assert_close(answer.queries[:, layer], out.queries[layer][1:], rtol=1e-3, atol=1e-3)
        cache = replayer._cache[:, :, :, : len(prompt) + len(tokens)]
        for n, (before, behind) in enumerate(((found.keys, answer.keys), (found.values, answer.values))):
            torch.testing.assert_close(torch.cat([before, behind], 2), cache[:, n], rtol=1e-3, atol=1e-3)


@pytest.fixture
def step(benchmark: Any) -> Any:
    """Planted: 2 KV heads of 3 query heads, 512 prefix tokens, 20 behind."""
    keys, values = drawn(2, 512, 16, seed=8).float(), drawn(2, 512, 16, seed=9).float()
    own, query = drawn(2, 2, 20, 16, seed=10).float(), drawn(6, 16, seed=11).float()
    last = query + 0.3 * drawn(6, 16, seed=12).float()
    blocks = benchmark.ABSparseBuilder(benchmark.ABSparseSpec()).build_layer(keys.transpose(0, 1), None)
    args = SelectArgs(prefix_len=512, num_sink=4, num_recent=16, sm_scale=0.25)
    return benchmark.Step(keys, values, blocks, own[0], own[1], query, last, last[None], args)


def test_mass_and_error_are_those_of_gathered_attention(step: Any) -> None:
    selected = step.top(step.scores()[1], 64)
    mass, error = step.attended(selected[None])
    for head in range(2):
        own, masses, errors = selected[head], [], []
        keys = torch.cat([step.keys[head], step.own_keys[head]])
        values = torch.cat([step.values[head], step.own_values[head]])
        read = torch.cat([own, torch.ones(20, dtype=torch.bool)])
        for query in step.query[3 * head : 3 * head + 3]:
            weights = (keys @ query * 0.25).softmax(0)
            dense = weights @ values
            sparse = (keys[read] @ query * 0.25).softmax(0) @ values[read]
            masses.append(weights[read].sum())
            errors.append((sparse - dense).norm() / dense.norm())
        torch.testing.assert_close(mass[0, head], torch.stack(masses).mean())
        torch.testing.assert_close(error[0, head], torch.stack(errors).mean())
    everything = step.attended(torch.ones(2, 512, dtype=torch.bool))
    torch.testing.assert_close(everything, (torch.ones(2), torch.zeros(2)), atol=1e-5, rtol=0)


def test_a_repair_takes_missing_tokens_of_wanted_blocks_within_its_budget(step: Any) -> None:
    selected = step.top(step.scores()[1], 64)
    scores = step.wanted(step.query)
    wanted = step.top(scores, 64)
    for share in (1 / 8, 1 / 4, 4.0):
        repaired = step.repaired(selected[None], 64, share)[0]
        added = repaired & ~selected
        missing = wanted & ~selected
        assert (repaired & selected).sum() == selected.sum()
        assert not (added & ~wanted).any()
        for head in range(2):
            count = min(int(share * 64), int(missing[head].sum()))
            assert int(added[head].sum()) == count > 0
            if count < int(missing[head].sum()):
                assert scores[head][added[head]].min() >= scores[head][missing[head] & ~added[head]].max()


def test_candidates_are_named_by_the_last_query_and_ranked_by_the_true_one(step: Any, benchmark: Any) -> None:
    found, best = step.candidates(64), step.top(step.scores()[0], 64)
    assert all(mask.sum(1).tolist() == [64, 64] for mask in found.values())
    named = {"lagged blocks": step.wanted(step.last), "lagged tokens": step.scores()[1]}
    for name, scores in named.items():
        assert not (found[f"{name} x 4"] & ~step.top(scores, 256)).any()
        torch.testing.assert_close(found[f"{name} x 8"], best)  # 512 candidates are all
    right = {name: int((mask & best).sum()) for name, mask in found.items()}
    assert right["lagged blocks x 4"] <= right["blocks x 4"] < right["lagged tokens x 4"] < 128
    sure = replace(step, last=step.query).candidates(64)
    torch.testing.assert_close(sure["lagged blocks x 4"], found["blocks x 4"])
    # Each query head's shares are now of the candidates alone.
    assert int((sure["lagged tokens x 4"] & best).sum()) > right["lagged tokens x 4"]


def test_a_step_has_the_tokens_and_queries_up_to_its_own(
    benchmark: Any, captured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, steps = captured[2], []
    monkeypatch.setattr(benchmark, "compared", lambda step, names: steps.append(step) or [])
    answer = found.answers[0]
    assert not list(benchmark.judge(found, answer, 2))
    asked = answer.keys.shape[2] - 6
    for i, step in enumerate(steps):
        layer, t = 1 + i // 3, 1 + 2 * (i % 3)
        torch.testing.assert_close(step.query, answer.queries[t, layer])
        torch.testing.assert_close(step.last, answer.queries[t - 1, layer])
        torch.testing.assert_close(step.predicted[0], step.last)
        torch.testing.assert_close(step.own_keys, answer.keys[layer, :, : asked + t + 1])
        assert step.own_keys.shape == step.own_values.shape
        torch.testing.assert_close(step.values, found.values[layer])
    assert len(steps) == 5 * 3


def test_rows_of_an_answer(benchmark: Any, captured: Any) -> None:
    found = captured[2]
    rows = list(benchmark.judge(found, found.answers[0], 2))
    assert {row["steps"] for row in rows} == {3}
    names = [row["selection"] for row in rows if row["kept"] == benchmark.KEPT[0]]
    repaired = len(benchmark.WATCHED) * len(benchmark.REPAIRS)
    ways = len(benchmark.predictors(FREQUENCIES)) + 3 * len(benchmark.CANDIDATES)
    assert len(names) == len(set(names)) == 1 + ways + repaired
    for row in rows:
        assert 0 < row["overlap"] <= 1
        assert 0 < row["mass"] <= 1
        assert row["error"] > 0
        if row["selection"] == benchmark.TRUE:
            assert row["overlap"] == 1
        if row["selection"] in benchmark.WATCHED:
            heads = torch.tensor(row["by_head"])
            assert heads.shape == (5, 2)
            assert float(heads.mean()) == pytest.approx(row["overlap"], abs=1e-3)


def test_answers_of_one_step_are_refused(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.parse(["--new-tokens", "1"])
    assert (
        "expected --new-tokens of at least 2, as a first step has no query before it, got 1" in capsys.readouterr().err
    )


def test_the_documented_predictions_are_the_rows(benchmark: Any) -> None:
    rows = benchmark.read([RESULTS / "query-prediction-cpu.jsonl.xz"])
    columns = [(model, kept) for model in dict.fromkeys(row["model"] for row in rows) for kept in benchmark.KEPT]

    def figures(name: str, figure: str) -> list[float]:
        return [benchmark.mean_of(rows, *column, name)[figure] for column in columns]

    shown = documented_table("selection", "| selected by | Qwen, 1/8 |")
    for bold, *said in shown:
        name = bold.strip("*")
        pairs = zip(figures(name, "overlap"), figures(name, "error"), strict=True)
        assert said == [f"{overlap:.1%}, {error:.3f}" for overlap, error in pairs], name
    known = list(benchmark.predictors(FREQUENCIES))
    best = max(known, key=lambda name: sum(figures(name, "overlap")))
    assert [name for name, *_ in shown if name.startswith("**")] == [f"**{best}**"]
    for figure, sign in (("overlap", 1), ("error", -1)):
        gain = np.array(figures("last", figure)) - figures("ridge 16", figure)
        assert (sign * gain > 0).all()
    worse = [name for name in known if name.startswith(("mean", "exponential", "linear"))]
    assert min(sum(figures(name, "error")) for name in worse) > sum(figures("last", "error"))
    assert max(np.array(figures(best, "error")) - figures("last", "error")) < 0.001
    ahead = [name for name, *_ in shown if name != benchmark.TRUE]
    errors = [[float(cell.split()[1]) for cell in row[1:]] for row in shown if row[0] != benchmark.TRUE]
    assert ahead[int(np.sum(errors, axis=1).argmin())] == "lagged tokens x 4"
    text, old = prose("selection"), figures("lag 16", "overlap")
    assert "Queries 16 steps old overlap by {:.1%} and {:.1%} at 1/8".format(*old[::2]) in text
    h100 = benchmark.read([RESULTS / "query-prediction-h100.jsonl.xz"])
    longer = [
        benchmark.mean_of(h100, h100[0]["model"], kept, name)["overlap"]
        for name in ("lagged tokens x 4", "last")
        for kept in benchmark.KEPT
    ]
    assert "overlap of {:.1%} and {:.1%}, the last query's {:.1%} and {:.1%}".format(*longer) in text
    layers = [benchmark.by_layer(rows, model, kept, best) for model, kept in columns[1::2]]
    ranges = [f"{min(one):.0%} to {max(one):.0%}" for one in layers]
    assert "Its overlap at 5% by layer: {}, {}.".format(*ranges) in text
