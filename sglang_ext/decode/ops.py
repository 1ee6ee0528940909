"""Which operation selects, for a method: its own inside decode graphs, else the reference."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable

import torch

from prefix_kernels.grouped_attention import AttentionShape
from prefix_kernels.pooling import Pooling
from sglang_ext.config import SparseAttnConfig
from sglang_ext.decode.select_op import ListSizes, ReferenceOp, SelectOp
from sglang_ext.methods import METHODS, make_selector
from sglang_ext.methods.base import IndexSpec


def graph_refusal(method: str) -> str | None:
    """Why a method's indexes cannot be used inside decode graphs; None if they can."""
    if METHODS[method].decode_op is not None:
        return None
    others = ", ".join(name for name, one in METHODS.items() if one.decode_op is not None)
    return f"method {method} has no kernels in the decode graph yet; {others} has"


def op_maker(
    shape: AttentionShape,
    config: SparseAttnConfig,
    spec: IndexSpec,
    num_layers: int,
    device: torch.device,
    *,
    captured: bool,
) -> Callable[[ListSizes], SelectOp]:
    """What makes the operation of a method, once the sizes of lists are known.

    A method's own maker is called with `(shape, config, spec, num_layers, sizes, device)`.

    Args:
        shape: of a layer.
        config: pooling, and how many tokens enter its sums.
        spec: of the method. What `graph_refusal` names has the reference only.
        num_layers: of the model.
        device: of the KV pool.
        captured: whether decode steps replay graphs.
    """
    named = METHODS[spec.method].decode_op

    def make(sizes: ListSizes) -> SelectOp:
        if named is None or not captured:
            return ReferenceOp(make_selector(spec, config.summed_every), Pooling(config.pooling))
        op: SelectOp = pkgutil.resolve_name(named)(shape, config, spec, num_layers, sizes, device)
        return op

    return make
