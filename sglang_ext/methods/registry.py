"""The methods by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_ext.methods.ab_sparse import ABSparseBuilder, ABSparseSelector, ABSparseSpec
from sglang_ext.methods.base import METHODS, IndexSpec, Method, make_builder, make_selector, parse_spec
from sglang_ext.methods.combined import CombinedBuilder
from sglang_ext.methods.csattention import CSAttentionBuilder, CSAttentionSelector, CSAttentionSpec
from sglang_ext.methods.exact import ExactBuilder, ExactSelector, ExactSpec
from sglang_ext.methods.token_index import TokenIndexBuilder, TokenIndexSelector, TokenIndexSpec
from sglang_ext.methods.two_level import TwoLevelSelector, TwoLevelSpec
from sglang_ext.methods.union import UnionSelector, UnionSpec
from sglang_ext.options import SparseAttnConfig

__all__ = ["METHODS", "make_builder", "make_selector", "method_specs", "parse_spec"]

_BLOCK_OP = "sglang_ext.methods.ab_sparse.decode_op:ABSparseOp"
_TOKEN_OP = "sglang_ext.methods.token_index.decode_op:TokenIndexOp"
_TWO_LEVEL_OP = "sglang_ext.methods.two_level.decode_op:TwoLevelOp"
_UNION_OP = "sglang_ext.methods.union.decode_op:UnionOp"
_CSA_OP = "sglang_ext.methods.csattention.decode_op:CSAttentionOp"

METHODS.update(
    {
        "csattention": Method(CSAttentionSpec, CSAttentionBuilder, CSAttentionSelector, _CSA_OP),
        "ab_sparse": Method(ABSparseSpec, ABSparseBuilder, ABSparseSelector, _BLOCK_OP),
        "token_index": Method(TokenIndexSpec, TokenIndexBuilder, TokenIndexSelector, _TOKEN_OP, samples_sums=True),
        "two_level": Method(TwoLevelSpec, CombinedBuilder, TwoLevelSelector, _TWO_LEVEL_OP, samples_sums=True),
        "union": Method(UnionSpec, CombinedBuilder, UnionSelector, _UNION_OP),
        "exact": Method(ExactSpec, ExactBuilder, ExactSelector),
    }
)


def method_specs(config: SparseAttnConfig) -> dict[str, IndexSpec]:
    """The checked specs of all methods that an index of this configuration holds: those named, or the serving one."""
    raw: Mapping[str, Mapping[str, Any]] = config.methods or {config.method: {}}
    return {name: METHODS[name].spec.from_dict(spec) for name, spec in sorted(raw.items())}
