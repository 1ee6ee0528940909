"""Profiles: round trip, checks against the model, versions, damaged and hostile files, atomic writing."""

import json
from pathlib import Path

import pytest

from sglang_ext.methods import profile
from sglang_ext.methods.base import METHODS
from sglang_ext.methods.profile import ProfileError, decode_profile, load_profile

DIGEST = "ab" * 32
MODEL = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8}


def plain(**changes):
    """A profile as JSON values; a change names a field, `a__b` a field of a field."""
    data = {
        "version": 1,
        "model": {**MODEL, "config_digest": DIGEST, "rope_digest": "cd" * 32},
        "block_sizes": [[16, 64], [32, 32], [16, 16]],
        "layer_plan": {"layers": ["dense", "anchor", {"reuse": 1, "head_map": [1, 1]}]},
        "channels": [[[0, 3], [1, 7]]] * 3,
        "dense_heads": [[], [1], []],
        "recommended": {"method": "ab_sparse", "spec": {"block_size": 16}, "keep_ratio": 0.05},
        "calibration": {"prompts": 4, "tokens": 65536, "seed": 7, "versions": {"torch": "2.11.0"}, "description": "x"},
    }
    for name, value in changes.items():
        *path, last = name.split("__")
        place = data
        for part in path:
            place = place[part]
        place[last] = value
    return data


def imported(**changes):
    """A profile without measurements, as JSON values."""
    data = {"version": 1, "model": {**MODEL, "config_digest": DIGEST}, "layer_plan": plain()["layer_plan"]}
    return {**data, "calibration": {"description": "layer plan imported"}, **changes}


def decode(data):
    return decode_profile(json.dumps(data).encode())


def test_round_trip(tmp_path):
    made = decode(plain())
    path = tmp_path / "profile.json"
    made.save(path)
    loaded = load_profile(path)
    assert loaded == made
    assert json.loads(path.read_text()) == plain()
    assert path.read_bytes() == made.encode()
    assert path.read_text().endswith("\n")
    assert decode(plain(recommended__spec={"method": "ab_sparse"})).recommended.index_spec().method == "ab_sparse"


def test_an_imported_plan_has_no_values_that_were_not_measured(tmp_path):
    made = decode(imported())
    made.save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == made
    assert (made.block_sizes, made.channels, made.dense_heads, made.recommended) == ((), (), (), None)
    assert made.plan() == decode(plain()).plan()
    assert profile.stacked_profile(made, [0, 2], range(1)) == profile.NO_PROFILE


@pytest.mark.parametrize("name", ["block_sizes", "channels", "dense_heads", "recommended"])
def test_what_is_measured_stands_with_its_prompts(name):
    with pytest.raises(ProfileError, match=rf"expected no {name} where nothing was measured .* remove {name}, or cal"):
        decode(imported(**{name: plain()[name]}))
    data = plain()
    del data[name]
    if name == "channels":
        assert decode(data).channels == ()
    else:
        with pytest.raises(ProfileError, match=r"expected (block_sizes|dense_heads|a recom).*calibrate again"):
            decode(data)


def test_the_digest_tells_profiles_apart_and_does_not_depend_on_the_order_of_keys():
    for changes in ({"model__head_dim": 9}, {"recommended__keep_ratio": 0.1}, {"dense_heads": [[], [], []]}):
        assert decode(plain(**changes)).digest() != decode(plain()).digest()
    data = plain()
    turned = dict(reversed([(key, value) for key, value in data.items()]))
    turned["calibration"] = dict(reversed(data["calibration"].items()))
    data["calibration"]["versions"] = {"sglang": "1", "torch": "2"}
    turned["calibration"]["versions"] = {"torch": "2", "sglang": "1"}
    assert decode(turned).digest() == decode(data).digest()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "expected version 1, got 2; it was made by a newer sglang-ext"),
        ({"version": 0}, "expected version 1, got 0; calibrate again"),
        ({"version": "1"}, "Expected `int`, got `str`"),
        ({"version": None}, "expected a version, got none"),
        ({"extra": 1}, "unknown field `extra`"),
        ({"recommended__extra": 1}, "unknown field `extra`"),
        ({"model__num_layers": 0}, "expected model.num_layers >= 1, got 0"),
        ({"model__num_layers": 4}, "expected block_sizes of 4 layers, got 3"),
        ({"model__head_dim": 7}, r"channels\[0\]\[1\] ascending in 0\.\.6 \(below head_dim\), got \[1, 7\]"),
        ({"block_sizes": [[16, 64], [32], [16, 16]]}, r"expected block_sizes\[1\] of 2 KV heads, got 1"),
        ({"block_sizes": [[16, 64], [32, 48], [16, 16]]}, r"expected block_sizes\[1\] of 16, 32, 64 tokens, got 48"),
        ({"layer_plan": {"layers": ["dense"]}}, "expected 3 layers in the plan"),
        ({"layer_plan": {"layers": 3}}, "expected layers as a list"),
        ({"channels": [[[0, 3], [1, 7]]] * 2}, "expected channels of 3 layers, got 2"),
        ({"channels": [[[0, 3]], [[1, 7]], [[1, 7]]]}, r"expected channels\[0\] of 2 KV heads, got 1"),
        (
            {"channels": [[[0, 3], [1]]] * 3},
            r"channels\[0\]\[1\] of 2 channels \(as many as the first head has\), got 1",
        ),
        ({"channels": [[[3, 0], [1, 7]]] * 3}, r"expected channels\[0\]\[0\] ascending"),
        ({"channels": [[[0, 0], [1, 7]]] * 3}, r"expected channels\[0\]\[0\] ascending"),
        ({"channels": [[[], []]] * 3}, "expected at least one channel per head"),
        ({"dense_heads": [[], []]}, "expected dense_heads of 3 layers, got 2"),
        ({"dense_heads": [[], [2], []]}, r"expected dense_heads\[1\] ascending in 0\.\.1 \(below num_kv_heads\)"),
        ({"dense_heads": [[], [-1], []]}, r"expected dense_heads\[1\] ascending"),
        ({"recommended__keep_ratio": 0}, "expected keep_ratio above 0 and at most 1, got 0"),
        ({"recommended__keep_ratio": 1.5}, "expected keep_ratio above 0 and at most 1, got 1.5"),
        ({"recommended__method": "magic"}, "expected method to be one of .*got 'magic'"),
        ({"recommended__spec": {"block": 1}}, "unknown parameter 'block' of ab_sparse"),
        (
            {"recommended__spec": {"method": "exact"}},
            "expected a spec of the recommended method 'ab_sparse', got one of",
        ),
        ({"calibration__prompts": 0}, "expected calibration.prompts >= 1"),
        ({"calibration__tokens": 0}, "expected calibration.tokens >= 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused(changes, message):
    with pytest.raises(ProfileError, match=message) as caught:
        decode(plain(**changes))
    assert str(caught.value).startswith("profile: ")


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff\xfe", b"[]", b"7", b"null", b"[" * 100_000, b'{"version":1e400}', b"{}", b'{"version": 1}'],
    ids=lambda text: text[:12].decode(errors="replace"),
)
def test_damaged_and_hostile_files(text, tmp_path):
    path = tmp_path / "profile.json"
    path.write_bytes(text)
    with pytest.raises(ProfileError, match=r"profile: .*expected"):
        load_profile(path)


def test_the_shipped_models_profile_is_its_own():
    folder = Path(__file__).resolve().parents[2] / "models" / "needle"
    profile = load_profile(folder / "sparse_attn_profile.json")
    config = json.loads((folder / "config.json").read_text())
    sizes = (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"])
    names = ("num_layers", "num_kv_heads", "head_dim")
    assert tuple(getattr(profile.model, name) for name in names) == sizes
    assert profile.plan().anchor_layers == (1, 2, 3, 4, 5)
    spec = profile.recommended.index_spec()
    assert spec == METHODS["token_index"].spec(channel_ratio=0.75), "the default when it was calibrated"
