"""What of a served model goes into its fingerprint: everything that makes its KV what it is."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prefix_index import canonical_digest

logger = logging.getLogger(__name__)

ENV_WEIGHTS = "SGLANG_EXT_WEIGHTS"

#: Keys of a Hugging Face config that do not change what the model computes.
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "max_position_embeddings")

_SUFFIXES = (".safetensors", ".bin", ".pt")
_OF_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""Ends of the names that SGLang, too, leaves out."""
_TWO_COPIES = {"model.safetensors", "consolidated.safetensors"}
_WHOLE_BYTES = 1 << 30
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16


def read_config(folder: str, overrides: str | None) -> dict[str, Any]:
    """A checkpoint's own config, with the keys of SGLang's `--json-model-override-args`. SGLang releases differ in what
    they add to the parsed one.
    """
    raw: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return {**raw, **json.loads(overrides or "{}")}


def config_digests(hf_config: Mapping[str, Any], quantization: str | None) -> tuple[str, str]:
    """Digests of what a model computes, and of its rotary embedding: of a fingerprint `config_digest`, `rope_digest`.

    Args:
        hf_config: the model's config, as JSON gives it; volatile keys are left out.
        quantization: SGLang's quantization method, None for none.
    """
    config = {key: value for key, value in hf_config.items() if key not in _VOLATILE}
    rope = {key: config.pop(key) for key in _ROPE if key in config}
    return canonical_digest({**config, "quantization": quantization}), canonical_digest(rope)


def weights_digest(folder: str) -> str:
    """SHA-256 over names, sizes and bytes of the weight files in a folder, of those that SGLang loads: what a training
    left is none of them, nor a `.bin` beside safetensors, nor safetensors that their index does not list.

    Checkpoints up to 1 GiB, and with `SGLANG_EXT_WEIGHTS=whole` all, are read whole. Larger ones are sampled, which
    is a warning in the log: per file the first 64 KiB, which in safetensors hold names, shapes and offsets, and 64
    evenly spaced pieces of 64 KiB. Two checkpoints that agree in all of these are taken for one; a fine-tune that
    changed any layer as a whole differs, one that changed a few MiB as a rule does not.

    Raises:
        FileNotFoundError: no weight file in the folder.
        ValueError: SGLANG_EXT_WEIGHTS is another word.
    """
    choice = os.environ.get(ENV_WEIGHTS, "sample")
    if choice not in ("sample", "whole"):
        raise ValueError(f"{ENV_WEIGHTS}: expected sample or whole, got {choice!r}; correct it, or unset it")
    files = sorted(p for p in Path(folder).iterdir() if p.suffix in _SUFFIXES and not p.name.endswith(_OF_TRAINING))
    if names := {path.name for path in files if path.suffix == ".safetensors"}:
        stray = _unlisted(Path(folder, "model.safetensors.index.json"), names)
        files = [path for path in files if path.suffix != ".bin" and path.name not in stray]
    if not files:
        raise FileNotFoundError(
            f"expected weight files ({', '.join(_SUFFIXES)}) in {folder}, found none; sparse attention needs "
            "them to tell models apart"
        )
    total = sum(path.stat().st_size for path in files)
    whole = choice == "whole" or total <= _WHOLE_BYTES
    if not whole:
        logger.warning(
            "sparse attention: the weights in %s are told from others by a sample: %d pieces of %d KiB in each of %d "
            "files, of %.1f GiB in all. Indexes of weights that differ in between are taken for theirs; %s=whole reads "
            "everything, at each start, and has indexes of its own.",
            folder,
            _SAMPLES,
            _SAMPLE_BYTES >> 10,
            len(files),
            total / (1 << 30),
            ENV_WEIGHTS,
        )
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for offset, nbytes in _pieces(size, whole=whole):
                file.seek(offset)
                digest.update(file.read(nbytes))
    return digest.hexdigest()


def _unlisted(index: Path, names: set[str]) -> set[str]:
    """Names of safetensors that SGLang leaves out, as Mistral's second copy of all weights."""
    listed = names - {"consolidated.safetensors"} if names == _TWO_COPIES else names
    if index.is_file():
        try:
            listed = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{index}: expected a JSON object whose weight_map names each weight's file, got {error!r}; fetch the "
                "file again"
            ) from error
    # Shards of ranks (`--load-format sharded_state`) are in no list, and may lie beside that of the model.
    return {name for name in names - listed if not name.startswith("model-rank-")} if listed <= names else set()


def _pieces(size: int, *, whole: bool) -> Iterable[tuple[int, int]]:
    if whole:
        step = 1 << 22
        return ((offset, step) for offset in range(0, size, step))
    spaced = (size * i // _SAMPLES for i in range(_SAMPLES))
    return ((offset, _SAMPLE_BYTES) for offset in sorted({0, *spaced, max(size - _SAMPLE_BYTES, 0)}))


def resolve_folder(model_path: str, revision: str | None, cache_dir: str | None = None) -> str:
    """The local folder of a model path; a hub name is looked up in the cache that SGLang loads from.

    Raises:
        FileNotFoundError: neither a folder nor in the cache.
    """
    if os.path.isdir(model_path):
        return model_path
    try:
        from huggingface_hub import snapshot_download

        return str(snapshot_download(model_path, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except Exception as error:
        raise FileNotFoundError(
            f"--sparse-attn: expected the model {model_path!r} as a folder, or as a name in the local Hugging Face "
            f"cache (a single .gguf file and remote URLs are not supported); found neither ({error})"
        ) from error
