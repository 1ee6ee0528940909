"""What is measured of one prompt, against plain loops; its file; its mean over prompts."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sglang_ext.calibration import ChannelAccumulator, prompt_similarity
from sglang_ext.calibration.block_recall import minmax_scorer, recall_by_block_size
from sglang_ext.calibration.measurement import (
    KEEP_RATIOS,
    MEASUREMENT_VERSION,
    MeasureSetting,
    PromptInfo,
    PromptMeasurement,
    average,
    keys_for_mass,
    load_measurement,
    measure_prompt,
    measured_tokens,
    reuse_recovery,
    save_measurement,
)
from sglang_ext.config import SparseAttnConfig
from tests.calibration.captures import make_capture

SETTING = MeasureSetting(keep_ratio=0.6, min_top_k=40, num_sink=4, num_recent=8, top_k=16, max_tokens=4)
INFO = PromptInfo("a-1", "a", True, 262, 256, 4)


def pooled(layer, sm_scale):
    """[kv_head][token] -> probabilities over the keys a token sees, mean over the group, in numpy fp64."""
    q, k = layer.queries.double().numpy(), layer.keys.double().numpy()
    gqa = q.shape[1] // k.shape[1]
    heads = []
    for head in range(k.shape[1]):
        tokens = []
        for token, position in enumerate(layer.positions.tolist()):
            seen = min(position + 1, len(k))
            score = q[token, head * gqa : (head + 1) * gqa] @ k[:seen, head].T * sm_scale
            weight = np.exp(score - score.max(axis=1, keepdims=True))
            tokens.append((weight / weight.sum(axis=1, keepdims=True)).mean(axis=0))
        heads.append(tokens)
    return heads


def layers_of(capture, rows):
    return [capture.layer(layer, rows) for layer in range(capture.num_layers)]


@pytest.mark.parametrize("mass", [0.5, 0.95])
def test_sparsity_counts_the_fewest_keys(mass):
    capture = make_capture(1)
    layer = capture.layer(0, torch.tensor([3, 20, 42]))
    found = keys_for_mass(layer, capture.sm_scale, mass)
    for head, tokens in enumerate(pooled(layer, capture.sm_scale)):
        for token, weight in enumerate(tokens):
            held, count = 0.0, 0
            for value in sorted(weight, reverse=True):
                held, count = held + value, count + 1
                if held >= mass:
                    break
            assert found[head, token] == pytest.approx(count / len(weight), abs=1.01 / len(weight))


def test_recovery_is_the_mass_in_the_other_layers_top_k():
    capture = make_capture(2)
    layers = layers_of(capture, torch.arange(40, 46))
    found = reuse_recovery(layers, capture.sm_scale, 0.6)
    budget = int(0.6 * 256)
    mass = [pooled(layer, capture.sm_scale) for layer in layers]
    for a in range(3):
        for b in range(3):
            for h in range(2):
                for g in range(2):
                    kept = [mass[b][h][t][np.argsort(-mass[a][g][t])[:budget]].sum() for t in range(6)]
                    expected = np.mean(kept) if a <= b else 0.0
                    assert float(found[a, b, h, g]) == pytest.approx(expected, abs=1e-5)


def test_recovery_does_not_depend_on_chunks(monkeypatch):
    capture = make_capture(2)
    layers = layers_of(capture, torch.arange(40, 46))
    whole = reuse_recovery(layers, capture.sm_scale, 0.6)
    monkeypatch.setattr("sglang_ext.calibration.capture.ELEMENTS_PER_CHUNK", 3000)
    torch.testing.assert_close(reuse_recovery(layers, capture.sm_scale, 0.6), whole)


def test_tokens_behind_the_prefix_are_measured_the_last_one_always():
    capture = make_capture(asked=30)
    assert capture.positions[measured_tokens(capture, 100)].tolist() == list(range(256, 286))
    some = capture.positions[measured_tokens(capture, 4)].tolist()
    assert (len(some), some[-1]) == (4, 285)
    assert some == sorted(set(some))


def test_without_tokens_behind_the_prefix_the_latest_are_measured():
    capture = make_capture(asked=0)
    assert measured_tokens(capture, 3).tolist() == [37, 38, 39]


def test_a_measurement_holds_what_the_single_functions_say():
    capture = make_capture(3)
    one = measure_prompt(capture, SETTING)
    layers = layers_of(capture, measured_tokens(capture, 4))
    for layer, part in enumerate(layers):
        expected = recall_by_block_size(part, capture.sm_scale, SETTING.recall_setting(), minmax_scorer)
        torch.testing.assert_close(one.recall[1, layer], expected.recall.mean(dim=2).T)
        torch.testing.assert_close(one.oracle[layer], expected.oracle.mean(dim=1))
    torch.testing.assert_close(one.similarity, prompt_similarity(layers, capture.sm_scale, 16))
    torch.testing.assert_close(one.importance, capture.importance.double().mean(dim=1))
    assert not torch.equal(one.recall[0], one.recall[1]), "two representations"
    assert one.quality.numel() == 0


def test_heads_are_judged_at_the_budgets_that_serving_has():
    """256 tokens: the floor of 40 decides at 1%, 2%, 5% and 10%, windows of 12 included, and 20% are 51."""
    capture = make_capture(3)
    one = measure_prompt(capture, SETTING)
    for layer, part in enumerate(layers_of(capture, measured_tokens(capture, 4))):
        for head, tokens in enumerate(pooled(part, capture.sm_scale)):
            for number, budget in enumerate(
                SparseAttnConfig(keep_ratio=r, min_top_k=40).budget(256) for r in KEEP_RATIOS
            ):
                mass = [w[:4].sum() + w[-8:].sum() + np.sort(w[4:-8])[::-1][: budget - 12].sum() for w in tokens]
                assert float(one.best[number, layer, head]) == pytest.approx(np.mean(mass), abs=1e-5)


def test_blocks_and_reuse_are_measured_at_the_budget_that_serving_has():
    capture = make_capture(3)
    low, floor = (measure_prompt(capture, replace(SETTING, keep_ratio=ratio)) for ratio in (0.02, 40.5 / 256))
    torch.testing.assert_close(low.recall, floor.recall)
    torch.testing.assert_close(low.oracle, floor.oracle)
    torch.testing.assert_close(low.recovery, floor.recovery)


def test_the_average_weighs_prompts_alike_and_keeps_channel_maxima():
    captures = [make_capture(seed) for seed in range(3)]
    ones = [measure_prompt(capture, SETTING) for capture in captures]
    means = average(ones)
    torch.testing.assert_close(means.recall, sum(one.recall for one in ones) / 3)
    together = ChannelAccumulator(3, 4, 2, 16)
    for capture in captures:
        together.add_prompt(capture.layer(layer) for layer in range(3))
    for name, value in together.state_dict().items():
        assert (
            torch.allclose(value, getattr(means.channels, name))
            if isinstance(value, torch.Tensor)
            else value == means.channels.num_prompts
        )


def test_an_average_of_nothing_or_of_two_models_is_refused():
    with pytest.raises(ValueError, match="at least one measured prompt, got none"):
        average([])
    ones = [measure_prompt(make_capture(num_layers=layers), SETTING) for layers in (2, 3)]
    with pytest.raises(ValueError, match="prompts of one model"):
        average(ones)


def test_a_file_is_read_back_as_it_was_written(tmp_path):
    one = measure_prompt(make_capture(4), SETTING, quality=torch.rand(2, 5, 6))
    save_measurement(one, INFO, tmp_path / "a.safetensors")
    again, info = load_measurement(tmp_path / "a.safetensors")
    assert info == INFO
    for field in fields(PromptMeasurement):
        assert torch.equal(getattr(again, field.name), getattr(one, field.name)), field.name
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"], "nothing partial stays"


def test_a_damaged_or_newer_file_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        load_measurement(path)
    monkeypatch.setattr("sglang_ext.calibration.measurement.MEASUREMENT_VERSION", 99)
    save_measurement(measure_prompt(make_capture(), SETTING), INFO, path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=rf"version {MEASUREMENT_VERSION} in .*, got '99'"):
        load_measurement(path)


GOOD_INFO = INFO._asdict()


@pytest.mark.parametrize(
    "info",
    [
        None,
        "{",
        "[]",
        "null",
        json.dumps({**GOOD_INFO, "odd": 1}),
        json.dumps({name: value for name, value in GOOD_INFO.items() if name != "task"}),
        json.dumps({**GOOD_INFO, "held_out": 2}),
    ],
    ids=["none", "no JSON", "a list", "null", "one field more", "one less", "another kind"],
)
def test_a_file_that_does_not_tell_its_prompt_is_refused(tmp_path, info):
    one = measure_prompt(make_capture(), SETTING)
    tensors = {field.name: getattr(one, field.name).contiguous() for field in fields(PromptMeasurement)}
    meta = {"version": str(MEASUREMENT_VERSION)}
    path = tmp_path / "a.safetensors"
    save_file(tensors, str(path), {**meta, "info": json.dumps(GOOD_INFO)})
    assert load_measurement(path)[1] == INFO
    save_file(tensors, str(path), meta if info is None else {**meta, "info": info})
    with pytest.raises(ValueError, match=r"expected a measurement with the fields id, task, .* measured again"):
        load_measurement(path)


@pytest.mark.parametrize("name", ["queries", "keys", "importance"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_are_refused(name, value):
    capture = make_capture()
    broken = getattr(capture, name).clone()
    broken.view(-1)[-1] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        measure_prompt(replace(capture, **{name: broken}), SETTING)


def test_a_capture_without_tokens_is_refused():
    capture = make_capture(asked=0, sampled=0)
    with pytest.raises(ValueError, match="at least one token, got none"):
        measure_prompt(capture, SETTING)


@pytest.mark.parametrize("change", [{"keep_ratio": 0.0}, {"mass": 1.0}, {"top_k": 0}, {"max_tokens": 0}])
def test_settings_out_of_range_are_refused(change):
    with pytest.raises(ValueError, match="expected"):
        MeasureSetting(**change)
