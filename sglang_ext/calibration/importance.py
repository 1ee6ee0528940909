"""How much the attention of each layer changes the hidden state: the weights of the anchor programme.

Source: Kascade, 3.3: w = 1 - CosineSim(x, y) of an (input, output) pair of attention, aggregated over the
development set. The paper leaves open where x and y are taken; its published code takes x as the residual stream
that enters the layer and y as x plus the output of the attention block (after the output projection). So
do callers here: with y as the block's bare output the score would not say how much the representation changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sglang_ext.calibration.capture import check_state, require_prompts


def attention_importance(x: Tensor, y: Tensor) -> Tensor:
    """1 - cos(x, y) for each token.

    Args:
        x: [num_tokens >= 1, hidden_size] floating, residual stream before the attention block.
        y: same shape, the residual stream behind it: x plus the block's output.

    Returns:
        [num_tokens] fp64 in 0..2. A vector of length 0 has no direction: 0 where both are, as nothing changed,
        1 where one is.

    Raises:
        ValueError: shapes do not fit, or a value is NaN or infinite.
    """
    if x.dim() != 2 or 0 in x.shape or x.shape != y.shape:
        raise ValueError(
            "expected x and y [num_tokens >= 1, hidden_size] of one shape, got "
            f"{tuple(x.shape)} and {tuple(y.shape)}; pass the residual stream before and behind one attention block"
        )
    x, y = x.double(), y.double()
    if not bool(torch.isfinite(x).all() & torch.isfinite(y).all()):
        raise ValueError("expected finite hidden states, got NaN or infinity; the capture is unusable, take it again")
    lengths = x.norm(dim=1) * y.norm(dim=1)
    cosine = (x * y).sum(dim=1) / lengths.masked_fill(lengths == 0, 1.0)
    unchanged = (x == y).all(dim=1)
    change: Tensor = 1.0 - cosine.clamp(-1.0, 1.0)
    return change.masked_fill(unchanged, 0.0)


@dataclass
class ImportanceAccumulator:
    """Mean over tokens, then over prompts, of each layer's importance. Mutable: `add_prompt` adds one prompt.

    Attributes:
        num_layers: layers of the model.
        num_prompts: prompts so far.
        total: [num_layers] fp64, sum over prompts of the mean over tokens. Owned.

    Raises:
        ValueError: `num_layers` below 1.
    """

    num_layers: int
    num_prompts: int = field(default=0, init=False)
    total: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"expected num_layers >= 1, got {self.num_layers}")
        self.total = torch.zeros(self.num_layers, dtype=torch.float64)

    def add_prompt(self, layers: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add one prompt; after an error nothing was added.

        Args:
            layers: (x, y) of each layer in layer order, see `attention_importance`; read once.

        Raises:
            ValueError: another number of layers, or an unusable pair.
        """
        weights = [float(attention_importance(x, y).mean()) for x, y in layers]
        if len(weights) != self.num_layers:
            raise ValueError(
                f"expected hidden states of {self.num_layers} layers, got {len(weights)}; capture every layer"
            )
        self.total += torch.tensor(weights, dtype=torch.float64)
        self.num_prompts += 1

    def weights(self) -> Tensor:
        """[num_layers] fp64, w of each layer, new.

        Raises:
            ValueError: no prompt was added.
        """
        require_prompts(self.num_prompts)
        return self.total / self.num_prompts

    def state_dict(self) -> dict[str, object]:
        """Plain values that `load_state_dict` of an equally made accumulator goes on from; tensors are copies."""
        return {"num_layers": self.num_layers, "num_prompts": self.num_prompts, "total": self.total.clone()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a saved state, which is copied.

        Raises:
            ValueError: it is of another accumulator or model.
        """
        check_state(state, self.state_dict())
        num_prompts, total = state["num_prompts"], state["total"]
        assert isinstance(num_prompts, int)
        assert isinstance(total, Tensor)
        self.num_prompts, self.total = num_prompts, total.clone()
