"""The planted inputs are what their description says."""

import pytest
import torch

from prefix_kernels import Selection
from prefix_kernels.top_k_selection import top_k_selection
from tests.planted import PlantedConfig, attention_recall, planted_prefix


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


@pytest.mark.parametrize("rope_base", [0.0, 1e7], ids=["plain", "rope"])
def test_planted_keys_are_hard_for_chance_and_windows_and_possible_for_the_oracle(rope_base):
    config = PlantedConfig(prefix_len=4096, rope_base=rope_base)
    planted = planted_prefix(config)
    heads, budget = config.num_kv_heads, config.prefix_len // 10
    windows = top_k_selection(torch.zeros(heads, config.prefix_len), budget, 16, budget - 16)
    noise = torch.rand(heads, config.prefix_len, generator=torch.Generator().manual_seed(0))
    chance = top_k_selection(noise, budget, 16, 64)
    # Ideal: the critical keys of the topics that each row's heads ask about.
    recalls = []
    for row in range(config.num_rows):
        q = planted.queries[row : row + 1]
        topics = planted.topics[row].view(heads, -1)
        scores = torch.zeros(heads, config.prefix_len)
        for head in range(heads):
            scores[head, planted.hits[head, topics[head]].flatten()] = 1.0
        best = top_k_selection(scores, budget, 16, 64)
        chosen = (windows, chance, best)
        recalls.append([float(attention_recall(q, planted.keys, c, planted.sm_scale).mean()) for c in chosen])
    by_windows, by_chance, ideal = torch.tensor(recalls).mean(dim=0).tolist()
    assert by_windows < 0.5
    assert by_chance < 0.5
    assert ideal > 0.7
    full = attention_recall(planted.queries, planted.keys, Selection.all(config.prefix_len, heads), planted.sm_scale)
    torch.testing.assert_close(full, torch.ones_like(full))
