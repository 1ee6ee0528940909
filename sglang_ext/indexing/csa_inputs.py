"""What CSAttention's build takes in: shapes and finite values, checked with one wait for the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_layer(keys: Tensor, queries: Tensor | None, method: str) -> tuple[Tensor, float]:
    """The queries and the largest absolute value in the keys, if both are as `IndexBuilder.build_layer` wants them.

    The checks of `base` wait for the device once each, in every layer.

    Raises:
        ValueError: otherwise.
    """
    if keys.dim() != 3 or 0 in keys.shape or not keys.dtype.is_floating_point:
        raise ValueError(
            "expected keys [prefix_len >= 1, num_kv_heads, head_dim] in a floating dtype, got "
            f"{tuple(keys.shape)} {keys.dtype}"
        )
    if queries is None:
        raise ValueError(
            f"{method} needs queries of the prefix's prefill, got none; record them, or choose a method that "
            "needs keys only"
        )
    _, num_kv_heads, head_dim = keys.shape
    if queries.dim() != 3 or (queries.shape[0], queries.shape[2]) != (num_kv_heads, head_dim) or 0 in queries.shape:
        raise ValueError(
            f"expected queries [num_kv_heads={num_kv_heads}, num_samples >= 1, head_dim={head_dim}], got "
            f"{tuple(queries.shape)}"
        )
    return queries, check_finite(keys=keys, queries=queries)["keys"]


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
            raise ValueError(f"expected finite {name}, got NaN or infinity; the capture is unusable, take it again")
    return largest
