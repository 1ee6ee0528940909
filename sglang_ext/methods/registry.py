"""The methods by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_ext.methods.ab_sparse import ABSparseBuilder, ABSparseSelector, ABSparseSpec
from sglang_ext.methods.base import (
    METHODS,
    NO_PROFILE,
    IndexBuilder,
    IndexSpec,
    LayerProfile,
    Method,
    Selector,
    parse_spec,
)
from sglang_ext.methods.combined import (
    CombinedBuilder,
    TwoLevelSelector,
    TwoLevelSpec,
    UnionSelector,
    UnionSpec,
)
from sglang_ext.methods.csattention import CSAttentionBuilder, CSAttentionSelector, CSAttentionSpec
from sglang_ext.methods.exact import ExactBuilder, ExactSelector, ExactSpec
from sglang_ext.methods.token_index import TokenIndexBuilder, TokenIndexSelector, TokenIndexSpec
from sglang_ext.options import SparseAttnConfig

__all__ = ["METHODS", "make_builder", "make_selector", "method_specs", "parse_spec"]

METHODS.update(
    {
        "csattention": Method(CSAttentionSpec, CSAttentionBuilder, CSAttentionSelector),
        "ab_sparse": Method(ABSparseSpec, ABSparseBuilder, ABSparseSelector),
        "token_index": Method(
            TokenIndexSpec, TokenIndexBuilder, TokenIndexSelector, "sglang_ext.methods.token_index.decode_op:make_op"
        ),
        "two_level": Method(TwoLevelSpec, CombinedBuilder, TwoLevelSelector),
        "union": Method(UnionSpec, CombinedBuilder, UnionSelector),
        "exact": Method(ExactSpec, ExactBuilder, ExactSelector),
    }
)


def method_specs(config: SparseAttnConfig) -> dict[str, IndexSpec]:
    """The checked specs of all methods that an index of this configuration holds: those named, or the serving one."""
    raw: Mapping[str, Mapping[str, Any]] = config.methods or {config.method: {}}
    return {name: METHODS[name].spec.from_dict(spec) for name, spec in sorted(raw.items())}


def make_builder(spec: IndexSpec, layer: LayerProfile = NO_PROFILE) -> IndexBuilder:
    """The builder of a spec's method for one layer.

    Args:
        spec: of any method.
        layer: what the model's profile says of the layer.
    """
    return METHODS[spec.method].builder(spec, layer)


def make_selector(spec: IndexSpec, sum_every: int = 1) -> Selector:
    """The selector of a spec's method.

    Args:
        spec: of any method.
        sum_every: as `TokenIndexSelector` says; of another method 1.

    Raises:
        ValueError: another number for another method.
    """
    if isinstance(spec, TokenIndexSpec):
        return TokenIndexSelector(spec, sum_every)
    if sum_every != 1:
        raise ValueError(f"expected sum_every 1 for {spec.method}, got {sum_every}; only token_index has a sample")
    return METHODS[spec.method].selector(spec)
