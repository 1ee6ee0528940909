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


@dataclass(frozen=True, eq=False)
class PlantedPrefix:
    """A prefix with critical keys that only queries about their topic attend."""

    keys: Tensor
    """[prefix_len, num_kv_heads, head_dim] fp32."""
    values: Tensor
    """Same shape, unit variance."""
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
    """What `planted_prefix` makes; lengths in tokens, strengths in units of the noise's standard deviation.

    Attributes:
        prefix_len, num_kv_heads, gqa, head_dim, num_rows, num_samples: sizes.
        num_topics: clusters of queries per KV head.
        hits_per_topic: critical keys of each topic.
        span: critical keys stand in runs of this many neighbours (1: scattered).
        strength: length of a topic's direction in queries and critical keys. 0 plants nothing.
        shift: length of the constant that is added to every query and, negated, to every key: queries and
            keys are then two separate clouds (CSAttention, 2.4), while the content of the scores stays.
        noise: standard deviation of the query noise per channel.
        rope_base: 0 for none; else queries and keys are rotated by their position (neox halves) and topics
            live in the slow channels, as trained models keep content there.
        margin: positions at either end that hold no critical key.
        seed: of everything.
    """

    prefix_len: int = 8192
    num_kv_heads: int = 2
    gqa: int = 4
    head_dim: int = 64
    num_rows: int = 8
    num_samples: int = 2048
    num_topics: int = 32
    hits_per_topic: int = 32
    span: int = 1
    strength: float = 8.5
    shift: float = 12.0
    noise: float = 0.7
    rope_base: float = 0.0
    margin: int = 256
    seed: int = 0


def planted_prefix(config: PlantedConfig) -> PlantedPrefix:
    """Heavy hitters under a query/key shift: see `PlantedConfig`.

    Raises:
        ValueError: the critical keys do not fit between the margins.
    """
    c = config
    gen = torch.Generator().manual_seed(c.seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    slow = _slow_channels(c)
    direction = torch.zeros(c.num_kv_heads, c.num_topics, c.head_dim)
    direction[..., slow] = randn(c.num_kv_heads, c.num_topics, int(slow.sum()))
    direction = torch.nn.functional.normalize(direction, dim=-1) * c.strength
    offset = torch.nn.functional.normalize(randn(c.num_kv_heads, c.head_dim), dim=-1) * c.shift

    hits = _plant_positions(c, gen)
    keys = randn(c.num_kv_heads, c.prefix_len, c.head_dim) - offset[:, None]
    expanded = direction[:, :, None].expand(-1, -1, hits.shape[2], -1).flatten(1, 2)
    keys.scatter_add_(1, hits.flatten(1)[..., None].expand_as(expanded), expanded)

    sample_topic = torch.randint(c.num_topics, (c.num_kv_heads, c.num_samples), generator=gen)
    head = torch.arange(c.num_kv_heads)
    samples = direction[head[:, None], sample_topic] + offset[:, None]
    samples = samples + c.noise * randn(*samples.shape)
    topics = torch.randint(c.num_topics, (c.num_rows, c.num_kv_heads, c.gqa), generator=gen)
    queries = direction[head[None, :, None], topics] + offset[None, :, None]
    queries = queries + c.noise * randn(*queries.shape)
    if c.rope_base:
        asked_at = torch.randint(c.prefix_len, (c.num_samples,), generator=gen)
        keys = rotate(keys, torch.arange(c.prefix_len), c.rope_base)
        samples = rotate(samples, asked_at, c.rope_base)
        decode_at = c.prefix_len + torch.arange(c.num_rows)
        queries = rotate(queries, decode_at[:, None, None].expand(queries.shape[:3]), c.rope_base)
    keys = keys.transpose(0, 1).contiguous()
    return PlantedPrefix(
        keys, randn(*keys.shape), samples, queries.flatten(1, 2), hits, topics.flatten(1, 2), c.head_dim**-0.5
    )


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


def _slow_channels(c: PlantedConfig) -> Tensor:
    """Bool [head_dim]: channels that turn less than half a radian over the prefix; all without RoPE."""
    if not c.rope_base:
        return torch.ones(c.head_dim, dtype=torch.bool)
    half = c.head_dim // 2
    slowest = math.ceil(half * math.log(2 * c.prefix_len) / math.log(c.rope_base))
    if slowest >= half:
        raise ValueError(f"rope_base={c.rope_base} leaves no slow channel at {c.prefix_len} tokens; raise it")
    slow = torch.arange(half) >= slowest
    return torch.cat([slow, slow])


def _plant_positions(c: PlantedConfig, gen: torch.Generator) -> Tensor:
    """[num_kv_heads, num_topics, hits_per_topic] distinct positions in runs of `span`."""
    runs = -(-c.hits_per_topic // c.span)
    places = (c.prefix_len - 2 * c.margin) // c.span
    if c.num_topics * runs > places:
        raise ValueError(
            f"expected room for {c.num_topics * runs} runs of {c.span} critical keys, the prefix has "
            f"{places}; lower num_topics or hits_per_topic, or raise prefix_len"
        )
    order = torch.stack([torch.randperm(places, generator=gen) for _ in range(c.num_kv_heads)])
    start = order[:, : c.num_topics * runs].view(c.num_kv_heads, c.num_topics, runs, 1) * c.span + c.margin
    return (start + torch.arange(c.span)).flatten(2)[..., : c.hits_per_topic]
