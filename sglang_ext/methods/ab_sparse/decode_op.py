"""`SelectOp` of block representations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefix_kernels.pooled_scores import ScoreShape
from prefix_kernels.pooling import Pooling
from prefix_kernels.types import CandidateForm
from sglang_ext.decode.select_op import OpContext
from sglang_ext.methods.ab_sparse.spec import ABSparseSpec, ragged_name
from sglang_ext.methods.arrays import ROW_INDPTR
from sglang_ext.methods.channels import CHANNELS
from sglang_ext.methods.scored_op import LayerRows, ScoredOp
from sglang_ext.prefix.residency import LayerArrays

_FORMS = {"mean": CandidateForm.MEAN, "minmax": CandidateForm.MINMAX, "ball": CandidateForm.BALL}


class ABSparseOp(ScoredOp):
    """Scores blocks; a block's tokens share its score. Entries of lists are scored by their blocks' mean keys as tokens
    are.
    """

    def __init__(self, spec: ABSparseSpec, context: OpContext) -> None:
        self._ab_sparse, shape, entry_tokens = spec, context.shape, context.sizes.entry_tokens
        of_entries = spec.representation == "mean" and entry_tokens > 1
        scored = ScoreShape(
            shape.num_qo_heads,
            shape.num_kv_heads,
            channels=spec.kept_channels(shape.head_dim),
            bits=spec.bits,
            listed_channels=spec.selects_channels(shape.head_dim),
            pooling=Pooling(context.config.pooling),
            form=CandidateForm.TOKEN if of_entries else _FORMS[spec.representation],
            entry_tokens=1 if of_entries else entry_tokens,
            shared_rows=of_entries,
        )
        super().__init__(spec, scored, context, alike=spec.sizes == "uniform")

    def rows(self, layers: Sequence[LayerArrays], prefix_len: int) -> list[LayerRows]:
        if self._ab_sparse.sizes == "profile":
            begins, sizes = (
                torch.stack([layer[name] for layer in layers]).tolist() for name in (ROW_INDPTR, "block_sizes")
            )
            return [LayerRows(tuple(of[:-1]), tuple(own)) for of, own in zip(begins, sizes, strict=True)]
        heads, size = self.shape.num_kv_heads, self._ab_sparse.block_size
        return [LayerRows(tuple(head * -(-prefix_len // size) for head in range(heads)), (size,) * heads)] * len(layers)

    def arrays(self, layer: LayerArrays) -> tuple[Tensor | None, ...]:
        name = str if self._ab_sparse.sizes == "uniform" else ragged_name
        found: list[Tensor | None] = [layer.get(CHANNELS)]
        for part in self._ab_sparse.parts:
            coded = self._ab_sparse.quantization != "none"
            found += [layer[name(f"{part}_packed" if coded else part)], layer[f"{part}_scale"] if coded else None]
        if self._ab_sparse.representation == "ball":
            found += [layer[name("radius")], None]
        return tuple(found)
