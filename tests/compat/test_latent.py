"""MLA models: what their KV pool holds, queries in its channels, and what is refused; by SGLang's own classes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.compat import latent
from sglang_ext.config import config_from_dict
from tests.compat.sglang_process import GROUP
from tests.compat.test_kv_scales import model_runner
from tests.mla_model import HEADS, LAYERS, NEEDLE, NOPE, RANK, ROPE, mla_model

pytestmark = [pytest.mark.usefixtures("mends"), GROUP]

MLA = SimpleNamespace(attention_arch=SimpleNamespace(name="MLA"))
FLAGS = ["--device", "cpu", "--dtype", "float32"]


def test_absorbed_queries_score_latent_keys_as_the_model_scores_its_own() -> None:
    """q . k of a head, whose key is W c and a part with RoPE, is absorbed q . (c, that part)."""
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(5, HEADS, NOPE + ROPE, generator=gen, dtype=torch.float64)
    w_kc = torch.randn(HEADS, NOPE, RANK, generator=gen, dtype=torch.float64)
    stored = torch.randn(7, RANK + ROPE, generator=gen, dtype=torch.float64)
    keys = torch.cat(
        [torch.einsum("hnr,tr->thn", w_kc, stored[:, :RANK]), stored[:, None, RANK:].expand(-1, HEADS, -1)], dim=2
    )
    scores = torch.einsum("qhd,thd->qht", q, keys)
    torch.testing.assert_close(torch.einsum("qhd,td->qht", latent.absorb(q, w_kc), stored), scores)


def previewed(model: str, flags: list[str]) -> tuple[Any, str | None]:
    from sglang_ext.compat.preview import ServerPreview

    found = ServerPreview(["--model-path", model, *FLAGS, *flags])
    return found.model(weights=False), found.refusal


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ([], None),
        (["--decode-attention-backend", "triton"], "got torch_native and triton. Choose --attention-backend triton"),
    ],
    ids=["served", "two backends"],
)
def test_a_checkpoint_tells_its_latent_keys(
    plugged: Any, flags: list[str], refused: str | None, tmp_path: Path
) -> None:
    flags = ["--attention-backend", "torch_native", *flags]
    model, why = plugged(f"{__name__}:previewed", str(mla_model(tmp_path / "model")), flags)
    assert (model.num_layers, model.num_kv_heads, model.head_dim, model.v_head_dim) == (LAYERS, 1, RANK + ROPE, RANK)
    assert model.kv_width == RANK + ROPE
    assert why is None if refused is None else refused in str(why)


def started(model: str, flags: list[str], hopper: bool = False) -> tuple[list[str], str, Any]:
    """The backends of a server that would start, what was logged and printed, and its exit status otherwise."""
    import contextlib
    import io
    import logging

    from sglang_ext.compat.checkpoint import attention_backends, resolved
    from sglang_ext.compat.engine import checked_record

    if hopper:
        for module in [one for one in sys.modules.values() if "is_hopper_with_cuda_12_3" in vars(one)]:
            module.is_hopper_with_cuda_12_3 = lambda: True
    logged, said, backends, status = io.StringIO(), io.StringIO(), [], None
    logging.getLogger("sglang_ext").addHandler(logging.StreamHandler(logged))
    with contextlib.redirect_stderr(said):
        try:
            record = checked_record(["--model-path", model, "--sparse-attn", *flags])
            backends = list(attention_backends(resolved(record)))
            record.check_server_args()
        except SystemExit as error:
            status = error.code
    return backends, logged.getvalue() + said.getvalue(), status


@pytest.mark.parametrize(
    ("flags", "mla", "backend", "chosen"),
    [
        (["--device", "cuda"], True, "triton", True),
        (["--device", "cpu"], True, "torch_native", True),
        (["--device", "cuda", "--attention-backend", "triton"], True, "triton", False),
        (["--device", "cuda"], False, "fa3", False),
    ],
    ids=["on a GPU", "on a CPU", "named", "another model"],
)
def test_a_backend_that_nobody_names_is_one_that_attends_latent_keys(
    plugged: Any, flags: list[str], mla: bool, backend: str, chosen: bool, tmp_path: Path
) -> None:
    """On Hopper SGLang itself takes another one."""
    model = mla_model(tmp_path / "model") if mla else NEEDLE
    flags = [*flags, "--sparse-attn-store", str(tmp_path)]
    found, said, status = plugged(f"{__name__}:started", str(model), flags, True)
    assert (found, status) == ([backend] * 2, None), said
    assert (f"--attention-backend {backend}, as none is named" in said) == chosen


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--attention-backend", "flashinfer"], "got flashinfer. Choose --attention-backend triton"),
        (["--decode-attention-backend", "triton", "--prefill-attention-backend", "fa3"], "got fa3 and triton. Choose"),
        (["--kv-cache-dtype", "fp8_e4m3"], "got torch.float8_e4m3fn. Remove --kv-cache-dtype"),
        (
            ["--tp-size", "2", "--sparse-attn-config", '{"build": "shared"}'],
            "at most 1 tensor-parallel ranks (KV heads) to build indexes; got 2. Build with a smaller --tp-size",
        ),
    ],
    ids=["backend", "two backends", "fp8", "ranks that build"],
)
def test_what_an_mla_model_does_not_go_with_ends_the_start_before_weights_are_loaded(
    plugged: Any, flags: list[str], said: str, tmp_path: Path
) -> None:
    flags = ["--device", "cuda", "--sparse-attn-store", str(tmp_path), *flags]
    _, found, status = plugged(f"{__name__}:started", str(mla_model(tmp_path / "model")), flags)
    assert status == 2, found
    assert said in found


def on_a_gpu(model: str, shared_memory: int) -> str | None:
    """What a preview refuses on a machine with such a GPU before Hopper."""
    from sglang_ext.compat.preview import ServerPreview

    preview = ServerPreview(["--model-path", model, "--device", "cuda", "--attention-backend", "triton"])
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(shared_memory_per_block_optin=shared_memory, major=8)
    return preview.refusal


@pytest.mark.parametrize(("shared_memory", "message"), [(166912, None), (101376, "got 101376 bytes")])
def test_a_preview_tells_whether_the_gpu_that_is_there_has_room(
    plugged: Any, shared_memory: int, message: str | None, tmp_path: Path
) -> None:
    found = plugged(f"{__name__}:on_a_gpu", str(mla_model(tmp_path / "model")), shared_memory)
    assert found is None if message is None else message in str(found)


@pytest.mark.parametrize(
    ("model", "config", "backend", "device", "message"),
    [
        ({}, {}, "TritonAttnBackend", "cuda", None),
        ({}, {"build": "shared"}, "TorchNativeAttnBackend", "cpu", None),
        ({}, {}, "TorchNativeAttnBackend", "cuda", "or torch_native on a CPU"),
        ({"index_head_dim": 128}, {}, "TritonAttnBackend", "cuda", "all tokens to be attended"),
        ({}, {}, "FlashAttentionBackend", "cpu", "expected attention backend triton, or torch_native"),
        ({}, {"offload": {"host_bytes": 1 << 30}}, "TritonAttnBackend", "cuda", "no offload"),
        ({}, {"exactness": "verify"}, "TritonAttnBackend", "cuda", "exactness selected"),
        ({}, {"build": "capture", "capture_folder": "x"}, "TritonAttnBackend", "cuda", "build off, prefill or shared"),
    ],
)
def test_what_an_mla_model_does_not_go_with_is_refused(
    model: dict[str, Any], config: dict[str, Any], backend: str, device: str, message: str | None
) -> None:
    given = config_from_dict(config)
    found = latent.refusal(SimpleNamespace(**vars(MLA), **model), given, [backend], torch.bfloat16, device)
    assert found is None if message is None else message in str(found)
    assert latent.refusal(SimpleNamespace(), given, [backend], torch.bfloat16, device) is None, "another model"


def test_a_checkpoint_that_asks_for_fp8_is_served_with_a_flag() -> None:
    """Without one its KV pool is of fp8, so removing the flag does not help."""
    found = latent.refusal(MLA, config_from_dict({}), ["TritonAttnBackend"], torch.float8_e4m3fn, "cuda")
    assert "set it to bfloat16" in str(found)


@pytest.mark.parametrize(
    ("heads", "dtype", "shared_memory", "message"),
    [
        (64, torch.bfloat16, 232448, None),
        (32, torch.bfloat16, 166912, None),
        (64, torch.bfloat16, 166912, "at most 32"),
        (128, torch.bfloat16, 232448, "got 128. Raise --tp-size"),
        (16, torch.bfloat16, 101376, "got 101376"),
        (16, torch.float32, 232448, None),
        (32, torch.float32, 232448, "at most 16"),
    ],
)
def test_a_gpu_has_room_for_the_heads_of_one_latent_key(
    heads: int, dtype: torch.dtype, shared_memory: int, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(shared_memory_per_block_optin=shared_memory, major=9 if shared_memory == 232448 else 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    found = latent.device_refusal(heads, dtype, torch.device("cuda"))
    assert found is None if message is None else message in str(found)


def _runner(attentions: int = LAYERS, width: int = RANK + ROPE, pool: str = "MLATokenToKVPool") -> Any:
    """A runner of SGLang's own pool and attention modules; these have no more than what is asked of them."""
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    sizes = {"size": 64, "page_size": 1, "dtype": torch.float32, "device": "cpu", "enable_memory_saver": False}
    made = getattr(memory_pool, pool)(kv_lora_rank=width - ROPE, qk_rope_head_dim=ROPE, layer_num=LAYERS, **sizes)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList()
    for number in range(attentions):
        module = DeepseekV2AttentionMLA.__new__(DeepseekV2AttentionMLA)
        torch.nn.Module.__init__(module)
        module.attn_mha, module.qk_rope_head_dim = torch.nn.Identity(), ROPE
        module.use_deep_gemm_bmm, module.w_kc = False, torch.randn(HEADS, NOPE, RANK) + number
        model.layers.append(module)
    shapes = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE}
    return model_runner(made, model, **vars(MLA), **shapes)


def test_values_are_the_first_channels_of_the_keys_in_the_pool() -> None:
    from sglang_ext.compat.runner import RunnerView
    from sglang_ext.options import Build

    view = RunnerView(_runner())
    assert view.refusal(Build.SHARED) is None
    assert (view.num_kv_heads, view.head_dim, view.v_head_dim) == (1, RANK + ROPE, RANK)
    keys, slots = torch.randn(8, 1, RANK + ROPE), torch.arange(3, 11)
    view.runner.token_to_kv_pool.kv_buffer[1][slots] = keys
    kv = view.kv(1)
    assert torch.equal(kv.k_cache[slots], keys)
    assert torch.equal(kv.v_cache[slots], keys[..., :RANK])
    assert kv.v_cache.data_ptr() == kv.k_cache.data_ptr()


def test_a_layer_absorbs_with_its_own_weights_as_they_are_now() -> None:
    from sglang_ext.compat.runner import RunnerView

    view, q = RunnerView(_runner()), torch.randn(2, HEADS, NOPE + ROPE)
    module = view.runner.model.layers[1]
    found = view.absorption(module.attn_mha)
    assert torch.equal(found(q), latent.absorb(q, module.w_kc))
    module.w_kc = 2 * module.w_kc
    assert torch.equal(found(q), latent.absorb(q, module.w_kc))
    assert view.absorption(torch.nn.Identity()) is None, "one whose queries are absorbed"


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        ({"attentions": 2 * LAYERS}, f"got {2 * LAYERS} and {LAYERS}"),
        ({"width": 2 * RANK}, f"{LAYERS}, {2 * RANK} wide"),
        ({"pool": "MLATokenToKVPoolFP4"}, "got MLATokenToKVPoolFP4"),
    ],
)
def test_another_pool_or_another_attention_is_refused(runner: dict[str, Any], message: str) -> None:
    from sglang_ext.compat.runner import RunnerView

    assert message in str(RunnerView(_runner(**runner)).refusal())


@pytest.mark.parametrize(
    "change", [{"use_deep_gemm_bmm": True}, {"w_kc": torch.zeros(1, dtype=torch.int8)}, {"use_intel_amx_backend": True}]
)
def test_other_weights_than_the_models_are_refused_where_queries_are_recorded(change: dict[str, Any]) -> None:
    from sglang_ext.compat.runner import RunnerView
    from sglang_ext.options import Build

    view = RunnerView(_runner())
    vars(view.runner.model.layers[0]).update(change)
    assert view.refusal() is None
    assert "Set build off" in str(view.refusal(Build.PREFILL))
