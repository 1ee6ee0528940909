"""A model's profile in serving and prebuild: found, merged, checked against the model, part of what is built."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefix_index import ArrayKey, ModelFingerprint
from sglang_ext.administration import BAD, CONFLICT, GOOD, Answer, answered
from sglang_ext.config import ConfigError, Settings, make_settings, settings_from_env
from sglang_ext.methods import method_specs
from sglang_ext.methods.profile import Profile, ProfileError
from sglang_ext.prefill.builder import IndexFactory, profile_digest
from sglang_ext.profiles import PROFILE_FILE, check_profile, find_profile, layer_plan_of_rank, local_folder
from sglang_ext.runtime import SparseRuntime
from tests.prefix_index.samples import sample_model
from tests.serving.admitting import DIM, KV_HEADS, LAYERS, Model

PLAN = ["dense", "anchor", {"reuse": 1, "head_map": [1, 1]}]
SPEC = {"first": {"method": "ab_sparse", "sizes": "profile"}, "second": {"method": "token_index", "num_channels": 4}}


def _model(**changes: Any) -> ModelFingerprint:
    return sample_model(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM, kv_dtype="float32", **changes)


def _profile(**changes: Any) -> Profile:
    raw = {
        "model": {
            "num_layers": LAYERS,
            "num_kv_heads": KV_HEADS,
            "head_dim": DIM,
            "config_digest": _model().config_digest,
            "rope_digest": _model().rope_digest,
        },
        "block_sizes": [[16, 64], [32, 32], [64, 16]],
        "layer_plan": {"layers": PLAN},
        "channels": [[[0, 3, 5, 9], [1, 7, 8, 15]]] * LAYERS,
        "dense_heads": [[], [1], []],
        "recommended": {"method": "two_level", "spec": SPEC, "keep_ratio": 0.05},
        "calibration": {"prompts": 4, "tokens": 65536, "seed": 7},
    }
    return msgspec.convert({**raw, **changes}, Profile)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with its profile."""
    model = tmp_path / "model"
    model.mkdir()
    _profile().save(model / PROFILE_FILE)
    return model


@pytest.fixture
def settle(tmp_path: Path, folder: Path) -> Callable[..., Settings]:
    """Configuration as keys -> settings of a server of the model."""
    store = tmp_path / "store"
    store.mkdir()

    def settle(**keys: Any) -> Settings:
        return make_settings(json.dumps(keys), str(store), str(folder))

    return settle


Settle = Callable[..., Settings]


def test_the_profile_in_the_models_folder_fills_what_is_not_given(settle: Settle, folder: Path) -> None:
    settings = settle()
    config = settings.config
    assert settings.profile == _profile()
    assert config.profile == str(folder / PROFILE_FILE)
    assert (config.method, config.keep_ratio) == ("two_level", 0.05)
    assert config.layer_plan == PLAN
    assert method_specs(config)["two_level"] == _profile().recommended.index_spec()
    assert settle(method="two_level").config == config, "a named method has its parameters"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"keep_ratio": 0.3}, {"keep_ratio": 0.3, "method": "two_level"}),
        ({"layer_plan": ["anchor"] * 3}, {"layer_plan": ["anchor"] * 3, "keep_ratio": 0.05}),
        ({"layer_plan": []}, {"layer_plan": []}),
        ({"method": "exact"}, {"method": "exact", "methods": {}, "keep_ratio": 0.05, "layer_plan": PLAN}),
        ({"method": "two_level", "methods": {"two_level": {}}}, {"methods": {"two_level": {}}}),
        ({"methods": {"two_level": {}, "exact": {}}}, {"method": "two_level"}),
        ({"methods": {"exact": {}}, "method": "exact"}, {"methods": {"exact": {}}, "method": "exact"}),
        ({"top_k": 64}, {"top_k": 64, "method": "two_level"}),
    ],
    ids=str,
)
def test_keys_that_are_given_win(settle: Settle, given: dict[str, Any], expected: dict[str, Any]) -> None:
    config = msgspec.to_builtins(settle(**given).config)
    assert {name: config[name] for name in expected} == expected


def test_none_takes_no_profile_and_a_capture_never_has_one(settle: Settle, tmp_path: Path) -> None:
    for keys in ({"profile": "none"}, {"build": "capture", "capture_folder": str(tmp_path)}):
        settings = settle(**keys)
        assert (settings.profile, settings.config.profile) == (None, "none")
        assert (settings.config.keep_ratio, settings.config.layer_plan) == (None, [])


def test_where_a_profile_is_looked_for(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_profile(None, "model") == str(folder / PROFILE_FILE)
    assert find_profile(None, str(tmp_path)) is None
    assert find_profile(None, None) is None
    assert find_profile("a.json", "model") == str(tmp_path / "a.json")
    assert find_profile("none", "model") is None
    assert local_folder(str(folder)) == str(folder)
    assert local_folder(None) is None
    assert local_folder("nobody/has-this-model", cache_dir=str(tmp_path)) is None


def test_what_was_merged_is_complete_in_itself(settle: Settle, folder: Path, tmp_path: Path) -> None:
    """As prebuild hands it to its engine: parsed again, without the model's folder, it is the same. And as it travels
    between processes, with the profile itself.
    """
    settings, off = settle(keep_ratio=0.2), settle(profile="none")
    again = make_settings(msgspec.json.encode(settings.config).decode(), str(tmp_path))
    assert (again.config, again.profile) == (settings.config, settings.profile)
    assert make_settings(msgspec.json.encode(off.config).decode(), off.store, str(folder)) == off
    environ = {"SGLANG_SPARSE_ATTN": "1", "SGLANG_SPARSE_ATTN_STORE": str(tmp_path)}
    by_environment = settings_from_env(environ, str(folder))
    assert by_environment.profile == _profile()
    (folder / PROFILE_FILE).unlink()
    assert Settings.load(settings.dump()) == settings
    assert Settings.load(settings.dump()).profile == _profile()


def test_a_damaged_profile_refuses_the_start(settle: Settle, folder: Path) -> None:
    (folder / PROFILE_FILE).write_bytes(b"")
    with pytest.raises(ConfigError) as caught:
        settle()
    for word in ["damaged, calibrate again", str(folder / PROFILE_FILE), "set 'profile' to \"none\""]:
        assert word in str(caught.value)


def test_a_profile_that_is_named_and_missing_refuses_the_start(settle: Settle, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a readable profile, got: .*nowhere\.json.*correct the path"):
        settle(profile=str(tmp_path / "nowhere.json"))


def test_methods_that_do_not_go_with_the_profile_refuse_the_start(settle: Settle) -> None:
    with pytest.raises(ConfigError, match=r"num_channels of 4, as many as the profile has, got 8"):
        settle(method="token_index", methods={"token_index": {"num_channels": 8}})
    sized = {"method": "ab_sparse", "methods": {"ab_sparse": {"sizes": "profile"}}}
    assert settle(**sized).config.method == "ab_sparse"
    with pytest.raises(ConfigError, match=r"expected a profile for ab_sparse\.sizes=profile, got none"):
        settle(**sized, profile="none")


def test_a_profile_of_another_model_refuses_the_start(settle: Settle) -> None:
    check_profile(_profile(), _model())
    for name, value in {"num_layers": 4, "num_kv_heads": 4, "head_dim": 32, "config_digest": "f" * 64}.items():
        other = msgspec.structs.replace(_model(), **{name: value})
        with pytest.raises(ProfileError) as caught:
            SparseRuntime(settle(), Model(other))
        for word in (f"profile: expected {name}={value!r}", "it is of another model", "calibrate", '"none"'):
            assert word in str(caught.value)


def test_a_profile_of_other_positions_is_refused_and_one_that_does_not_say_is_a_warning(caplog: Any) -> None:
    scaled = _model(rope_digest="e" * 64)
    with pytest.raises(ProfileError, match=r"other RoPE settings .* \(its --json-model-override-args\)"):
        check_profile(_profile(), scaled)
    assert not caplog.messages
    older = msgspec.structs.replace(_profile().model, rope_digest=None)
    check_profile(msgspec.structs.replace(_profile(), model=older), scaled)
    assert "expected the profile to say which RoPE settings it is of, got none" in caplog.text


def test_the_runtime_has_the_profiles_plan(settle: Settle) -> None:
    runtime = SparseRuntime(settle(), Model(_model()))
    try:
        assert runtime.profile == profile_digest(settle().config, _profile())
        assert runtime.planner.sparse.layer_plan == _profile().plan().with_dense([1])
    finally:
        runtime.close()


def test_layers_of_dense_heads_attend_everything_in_the_plan_they_were_calibrated_with() -> None:
    """A layer that reused one of them selects itself."""
    model, all_select = _model(), ["anchor"] * 3

    def roles(layers: list[Any], profile: Profile | None, *rank: int) -> list[Any]:
        return list(layer_plan_of_rank(layers, profile, model, *rank).to_dict()["layers"])

    assert roles(PLAN, _profile()) == roles(PLAN, _profile(), 1, 2) == ["dense", "dense", "anchor"]
    assert roles(all_select, _profile()) == all_select
    assert roles(PLAN, None) == PLAN
    assert roles([], _profile(layer_plan={})) == ["dense", "dense", "anchor"]


def test_equal_builds_have_equal_digests(settle: Settle) -> None:
    config, profile = settle().config, _profile()
    plain = profile_digest(config, profile)
    assert profile_digest(config, _profile(layer_plan={}, dense_heads=[[], [], []])) == plain
    assert profile_digest(config, _profile(block_sizes=[[16, 16]] * LAYERS)) != plain
    assert profile_digest(config, _profile(channels=[[[0, 1, 2, 3]] * KV_HEADS] * LAYERS)) != plain
    exact = settle(method="exact").config
    assert profile_digest(exact, profile) == profile_digest(exact)

    def digest(profile: Profile | None, **keys: Any) -> str:
        named = {"token_index": {"num_channels": 4}}
        return profile_digest(settle(method="token_index", methods=named, **keys).config, profile)

    assert digest(_profile(), seed=5) == digest(_profile()), "channels of the profile: nothing is sampled"
    assert digest(None, seed=5) != digest(None)


def test_an_index_is_built_with_each_layers_part_of_the_profile(settle: Settle, bench: Any) -> None:
    config, profile = settle().config, _profile()
    prompt = list(range(128))
    identity = bench.identity(prompt, model=_model(), profile=profile_digest(config, profile))
    factory = IndexFactory(bench.store, config, profile)
    built = factory.assemble(identity, lambda layer: bench.keys(prompt, layer), None, DIM**-0.5)
    entry, _ = factory.keep(*built, prompt)
    with bench.store.get(entry.identity) as file:
        for layer, head in product(range(LAYERS), range(KV_HEADS)):
            names = ("first.block_sizes", "second.channels")
            sizes, channels = file.read_many(ArrayKey(f"two_level.{name}", layer, head) for name in names).values()
            assert int(sizes) == profile.block_sizes[layer][head]
            assert channels.tolist() == list(profile.channels[layer][head])


def test_of_a_profile_that_is_read_again_the_keep_ratio_counts_and_all_else_needs_a_restart(settle: Settle) -> None:
    runtime = SparseRuntime(settle(min_sparse_prompt_len=16), Model(_model()))

    def read(**changes: Any) -> Answer:
        return answered(runtime, "reload_profile", {"profile": _profile(**changes).encode().decode()})

    recommended = {"method": "two_level", "spec": SPEC, "keep_ratio": 0.02}
    assert read(recommended=recommended) == Answer(GOOD, {"keep_ratio": 0.02, "top_k": None, "most_tokens": 120})
    assert runtime.config.budget(10000) == 200
    assert read(recommended={**recommended, "keep_ratio": 0.03}).status == GOOD, "and once more"
    for changes in (
        {"layer_plan": {"layers": ["dense", "anchor", "anchor"]}},
        {"dense_heads": [[], [], []]},
        {"channels": [[[0, 3, 5, 9], [1, 7, 8, 14]]] * LAYERS},
        {"block_sizes": [[16, 64], [32, 32], [64, 64]]},
    ):
        answer = read(**changes)
        assert answer.status == CONFLICT
        assert f"{next(iter(changes))} differ: restart the server" in answer.body["error"]
    model = {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "config_digest": "cd" * 32}
    other = read(model=model)
    assert (other.status, "config_digest" in other.body["error"]) == (BAD, True), other
    assert answered(runtime, "reload_profile", {"profile": "no JSON"}).status == BAD
    assert runtime.config.keep_ratio == 0.03
    runtime.close()
    for given in ({"keep_ratio": 0.2}, {"top_k": 64}):
        runtime = SparseRuntime(settle(min_sparse_prompt_len=16, **given), Model(_model()))
        answer = read(recommended=recommended)
        assert answer.status == CONFLICT
        assert "the configuration gives a budget, which counts first" in answer.body["error"]
        runtime.close()
