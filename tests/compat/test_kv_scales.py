"""An fp8 pool is read with the scales that SGLang wrote it with: its own pool, its own layers, no fakes of these."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("mends")

LAYERS, HEADS, DIM, SLOTS = 2, 2, 32, 64
FP8 = torch.float8_e4m3fn


def _layers(*, k_scale: float | None = None, v_scale: float | None = None) -> torch.nn.ModuleList:
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = torch.nn.ModuleList(RadixAttention(4, DIM, DIM**-0.5, HEADS, number) for number in range(LAYERS))
    if k_scale is not None and v_scale is not None:  # as SGLang's BaseKVCacheMethod leaves them, of the last layer only
        last: Any = layers[-1]
        last.k_scale, last.v_scale = torch.tensor(k_scale), torch.tensor(v_scale)
        last.k_scale_float, last.v_scale_float = k_scale, v_scale
    return layers


def _view(layers: torch.nn.ModuleList, dtype: torch.dtype = FP8) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_ext.compat.runner import RunnerView

    pool = MHATokenToKVPool(
        size=SLOTS, page_size=1, dtype=dtype, head_num=HEADS, head_dim=DIM, layer_num=LAYERS, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": DIM}
    return RunnerView(model_runner(pool, layers, **sizes))


def model_runner(pool: Any, model: torch.nn.Module, **config: Any) -> Any:
    """What a view reads of SGLang's, on one rank of a CPU."""
    return SimpleNamespace(
        model_config=SimpleNamespace(**config, dtype=torch.float32),
        ps=SimpleNamespace(tp_rank=0, tp_size=1), token_to_kv_pool=pool, max_total_num_tokens=SLOTS, device="cpu",
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(4, SLOTS, dtype=torch.int32), size=4), model=model,
        attn_backend=None,
    )  # fmt: skip


def test_what_is_written_comes_back_within_fp8s_rounding() -> None:
    layers = _layers(k_scale=0.25, v_scale=4.0)
    view = _view(layers)
    assert view.refusal() is None
    gen = torch.Generator().manual_seed(0)
    for number, layer in enumerate(layers):
        k, v = torch.randn(2, 8, HEADS, DIM, generator=gen)
        view.write_kv(layer, SimpleNamespace(out_cache_loc=torch.arange(3, 11)), k.clone(), v.clone())
        kv = view.kv(number)
        assert kv.k_cache.dtype is FP8
        assert (kv.k_scale, kv.v_scale) == ((1.0, 1.0), (0.25, 4.0))[number]
        slots = torch.arange(3, 11)
        # Half a unit of three mantissa bits, and below 2^-6 of the scale half a subnormal step.
        torch.testing.assert_close(kv.keys(slots, torch.float32), k, rtol=2**-4, atol=kv.k_scale * 2**-10)
        values = kv.v_scale * kv.v_cache[slots].float()
        torch.testing.assert_close(values, v, rtol=2**-4, atol=kv.v_scale * 2**-10)
        assert torch.equal(kv.keys(slots, torch.bfloat16, slice(1, 2)), kv.keys(slots, torch.bfloat16)[:, 1:])


@pytest.mark.parametrize(
    ("change", "dtype", "backend", "expected"),
    [
        ({}, FP8, "FlashInferAttnBackend", None),
        ({}, torch.bfloat16, "FlashInferAttnBackend", None),
        ({"k_scale": 0.5, "k_scale_float": 0.5}, FP8, "FlashInferAttnBackend", None),
        ({"k_scale": 0.5, "k_scale_float": 0.5}, torch.bfloat16, "FlashInferAttnBackend", "scaled K or V"),
        ({"k_scale": 0.5, "k_scale_float": 0.5}, FP8, "TorchNativeAttnBackend", "TorchNativeAttnBackend does not"),
        ({"v_scale": 0.5}, FP8, "FlashInferAttnBackend", "only writes with"),
        ({"k_scale": 1.0, "k_scale_float": 1.0}, FP8, "TorchNativeAttnBackend", None),
    ],
)
def test_scales_that_sglang_does_not_follow_itself_are_refused(
    change: dict[str, float], dtype: torch.dtype, backend: str, expected: str | None
) -> None:
    from sglang_ext.compat.runner import scales_refusal

    layer: Any = _layers()[0]
    for name, value in change.items():
        assert hasattr(layer, name), f"this SGLang's RadixAttention has no {name}"
        setattr(layer, name, value)
    made = type(backend, (), {})()
    alone = scales_refusal(layer, made, dtype)
    hybrid = scales_refusal(layer, SimpleNamespace(prefill_backend="name", decode_backend=made), dtype)
    for refused in (alone, hybrid):
        assert refused is None if expected is None else expected in str(refused)


def test_a_view_asks_its_own_backend_and_takes_its_scales_away() -> None:
    layers = _layers(k_scale=0.5, v_scale=3.0)
    view = _view(layers)
    assert view.layer_refusal(layers[1], {}) is None
    assert view.layer_refusal(layers[1], {"sinks": 1}) == "extra inputs ['sinks']"
    assert view.has_kv_scales
    view = _view(layers)
    view.runner.attn_backend = type("TorchNativeAttnBackend", (), {})()
    assert "TorchNativeAttnBackend" in str(view.layer_refusal(layers[1], {}))
    assert (view.kv(1).k_scale, view.kv(1).v_scale) == (1.0, 1.0), "what it wrote is not scaled"
    assert not _view(_layers()).has_kv_scales
    assert not _view(layers, torch.bfloat16).has_kv_scales


def test_a_pool_of_more_layers_than_the_model_has_is_refused() -> None:
    """Of a model that runs its layers several times: an index has one list a layer."""
    view = _view(_layers(), torch.bfloat16)
    view.runner.model_config.num_hidden_layers = LAYERS // 2
    assert f"expected a KV pool of {LAYERS // 2} layers" in str(type(view)(view.runner).refusal())


def test_another_fp8_is_refused_with_what_to_do() -> None:
    message = str(_view(_layers(), torch.float8_e5m2).refusal())
    assert "fp8_e4m3" in message
    assert "float8_e5m2" in message
