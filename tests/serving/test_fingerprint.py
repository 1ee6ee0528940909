"""What tells two models apart, and what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext import fingerprint
from sglang_ext.fingerprint import config_digests, resolve_folder, weights_digest

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "rope_theta": 1e6,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "transformers_version": "5.0",
    "torch_dtype": "bfloat16",
    "architectures": ["Qwen3ForCausalLM"],
}


def test_what_the_model_computes_and_what_sglang_makes_of_it_change_a_digest() -> None:
    config, rope = config_digests(CONFIG, None)
    for change in ({"hidden_size": 65}, {"rms_norm_eps": 1e-5}, {"attention_bias": True}):
        assert config_digests({**CONFIG, **change}, None)[0] != config
    ropes = {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4}, "max_position_embeddings": 2048}
    for name, value in ropes.items():
        assert config_digests({**CONFIG, name: value}, None)[1] != rope
    assert config_digests(CONFIG, "fp8")[0] != config


def test_volatile_keys_and_the_order_of_keys_do_not() -> None:
    same = config_digests(CONFIG, None)
    volatile = {"transformers_version": "6.0", "torch_dtype": "float32", "_name_or_path": "x", "use_cache": False}
    for name, value in volatile.items():
        assert config_digests({**CONFIG, name: value}, None) == same
    assert config_digests(dict(reversed(CONFIG.items())), None) == same
    assert config_digests(json.loads(json.dumps(CONFIG)), None) == same


def _checkpoint(folder: Path, size: int = 5000) -> Path:
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(bytes(range(256)) * (size // 256))
    (folder / "model-2.safetensors").write_bytes(b"x" * size)
    (folder / "config.json").write_text("{}")
    return folder


def test_names_sizes_and_split_points_count_and_other_files_do_not(tmp_path: Path) -> None:
    one, two = _checkpoint(tmp_path / "a"), _checkpoint(tmp_path / "b")
    assert weights_digest(str(one)) == weights_digest(str(two))
    (two / "README.md").write_text("text")
    assert weights_digest(str(one)) == weights_digest(str(two))
    (two / "model-2.safetensors").rename(two / "model-3.safetensors")
    assert weights_digest(str(one)) != weights_digest(str(two))
    (two / "model-3.safetensors").rename(two / "model-2.safetensors")
    raw = bytearray((two / "model-2.safetensors").read_bytes())
    raw[-1] ^= 1
    (two / "model-2.safetensors").write_bytes(raw)
    assert weights_digest(str(one)) != weights_digest(str(two)), "one byte"


def test_files_that_sglang_does_not_load_do_not_count(tmp_path: Path) -> None:
    """Values of digests: those of the first release, which stores hold."""
    folder = _checkpoint(tmp_path / "a")
    of_safetensors = "bf36e12930b18e6f813b794a48af2ac97b22150d79f1f8acb4f6a77e12093106"
    assert weights_digest(str(folder)) == of_safetensors
    for stray in ("training_args.bin", "optimizer.bin", "optimizer.pt", "pytorch_model.bin", "model.gguf"):
        (folder / stray).write_bytes(b"stray")
        assert weights_digest(str(folder)) == of_safetensors, stray
    (folder / "consolidated.pt").write_bytes(b"of --load-format pt")
    assert weights_digest(str(folder)) != of_safetensors
    of_bin, of_bin_digest = tmp_path / "b", "40f249ec72df3a6d4684f8cc28308a84ee14ce6060efd776534732243a00cacb"
    of_bin.mkdir()
    (of_bin / "pytorch_model.bin").write_bytes(b"weights")
    assert weights_digest(str(of_bin)) == of_bin_digest
    (of_bin / "training_args.bin").write_bytes(b"stray")
    assert weights_digest(str(of_bin)) == of_bin_digest
    (of_bin / "pytorch_model.bin").write_bytes(b"others!")
    assert weights_digest(str(of_bin)) != of_bin_digest


@pytest.mark.parametrize("listed", [["model-1.safetensors", "model-2.safetensors"], None], ids=["listed", "two"])
def test_safetensors_that_sglang_leaves_out_do_not_count(tmp_path: Path, listed: list[str] | None) -> None:
    """As Mistral's second copy of all weights, and adapters that somebody trained."""
    folder = _checkpoint(tmp_path / "a")
    if listed is None:
        (folder / "model-1.safetensors").rename(folder / "model.safetensors")
        (folder / "model-2.safetensors").unlink()
    else:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(enumerate(listed))}))
    digest = weights_digest(str(folder))
    (folder / "consolidated.safetensors").write_bytes(b"copy")
    assert weights_digest(str(folder)) == digest
    (folder / "adapter_model.safetensors").write_bytes(b"stray")
    assert (weights_digest(str(folder)) == digest) == (listed is not None), "without a list SGLang loads all of these"
    (folder / "adapter_model.safetensors").unlink()
    (folder / "model-rank-0-part-0.safetensors").write_bytes(b"of --load-format sharded_state")
    assert weights_digest(str(folder)) != digest
    shards = tmp_path / "shards"
    shards.mkdir()
    for path in folder.glob("*.index.json"):
        (shards / path.name).write_bytes(path.read_bytes())
    (shards / "part-0.safetensors").write_bytes(b"by another pattern, beside a list of what is not there")
    assert weights_digest(str(shards))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": []}}'])
def test_a_damaged_list_of_safetensors_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index.json: expected a JSON object whose weight_map .*fetch the file again"):
        weights_digest(str(tmp_path))


def test_a_sample_says_that_it_is_one_and_everything_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _checkpoint(tmp_path / "a", 1 << 20)
    small = weights_digest(str(folder))
    assert caplog.messages == []
    monkeypatch.setattr(fingerprint, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(fingerprint, "_SAMPLE_BYTES", 64)
    sampled = weights_digest(str(folder))
    (message,) = caplog.messages
    file = folder / "model-2.safetensors"
    whole = file.read_bytes()
    for offset in (0, 40, len(whole) // 2 + 3, len(whole) - 1):
        file.write_bytes(whole[:offset] + b"\0" + whole[offset + 1 :])
        assert weights_digest(str(folder)) != sampled, offset
    file.write_bytes(whole)
    assert f"weights in {folder} are told from others by a sample: 64 pieces" in message
    assert "SGLANG_EXT_WEIGHTS=whole reads everything" in message
    caplog.clear()
    monkeypatch.setenv("SGLANG_EXT_WEIGHTS", "whole")
    assert weights_digest(str(folder)) == small
    raw = bytearray((folder / "model-2.safetensors").read_bytes())
    raw[1000:9000] = bytes(8000)  # between two pieces
    (folder / "model-2.safetensors").write_bytes(raw)
    assert weights_digest(str(folder)) != small
    assert caplog.messages == []
    monkeypatch.setenv("SGLANG_EXT_WEIGHTS", "sample")
    assert weights_digest(str(folder)) == sampled
    monkeypatch.setenv("SGLANG_EXT_WEIGHTS", "all")
    with pytest.raises(ValueError, match="SGLANG_EXT_WEIGHTS: expected sample or whole, got 'all'"):
        weights_digest(str(folder))


def test_a_folder_without_weights_and_a_model_that_is_nowhere_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(FileNotFoundError, match="expected weight files"):
        weights_digest(str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="neither"):
        resolve_folder("nobody/nothing-here", None)
