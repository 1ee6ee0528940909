"""The residual stream before and behind each attention block, seen by module hooks on SGLang's own model.

Only in a process that captures prompts for calibration; needs eager prefill, as module hooks do not run in graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

Observer = Callable[[int, Tensor, Tensor], None]
"""(layer, x [num_tokens, hidden_size], y [num_tokens, hidden_size])."""


def observe_residual_stream(model: Any, observer: Observer) -> None:
    """Call `observer` in every forward, once per layer.

    Args:
        model: SGLang's model: `model.model.layers[i].self_attn`, as its dense decoders have it. Its layers take
            `hidden_states` and the `residual` that the fused norms have not added yet (before 0.5.22), or an
            `attn_boundary` that keeps the stream in `forward_batch.residual_stream` (from 0.5.22).
        observer: what is called.

    Raises:
        RuntimeError: a model of another structure.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    fits = layers is not None and len(layers) > 0 and all(_fits(layer) for layer in layers)
    if not fits or layers is None:
        raise RuntimeError(
            "--sparse-attn: expected a decoder whose layers have self_attn, take hidden_states and residual, and add "
            f"attention's output to the residual stream as it is, got {type(model).__name__}; calibration does not "
            "support this architecture yet"
        )
    for number, layer in enumerate(layers):
        _observe(layer, number, observer)


#: Attributes of layers that change attention's output before it is added (Granite, GLM-4, Gemma 2 and 3).
_CHANGED_BEFORE_ADDING = ("residual_multiplier", "post_self_attn_layernorm", "pre_feedforward_layernorm")


def _fits(layer: Any) -> bool:
    takes = set(inspect.signature(type(layer).forward).parameters)
    plain = not any(hasattr(layer, name) for name in _CHANGED_BEFORE_ADDING)
    known = hasattr(layer, "attn_boundary") or {"hidden_states", "residual"} <= takes
    return plain and known and hasattr(layer, "self_attn")


def _observe(layer: Any, number: int, observer: Observer) -> None:
    """Two hooks of one layer: what comes in, and what attention adds."""
    bounded = hasattr(layer, "attn_boundary")
    place = layer.self_attn if bounded else layer
    signature = inspect.signature(type(place).forward)
    incoming: list[Tensor] = []

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = signature.bind(module, *args, **kwargs).arguments
        if bounded:  # what the boundary before attention left in the batch
            hidden, residual = given["forward_batch"].residual_stream.residual, None
        else:
            hidden, residual = given["hidden_states"], given.get("residual")
        # New memory in all cases: the fused norms write into their inputs.
        incoming[:] = [hidden.clone() if residual is None else hidden + residual]

    def behind(_attention: Any, _args: tuple[Any, ...], output: Tensor) -> None:
        if incoming:
            x = incoming.pop()
            observer(number, x, x + output)

    place.register_forward_pre_hook(before, with_kwargs=True)
    layer.self_attn.register_forward_hook(behind)
