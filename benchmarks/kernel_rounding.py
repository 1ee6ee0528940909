"""What rounded queries cost a low-bit score: an oracle that rounds as the kernel does, and what that may come to.

The kernel multiplies a query's channel by the channel's step and rounds the product to fp16, 11 bits; Hopper's own
rounds it to INT8, in one unit for all rows of a tile (`Inputs.unit_rows`). Codes are exact.
Keys in INT4 are far coarser. So a result is compared twice: with the oracle of rounded queries, to what arithmetic in
fp32 allows, and with the oracle proper, to that and what the rounding of these very queries and codes can do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from kernel_naive import Inputs
from torch import Tensor

from prefix_kernels.low_bit import LowBitTensor, dequantize, unpack_codes
from prefix_kernels.pooling import log_shares

_ORACLE_ELEMENTS = 1 << 24
_MOST = 65504
"""Of a product that Hopper's own kernel takes. What is more, or no number, counts as 0 there."""
_LEAST_UNIT = 2**-24
"""Of that kernel's exponents to base 2."""


def rounded_oracle(inputs: Inputs, head: int) -> Tensor:
    """As `Inputs.oracle`, in fp64, for queries that were rounded; for fp32 queries, which are not, the same."""
    keys = [dequantize(part).double() for part in inputs.parts[head]]
    best: Tensor | None = None
    step = max(1, _ORACLE_ELEMENTS // keys[0].numel())
    rows = inputs.tile(head).flatten(0, 1)
    rounded = [_rounded(rows, part, inputs.sm_scale, inputs.unit_rows) for part in inputs.parts[head]]
    for begin in range(0, len(rows), step):
        some = slice(begin, begin + step)
        products = [own[some, None] * of for own, of in zip(rounded, keys, strict=True)]
        # Of blocks the parts are the minimum and the maximum.
        bound = products[0] if len(products) == 1 else torch.where(rows[some, None] > 0, products[1], products[0])
        own = log_shares(bound.sum(dim=2) * inputs.sm_scale, inputs.sum_every).amax(dim=0)
        best = own if best is None else torch.maximum(best, own)
    if best is None:
        raise ValueError("expected a batch of one request or more, got none")
    return best


def rounding_limit(inputs: Inputs, head: int) -> float:
    """`rounding_of` a KV head's queries and codes."""
    return rounding_of(inputs.tile(head).flatten(0, 1), inputs.parts[head], inputs.sm_scale, inputs.unit_rows)


def rounding_of(rows: Tensor, parts: Sequence[LowBitTensor], sm_scale: float, unit_rows: int = 0) -> float:
    """How far rounded queries move the worst of all log-probabilities of a KV head, in natural-log units.

    Args:
        rows: [rows, channels] queries on the channels that the codes keep; fp32 ones are not rounded: 0.
        parts: codes of the candidates [candidates, bytes]: of their keys, or of blocks' minimum and maximum.
        sm_scale: multiplies q.k.
        unit_rows: rows that share a unit of INT8; 0: fp16.

    What a product x = query * step was rounded by is known: e. A candidate's score is off by the sum over channels of
    e times its codes, less what all candidates have in common: of variance sum over channels of e^2 * variance of the
    codes. Of n normal draws the largest is about sqrt(2 ln(2 n)) standard deviations.
    """
    if rows.dtype is torch.float32:
        return 0.0
    variance = torch.zeros(rows.shape[0], dtype=torch.float64, device=rows.device)
    for number, part in enumerate(parts):
        used = rows if len(parts) == 1 else rows.clamp(max=0) if number == 0 else rows.clamp(min=0)
        error = (_rounded(used, part, sm_scale, unit_rows) - used.double()) * part.scale.double()
        spread = unpack_codes(part.packed, part.bits).double().var(dim=0)
        variance += (error.square() * spread).sum(dim=1)
    draws = 2 * rows.shape[0] * len(parts[0].packed)
    return float(variance.max().sqrt()) * sm_scale * math.sqrt(2 * math.log(draws))


def _int8_units(rows: Tensor, part: LowBitTensor, sm_scale: float, unit_rows: int) -> tuple[Tensor, Tensor]:
    """fp32 products of queries and steps, and [rows, 1] the unit of a row's tile, as the kernel makes it."""
    x = rows.float() * part.scale
    x = torch.where(x.abs() <= _MOST, x, 0.0)
    largest = torch.cat([tile.abs().amax().expand(len(tile), 1) for tile in x.split(unit_rows)])
    least = _LEAST_UNIT / (sm_scale * math.log2(math.e))
    return x, (largest * torch.tensor(1 / 127, device=x.device)).clamp_min(least)


def half_a_unit(inputs: Inputs, head: int) -> float:
    """What rounding rows' sums to whole units may cost a pooled score, natural log; of fp16 queries nothing."""
    rows, (part,) = inputs.tile(head).flatten(0, 1), inputs.parts[head][:1]
    if not inputs.unit_rows or rows.dtype is torch.float32:
        return 0.0
    _, units = _int8_units(rows, part, inputs.sm_scale, inputs.unit_rows)
    return float(units.max()) * inputs.sm_scale / 2


def _rounded(rows: Tensor, part: LowBitTensor, sm_scale: float, unit_rows: int) -> Tensor:
    """Queries in fp64 as the kernel has them, divided by the step again."""
    if rows.dtype is torch.float32:
        return rows.double()
    if unit_rows:
        # To the bit as the kernel: fp32 products and units, and one rounding of their product.
        x, unit = _int8_units(rows, part, sm_scale, unit_rows)
        whole = (x.double() * (1.0 / unit).double()).round()
        return whole * unit.double() / part.scale.double()
    return (rows.float() * part.scale).half().double() / part.scale.double()
