"""The oracle: selection by the true scores of every key. For tests and quality figures, never for serving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from prefix_kernels.block_scores import block_scores_mean
from sglang_ext.methods.arrays import LARGEST, Form, IndexSize
from sglang_ext.methods.base import (
    Arrays,
    IndexBuilder,
    IndexSpec,
    SelectArgs,
    Selector,
    check_keys,
    pool_candidates,
)


@dataclass(frozen=True)
class ExactSpec(IndexSpec):
    """No parameters: Oracle Top-k (Kascade, 3.1)."""

    method: ClassVar[str] = "exact"

    def forms(self, size: IndexSize) -> dict[str, Form]:
        return {"keys": Form("float32", (size.prefix_len, size.head_dim), -LARGEST, LARGEST)}


class ExactBuilder(IndexBuilder[ExactSpec]):
    """Keeps the keys themselves: `keys` [num_kv_heads, prefix_len, head_dim] fp32."""

    def build_layer(self, keys: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        check_keys(keys)
        return {"keys": keys.transpose(0, 1).float().contiguous()}


class ExactSelector(Selector[ExactSpec]):
    """Token scores q.k, pooled after the softmax."""

    def token_scores(self, arrays: Arrays, q: Tensor, args: SelectArgs, candidates: Tensor | None = None) -> Tensor:
        # A block of one key is its own mean.
        return pool_candidates(block_scores_mean(q, arrays["keys"]), args, candidates)
