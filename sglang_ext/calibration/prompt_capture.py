"""What one request left behind in all layers: kept queries, the prompt's keys and values; as a file between
the process that runs the model and the one that measures.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sglang_ext.calibration.capture import LayerCapture

CAPTURE_VERSION = 1

_TENSORS = ("queries", "positions", "sampled", "keys", "values", "importance")


@dataclass(frozen=True, eq=False)
class PromptCapture:
    """One request's capture. Read only.

    Attributes:
        queries: [num_layers, num_tokens, num_qo_heads, head_dim] post-RoPE queries of the kept tokens, floating.
        positions: [num_tokens] int64, ascending: position of each kept token in the request.
        sampled: [num_tokens] bool, whether the token belongs to the uniform sample over the prompt; the others were
            kept because they are late: the prompt's end and the decode steps.
        keys: [num_layers, prefix_len, num_kv_heads, head_dim] post-RoPE.
        values: [num_layers, prefix_len, num_kv_heads, v_head_dim].
        importance: [num_layers, num_tokens] fp32, 1 - cos(x, y) of each layer's attention (`importance`).
        prompt_len: tokens of the request's prompt.
        sm_scale: the model's attention scale.
    """

    queries: Tensor
    positions: Tensor
    sampled: Tensor
    keys: Tensor
    values: Tensor
    importance: Tensor
    prompt_len: int
    sm_scale: float

    @property
    def num_layers(self) -> int:
        return self.queries.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[2]

    @property
    def prefix_len(self) -> int:
        """Tokens whose keys and values are here."""
        return self.keys.shape[1]

    def behind(self, prefix_len: int) -> PromptCapture:
        """The same with the first `prefix_len` tokens as the prefix: later keys and values are left out.

        Raises:
            ValueError: fewer tokens than that are here, or none is asked for.
        """
        if not 1 <= prefix_len <= self.prefix_len:
            raise ValueError(
                f"expected a prefix of 1..{self.prefix_len} tokens (the capture's), got {prefix_len}; capture a "
                "prompt that contains the prefix"
            )
        return replace(self, keys=self.keys[:, :prefix_len], values=self.values[:, :prefix_len])

    def to(self, device: torch.device | str) -> PromptCapture:
        """The same on another device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in _TENSORS})

    def samples(self) -> Tensor:
        """Sampled queries of the prefix's own prefill, [num_layers, num_kv_heads, num_samples, head_dim].

        Those of all query heads of a KV head's group together, as builders expect them. Empty when the sample has
        no token in the prefix.
        """
        kept = (self.sampled & (self.positions < self.prefix_len)).nonzero().squeeze(1)
        queries = self.queries[:, kept]
        layers, count, num_qo_heads, head_dim = queries.shape
        grouped = queries.reshape(layers, count, self.num_kv_heads, num_qo_heads // self.num_kv_heads, head_dim)
        return grouped.transpose(1, 2).reshape(layers, self.num_kv_heads, -1, head_dim)

    def asked(self) -> Tensor:
        """[n] int64, late tokens behind the prefix: the end of the prompt and the decode steps."""
        return (~self.sampled & (self.positions >= self.prefix_len)).nonzero().squeeze(1)

    def layer(self, layer: int, tokens: Tensor | None = None) -> LayerCapture:
        """One layer's capture, of some kept tokens (indices) or of all."""
        rows = slice(None) if tokens is None else tokens
        return LayerCapture(self.queries[layer][rows], self.keys[layer], self.positions[rows])


def save_capture(capture: PromptCapture, path: str | Path) -> None:
    """Write a capture as one safetensors file, for this user alone: all of it or nothing.

    Raises:
        OSError: the folder is missing or full.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    tensors = {name: getattr(capture, name).contiguous().cpu() for name in _TENSORS}
    meta = {"version": CAPTURE_VERSION, "prompt_len": capture.prompt_len, "sm_scale": repr(capture.sm_scale)}
    try:
        partial.touch(0o600)  # before it holds anything
        save_file(tensors, str(partial), {name: str(value) for name, value in meta.items()})
        partial.chmod(0o600)  # should a library write another file than the one that was there
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_capture(path: str | Path, device: torch.device | str = "cpu") -> PromptCapture:
    """Read a file of `save_capture`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no capture, or one of another version.
    """
    try:
        with safe_open(str(path), "pt", device=str(device)) as file:
            meta = file.metadata() or {}
            if meta.get("version") != str(CAPTURE_VERSION):
                raise ValueError(
                    f"expected a capture of version {CAPTURE_VERSION} in {path}, got {meta.get('version')!r}; take it "
                    "again with this sglang-ext"
                )
            tensors = {name: file.get_tensor(name) for name in _TENSORS}
    except SafetensorError as error:
        raise ValueError(
            f"expected a capture in {path}, got a file that cannot be read ({error}); take it again"
        ) from error
    return PromptCapture(**tensors, prompt_len=int(meta["prompt_len"]), sm_scale=float(meta["sm_scale"]))
