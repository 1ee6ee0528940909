"""Channels that approximate attention scores best, per KV head: the token index reads only these.

Source: AsyncTLS, "Fine-grained Token Selection" (after Double Sparsity): the channels with the greatest |q_i| |k_i|
over a calibration set, mean over the query heads of a KV head's group. The paper prints maxima over the set;
means over it are the other choice here. Both factorize over all pairs of a query and a key, so no pair is formed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from sglang_ext.calibration.capture import LayerCapture, check_state, require_prompts, take_layers

NUM_CHANNELS_GQA = 32
"""Channels of a KV head's key in GQA models (AsyncTLS)."""
NUM_CHANNELS_MLA = 128
"""Channels of the shared latent key in MLA models (AsyncTLS)."""


class ChannelStatistic(str, Enum):
    """How a channel's contribution is aggregated over the calibration set."""

    MAX = "max"
    """max |q_i| * max |k_i|, as AsyncTLS prints it: critical keys are rare, and only a maximum sees them."""
    MEAN = "mean"
    """mean |q_i| * mean |k_i|: the mean of |q_i k_i| over all pairs of a query and a key. Steadier, but blind to
    channels that few keys use, and drawn to channels that all keys share, which move no rank."""


@dataclass
class ChannelAccumulator:
    """Sums and maxima of |q| and |k| per channel. Mutable: `add_prompt` adds one prompt.

    Attributes:
        num_layers: layers of the model.
        num_qo_heads: query heads per layer, a multiple of num_kv_heads.
        num_kv_heads: KV heads per layer, before tensor parallelism.
        head_dim: channels of a key.
        num_prompts: prompts so far.
        q_sum, q_max: [num_layers, num_qo_heads, head_dim] fp64, of the prompts' means and maxima. Owned.
        k_sum, k_max: [num_layers, num_kv_heads, head_dim] fp64. Owned.

    Raises:
        ValueError: sizes out of range.
    """

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    num_prompts: int = field(default=0, init=False)
    q_sum: Tensor = field(init=False, repr=False)
    q_max: Tensor = field(init=False, repr=False)
    k_sum: Tensor = field(init=False, repr=False)
    k_max: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.num_qo_heads, self.num_kv_heads, self.head_dim)
        if min(sizes) < 1 or self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                "expected num_layers, num_qo_heads, num_kv_heads and head_dim >= 1 with num_qo_heads a multiple of "
                f"num_kv_heads, got {sizes}"
            )
        q_shape = (self.num_layers, self.num_qo_heads, self.head_dim)
        k_shape = (self.num_layers, self.num_kv_heads, self.head_dim)
        self.q_sum, self.q_max = torch.zeros(2, *q_shape, dtype=torch.float64).unbind()
        self.k_sum, self.k_max = torch.zeros(2, *k_shape, dtype=torch.float64).unbind()

    def add_prompt(self, layers: Iterable[LayerCapture]) -> None:
        """Add one prompt; after an error nothing was added. Every prompt weighs the same.

        Args:
            layers: one capture per layer in layer order; read once. Positions are not used.

        Raises:
            ValueError: another number of layers, heads or channels, or an unusable capture.
        """
        rows: list[tuple[Tensor, ...]] = []
        for layer, capture in enumerate(take_layers(layers, self.num_layers, self.num_kv_heads)):
            came = (*capture.queries.shape[1:], *capture.keys.shape[1:])
            expected = (self.num_qo_heads, self.head_dim, self.num_kv_heads, self.head_dim)
            if came != expected:
                raise ValueError(
                    f"layer {layer}: expected (num_qo_heads, head_dim, num_kv_heads, head_dim) = {expected}, got "
                    f"{came}; is the capture of another model?"
                )
            q, k = capture.queries.abs(), capture.keys.abs()
            parts = (
                q.mean(dim=0, dtype=torch.float64),
                q.amax(dim=0),
                k.mean(dim=0, dtype=torch.float64),
                k.amax(dim=0),
            )
            rows.append(tuple(part.double().cpu() for part in parts))
        q_mean, q_max, k_mean, k_max = (torch.stack(part) for part in zip(*rows, strict=True))
        self.q_sum += q_mean
        self.k_sum += k_mean
        self.q_max = torch.maximum(self.q_max, q_max)
        self.k_max = torch.maximum(self.k_max, k_max)
        self.num_prompts += 1

    def contribution(self, statistic: ChannelStatistic = ChannelStatistic.MAX) -> Tensor:
        """s_i of every channel: mean over the group's query heads of |q_i|, times |k_i|.

        Returns:
            [num_layers, num_kv_heads, head_dim] fp64, new.

        Raises:
            ValueError: no prompt was added.
        """
        require_prompts(self.num_prompts)
        if ChannelStatistic(statistic) is ChannelStatistic.MEAN:
            q, k = self.q_sum / self.num_prompts, self.k_sum / self.num_prompts
        else:
            q, k = self.q_max, self.k_max
        group = q.view(self.num_layers, self.num_kv_heads, -1, self.head_dim)
        return group.mean(dim=2) * k

    def state_dict(self) -> dict[str, object]:
        """Plain values that `load_state_dict` of an equally made accumulator goes on from; tensors are copies."""
        tensors = ("q_sum", "q_max", "k_sum", "k_max")
        return {"num_prompts": self.num_prompts, **{name: getattr(self, name).clone() for name in tensors}}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a saved state, which is copied.

        Raises:
            ValueError: it is of another accumulator or model.
        """
        check_state(state, self.state_dict())
        for name, value in state.items():
            setattr(self, name, value.clone() if isinstance(value, Tensor) else value)


def top_channels(contribution: Tensor, num_channels: int = NUM_CHANNELS_GQA) -> Tensor:
    """The channels with the greatest contribution.

    Args:
        contribution: [..., num_kv_heads, head_dim] floating, finite.
        num_channels: 1..head_dim.

    Returns:
        [..., num_kv_heads, num_channels] int16, ascending; of equal channels the lower number.

    Raises:
        ValueError: sizes out of range, or NaN.
    """
    head_dim = contribution.shape[-1] if contribution.dim() else 0
    if not 1 <= num_channels <= min(head_dim, 1 << 15):
        raise ValueError(
            f"expected num_channels in 1..{head_dim} (head_dim), got {num_channels}; a key has no more channels"
        )
    if not bool(torch.isfinite(contribution).all()):
        raise ValueError("expected finite contributions, got NaN or infinity; measure them again")
    order = contribution.argsort(dim=-1, descending=True, stable=True)
    return order[..., :num_channels].sort(dim=-1).values.to(torch.int16)
