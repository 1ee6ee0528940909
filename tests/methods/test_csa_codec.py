"""CSAttention's codec in the index: bytes, recall beside the paper's layout."""

import pytest
import torch

from prefix_kernels.csa_scores import decode_lists
from prefix_kernels.testing import PlantedConfig, planted_prefix
from sglang_ext.methods import make_builder
from sglang_ext.methods.csattention import CSAttentionSpec
from sglang_ext.methods.csattention.lists import compact_lists
from tests.methods.common import randn, recall


def build(spec, keys, samples):
    return make_builder(spec).build_layer(keys, samples)


def built_bytes(spec, keys, samples):
    return sum(array.nbytes for array in build(spec, keys, samples).values())


@pytest.mark.parametrize(("m", "c", "alpha"), [(8, 64, 0.2), (4, 16, 0.02), (16, 32, 0.4)])
def test_bytes_of_the_papers_tables(m, c, alpha):
    """Eq. B.1, 3 m C alpha / (2 d): bytes that 500 more tokens add to tables and to fp16 keys and values."""
    spec = CSAttentionSpec(num_subspaces=m, num_centroids=c, list_ratio=alpha, codec="paper", iterations=0)
    tables = [built_bytes(spec, randn(n, 1, 32), randn(1, 20, 32, seed=1)) for n in (500, 1000)]
    assert (tables[1] - tables[0]) / (500 * 32 * 2 * 2) == pytest.approx(3 * m * c * alpha / (2 * 32))


def test_the_default_is_small():
    """At most 13% of the keys and values from 4,096 tokens on."""
    keys = randn(4096, 1, 64)
    assert built_bytes(CSAttentionSpec(), keys, randn(1, 40, 64, seed=1)) <= 0.13 * 2 * keys.half().nbytes


def test_compact_tables_hold_the_paper_tables():
    """The same positions; scores at most half a step of a list's span away."""
    keys, samples = randn(3000, 2, 16), randn(2, 300, 16, seed=1)
    paper = build(CSAttentionSpec(codec="paper"), keys, samples)
    for bits in (4, 8):
        compact = build(CSAttentionSpec(score_bits=bits), keys, samples)
        assert torch.equal(compact["centroids"], paper["centroids"])
        list_len = paper["positions"].shape[3]
        positions, scores = decode_lists(compact_lists(compact), list_len, bits)
        assert torch.equal(positions.int(), paper["positions"])
        span = paper["scores"].float().amax(-1) - paper["scores"].float().amin(-1)
        error = (scores - paper["scores"].float()).abs().amax(-1)
        rounding = 0.001 * paper["scores"].float().abs().amax(-1)  # of the paper's fp16
        assert bool((error <= 0.503 * span / (2**bits - 1) + rounding).all())


@pytest.mark.parametrize("rope_base", [0.0, 1e6], ids=["shift", "rope"])
@pytest.mark.parametrize(
    "parameters",
    [{}, {"num_subspaces": 8, "list_ratio": 0.2}, {"num_subspaces": 8, "num_centroids": 64, "list_ratio": 0.035}],
    ids=["default", "bitmap", "many-centroids"],
)
def test_recall_is_that_of_the_paper_layout(parameters, rope_base):
    planted = planted_prefix(PlantedConfig(prefix_len=4096, num_topics=16, rope_base=rope_base))
    paper, compact = (recall(CSAttentionSpec(codec=c, **parameters), planted, 204) for c in ("paper", "compact"))
    assert paper > 0.7
    assert abs(compact - paper) <= 0.01
