"""Planted inputs, dense oracle, recall of attention mass; for benchmarks, too.

Everything is seeded and made on the CPU, so the numbers are the same whichever device reads them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from prefix_kernels.types import Selection


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


KV_HEADS, GQA, HEAD_DIM, ROWS, SAMPLES = 2, 4, 64, 8, 2048
STRENGTH, NOISE = 8.5, 0.7
"""Length of a topic's direction in queries and critical keys; standard deviation of a query's noise per channel."""
SHIFT = 12.0
"""Length of the constant that is added to every query and, negated, to every key: queries and keys are then two
separate clouds (CSAttention, 2.4), while the content of the scores stays."""
MARGIN = 256
"""Positions at either end that hold no critical key."""


class PlantedPrefix(NamedTuple):
    """A prefix with critical keys that only queries about their topic attend; all fp32."""

    keys: Tensor
    """[prefix_len, num_kv_heads, head_dim]."""
    samples: Tensor
    """[num_kv_heads, num_samples, head_dim] queries of the prefix's own prefill, all heads of the group."""
    queries: Tensor
    """[num_rows, num_qo_heads, head_dim] fresh decode queries of the same distribution."""
    hits: Tensor
    """[num_kv_heads, num_topics, hits_per_topic] int64, the planted positions."""
    topics: Tensor
    """[num_rows, num_qo_heads] int64, what each query asks about."""
    sm_scale: float
    """1 / sqrt(head_dim)."""


@dataclass(frozen=True)
class PlantedConfig:
    """What `planted_prefix` makes.

    Attributes:
        prefix_len: tokens.
        num_topics: clusters of queries per KV head.
        hits_per_topic: critical keys of each topic.
        rope_base: 0 for none; else queries and keys are rotated by their position (neox halves) and topics
            live in the slow channels, as trained models keep content there.
    """

    prefix_len: int = 8192
    num_topics: int = 32
    hits_per_topic: int = 32
    rope_base: float = 0.0


def planted_prefix(config: PlantedConfig) -> PlantedPrefix:
    """Heavy hitters under a query/key shift: see `PlantedConfig`."""
    gen = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    slow = _slow_channels(config)
    direction = torch.zeros(KV_HEADS, config.num_topics, HEAD_DIM)
    direction[..., slow] = randn(KV_HEADS, config.num_topics, int(slow.sum()))
    direction = torch.nn.functional.normalize(direction, dim=-1) * STRENGTH
    offset = torch.nn.functional.normalize(randn(KV_HEADS, HEAD_DIM), dim=-1) * SHIFT

    places, planted = config.prefix_len - 2 * MARGIN, config.num_topics * config.hits_per_topic
    order = torch.stack([torch.randperm(places, generator=gen)[:planted] for _ in range(KV_HEADS)])
    hits = order.view(KV_HEADS, config.num_topics, config.hits_per_topic) + MARGIN
    keys = randn(KV_HEADS, config.prefix_len, HEAD_DIM) - offset[:, None]
    keys.scatter_add_(
        1,
        hits.flatten(1, 2)[..., None].expand(-1, -1, HEAD_DIM),
        direction.repeat_interleave(config.hits_per_topic, dim=1),
    )

    head = torch.arange(KV_HEADS)
    sample_topic = torch.randint(config.num_topics, (KV_HEADS, SAMPLES), generator=gen)
    samples = direction[head[:, None], sample_topic] + offset[:, None]
    samples = samples + NOISE * randn(*samples.shape)
    topics = torch.randint(config.num_topics, (ROWS, KV_HEADS, GQA), generator=gen)
    queries = direction[head[None, :, None], topics] + offset[None, :, None]
    queries = queries + NOISE * randn(*queries.shape)
    if config.rope_base:
        asked_at = torch.randint(config.prefix_len, (SAMPLES,), generator=gen)
        keys = rotate(keys, torch.arange(config.prefix_len), config.rope_base)
        samples = rotate(samples, asked_at, config.rope_base)
        decode_at = config.prefix_len + torch.arange(ROWS)
        queries = rotate(queries, decode_at[:, None, None].expand(queries.shape[:3]), config.rope_base)
    keys = keys.transpose(0, 1).contiguous()
    return PlantedPrefix(keys, samples, queries.flatten(1, 2), hits, topics.flatten(1, 2), HEAD_DIM**-0.5)


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary embedding of x [..., head_dim] at positions [...], neox layout (channel i turns with i + head_dim / 2)."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half) / half)
    angle = positions[..., None] * frequency
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1)


class AttnState(NamedTuple):
    """Attention over some keys: out [num_rows, num_qo_heads, v_head_dim] fp64, lse [num_rows, num_qo_heads] fp32,
    natural log of the sum of exp(sm_scale * q.k).
    """

    out: Tensor
    lse: Tensor


def dense_attention(q: Tensor, keys: Tensor, values: Tensor, sm_scale: float) -> AttnState:
    """The oracle: attention of q [num_rows, num_qo_heads, head_dim] over all keys and values [seq_len, num_kv_heads,
    dim] in fp64, seq_len 0 allowed; results in fp64 (out) and fp32 (lse, natural log)."""
    scores = _scores(q, keys) * sm_scale
    lse = scores.logsumexp(dim=-1)
    weight = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    gqa = q.shape[1] // keys.shape[1]
    out = torch.einsum("rhn,nhd->rhd", weight, values.double().repeat_interleave(gqa, dim=1))
    return AttnState(out, lse.float())


def attention_mass(q: Tensor, keys: Tensor, sm_scale: float) -> Tensor:
    """Attention probabilities [num_rows, num_qo_heads, prefix_len] fp64 over all keys."""
    return (_scores(q, keys) * sm_scale).softmax(dim=-1)


def attention_recall(q: Tensor, keys: Tensor, selection: Selection, sm_scale: float) -> Tensor:
    """Share of each row's attention mass that the selected positions hold (AB-Sparse, 2.3).

    Returns:
        [num_rows, num_qo_heads] fp64 in 0..1.
    """
    mass = attention_mass(q, keys, sm_scale)
    num_kv_heads = selection.num_kv_heads
    column = torch.arange(selection.max_count, device=selection.positions.device)
    valid = column < selection.counts[:, None]
    taken = torch.zeros(num_kv_heads, keys.shape[0] + 1, dtype=mass.dtype, device=mass.device)
    taken.scatter_(1, torch.where(valid, selection.positions, keys.shape[0]).long(), 1.0)
    gqa = q.shape[1] // num_kv_heads
    return (mass * taken[:, :-1].repeat_interleave(gqa, dim=0)).sum(dim=-1)


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    gqa = q.shape[1] // keys.shape[1]
    return torch.einsum("rhd,nhd->rhn", q.double(), keys.double().repeat_interleave(gqa, dim=1))


def _slow_channels(config: PlantedConfig) -> Tensor:
    """Bool [head_dim]: channels that turn less than half a radian over the prefix; all without RoPE."""
    if not config.rope_base:
        return torch.ones(HEAD_DIM, dtype=torch.bool)
    half = HEAD_DIM // 2
    slow = torch.arange(half) >= math.ceil(half * math.log(2 * config.prefix_len) / math.log(config.rope_base))
    return torch.cat([slow, slow])
