"""What is measured of one prompt; its file; its mean over prompts."""

import json
from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_ext.calibration.channels import channel_maxima
from sglang_ext.calibration.layer_statistics import MeasureSetting, keys_for_mass, recall_by_block_size, reuse_recovery
from sglang_ext.calibration.measurement import (
    PromptInfo,
    PromptMeasurement,
    average,
    load_measurement,
    measure_prompt,
    measured_tokens,
    save_measurement,
)
from sglang_ext.config import SparseAttnConfig
from tests.calibration.captures import attention, make_capture

SETTING = MeasureSetting(keep_ratio=0.6, min_top_k=40, num_sink=4, num_recent=8, max_tokens=4)
INFO = PromptInfo("a-1", "a", True, 262, 256, 4)


def layers_of(capture, rows):
    return [capture.layer(layer, rows) for layer in range(capture.num_layers)]


def test_tokens_behind_the_prefix_are_measured_the_last_one_always_and_without_them_the_latest():
    capture = make_capture(asked=30)
    assert capture.positions[measured_tokens(capture, 100)].tolist() == list(range(256, 286))
    some = capture.positions[measured_tokens(capture, 4)].tolist()
    assert (len(set(some)), sorted(some), some[-1]) == (4, some, 285)
    assert measured_tokens(make_capture(asked=0), 3).tolist() == [37, 38, 39]


def test_a_measurement_holds_what_the_single_functions_say():
    capture = make_capture(3)
    one = measure_prompt(capture, SETTING)
    layers = layers_of(capture, measured_tokens(capture, 4))
    for layer, part in enumerate(layers):
        expected = recall_by_block_size(part, capture.sm_scale, SETTING)
        torch.testing.assert_close(one.recall[layer], expected.mean(dim=2).T)
        sparsity = keys_for_mass(part, capture.sm_scale, 0.95)
        torch.testing.assert_close(one.sparsity[layer], sparsity.mean(dim=1))
    torch.testing.assert_close(one.recovery, reuse_recovery(layers, capture.sm_scale, int(0.6 * 256)))
    torch.testing.assert_close(one.importance, capture.importance.double().mean(dim=1))
    q_max, k_max = channel_maxima(layers_of(capture, None))
    assert torch.equal(one.q_max, q_max)
    assert torch.equal(one.k_max, k_max)


def test_heads_are_judged_at_the_budgets_that_serving_has():
    """256 tokens: the floor of 40 decides at 5% and 2%, windows of 12 included; 60% are 153."""
    capture = make_capture(3)
    one = measure_prompt(capture, SETTING)
    assert SETTING.keep_ratios == (0.6, 0.05, 0.02)
    for layer, part in enumerate(layers_of(capture, measured_tokens(capture, 4))):
        for head, tokens in enumerate(attention(part, capture.sm_scale)):
            for number, budget in enumerate(
                SparseAttnConfig(keep_ratio=r, min_top_k=40).budget(256) for r in SETTING.keep_ratios
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
    q_max, k_max = zip(*(channel_maxima(layers_of(capture, None)) for capture in captures), strict=True)
    assert torch.equal(means.q_max, torch.stack(q_max).amax(dim=0))
    assert torch.equal(means.k_max, torch.stack(k_max).amax(dim=0))
    with pytest.raises(ValueError, match="expected prompts of one model, got different numbers of layers or heads"):
        average([ones[0], replace(ones[1], q_max=ones[1].q_max[:1])])


def test_a_file_is_read_back_as_it_was_written(tmp_path):
    one = measure_prompt(make_capture(4), SETTING)
    save_measurement(one, INFO, tmp_path / "a.safetensors")
    again, info = load_measurement(tmp_path / "a.safetensors")
    assert info == INFO
    for field in fields(PromptMeasurement):
        assert torch.equal(getattr(again, field.name), getattr(one, field.name)), field.name
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"], "nothing partial stays"


@pytest.mark.parametrize("info", [None, "{", '{"id": "a-1"}', json.dumps({**msgspec.to_builtins(INFO), "odd": 1})])
def test_a_file_that_is_damaged_or_does_not_tell_its_prompt_is_refused(tmp_path, info):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"expected a measurement of a prompt in .* measured again"):
        load_measurement(path)
    one = measure_prompt(make_capture(), SETTING)
    save_measurement(replace(one, recall=one.recall * torch.nan), INFO, path)
    with pytest.raises(ValueError, match=r"expected a measurement of a prompt in .* finite recall, got NaN"):
        load_measurement(path)
    save_measurement(one, INFO, path)
    save_file(load_file(path), path, info and {"info": info})
    with pytest.raises(ValueError, match=r"expected a measurement of a prompt in .* measured again"):
        load_measurement(path)


@pytest.mark.parametrize("name", ["queries", "keys", "importance"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_are_refused(name, value):
    capture = make_capture()
    broken = getattr(capture, name).clone()
    broken.view(-1)[-1] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        measure_prompt(replace(capture, **{name: broken}), SETTING)
