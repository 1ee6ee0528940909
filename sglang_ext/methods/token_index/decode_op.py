"""`SelectOp` of the token index."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from prefix_kernels.pooled_scores import ScoreShape
from prefix_kernels.pooling import Pooling
from prefix_kernels.types import CandidateForm
from sglang_ext.decode.select_op import OpContext
from sglang_ext.methods.base import summed_every
from sglang_ext.methods.scored_op import LayerRows, ScoredOp
from sglang_ext.methods.token_index import TokenIndexSpec
from sglang_ext.prefix.residency import LayerArrays


class TokenIndexOp(ScoredOp):
    """Scores every token by the codes of its kept channels.

    Args:
        spec, context: see `decode.select_op.graph_op`.
        form: of candidates: all tokens, or listed ones.
        entry_tokens: of their lists, see `ScoreShape`.
    """

    def __init__(
        self,
        spec: TokenIndexSpec,
        context: OpContext,
        form: CandidateForm = CandidateForm.TOKEN,
        entry_tokens: int = 1,
    ) -> None:
        shape, config = context.shape, context.config
        scored = ScoreShape(
            shape.num_qo_heads,
            shape.num_kv_heads,
            channels=spec.kept_channels(shape.head_dim),
            bits=spec.bits,
            listed_channels=True,
            pooling=Pooling(config.pooling),
            sum_every=summed_every(config),
            form=form,
            entry_tokens=entry_tokens,
        )
        super().__init__(spec, scored, context)

    def arrays(self, layer: LayerArrays) -> tuple[Tensor | None, ...]:
        return layer["channels"], layer["keys_packed"], layer["keys_scale"]

    def rows(self, layers: Sequence[LayerArrays], prefix_len: int) -> list[LayerRows]:
        return [LayerRows(tuple(head * prefix_len for head in range(self.shape.num_kv_heads)))] * len(layers)
