"""An index of a request's own tokens behind its prefix, made as the request grows.

Agents and long answers leave thousands of tokens behind a prefix that no stored index speaks of. Attending all of them
would cost what the index of the prefix saves. So from a limit on, what lies further back is selected from, too: by a
token index of the prefix's own channels, from the keys in the KV pool, which needs no queries.

What is indexed grows in steps of half the limit, each time anew from the pool: to quantize keys costs less than a step
of decode, once in hundreds of steps, and the units are those of all tokens then.
"""

from __future__ import annotations

from torch import Tensor

from prefix_kernels.types import PagedKV
from sglang_ext.config import PAGE_TOKENS
from sglang_ext.indexing.token_index import index_behind
from sglang_ext.prefix.residency import LayerArrays, ResidentIndex


class PrivateIndex:
    """Of one request; to what selects it is an index like the prefix's, whose first token is the one behind that.

    Attributes:
        prefix: the prefix's index. Not owned.
        prefix_len: private tokens that are covered, from the first one on: 0 until there are enough.
        layers: by layer, the arrays of `TokenIndexBuilder`; only of layers that were asked for since it grew.
    """

    def __init__(self, prefix: ResidentIndex) -> None:
        self.prefix = prefix
        self.prefix_len = 0
        self.layers: dict[int, LayerArrays] = {}

    def grow(self, num_private: int, limit: int) -> None:
        """Cover more where the tokens that are not covered have become more than the limit.

        Args:
            num_private: tokens behind the prefix, the one being decoded included.
            limit: of tokens that are attended in full; half of it, or some more, are left so.
        """
        if num_private - self.prefix_len > limit:
            self.prefix_len = (num_private - limit // 2) // PAGE_TOKENS * PAGE_TOKENS
            self.layers.clear()

    def build(self, layer: int, kv: PagedKV, slots: Tensor, q: Tensor) -> None:
        """Have the arrays of a layer; nothing happens where they are there.

        Args:
            layer: its number.
            kv: its pool buffers.
            slots: [prefix_len] int64, of the covered tokens.
            q: queries, in the model's dtype.
        """
        if layer not in self.layers:
            self.layers[layer] = index_behind(self.prefix.layers[layer], kv.keys(slots, q.dtype))
