"""Index builders and selectors, one module per method. Imports torch and `prefix_kernels` only.

`METHODS` is the registry: name -> spec class, builder, selector. See `base` for the contract.
"""

from sglang_ext.methods.base import IndexBuilder, IndexSpec, Method, Selector
from sglang_ext.methods.layer_plan import LayerMode, LayerPlan, LayerRole
from sglang_ext.methods.registry import METHODS, make_builder, make_selector, method_specs, parse_spec

__all__ = [
    "METHODS",
    "IndexBuilder",
    "IndexSpec",
    "LayerMode",
    "LayerPlan",
    "LayerRole",
    "Method",
    "Selector",
    "make_builder",
    "make_selector",
    "method_specs",
    "parse_spec",
]
