"""One layer's captured queries and keys, the attention they make, and the states of the accumulators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from prefix_kernels.block_scores import block_scores_mean
from prefix_kernels.pooling import Pooling, pool_scores
from sglang_ext.methods.base import check_keys

ELEMENTS_PER_CHUNK = 1 << 24
"""Upper bound, in elements, of the largest temporary (64 MiB in fp32): queries are taken in chunks below it."""


class LayerCapture(NamedTuple):
    """What one layer saw of one prompt. Read only.

    Attributes:
        queries: [num_tokens >= 1, num_qo_heads, head_dim] post-RoPE, floating.
        keys: [prefix_len >= 1, num_kv_heads, head_dim] post-RoPE, floating.
        positions: [num_tokens] int, position of each query's token. It attends the keys 0..position; a position
            of prefix_len or more (a decode step, or a question behind the prefix) attends the whole prefix.
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


def check_capture(capture: LayerCapture) -> None:
    """Raise unless shapes belong together and every value can be used.

    Raises:
        ValueError: shapes or dtypes that do not fit, NaN or infinity, or a negative position.
    """
    queries, keys, positions = capture
    check_keys(keys)
    num_kv_heads, head_dim = keys.shape[1:]
    fits = queries.dim() == 3 and 0 not in queries.shape and queries.dtype.is_floating_point
    if not fits or queries.shape[2] != head_dim or queries.shape[1] % num_kv_heads:
        raise ValueError(
            f"expected queries [num_tokens >= 1, num_qo_heads, head_dim={head_dim}] with num_qo_heads a multiple "
            f"of num_kv_heads={num_kv_heads} in a floating dtype, got {tuple(queries.shape)} {queries.dtype}; "
            "capture queries and keys of the same layer"
        )
    if not bool(torch.isfinite(queries).all()):
        raise ValueError("expected finite queries, got NaN or infinity; the capture is unusable, take it again")
    integer = not positions.dtype.is_floating_point and positions.dtype is not torch.bool
    if positions.shape != queries.shape[:1] or not integer:
        raise ValueError(
            f"expected positions [num_tokens={queries.shape[0]}] of an integer dtype, got "
            f"{tuple(positions.shape)} {positions.dtype}; one position for each query's token"
        )
    if bool((positions < 0).any()):
        raise ValueError(f"expected positions >= 0, got {int(positions.min())}; count from the prompt's first token")


def take_layers(layers: Iterable[LayerCapture], num_layers: int, num_kv_heads: int) -> Iterator[LayerCapture]:
    """The prompt's layers one by one, checked; complains when there are fewer or more than the model has.

    Raises:
        ValueError: another number of layers or KV heads, or a capture that `check_capture` refuses.
    """
    count = 0
    for capture in layers:
        count += 1
        if count > num_layers:
            raise ValueError(f"expected {num_layers} layers of a prompt, got more; is it of another model?")
        check_capture(capture)
        if capture.num_kv_heads != num_kv_heads:
            raise ValueError(
                f"layer {count - 1}: expected keys of {num_kv_heads} KV heads, got {capture.num_kv_heads}; "
                "is the capture of another model or of one tensor-parallel rank?"
            )
        yield capture
    if count != num_layers:
        raise ValueError(f"expected {num_layers} layers of a prompt, got {count}; capture every layer")


def token_chunks(num_tokens: int, elements_per_token: int) -> Iterator[slice]:
    """Slices of the tokens, each of which makes a temporary of at most `ELEMENTS_PER_CHUNK` elements."""
    size = max(1, ELEMENTS_PER_CHUNK // max(1, elements_per_token))
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))


def log_attention(capture: LayerCapture, tokens: slice, sm_scale: float) -> Tensor:
    """Attention of some tokens over the keys, post-softmax, mean over the query heads of a KV head's group.

    Source: Kascade, 3.4 (post-softmax pooling; decode pools over the GQA group only).

    Args:
        capture: one layer's, checked.
        tokens: which of its tokens.
        sm_scale: the model's attention scale.

    Returns:
        [num_kv_heads, num_tokens of the slice, prefix_len] fp32, natural log of the probability; -inf for keys
        behind the token. The logarithm keeps an order among keys whose probability is 0 in fp32.
    """
    # A block of one key is its own mean.
    raw = block_scores_mean(capture.queries[tokens], capture.keys.transpose(0, 1))
    key = torch.arange(capture.prefix_len, device=raw.device)
    hidden = key >= capture.visible[tokens].to(raw.device)[:, None]
    raw = raw.masked_fill_(hidden[None, :, None], -torch.inf)
    return pool_tokens(raw, sm_scale, Pooling.MEAN)


def pool_tokens(raw: Tensor, sm_scale: float, pooling: Pooling) -> Tensor:
    """[num_kv_heads, num_tokens, gqa, n] raw scores -> [num_kv_heads, num_tokens, n]: each token its own group."""
    num_kv_heads, num_tokens, gqa, num_candidates = raw.shape
    pooled = pool_scores(raw.reshape(num_kv_heads * num_tokens, 1, gqa, num_candidates), sm_scale, pooling)
    return pooled.view(num_kv_heads, num_tokens, num_candidates)


def check_state(state: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Raise unless a saved state belongs to an accumulator with this state.

    Args:
        state: what `state_dict` of some accumulator returned.
        own: `state_dict` of the accumulator that shall go on. Tensors must agree in shape and dtype, settings
            in value; counters (`num_prompts`) may differ.

    Raises:
        ValueError: naming the key.
    """
    if set(state) != set(own):
        odd = sorted(str(key) for key in set(state) ^ set(own))
        raise ValueError(
            f"expected a saved state with the keys {', '.join(sorted(own))}, got a difference in {odd[0]!r}; it is "
            "of another accumulator or version, remove it and calibrate again"
        )
    for key, mine in own.items():
        theirs = state[key]
        if isinstance(mine, Tensor):
            if not isinstance(theirs, Tensor) or theirs.shape != mine.shape or theirs.dtype != mine.dtype:
                came = f"{tuple(theirs.shape)} {theirs.dtype}" if isinstance(theirs, Tensor) else repr(theirs)
                raise ValueError(
                    f"expected {key} of the saved state as {tuple(mine.shape)} {mine.dtype}, got {came}; it is of "
                    "another model, remove it and calibrate again"
                )
        elif key == "num_prompts":
            if type(theirs) is not int or theirs < 0:
                raise ValueError(
                    f"expected num_prompts >= 0 in the saved state, got {theirs!r}; it is damaged, remove it and "
                    "calibrate again"
                )
        elif theirs != mine:
            raise ValueError(
                f"expected {key}={mine!r} in the saved state, got {theirs!r}; it was made with other settings: use "
                "those, or remove it and calibrate again"
            )


def require_prompts(num_prompts: int) -> None:
    """Raise unless something was measured.

    Raises:
        ValueError: no prompt yet.
    """
    if num_prompts == 0:
        raise ValueError("expected at least one prompt, got none; add prompts of a development set first")
