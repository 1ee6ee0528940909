"""An index of a request's suffix behind its prefix, made as the request grows.

Agents and long answers leave thousands of tokens behind a prefix that no stored index speaks of. Attending all of them
would cost what the index of the prefix saves. So from a limit on, what lies further back is selected from, too: by a
token index of the prefix's own channels, from the keys in the KV pool, which needs no queries.

What is indexed grows in steps of half the limit, each time anew from the pool, so that the units are those of all
tokens then. In sum that work grows with the square of the suffix tokens, over the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefix_kernels.types import PagedKV
from sglang_ext.config import PAGE_TOKENS
from sglang_ext.methods.token_index import index_behind
from sglang_ext.options import SparseAttnConfig
from sglang_ext.prefix.residency import LayerArrays, ResidentIndex


class SuffixIndex:
    """Of one request; to what selects it is an index like the prefix's, whose first token is the one behind that.

    Attributes:
        prefix: the prefix's index. Not owned.
        prefix_len: suffix tokens that are covered, from the first one on.
        layers: by layer, the arrays of `TokenIndexBuilder`; empty where they were not made.
    """

    def __init__(self, prefix: ResidentIndex, prefix_len: int) -> None:
        self.prefix = prefix
        self.prefix_len = prefix_len
        self.layers: list[LayerArrays] = [{} for _ in prefix.layers]

    @property
    def is_complete(self) -> bool:
        """Whether all layers name arrays."""
        return all(self.layers)

    def complete(self, layers: Sequence[int], kv: Callable[[int], PagedKV], slots: Tensor, dtype: torch.dtype) -> None:
        """Have the arrays of all layers that select; the others name those of one of them, which nobody reads there.
        Never waits for the device.

        Args:
            layers: that select.
            kv: layer -> its pool buffers.
            slots: [prefix_len] int64, of the covered tokens.
            dtype: of the model.
        """
        for layer in layers:
            if not self.layers[layer]:
                self.layers[layer] = index_behind(self.prefix.layers[layer], kv(layer).keys(slots, dtype))
        for number, arrays in enumerate(self.layers):
            if not arrays:
                self.layers[number] = self.layers[layers[0]]


@dataclass(frozen=True)
class SuffixRules:
    """When a request's suffix tokens have an index, and whose.

    Attributes:
        limit: of suffix tokens that are attended in full.
        nbytes: of all of a batch's own indexes, on the device.
        budget: tokens that a layer which selects attends of so many. An index of which it would attend all is none.
    """

    limit: int
    nbytes: int
    budget: Callable[[int], int]

    @classmethod
    def of(cls, config: SparseAttnConfig) -> SuffixRules | None:
        """By the settings; None where all suffix tokens are attended in full."""
        if config.suffix_dense_tokens is None:
            return None
        return cls(config.suffix_dense_tokens, config.suffix_index_bytes, config.budget)

    def covering(self, before: SuffixIndex | None, prefix: ResidentIndex, num_suffix: int) -> SuffixIndex | None:
        """The index that a request's suffix tokens have in a step; None where all of them are attended in full.

        Args:
            before: that of the step before.
            prefix: the index of what stands before these tokens.
            num_suffix: tokens behind the prefix, the one being decoded included. Where more than the limit are not
                covered, half of it, or some more, are left so.
        """
        covered = before.prefix_len if before is not None and before.prefix is prefix else 0
        if num_suffix - covered > self.limit:
            covered = (num_suffix - self.limit // 2) // PAGE_TOKENS * PAGE_TOKENS
            before = SuffixIndex(prefix, covered)
        return before if covered > self.budget(covered) else None

    def renew(
        self,
        before: Sequence[SuffixIndex | None],
        indexes: Sequence[ResidentIndex | None],
        seq_lens: Sequence[int],
    ) -> list[SuffixIndex | None]:
        """Per row of a step, the index of its suffix tokens: the longest have one, as far as bytes go.

        By the batch alone, so that all ranks have the same. Arrays are the caller's to make.

        Args:
            before: per row, what this returned for its request in the step before.
            indexes: per row, of its prefix; None: it selects nothing.
            seq_lens: tokens of each request, the one being decoded included.
        """
        wanted: list[tuple[int, int, SuffixIndex]] = []
        for row, (last, prefix, length) in enumerate(zip(before, indexes, seq_lens, strict=True)):
            own = None if prefix is None else self.covering(last, prefix, length - prefix.prefix_len)
            if own is not None:
                wanted.append((-own.prefix_len, row, own))
        found: list[SuffixIndex | None] = [None] * len(seq_lens)
        room = self.nbytes
        for _, row, own in sorted(wanted, key=lambda of: of[:2]):
            # About as many bytes a token as the prefix's index has.
            room -= -(-own.prefix.nbytes * own.prefix_len // own.prefix.prefix_len)
            if room >= 0:
                found[row] = own
        return found
