"""Reference of `merge_state`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prefix_kernels.types import AttnState


def merge_state_reference(states: Sequence[AttnState]) -> AttnState:
    """lse = log sum_i exp(lse_i); out = sum_i exp(lse_i - lse) * out_i, in fp32.

    Empty parts (lse_i = -inf) get weight 0 and their out_i is masked, since 0 * NaN is NaN.
    """
    lse = torch.stack([state.lse for state in states])
    out = torch.stack([state.out.float() for state in states])
    peak = lse.amax(dim=0)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weight = (lse - peak).exp()
    total = weight.sum(dim=0)
    out = out.masked_fill_((lse == -torch.inf)[..., None], 0.0)
    merged = (weight[..., None] * out).sum(dim=0) / total.masked_fill(total == 0, 1.0)[..., None]
    return AttnState(merged, peak + total.log())
