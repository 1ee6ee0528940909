"""Index builders and selectors, one folder per method. Imports no SGLang, and nothing of serving but in a `decode_op`.

`METHODS` is the registry: name -> spec class, builder, selector. See `base` for the contract. Each folder has the same
plan: `spec` (parameters, forms, check), `build`, `reference` (the selector), `decode_op` where there is one; a small
method is one `__init__`.
"""

from sglang_ext.methods.base import IndexBuilder, IndexSpec, Method, SelectArgs, Selector
from sglang_ext.methods.layer_plan import LayerMode, LayerPlan, LayerRole
from sglang_ext.methods.registry import METHODS, make_builder, make_selector, method_specs, parse_spec
