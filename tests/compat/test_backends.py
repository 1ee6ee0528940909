"""Adopting a backend changes `forward` and what is prepared before a replay, for every backend that is known."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang_ext.compat.adoption import KNOWN_BACKENDS, adopt, is_adopted, refusal
from sglang_ext.decode.types import StepPath

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
def test_two_methods_differ_on_an_adopted_backend(name: str) -> None:
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
    assert {key for key in changed if not key.startswith("_sparse_attn")} == {
        "forward",
        "init_forward_metadata_out_graph",
    }
    assert old.keys() <= new.keys()
    missing = [key for key in dir(AttentionBackend) if not hasattr(type(adopted), key)]
    assert missing == []
    assert adopted.some_instance_attribute is marker
    added = vars(adopted).keys() - before.keys()
    assert all(key.startswith("_sparse_attn") for key in added)
    assert is_adopted(adopted)
    assert not is_adopted(_bare(name))


@pytest.mark.parametrize("name", ["forward", "init_forward_metadata_out_graph"])
def test_methods_have_the_signature_that_sglang_calls(name: str) -> None:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    adopted = adopt(_bare("TorchNativeAttnBackend"), SimpleNamespace(), lambda layer, kwargs: None)
    theirs = inspect.signature(getattr(AttentionBackend, name)).parameters
    assert list(inspect.signature(getattr(type(adopted), name)).parameters) == list(theirs)


def _replay_view(captured: ForwardMode, actual: ForwardMode, size: int = 3, padded: int = 4) -> Any:
    """What the installed release's decode graph runner hands to a backend before a replay."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

    batch = ForwardBatch(
        forward_mode=actual,
        batch_size=size,
        input_ids=torch.zeros(size, dtype=torch.int64),
        req_pool_indices=torch.arange(size),
        seq_lens=torch.full((size,), 5),
        out_cache_loc=torch.arange(size),
        seq_lens_sum=5 * size,
    )
    names = ("input_ids", "positions", "req_pool_indices", "seq_lens", "seq_lens_cpu", "mamba_track_indices")
    buffers = SimpleNamespace(**{name: torch.ones(padded, dtype=torch.int64) for name in names})
    given = {
        "forward_batch": batch, "buffers": buffers, "bs": padded, "raw_bs": size, "num_tokens": padded,
        "seq_len_fill_value": 1, "capture_forward_mode": captured, "is_encoder_decoder": False,
        "global_num_tokens_cpu": None,
    }  # fmt: skip
    return build_replay_fb_view(**{key: given[key] for key in inspect.signature(build_replay_fb_view).parameters})


@pytest.mark.parametrize("name", _BACKENDS)
def test_what_the_inner_backend_reads_is_made_but_for_a_replay_of_our_graphs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, made = _bare(name), []

    def make(self: Any, forward_batch: Any, in_capture: bool = False) -> None:
        assert self is backend
        made.append((forward_batch, in_capture))

    monkeypatch.setattr(type(backend), "init_forward_metadata_out_graph", make)
    forwards = SimpleNamespace(path=None, eager=False, view=SimpleNamespace(decode_graphs=True))
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    adopted = adopt(backend, forwards, lambda layer, kwargs: None)
    decode, idle, verify = ForwardMode.DECODE, ForwardMode.IDLE, ForwardMode.TARGET_VERIFY
    view = _replay_view(decode, decode)

    def makes(forward_batch: Any, **more: bool) -> bool:
        before = len(made)
        adopted.init_forward_metadata_out_graph(forward_batch, **more)
        assert made[before:] in ([], [(forward_batch, more.get("in_capture", False))])
        return len(made) > before

    assert makes(view), "no plan"
    for path in StepPath:
        forwards.path = path
        assert not makes(view)
        assert makes(view, in_capture=True)
        assert makes(_replay_view(decode, idle)), "no decode step"
        assert makes(_replay_view(verify, decode)), "a graph of drafts"
        assert makes(object.__new__(ForwardBatch)), "no graph"
        capturing = True
        assert makes(view), "SGLang captures the preparation, for steps of all kinds"
        capturing, forwards.eager = False, True
        assert makes(view), "attended twice, or from host memory"
        forwards.eager = False
    forwards.path = None
    assert makes(view), "a later step of SGLang's own"


def test_a_plan_stands_before_a_replay_is_prepared_and_its_graph_is_chosen_behind_that() -> None:
    """Else what is left out for our graph would be missing in another one."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner as Runner

    load = inspect.getsource(Runner.load_batch)
    recapture = load.find("self.recapture_if_needed(")  # of 0.5.16; the step has no plan behind it
    prepare = max(load.find("init_forward_metadata_out_graph("), load.find("self._init_replay_attn_metadata("))
    assert recapture < prepare < load.rindex("self._resolve_lora_variant(")
    assert "self.load_batch(" in inspect.getsource(Runner.execute), "inside ModelRunner.forward, behind the plan"


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
    forwards = SimpleNamespace(planned=False, attend=lambda *a: None)
    adopted = adopt(backend, forwards, lambda layer, kwargs: pytest.fail("not asked without a plan"))
    assert adopted.forward(1, 2, 3, "layer", "fb", False, sinks=5) == "inner"
    assert calls == [(adopted, (1, 2, 3, "layer", "fb", False), {"sinks": 5})]
    assert adopted.forward(q=1, k=2, v=3, layer="layer", forward_batch="fb") == "inner"


def test_an_unknown_backend_is_refused_by_name_and_a_hybrid_of_one() -> None:
    class FancyAttnBackend:
        pass

    message = str(refusal(FancyAttnBackend()))
    assert "FancyAttnBackend" in message
    assert "--attention-backend" in message
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
