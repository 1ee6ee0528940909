"""What `offload.py prefill` measures: exact attention of requests' suffixes behind one prefix in host memory.

All layers of a forward one after another, without the rest of a model: what is left of the link's time would be hidden
by that, or not. Host pages of the prefix lie side by side, as they are given out. Queries are large, so that a few keys
have most of the weight: a piece that is missing is seen.

The gate looks at the layers' outputs, beside attention in fp32 over a gathered copy of the prefix and the suffix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kernel_problem import Gate
from offload_swap import pinned
from torch import Tensor

from prefix_kernels import PagedKV
from prefix_kernels.prefill_attention import Reference, Span
from prefix_kernels.residents import from_pages
from sglang_ext.config import PAGE_TOKENS
from sglang_ext.offload.attention import StagedAttention
from sglang_ext.offload.directory import Offload

#: Of a query's channels: a score's spread is this.
SPREAD = 4.0
#: Of the error's norm beside the output's.
ALLOWED = {torch.bfloat16: 0.01, torch.float16: 0.005, torch.float32: 1e-5}


@dataclass(frozen=True)
class PrefillSizes:
    """One row's sizes.

    Attributes:
        context: tokens of the prefix.
        suffix: new tokens of a request.
        requests: behind it.
        staging: tokens of a piece.
        layers: of the forward.
        qo_heads, heads, dim: query heads, KV heads and their width.
        dtype: of queries and KV.
    """

    context: int
    suffix: int
    requests: int
    staging: int
    layers: int
    qo_heads: int
    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """K and V of the prefix in all layers."""
        return 2 * self.layers * self.context * self.heads * self.dim * self.dtype.itemsize


class PinnedLayers:
    """A prefix in pinned memory, as a `HostPool` has it: only `layer` is asked for."""

    def __init__(self, sizes: PrefillSizes, device: torch.device, seed: int) -> None:
        gen = torch.Generator(device).manual_seed(seed)
        layer = (sizes.context // PAGE_TOKENS, sizes.heads, sizes.dim, sizes.dtype, gen)
        self.kv = [pinned(*layer) for _ in range(sizes.layers)]

    def layer(self, layer: int) -> Tensor:
        """See `HostPool.layer`."""
        return self.kv[layer]


class Prefill:
    """A case.

    Args:
        sizes: see there.
        host: the prefix, of as many tokens.
        device: of the suffixes.
        seed: of them.
        implementation: of `StagedAttention`.
    """

    def __init__(
        self, sizes: PrefillSizes, host: PinnedLayers, device: torch.device, seed: int, implementation: str | None
    ) -> None:
        self.sizes, self._host, self._device = sizes, host, device
        gen = torch.Generator(device).manual_seed(seed)
        new = sizes.requests * sizes.suffix

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen, device=device)

        pool = (2, PAGE_TOKENS + new, sizes.heads, sizes.dim)
        self._pools = [drawn(*pool).to(sizes.dtype) for _ in range(sizes.layers)]
        self._q = [(SPREAD * drawn(new, sizes.qo_heads, sizes.dim)).to(sizes.dtype) for _ in range(sizes.layers)]
        slots = (torch.randperm(new, generator=torch.Generator().manual_seed(seed)) + PAGE_TOKENS).to(device)
        self._spans = [
            Span(slice(at, at + sizes.suffix), slots[at : at + sizes.suffix]) for at in range(0, new, sizes.suffix)
        ]
        self._front = Offload("", sizes.context, torch.arange(sizes.context // PAGE_TOKENS))
        self._attention = StagedAttention(
            host,  # type: ignore[arg-type]
            sizes.staging,
            sizes.layers,
            device,
            implementation=implementation,
        )
        self._found: list[Tensor] = []
        self.layers, self.nbytes, self.config = 1, sizes.nbytes, dict[str, int]()  # a time is that of all layers

    def _kv(self, layer: int) -> PagedKV:
        return PagedKV(*self._pools[layer])

    def run(self) -> None:
        """A forward's plan, and all layers."""
        rows = torch.arange(self.sizes.requests * self.sizes.suffix)
        step = self._attention.plan(self._spans, [(self._front, rows)])
        scale = self.sizes.dim**-0.5
        self._found = [
            self._attention.run(step, self._q[layer], self._kv(layer), layer, scale)
            for layer in range(self.sizes.layers)
        ]

    def poison(self) -> None:
        """What places hold, and what nobody may read."""
        self._attention.places.fill_(torch.nan)
        for pool in self._pools:
            pool[:, :PAGE_TOKENS] = torch.nan

    def check(self) -> Gate:
        """The last run's outputs."""
        sizes, worst = self.sizes, 0.0
        for layer, found in enumerate(self._found):
            caches = [torch.cat([own.new_empty(sizes.context, *own.shape[1:]), own]) for own in self._pools[layer]]
            keys, values = (cache[: sizes.context] for cache in caches)
            from_pages(self._host.layer(layer).to(self._device), keys, values)
            before = torch.arange(sizes.context, device=self._device)
            spans = [Span(rows, torch.cat([before, sizes.context + slots])) for rows, slots in self._spans]
            oracle = Reference(spans, [], self._device)
            expected = oracle.own(self._q[layer], PagedKV(*caches), sizes.dim**-0.5).out
            error = (found.float() - expected).norm() / expected.norm()
            worst = max(worst, float(error.nan_to_num(torch.inf)))
        return Gate(worst / ALLOWED[sizes.dtype], {"error": worst})
