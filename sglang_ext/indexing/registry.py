"""The methods by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_ext.indexing.ab_sparse import ABSparseBuilder, ABSparseSelector, ABSparseSpec
from sglang_ext.indexing.base import IndexBuilder, IndexSpec, Method, Selector
from sglang_ext.indexing.csattention import CSAttentionBuilder, CSAttentionSelector, CSAttentionSpec
from sglang_ext.indexing.exact import ExactBuilder, ExactSelector, ExactSpec

METHODS: dict[str, Method[Any]] = {
    "csattention": Method(CSAttentionSpec, CSAttentionBuilder, CSAttentionSelector),
    "ab_sparse": Method(ABSparseSpec, ABSparseBuilder, ABSparseSelector),
    "exact": Method(ExactSpec, ExactBuilder, ExactSelector),
}


def parse_spec(data: Mapping[str, Any]) -> IndexSpec:
    """The spec of whichever method `data["method"]` names.

    Args:
        data: {"method": name, parameter: value, ...}.

    Raises:
        ValueError: no or an unknown method, an unknown parameter, or a value out of range.
        TypeError: `data` is no mapping or a value has another type.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f'expected an object like {{"method": "csattention"}}, got {type(data).__name__}')
    name = data.get("method")
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"expected method to be one of {', '.join(METHODS)}, got {name!r}; choose one of them")
    spec: IndexSpec = METHODS[name].spec.from_dict(data)
    return spec


def make_builder(spec: IndexSpec) -> IndexBuilder:
    """The builder of a spec's method."""
    return METHODS[spec.method].builder(spec)


def make_selector(spec: IndexSpec) -> Selector:
    """The selector of a spec's method."""
    return METHODS[spec.method].selector(spec)
