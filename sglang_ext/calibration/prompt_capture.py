"""What one request left behind in all layers, as a file between the process that runs the model and the one that
measures; and the attention that its queries and keys make.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from prefix_kernels.block_scores import block_scores_mean
from prefix_kernels.pooling import Pooling, pool_scores
from sglang_ext.files import partial_file

ELEMENTS_PER_CHUNK = 1 << 24
"""Upper bound, in elements, of the largest temporary (64 MiB in fp32): queries are taken in chunks below it."""

_TENSORS = ("queries", "positions", "sampled", "keys", "importance")


def attention_importance(x: Tensor, y: Tensor) -> Tensor:
    """1 - cos(x, y) for each token: how much the attention of a layer changes the hidden state.

    Source: Kascade, 3.3 (the weights of the anchor programme). Where x and y are taken is that of its published code:
    the residual stream before and behind the attention block. The block's bare output would not say how much the
    representation changes.

    Args:
        x: [num_tokens >= 1, hidden_size] floating, residual stream before the attention block.
        y: same shape, the residual stream behind it: x plus the block's output.

    Returns:
        [num_tokens] fp64 in 0..2. A vector of length 0 has no direction: 0 where both are, as nothing changed,
        1 where one is, NaN where a value is NaN or infinite.
    """
    x, y = x.double(), y.double()
    lengths = x.norm(dim=1) * y.norm(dim=1)
    cosine = (x * y).sum(dim=1) / lengths.masked_fill(lengths == 0, 1.0)
    unchanged = (x == y).all(dim=1) & lengths.isfinite()
    change: Tensor = 1.0 - cosine.clamp(-1.0, 1.0)
    return change.masked_fill(unchanged, 0.0)


class LayerCapture(NamedTuple):
    """What one layer saw of one prompt. Read only.

    Attributes:
        queries: [num_tokens >= 1, num_qo_heads, head_dim] post-RoPE, floating.
        keys: [prefix_len >= 1, num_kv_heads, head_dim] post-RoPE, floating.
        positions: [num_tokens] int >= 0, of each query's token. It attends the keys 0..position; a position of
            prefix_len or more (a decode step, or a question behind the prefix) attends the whole prefix.
    """

    queries: Tensor
    keys: Tensor
    positions: Tensor

    @property
    def num_tokens(self) -> int:
        return self.queries.shape[0]

    @property
    def prefix_len(self) -> int:
        return self.keys.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def visible(self) -> Tensor:
        """[num_tokens] int64, how many keys each token attends."""
        return (self.positions.long() + 1).clamp_max(self.prefix_len)


def attention_chunks(
    capture: LayerCapture, sm_scale: float, elements_per_token: int = 0
) -> Iterator[tuple[slice, Tensor]]:
    """Attention of the tokens over the keys, post-softmax, mean over the query heads of a KV head's group.

    Source: Kascade, 3.4 (post-softmax pooling; decode pools over the GQA group only).

    Args:
        capture: one layer's, finite.
        sm_scale: the model's attention scale.
        elements_per_token: of the reader's largest temporary; a chunk keeps it below `ELEMENTS_PER_CHUNK`, too.

    Yields:
        Which tokens, and [num_kv_heads, num_tokens of the slice, prefix_len] fp32, natural log of the probability, to
        be changed by the reader; -inf for keys behind the token. The logarithm keeps an order among keys whose
        probability is 0 in fp32.
    """
    num_tokens, prefix_len = capture.num_tokens, capture.prefix_len
    size = max(1, ELEMENTS_PER_CHUNK // max(elements_per_token, capture.queries.shape[1] * prefix_len))
    key = torch.arange(prefix_len, device=capture.keys.device)
    visible = capture.visible.to(key.device)
    for start in range(0, num_tokens, size):
        tokens = slice(start, min(start + size, num_tokens))
        # A block of one key is its own mean.
        raw = block_scores_mean(capture.queries[tokens], capture.keys.transpose(0, 1))
        hidden = key >= visible[tokens, None]
        yield tokens, pool_tokens(raw.masked_fill_(hidden[None, :, None], -torch.inf), sm_scale, Pooling.MEAN)


def pool_tokens(raw: Tensor, sm_scale: float, pooling: Pooling) -> Tensor:
    """[num_kv_heads, num_tokens, gqa, n] raw scores -> [num_kv_heads, num_tokens, n]: each token its own group."""
    num_kv_heads, num_tokens, gqa, num_candidates = raw.shape
    pooled = pool_scores(raw.reshape(num_kv_heads * num_tokens, 1, gqa, num_candidates), sm_scale, pooling)
    return pooled.view(num_kv_heads, num_tokens, num_candidates)


@dataclass(frozen=True, eq=False)
class PromptCapture:
    """One request's capture. Read only.

    Attributes:
        queries: [num_layers, num_tokens, num_qo_heads, head_dim] post-RoPE queries of the kept tokens, floating.
        positions: [num_tokens] int64, ascending: position of each kept token in the request.
        sampled: [num_tokens] bool, whether the token belongs to the uniform sample over the prompt; the others were
            kept because they are late: the prompt's end and the decode steps.
        keys: [num_layers, prefix_len, num_kv_heads, head_dim] post-RoPE.
        importance: [num_layers, num_tokens] fp32, 1 - cos(x, y) of each layer's attention (`attention_importance`).
        prompt_len: tokens of the request's prompt.
        sm_scale: the model's attention scale.
    """

    queries: Tensor
    positions: Tensor
    sampled: Tensor
    keys: Tensor
    importance: Tensor
    prompt_len: int
    sm_scale: float

    @property
    def num_layers(self) -> int:
        return self.queries.shape[0]

    @property
    def prefix_len(self) -> int:
        """Tokens whose keys are here."""
        return self.keys.shape[1]

    def behind(self, prefix_len: int) -> PromptCapture:
        """The same with the first `prefix_len` tokens as the prefix: later keys are left out."""
        return replace(self, keys=self.keys[:, :prefix_len])

    def asked(self) -> Tensor:
        """[n] int64, late tokens behind the prefix: the end of the prompt and the decode steps."""
        return (~self.sampled & (self.positions >= self.prefix_len)).nonzero().squeeze(1)

    def layer(self, layer: int, tokens: Tensor | None = None) -> LayerCapture:
        """One layer's capture, of some kept tokens (indices) or of all."""
        rows = slice(None) if tokens is None else tokens
        return LayerCapture(self.queries[layer][rows], self.keys[layer], self.positions[rows])


def save_capture(capture: PromptCapture, path: str | Path) -> None:
    """Write a capture, for this user alone. Raises OSError where the folder is missing or full."""
    tensors = {name: getattr(capture, name).contiguous().cpu() for name in _TENSORS}
    with partial_file(path, private=True) as partial:
        save_file(tensors, partial, {"prompt_len": str(capture.prompt_len), "sm_scale": repr(capture.sm_scale)})


def load_capture(path: str | Path) -> PromptCapture:
    """Read a file of `save_capture`, which another process of this release wrote."""
    with safe_open(path, "pt") as file:
        tensors, meta = {name: file.get_tensor(name) for name in _TENSORS}, file.metadata()
    return PromptCapture(**tensors, prompt_len=int(meta["prompt_len"]), sm_scale=float(meta["sm_scale"]))
