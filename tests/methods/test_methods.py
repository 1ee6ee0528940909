"""Every method through the same matrix: sizes, heads alone, group pooling, recall on planted data."""

import pytest
import torch

from prefix_kernels.pooling import Pooling
from prefix_kernels.top_k_selection import top_k_selection
from sglang_ext.methods import METHODS, make_builder, parse_spec
from tests.methods.common import randn, select
from tests.planted import KV_HEADS, PlantedConfig, attention_mass, attention_recall, planted_prefix

SPECS = [
    {"method": "exact"},
    {"method": "csattention", "num_subspaces": 4, "num_centroids": 8},
    {"method": "csattention", "num_subspaces": 2, "num_centroids": 4, "list_ratio": 1.0, "baseline": "none"},
    {"method": "csattention", "num_subspaces": 8, "list_ratio": 0.02},
    {"method": "csattention", "score_bits": 8},
    {"method": "token_index", "num_channels": 8},
    {"method": "token_index", "bits": 2},
    {"method": "two_level", "first": {"method": "csattention"}, "candidate_ratio": 0.2},
    {"method": "two_level", "first": {"method": "ab_sparse"}, "second": {"method": "csattention"}},
    {"method": "two_level", "first": {"method": "union"}, "second": {"method": "exact"}},
    {"method": "union"},
    *(
        {"method": "ab_sparse", "block_size": size, "representation": form, "quantization": bits}
        for size, bits in ((16, "int4"), (64, "none"))
        for form in ("mean", "minmax", "ball")
    ),
    {"method": "ab_sparse", "num_channels": 6, "representation": "ball"},
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("prefix_len", [1, 17, 65, 1025])
@pytest.mark.parametrize("data", SPECS, ids=str)
def test_build_and_select(data, prefix_len, dtype, device):
    spec = parse_spec(data)
    keys = randn(prefix_len, 2, 16).to(device, dtype)
    samples = randn(2, 50, 16, seed=1).to(device, dtype)
    q = randn(3, 8, 16, seed=2).to(device, dtype)
    arrays = make_builder(spec).build_layer(keys, samples)
    for array in arrays.values():
        assert array.shape[0] == 2
        assert array.is_contiguous()
        assert array.device.type == device
        array.cpu().numpy()
    for budget in (8, 40, prefix_len, prefix_len + 1):
        if budget < min(prefix_len, 7):
            continue
        for pooling in Pooling:
            selection = select(spec, arrays, q, prefix_len, budget, pooling=pooling)
            assert selection.counts.tolist() == [min(budget, prefix_len)] * 2
            for row in selection.positions.tolist():
                assert {*range(min(2, prefix_len)), *range(max(prefix_len - 5, 0), prefix_len)} <= set(row)


@pytest.mark.parametrize("data", SPECS, ids=str)
def test_kv_heads_are_independent(data):
    spec = parse_spec(data)
    keys, samples, q = randn(300, 2, 16), randn(2, 90, 16, seed=1), randn(3, 8, 16, seed=2)
    arrays = make_builder(spec).build_layer(keys, samples)
    whole = select(spec, arrays, q, 300, 30)
    for head in range(2):
        part = {name: array[head : head + 1] for name, array in arrays.items()}
        alone = select(spec, part, q[:, head * 4 : head * 4 + 4], 300, 30)
        assert torch.equal(alone.positions[0], whole.positions[head])


def test_exact_selects_the_true_top():
    planted = planted_prefix(PlantedConfig(prefix_len=2048, num_topics=8, hits_per_topic=8))
    spec = parse_spec({"method": "exact"})
    arrays = make_builder(spec).build_layer(planted.keys, None)
    mass = attention_mass(planted.queries, planted.keys, planted.sm_scale)
    pooled = mass.view(8, 2, 4, 2048).amax(dim=(0, 2))
    chosen = select(spec, arrays, planted.queries, 2048, 100, 0, 0, sm_scale=planted.sm_scale)
    assert torch.equal(chosen.positions.long(), pooled.topk(100).indices.sort().values)


@pytest.mark.parametrize(
    ("config", "least"),
    [(PlantedConfig(), (0.80, 0.88, 0.92)), (PlantedConfig(rope_base=1e6), (0.65, 0.83, 0.89))],
    ids=["shift", "rope"],
)
def test_csattention_recalls_under_query_key_shift(config, least):
    """Per request at 2, 5 and 10% keep, default parameters: near the oracle (0.92, 0.96, 0.97 and 0.89, 0.96, 0.98)."""
    planted = planted_prefix(config)
    spec = parse_spec({"method": "csattention"})
    arrays = make_builder(spec).build_layer(planted.keys, planted.samples)
    for keep, wanted in zip((0.02, 0.05, 0.1), least, strict=True):
        budget, found = int(keep * config.prefix_len), []
        for q in planted.queries.split(1):
            chosen = select(spec, arrays, q, config.prefix_len, budget, 4, 64, planted.sm_scale)
            found.append(attention_recall(q, planted.keys, chosen, planted.sm_scale).mean())
        assert torch.stack(found).mean() > wanted
        window = top_k_selection(torch.zeros(KV_HEADS, config.prefix_len), budget, 16, budget - 16)
        assert attention_recall(planted.queries, planted.keys, window, planted.sm_scale).mean() < 0.5


@pytest.mark.parametrize("name", METHODS)
def test_unusable_captures_are_refused(name):
    builder = make_builder(parse_spec({"method": name}))
    good, samples = randn(40, 2, 16), randn(2, 30, 16)
    for value, dtype in ((torch.nan, torch.float32), (torch.inf, torch.float16), (-torch.inf, torch.bfloat16)):
        bad = good.clone().to(dtype)
        bad[3, 1, 2] = value
        with pytest.raises(ValueError, match=r"finite keys, got NaN or infinity; .* take it again"):
            builder.build_layer(bad, samples)
    with pytest.raises(ValueError, match="prefix_len >= 1"):
        builder.build_layer(good[:0], samples)
    if not builder.needs_queries(16):
        builder.build_layer(good, None)
        return
    with pytest.raises(ValueError, match="needs queries"):
        builder.build_layer(good, None)
    with pytest.raises(ValueError, match="num_samples >= 1"):
        builder.build_layer(good, samples[:, :0])
    with pytest.raises(ValueError, match="finite queries"):
        builder.build_layer(good, samples.log())


def test_values_beyond_fp16_are_refused():
    keys = 1e6 * randn(40, 2, 16)
    for parameters in ({"quantization": "none"}, {"representation": "ball"}):
        with pytest.raises(ValueError, match="more than fp16 holds"):
            make_builder(parse_spec({"method": "ab_sparse", **parameters})).build_layer(keys, None)
