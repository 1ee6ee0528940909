"""Adopting the attention backend that SGLang built: its own object, with `forward` routed through ours.

The object keeps its identity, its attributes and every class flag of its own class, because its class becomes a
subclass of what it was. So whatever a release of SGLang asks a backend for, the answer is the inner backend's. Only
`forward` differs, and what is prepared before a replay, and both only while a runtime has something to do in the
running step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang_ext.forwards import Forwards

#: Backends that are adopted, by class name. Others are refused at start, by name.
KNOWN_BACKENDS = (
    "FlashInferAttnBackend",
    "TritonAttnBackend",
    "FlashAttentionBackend",
    "TorchNativeAttnBackend",
    "HybridAttnBackend",
)

#: What --attention-backend calls them.
BACKEND_NAMES = ("flashinfer", "triton", "fa3", "fa4", "torch_native")

_INNER = "_sparse_attn_inner"

LayerRefusal = Callable[[Any, dict[str, Any]], "str | None"]


def _replays_ours(forwards: Forwards, forward_batch: Any) -> bool:
    """Whether the running step replays a decode graph of ours. Only the view of a batch that SGLang makes for a replay
    has an actual mode: a step without a graph may still fall back to the inner backend, in any layer.
    """
    mode = getattr(forward_batch, "actual_forward_mode", None)
    if mode is None or forwards.path is None or forwards.eager or not forwards.view.decode_graphs:
        return False
    if not (mode.is_decode() and forward_batch.forward_mode.is_decode()):
        return False
    return not torch.cuda.is_current_stream_capturing()  # a graph of the preparation, for steps of all kinds


def refusal(backend: object) -> str | None:
    """Why this backend cannot be adopted; None if it can."""
    names = [type(backend).__name__]
    if names == ["HybridAttnBackend"]:  # only there are these attributes backends (FlashInfer's are names)
        names += [type(getattr(backend, child)).__name__ for child in ("prefill_backend", "decode_backend")]
    return name_refusal(names, KNOWN_BACKENDS)


def name_refusal(names: Sequence[str], known: Sequence[str] = BACKEND_NAMES) -> str | None:
    """The same of names alone; by default of what `--attention-backend` calls backends that are not made yet."""
    other = next((name for name in names if name not in known), None)
    if other is None:
        return None
    return (
        f"--sparse-attn: expected an attention backend among {', '.join(known)}; got {other}. Choose "
        "--attention-backend flashinfer, triton, fa3 or torch_native."
    )


def adopt(backend: Any, forwards: Forwards, layer_refusal: LayerRefusal) -> Any:
    """Make `backend` route its forward through `forwards`; returns the same object.

    Args:
        backend: what SGLang built, and `refusal` does not refuse.
        forwards: where layers go while a step has a plan.
        layer_refusal: (layer, extra keyword arguments) -> why it must stay dense, or None.
    """
    inner = type(backend)

    def forward(
        self: Any,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """One layer: grouped sparse decode where the running step has a plan, else the inner backend.

        The only method that RadixAttention calls per layer.
        """
        why = layer_refusal(layer, kwargs) if forwards.planned else None
        out = forwards.attend(q, k, v, layer, forward_batch, save_kv_cache, why)
        return inner.forward(self, q, k, v, layer, forward_batch, save_kv_cache, **kwargs) if out is None else out

    def init_forward_metadata_out_graph(self: Any, forward_batch: Any, in_capture: bool = False) -> None:
        """What the inner backend's kernels read in a forward, made before it; nothing where a graph of ours is
        replayed.

        No kernel of the inner backend is in such a graph: a layer that had to stay dense in a capture ends all planning
        (`Forwards.attend`), so a step with a plan replays a graph whose layers are all ours. The plan stands
        before SGLang prepares the replay, and chooses its graph behind this. Kernels of known backends need nothing of
        an earlier step's: what a later step of SGLang's own reads is made in that step.
        """
        if in_capture or not _replays_ours(forwards, forward_batch):
            inner.init_forward_metadata_out_graph(self, forward_batch, in_capture=in_capture)

    # One base only: then the object's layout stays what it is, which assigning __class__ asks for.
    members = {"__qualname__": inner.__qualname__, "__module__": inner.__module__, _INNER: inner}
    methods = {one.__name__: one for one in (forward, init_forward_metadata_out_graph)}
    backend.__class__ = type(inner.__name__, (inner,), members | methods)
    return backend


def is_adopted(backend: object) -> bool:
    """Whether `adopt` ran on this object."""
    return hasattr(type(backend), _INNER)
