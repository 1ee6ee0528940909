"""Whether the kernels compute here what the torch reference does: a tiny selection, and attention by its lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefix_kernels.grouped_attention import AttentionShape, Segment, default_config
from prefix_kernels.grouped_attention.reference import ReferenceAttention
from prefix_kernels.pooling import Pooling
from prefix_kernels.types import PagedKV, list_stride, new_lists, pack_lists
from sglang_ext.decode.select_op import ListSizes, OpContext, Selecting, graph_op, graph_refusal, selection_group
from sglang_ext.methods import make_builder, make_selector, method_specs
from sglang_ext.methods.base import LayerProfile, SelectArgs, summed_every
from sglang_ext.options import SparseAttnConfig

TOKENS, ROWS, BUDGET = 512, 2, 128
QO_HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
LEAST_AGREEMENT = 0.9
"""Of the positions that the reference selects. Kernels rank in coarser numbers, so that near-ties may swap."""
ERROR_BUDGET = {torch.float64: 1e-6, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest absolute error of an output against fp64 on unit-variance values, by the inputs' dtype, when the operation
computes in fp32 and its output is cast to that dtype."""


class SelfTest(NamedTuple):
    """What was found.

    Attributes:
        agreement: share of the reference's positions that the kernels selected; None: the method has no kernels.
        error: of attention, the greatest absolute difference over what the dtype allows.
    """

    agreement: float | None
    error: float

    @property
    def passed(self) -> bool:
        """Whether the kernels may be used."""
        return self.error <= 1.0 and (self.agreement is None or self.agreement >= LEAST_AGREEMENT)


class _Index:
    """One layer's arrays, as an index has them."""

    def __init__(self, arrays: Mapping[str, Tensor]) -> None:
        self.layers, self.prefix_len = [arrays], TOKENS


def run_self_test(config: SparseAttnConfig, dtype: torch.dtype, device: torch.device) -> SelfTest:
    """Run the configured method's kernels, and those of attention, on made-up numbers; compiles what it needs.

    Args:
        config: whose method.
        dtype: of queries, keys and values.
        device: a CUDA device; a CPU where Triton interprets.
    """
    gen = torch.Generator().manual_seed(0)

    def randn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=gen).to(device, dtype)

    shape = AttentionShape(QO_HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, dtype, dtype)
    q, kv = randn(ROWS, QO_HEADS, HEAD_DIM), PagedKV(randn(TOKENS, KV_HEADS, HEAD_DIM), randn(TOKENS, KV_HEADS, 64))
    slots = torch.randperm(TOKENS, generator=gen).to(device, torch.int32)
    agreement = None
    if graph_refusal(config.method) is None:
        agreement = _selected(config, shape, q, kv.keys(slots.long(), dtype), randn(KV_HEADS, 256, HEAD_DIM), slots)
    return SelfTest(agreement, _attended(shape, q, kv, slots))


def _selected(
    config: SparseAttnConfig, shape: AttentionShape, q: Tensor, keys: Tensor, samples: Tensor, slots: Tensor
) -> float:
    """Share of the reference's positions that the method's operation selects."""
    spec = method_specs(config)[config.method]
    builder = make_builder(spec, LayerProfile(block_sizes=(16, 64)))
    index: Any = _Index(builder.build_layer(keys, samples))
    (group,) = pack_lists([selection_group(config, TOKENS, BUDGET)], KV_HEADS)
    entries = KV_HEADS * list_stride(BUDGET)
    sizes = ListSizes(1, entries, ROWS, TOKENS, TOKENS + 4, 1)
    op = graph_op(spec, OpContext(shape, config, 1, sizes, q.device))
    op.number_of(index)
    op.plan(Selecting(ROWS, [tuple(range(ROWS))], [group]), [index])
    lists = new_lists(entries, (1, KV_HEADS), q.device, with_slots=True)
    op.run(ROWS, q, HEAD_DIM**-0.5, slots, 0, lists)
    args = SelectArgs(
        prefix_len=TOKENS,
        budget=BUDGET,
        num_sink=group.num_sink,
        num_recent=group.num_recent,
        sm_scale=HEAD_DIM**-0.5,
        pooling=Pooling(config.pooling),
    )
    wanted = make_selector(spec, summed_every(config)).select(index.layers[0], q, args).positions
    found = group.lists_in(lists.positions, KV_HEADS)
    same = sum(len({*one.tolist()} & {*other.tolist()}) for one, other in zip(wanted, found, strict=True))
    return same / (KV_HEADS * BUDGET)


def _attended(shape: AttentionShape, q: Tensor, kv: PagedKV, slots: Tensor) -> float:
    """Greatest difference from the reference over what the dtype allows."""
    from prefix_kernels.grouped_attention.runner import GroupedAttention

    kernels = GroupedAttention(shape, ROWS, [default_config(shape, ROWS)], q.device)
    outs = []
    for attention in (kernels, ReferenceAttention(ROWS)):
        out, lse = torch.full_like(q, torch.nan), torch.zeros(ROWS, QO_HEADS, device=q.device)
        attention.plan([Segment(tuple(range(ROWS)), TOKENS)])
        attention.run(q, kv, slots, HEAD_DIM**-0.5, out, lse)
        outs.append(out.float())
    worst = float((outs[0] - outs[1]).abs().max())
    return worst / ERROR_BUDGET[shape.dtype] if worst == worst else float("inf")
