"""What CSAttention's build takes in: shapes and finite values, checked with one wait for the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sglang_ext.methods.base import not_finite, require_keys, require_samples


def check_layer(keys: Tensor, queries: Tensor | None, method: str) -> tuple[Tensor, float]:
    """The queries and the largest absolute value in the keys, if both are as `IndexBuilder.build_layer` wants them.

    The checks of `base` wait for the device once each, in every layer.

    Raises:
        ValueError: otherwise.
    """
    require_keys(keys)
    samples = require_samples(queries, keys, method)
    return samples, check_finite(keys=keys, queries=samples)["keys"]


def check_layers(queries: Tensor) -> None:
    """Raise unless `queries` is [num_layers, num_kv_heads, num_samples, head_dim], floating and finite."""
    if queries.dim() != 4 or 0 in queries.shape or not queries.dtype.is_floating_point:
        raise ValueError(
            "expected queries [num_layers, num_kv_heads, num_samples >= 1, head_dim] in a floating dtype, got "
            f"{tuple(queries.shape)} {queries.dtype}"
        )
    check_finite(queries=queries)


def check_finite(**tensors: Tensor) -> dict[str, float]:
    """The largest absolute value of each tensor, by name; one pass over each and one wait for the device.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    # The norm is NaN where a value is.
    norms = [torch.linalg.vector_norm(tensor, torch.inf).float() for tensor in tensors.values()]
    largest = dict(zip(tensors, torch.stack(norms).tolist(), strict=True))
    for name, value in largest.items():
        if not math.isfinite(value):
            raise not_finite(name)
    return largest
