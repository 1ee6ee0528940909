"""`SelectOp` of block representations."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.grouped_attention import AttentionShape
from prefix_kernels.pooled_scores import ScoreShape
from prefix_kernels.pooling import Pooling
from prefix_kernels.types import BlockForm
from sglang_ext.config import SparseAttnConfig
from sglang_ext.decode.select_op import ListSizes
from sglang_ext.methods.ab_sparse.spec import BITS, BLOCK_SIZES, ABSparseSpec, ragged_name
from sglang_ext.methods.arrays import ROW_INDPTR
from sglang_ext.methods.scored_op import LayerCodes, ScoredOp
from sglang_ext.prefix.residency import LayerArrays

_FORMS = {"mean": BlockForm.MEAN, "minmax": BlockForm.MINMAX, "ball": BlockForm.BALL}


class ABSparseOp(ScoredOp):
    """Scores blocks; a block's tokens share its score.

    Args:
        shape, config, spec, num_layers, sizes, device: see `decode.select_op.op_maker`.
    """

    def __init__(
        self,
        shape: AttentionShape,
        config: SparseAttnConfig,
        spec: ABSparseSpec,
        num_layers: int,
        sizes: ListSizes,
        device: torch.device,
    ) -> None:
        self._spec = spec
        scored = ScoreShape(
            shape.num_qo_heads,
            shape.num_kv_heads,
            channels=shape.head_dim,
            bits=BITS.get(spec.quantization, 16),
            pooling=Pooling(config.pooling),
            form=_FORMS[spec.representation],
        )
        alike = spec.sizes == "uniform"
        super().__init__(scored, num_layers, sizes, device, specialized=False, alike=alike)

    def codes(self, layer: LayerArrays, prefix_len: int) -> LayerCodes:
        """See the base. Waits for the device where heads have sizes of their own."""
        if self._spec.sizes == "uniform":
            heads, size = self.shape.num_kv_heads, self._spec.block_size
            rows = -(-prefix_len // size)
            return LayerCodes(self._arrays(layer), tuple(head * rows for head in range(heads)), (size,) * heads)
        sizes, first_rows = layer["block_sizes"].tolist(), layer[ROW_INDPTR][:-1].tolist()
        return LayerCodes(self._arrays(layer), tuple(first_rows), tuple(sizes))

    def _arrays(self, layer: LayerArrays) -> tuple[Tensor | None, ...]:
        name = str if self._spec.sizes == "uniform" else ragged_name
        found: list[Tensor | None] = [None]
        for part in self._spec.parts:
            coded = self._spec.quantization != "none"
            found += [layer[name(f"{part}_packed" if coded else part)], layer[f"{part}_scale"] if coded else None]
        if self._spec.representation == "ball":
            found += [layer[name("radius")], None]
        return tuple(found)

    def made_up(self, prefix_len: int) -> LayerCodes:
        """See the base: with sizes of their own, heads have the smallest, which cost most."""
        heads, channels, bits, device = self.shape.num_kv_heads, self.shape.channels, self.shape.bits, self._device
        size = self._spec.block_size if self._spec.sizes == "uniform" else min(BLOCK_SIZES)
        rows = -(-prefix_len // size)
        coded = torch.randint(256, (heads, rows, channels * bits // 8), dtype=torch.uint8, device=device)
        codes = coded if bits < 16 else torch.zeros(heads, rows, channels, dtype=torch.float16, device=device)
        scale = torch.ones(heads, channels, dtype=torch.float32, device=device)
        arrays = [None, *[codes, scale] * len(self._spec.parts)]
        if self._spec.representation == "ball":
            arrays += [torch.zeros(heads, rows, dtype=torch.float16, device=device), None]
        return LayerCodes(tuple(arrays), tuple(head * rows for head in range(heads)), (size,) * heads)
