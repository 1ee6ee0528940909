"""`SelectOp` of the token index."""

from __future__ import annotations

import torch

from prefix_kernels.grouped_attention import AttentionShape
from prefix_kernels.pooled_scores import ScoreShape
from prefix_kernels.pooling import Pooling
from sglang_ext.config import SparseAttnConfig
from sglang_ext.decode.select_op import ListSizes
from sglang_ext.methods.scored_op import LayerCodes, ScoredOp
from sglang_ext.methods.token_index.spec import TokenIndexSpec
from sglang_ext.prefix.residency import LayerArrays


class TokenIndexOp(ScoredOp):
    """Scores every token by the codes of its kept channels.

    Args:
        shape, config, spec, num_layers, sizes, device: see `decode.select_op.op_maker`.
    """

    def __init__(
        self,
        shape: AttentionShape,
        config: SparseAttnConfig,
        spec: TokenIndexSpec,
        num_layers: int,
        sizes: ListSizes,
        device: torch.device,
    ) -> None:
        scored = ScoreShape(
            shape.num_qo_heads,
            shape.num_kv_heads,
            channels=spec.kept_channels(shape.head_dim),
            bits=spec.bits,
            listed_channels=True,
            pooling=Pooling(config.pooling),
            sum_every=config.summed_every,
        )
        halves = device.type == "cuda" and shape.dtype is not torch.float32
        super().__init__(scored, num_layers, sizes, device, specialized=halves)

    def codes(self, layer: LayerArrays, prefix_len: int) -> LayerCodes:
        arrays = layer["channels"], layer["keys_packed"], layer["keys_scale"]
        return LayerCodes(arrays, tuple(head * prefix_len for head in range(self.shape.num_kv_heads)))

    def made_up(self, prefix_len: int) -> LayerCodes:
        heads, channels, device = self.shape.num_kv_heads, self.shape.channels, self._device
        packed = (heads, prefix_len, channels * self.shape.bits // 8)
        arrays = {
            "channels": torch.arange(channels, dtype=torch.int16, device=device).repeat(heads, 1),
            "keys_packed": torch.randint(256, packed, dtype=torch.uint8, device=device),
            "keys_scale": torch.ones(heads, channels, dtype=torch.float32, device=device),
        }
        return self.codes(arrays, prefix_len)
