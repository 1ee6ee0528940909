"""Whether the weights on a device are still what they were: a digest that is computed where they are."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from sglang_ext.ranks import Ranks

logger = logging.getLogger(__name__)

_WORDS = 1 << 20
"""64-bit words that are hashed at a time: three buffers of 8 MiB, which stay in a GPU's cache."""
_WORD = 8


class ServedWeights:
    """The weights of this process's model, as they were when serving began.

    Args:
        read: gives (name, tensor) of all of them, in an order that is always the same.
        ranks: of this process.
    """

    def __init__(self, read: Callable[[], Iterable[tuple[str, Tensor]]], ranks: Ranks) -> None:
        self._read, self._ranks = read, ranks
        self._hash = WeightsDigest()
        self._at_start: bytes | None = None

    def note(self) -> None:
        """Serving begins with these. Reads all of them once."""
        self._at_start = self._digest()

    def unchanged(self, *, replaced: bool) -> bool:
        """Whether the weights of all ranks are shown to be those of the start. A collective.

        Args:
            replaced: this rank's were replaced, whatever they are now.
        """
        same = not replaced and self._at_start is not None and self._digest() == self._at_start
        kept = bool(self._ranks.least([int(same)])[0])
        if kept:
            logger.info("sparse attention: the weights are what they were before the update; indexes stay in use")
        return kept

    def _digest(self) -> bytes | None:
        try:
            return self._hash.of(self._read())
        except Exception as error:  # serving goes on: weights that cannot be compared count as changed
            logger.warning("sparse attention: the weights cannot be compared with those of the start: %s", error)
            return None


class WeightsDigest:
    """Digests of one set of tensors over and over; equal if, but for a chance of about 2^-32, all of their bytes are.

    Pieces of 8 MiB are hashed by NH (UMAC; Black, Halevi, Krawczyk, Krovetz, Rogaway, CRYPTO 1999, section 3.1), sums
    of products of the halves of (word + key) mod 2^64, under keys that this process alone knows; then SHA-256 of these
    sums with names, dtypes, shapes and strides. So what a device does is about six passes over its cache for one over
    its memory, and no tensor is copied.
    """

    def __init__(self) -> None:
        self._seed = secrets.randbits(62)

    def of(self, named: Iterable[tuple[str, Tensor]]) -> bytes:
        """The digest. Waits for the devices, once.

        Args:
            named: (name, tensor) of any dtype, layout in memory and device, in an order that is always the same.

        Raises:
            Exception: of a tensor whose bytes cannot be had (sparse ones, for instance), or a device without memory.
        """
        text = hashlib.sha256()
        sums: dict[torch.device, list[Tensor]] = {}
        pieces: dict[torch.device, _Pieces] = {}
        for name, tensor in _plain(named):
            text.update(f"{name} {tensor.dtype} {list(tensor.shape)} {tensor.stride()} {tensor.device}\n".encode())
            if tensor.is_meta or not tensor.numel():
                continue
            if tensor.device not in pieces:
                pieces[tensor.device], sums[tensor.device] = _Pieces(self._seed, tensor.device), []
            sums[tensor.device].extend(pieces[tensor.device].sums(tensor))
        for found in sums.values():
            text.update(torch.stack(found).cpu().numpy().tobytes())
        return text.digest()


class _Pieces:
    """Keys and buffers on one device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        keys = torch.randint(-(1 << 63), (1 << 63) - 1, (_WORDS,), generator=torch.Generator().manual_seed(seed))
        self._keys = keys.to(device)
        self._high, self._low = torch.empty_like(self._keys), torch.empty_like(self._keys)

    def sums(self, tensor: Tensor) -> Iterator[Tensor]:
        """One number for each piece of the memory that a tensor's elements span, gaps included."""
        storage, size = tensor.untyped_storage(), tensor.element_size()
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.storage_offset() * size
        end = begin + (last + 1) * size
        first = -(-begin // _WORD)
        words = max(0, end // _WORD - first)
        whole = torch.empty(0, dtype=torch.int64, device=tensor.device).set_(storage, first, (words,), (1,))
        yield from (self._sum(whole[at : at + _WORDS]) for at in range(0, words, _WORDS))
        inner = (first * _WORD, (first + words) * _WORD) if words else (begin, begin)
        for start, stop in ((begin, inner[0]), (inner[1], end)):
            if stop > start:  # bytes beside whole words
                rest = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
                    storage, start, (stop - start,), (1,)
                )
                yield self._sum(rest.to(torch.int64))

    def _sum(self, words: Tensor) -> Tensor:
        count = len(words)
        high, low = self._high[:count], self._low[:count]
        torch.add(words, self._keys[:count], out=high)
        torch.bitwise_and(high, 0xFFFFFFFF, out=low)
        torch.bitwise_right_shift(high, 32, out=high)
        return torch.mul(high, low, out=high).sum()


def _plain(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same with tensors that are made of others (quantized ones) taken apart."""
    for name, tensor in named:
        if hasattr(tensor, "__tensor_flatten__"):
            parts, context = tensor.__tensor_flatten__()
            yield from _plain((f"{name}.{part}", getattr(tensor, part)) for part in parts)
            yield f"{name}.{context!r}", torch.empty(0)
        else:
            yield name, tensor.detach()
