"""Adopting the attention backend that SGLang built: its own object, with `forward` routed through ours.

The object keeps its identity, its attributes and every method and class flag of its own class, because its
class becomes a subclass of what it was. So whatever a release of SGLang asks a backend for, the answer is
the inner backend's; only `forward` differs, and only while a runtime has something to do in the running
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from sglang_ext.runtime import SparseRuntime

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

_RUNTIME = "_sparse_attn_runtime"
_LAYER_REFUSAL = "_sparse_attn_layer_refusal"
_INNER = "_sparse_attn_inner"

LayerRefusal = Callable[[Any, dict[str, Any]], "str | None"]


def _forward(
    backend: Any,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    **kwargs: Any,
) -> Any:
    """One layer: grouped sparse decode where the running step has a plan, else the inner backend.

    The only method that RadixAttention calls per layer, and the only one that an adopted backend changes.
    """
    runtime: SparseRuntime = getattr(backend, _RUNTIME)
    refusal = getattr(backend, _LAYER_REFUSAL)(layer, kwargs) if runtime.planned else None
    out = runtime.attend(q, k, v, layer, forward_batch, save_kv_cache, refusal)
    if out is not None:
        return out
    inner = getattr(backend, _INNER)
    return inner.forward(backend, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)


def refusal(backend: object) -> str | None:
    """Why this backend cannot be adopted; None if it can."""
    names = [type(backend).__name__]
    if names == ["HybridAttnBackend"]:  # only there are these attributes backends (FlashInfer's are names)
        names += [type(getattr(backend, child)).__name__ for child in ("prefill_backend", "decode_backend")]
    return _unknown(names, KNOWN_BACKENDS)


def name_refusal(names: Sequence[str]) -> str | None:
    """The same of backends that are not made yet, by what `--attention-backend` calls them."""
    return _unknown(names, BACKEND_NAMES)


def _unknown(names: Sequence[str], known: Sequence[str]) -> str | None:
    other = next((name for name in names if name not in known), None)
    if other is None:
        return None
    return (
        f"--sparse-attn: expected an attention backend among {', '.join(known)}; got {other}. Choose "
        "--attention-backend flashinfer, triton, fa3 or torch_native."
    )


def adopt(backend: Any, runtime: SparseRuntime, layer_refusal: LayerRefusal) -> Any:
    """Make `backend` route its forward through `runtime`; returns the same object.

    Args:
        backend: what SGLang built.
        runtime: where layers go while a step has a plan.
        layer_refusal: (layer, extra keyword arguments) -> why it must stay dense, or None.

    Raises:
        TypeError: a backend that is not known here; the message names it.
    """
    message = refusal(backend)
    if message:
        raise TypeError(message)
    inner = type(backend)
    # One base only: then the object's layout stays what it is, which assigning __class__ asks for.
    members = {"forward": _forward, _INNER: inner, "__qualname__": inner.__qualname__, "__module__": inner.__module__}
    backend.__class__ = type(inner.__name__, (inner,), members)
    setattr(backend, _RUNTIME, runtime)
    setattr(backend, _LAYER_REFUSAL, layer_refusal)
    return backend


def is_adopted(backend: object) -> bool:
    """Whether `adopt` ran on this object."""
    return hasattr(type(backend), _INNER)
