"""The planted inputs are what their description says."""

import pytest
import torch

from prefix_kernels import Selection
from prefix_kernels.ops import top_k_selection
from prefix_kernels.testing import PlantedConfig, attention_recall, planted_prefix

CONFIGS = [PlantedConfig(), PlantedConfig(rope_base=1e6), PlantedConfig(span=8)]


@pytest.mark.parametrize("config", CONFIGS, ids=["shift", "rope", "span8"])
def test_random_and_windows_recall_little(config):
    planted = planted_prefix(config)
    budget = config.prefix_len // 10
    gen = torch.Generator().manual_seed(0)

    def recall(num_recent):
        noise = torch.rand(2, config.prefix_len, generator=gen)
        chosen = top_k_selection(noise, budget, 4, num_recent, 1, config.prefix_len)
        return float(attention_recall(planted.queries, planted.keys, chosen, planted.sm_scale).mean())

    assert recall(0) < 0.5
    assert recall(config.margin - 1) < 0.5
    every = Selection.all(config.prefix_len, 2)
    full = attention_recall(planted.queries, planted.keys, every, planted.sm_scale)
    torch.testing.assert_close(full, torch.ones_like(full))


def test_critical_keys_are_distinct_and_inside_the_margins():
    config = PlantedConfig(span=8)
    hits = planted_prefix(config).hits
    assert hits.min() >= config.margin
    assert hits.max() < config.prefix_len - config.margin
    for head in hits.flatten(1):
        assert head.unique().numel() == head.numel()


def test_same_seed_same_data_and_room_is_checked():
    small = PlantedConfig(prefix_len=600, num_topics=2, hits_per_topic=3, margin=10, num_samples=8)
    assert torch.equal(planted_prefix(small).keys, planted_prefix(small).keys)
    with pytest.raises(ValueError, match="expected room"):
        planted_prefix(PlantedConfig(prefix_len=600))
    with pytest.raises(ValueError, match="rope_base"):
        planted_prefix(PlantedConfig(rope_base=1e4))
