"""Adopting a backend changes `forward` and nothing else, for every backend that is known."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("sglang")

from sglang_ext.compat.adoption import KNOWN_BACKENDS, adopt, is_adopted, refusal

pytestmark = pytest.mark.usefixtures("mends")

_BACKENDS = {
    "TorchNativeAttnBackend": "torch_native_backend",
    "TritonAttnBackend": "triton_backend",
    "FlashInferAttnBackend": "flashinfer_backend",
    "FlashAttentionBackend": "flashattention_backend",
    "HybridAttnBackend": "hybrid_attn_backend",
}


class _NoKernels(ModuleType):
    """Stands in for a compiled library that has no CPU build: any name can be imported, none can be called."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _not_here


def _not_here(*_args: Any, **_kwargs: Any) -> None:
    raise RuntimeError("a compiled operation was called in a structural test")


def _class(name: str) -> type:
    """The backend's own class. fa3's module needs sgl_kernel at its import only, so a stand-in does."""
    target = f"sglang.srt.layers.attention.{_BACKENDS[name]}"
    stand_ins: dict[str, ModuleType] = {}
    try:
        for _attempt in range(4):
            try:
                found: type = getattr(importlib.import_module(target), name)
                return found
            except ModuleNotFoundError as error:
                if error.name is None or not error.name.startswith("sgl_kernel"):
                    raise
                stand_ins[error.name] = sys.modules[error.name] = _NoKernels(error.name)
    except Exception as error:
        pytest.skip(f"{name} cannot be imported on this machine: {type(error).__name__}: {error}")
    finally:
        for module in stand_ins:
            del sys.modules[module]
    raise AssertionError(f"{target} asks for more parts of sgl_kernel than expected")


def _bare(name: str) -> Any:
    """An object of the backend's class whose __init__ did not run: this machine may lack its libraries."""
    backend = object.__new__(_class(name))
    if name == "HybridAttnBackend":
        backend.prefill_backend = _bare("TritonAttnBackend")
        backend.decode_backend = _bare("TorchNativeAttnBackend")
    return backend


def _attributes(cls: type) -> dict[str, Any]:
    return {name: inspect.getattr_static(cls, name) for name in dir(cls) if name not in ("__dict__", "__weakref__")}


def test_every_known_backend_has_a_test() -> None:
    assert set(_BACKENDS) == set(KNOWN_BACKENDS)


@pytest.mark.parametrize("name", _BACKENDS)
def test_only_forward_differs_on_an_adopted_backend(name: str) -> None:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    backend = _bare(name)
    inner = type(backend)
    backend.some_instance_attribute = marker = object()
    before = dict(vars(backend))
    adopted = adopt(backend, SimpleNamespace(planned=False), lambda layer, kwargs: None)
    assert adopted is backend
    assert isinstance(adopted, inner)
    assert isinstance(adopted, AttentionBackend)
    old, new = _attributes(inner), _attributes(type(adopted))
    identity = {"__doc__", "__module__", "__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl"}
    changed = {key for key in new if key not in old or new[key] is not old[key]} - identity
    assert {key for key in changed if not key.startswith("_sparse_attn")} == {"forward"}
    assert old.keys() <= new.keys()
    missing = [key for key in dir(AttentionBackend) if not hasattr(type(adopted), key)]
    assert missing == []
    assert adopted.some_instance_attribute is marker
    added = vars(adopted).keys() - before.keys()
    assert all(key.startswith("_sparse_attn") for key in added)
    assert is_adopted(adopted)
    assert not is_adopted(_bare(name))


def test_forward_has_the_signature_that_radix_attention_calls() -> None:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    from sglang_ext.compat.adoption import _forward

    theirs = list(inspect.signature(AttentionBackend.forward).parameters)
    ours = list(inspect.signature(_forward).parameters)
    assert ours[1:] == theirs[1:]


@pytest.mark.parametrize("name", _BACKENDS)
def test_known_backends_override_forward_only_in_ways_that_the_wrapper_delegates_to(name: str) -> None:
    """A planned step must reach `forward`; without a plan the inner class's own `forward` runs, with all arguments."""
    calls = []
    backend = _bare(name)
    inner = type(backend)

    def record(self: Any, *args: Any, **kwargs: Any) -> str:
        calls.append((self, args, kwargs))
        return "inner"

    stand_in = type(inner.__name__, (inner,), {"forward": record})
    backend.__class__ = stand_in
    runtime = SimpleNamespace(planned=False, attend=lambda *a: None)
    adopted = adopt(backend, runtime, lambda layer, kwargs: pytest.fail("not asked without a plan"))
    assert adopted.forward(1, 2, 3, "layer", "fb", False, sinks=5) == "inner"
    assert calls == [(adopted, (1, 2, 3, "layer", "fb", False), {"sinks": 5})]
    assert adopted.forward(q=1, k=2, v=3, layer="layer", forward_batch="fb") == "inner"


def test_an_unknown_backend_is_refused_by_name_and_a_hybrid_of_one() -> None:
    class FancyAttnBackend:
        pass

    message = str(refusal(FancyAttnBackend()))
    assert "FancyAttnBackend" in message
    assert "--attention-backend" in message
    with pytest.raises(TypeError, match="FancyAttnBackend"):
        adopt(FancyAttnBackend(), SimpleNamespace(), lambda layer, kwargs: None)
    hybrid = _bare("HybridAttnBackend")
    hybrid.decode_backend = FancyAttnBackend()
    assert "FancyAttnBackend" in str(refusal(hybrid))


@pytest.mark.parametrize(
    ("change", "kwargs", "expected"),
    [
        ({}, {}, None),
        ({}, {"sinks": None, "use_cascade": False}, None),
        ({}, {"sinks": 1}, "extra inputs"),
        ({"logit_cap": 30.0}, {}, "a logit cap"),
        ({"sliding_window_size": 128}, {}, "a sliding window"),
        ({"is_cross_attention": True}, {}, "cross attention"),
        ({"attn_type": "encoder_only"}, {}, "another attention type"),
        ({"xai_temperature_len": 10}, {}, "temperature scaling"),
    ],
)
def test_a_layer_that_asks_for_more_than_plain_attention_is_refused(change: Any, kwargs: Any, expected: Any) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    from sglang_ext.compat.runner import layer_refusal

    layer = RadixAttention(num_heads=8, head_dim=64, scaling=0.125, num_kv_heads=2, layer_id=0)
    for name, value in change.items():
        assert hasattr(layer, name), f"this SGLang's RadixAttention has no {name}"
        setattr(layer, name, value)
    refused = layer_refusal(layer, kwargs)
    assert refused is None if expected is None else expected in str(refused)
