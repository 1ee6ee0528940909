"""An index of a request's own tokens behind its prefix, made as the request grows.

Agents and long answers leave thousands of tokens behind a prefix that no stored index speaks of. Attending all of them
would cost what the index of the prefix saves. So from a limit on, what lies further back is selected from, too: by a
token index of the prefix's own channels, from the keys in the KV pool, which needs no queries.

What is indexed grows in steps of half the limit, each time anew from the pool: to quantize keys costs less than a step
of decode, once in hundreds of steps, and the units are those of all tokens then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prefix_kernels.types import PagedKV
from sglang_ext.config import PAGE_TOKENS
from sglang_ext.indexing.token_index import index_behind
from sglang_ext.prefix.residency import LayerArrays, ResidentIndex


class PrivateIndex:
    """Of one request; to what selects it is an index like the prefix's, whose first token is the one behind that.

    Attributes:
        prefix: the prefix's index. Not owned.
        prefix_len: private tokens that are covered, from the first one on.
        layers: by layer, the arrays of `TokenIndexBuilder`; empty where they were not made.
    """

    def __init__(self, prefix: ResidentIndex, prefix_len: int) -> None:
        self.prefix = prefix
        self.prefix_len = prefix_len
        self.layers: list[LayerArrays] = [{} for _ in prefix.layers]

    def build(self, layer: int, kv: PagedKV, slots: Tensor, dtype: torch.dtype) -> None:
        """Have the arrays of a layer; nothing happens where they are there. Never waits for the device.

        Args:
            layer: its number.
            kv: its pool buffers.
            slots: [prefix_len] int64, of the covered tokens.
            dtype: of the model.
        """
        if not self.layers[layer]:
            self.layers[layer] = index_behind(self.prefix.layers[layer], kv.keys(slots, dtype))

    def complete(self, layers: Sequence[int], kv: Callable[[int], PagedKV], slots: Tensor, dtype: torch.dtype) -> None:
        """Have the arrays of all layers that select; the others name those of one of them, and never read them."""
        for layer in layers:
            self.build(layer, kv(layer), slots, dtype)
        for number, arrays in enumerate(self.layers):
            if not arrays:
                self.layers[number] = self.layers[layers[0]]


def covering(before: PrivateIndex | None, prefix: ResidentIndex, num_private: int, limit: int) -> PrivateIndex | None:
    """The index that a request's own tokens have now; None where all of them are attended in full.

    Args:
        before: that of the step before.
        prefix: the index of what stands before these tokens.
        num_private: tokens behind the prefix, the one being decoded included.
        limit: of tokens that are attended in full. Where they would be more, half of them, or some more, are left so.
    """
    covered = before.prefix_len if before is not None and before.prefix is prefix else 0
    if num_private - covered > limit:
        return PrivateIndex(prefix, (num_private - limit // 2) // PAGE_TOKENS * PAGE_TOKENS)
    return before if covered else None


def bytes_of(prefix: ResidentIndex, num_tokens: int) -> int:
    """Device bytes of an index of so many own tokens in all layers, about: by those of the prefix's."""
    return -(-prefix.nbytes * num_tokens // prefix.prefix_len)
