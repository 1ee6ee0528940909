"""The step of a build that takes all layers at once: cheaper where one layer's share is many small kernels.

A builder may have it (`PreparingBuilder`; CSAttention clusters queries there, combined methods pass it to their
parts). Whoever builds calls `prepare` once, then `build_layer` for every layer; both accept any builder. What a layer
is without the step and with it is the same: see `cosine_kmeans` for how equal on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from sglang_ext.methods.base import IndexBuilder

TOKENS_AT_ONCE = 1 << 17
"""Tokens, over all layers of a batch, that are built at once: device memory as for one layer of so long a prefix."""

Prepared = dict[str, Tensor]
"""Name -> [num_layers, num_kv_heads, ...]; of one layer, without the first dimension."""


@runtime_checkable
class PreparingBuilder(Protocol):
    """An `IndexBuilder` with a step for all layers."""

    def prepare(self, queries: Tensor | None) -> Prepared:
        """See the function `prepare`."""
        ...

    def build_layer(
        self, keys: Tensor, queries: Tensor | None, prepared: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """See the function `build_layer`."""
        ...


def prepare(builder: IndexBuilder, queries: Tensor | None) -> Prepared:
    """What `builder` computes of all layers' queries at once; empty for a builder that has no such step.

    Args:
        builder: of any layer; what a `LayerProfile` says is not used here.
        queries: [num_layers, num_kv_heads, num_samples, head_dim] as in `IndexBuilder.build_layer`; None without a
            sample. Read only.

    Raises:
        ValueError: shapes do not fit, or a value is NaN or infinite.
    """
    return builder.prepare(queries) if isinstance(builder, PreparingBuilder) else {}


def layer_batches(num_layers: int, prefix_len: int) -> list[range]:
    """Runs of neighbouring layers to build at once, as one layer with the KV heads of all of them.

    KV heads do not depend on each other, and the layers of a short prefix are so little work that what costs time is
    starting it: 2.6 of 4.2 ms a layer at 32,768 tokens on an H200.
    """
    size = max(1, TOKENS_AT_ONCE // prefix_len)
    return [range(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]


def at_layers(prepared: Mapping[str, Tensor], layers: range) -> Prepared:
    """What `prepare` computed, of layers that are built at once (views): their KV heads one after the other."""
    return {name: tensor[layers.start : layers.stop].flatten(0, 1) for name, tensor in prepared.items()}


def build_layer(
    builder: IndexBuilder, keys: Tensor, queries: Tensor | None, prepared: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """`IndexBuilder.build_layer` with what `prepare` of a builder of the same spec computed.

    Args:
        builder, keys, queries: as there.
        prepared: of this layer, or of those built at once (`at_layers`); empty to have the builder do that step itself.

    Raises:
        ValueError: as there, or `prepared` is of another shape.
    """
    if isinstance(builder, PreparingBuilder):
        return builder.build_layer(keys, queries, prepared or None)
    return builder.build_layer(keys, queries)
