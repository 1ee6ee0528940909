"""The oracle: selection by the true scores of every key. For tests and quality figures, never for serving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from prefix_kernels.block_scores import block_scores_mean
from prefix_kernels.pooling import Pooling
from prefix_kernels.top_k_selection import top_k_selection
from prefix_kernels.types import Selection
from sglang_ext.methods.base import NO_PROFILE, IndexSpec, LayerProfile, check_keys, pool_candidates, require_arrays
from sglang_ext.methods.contents import LARGEST, Form, IndexSize


@dataclass(frozen=True)
class ExactSpec(IndexSpec):
    """No parameters: Oracle Top-k (Kascade, 3.1)."""

    method: ClassVar[str] = "exact"

    def forms(self, size: IndexSize) -> dict[str, Form]:
        """See `IndexSpec.forms`."""
        return {"keys": Form("float32", (size.prefix_len, size.head_dim), -LARGEST, LARGEST)}


@dataclass(frozen=True)
class ExactBuilder:
    """Keeps the keys themselves: `keys` [num_kv_heads, prefix_len, head_dim] fp32."""

    spec: ExactSpec
    layer: LayerProfile = NO_PROFILE
    needs_queries: ClassVar[bool] = False

    def build_layer(self, keys: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        """See `IndexBuilder.build_layer`."""
        check_keys(keys)
        return {"keys": keys.transpose(0, 1).float().contiguous()}


@dataclass(frozen=True)
class ExactSelector:
    """Token scores q.k, pooled after the softmax."""

    spec: ExactSpec

    def select(
        self,
        arrays: Mapping[str, Tensor],
        q: Tensor,
        *,
        prefix_len: int,
        budget: int,
        num_sink: int,
        num_recent: int,
        sm_scale: float,
        pooling: Pooling,
    ) -> Selection:
        """See `Selector.select`."""
        scores = self.token_scores(arrays, q, prefix_len=prefix_len, sm_scale=sm_scale, pooling=pooling)
        return top_k_selection(scores, budget, num_sink, num_recent, 1, prefix_len)

    def token_scores(
        self,
        arrays: Mapping[str, Tensor],
        q: Tensor,
        *,
        prefix_len: int,
        sm_scale: float,
        pooling: Pooling,
        candidates: Tensor | None = None,
    ) -> Tensor:
        """See `Selector.token_scores`."""
        (keys,) = require_arrays(arrays, ("keys",), ExactSpec.method)
        if keys.shape[1] != prefix_len:
            raise ValueError(f"expected keys of prefix_len={prefix_len} positions, got {keys.shape[1]}")
        # A block of one key is its own mean.
        return pool_candidates(block_scores_mean(q, keys), sm_scale, pooling, candidates)
