"""Naive selection, from the reference operations: what the papers' kernels, and ours, are compared with.

`loops` works KV head by KV head, since their blocks differ in size, and materialises dequantized representations
(the naive form of AB-Sparse, 4.4); `vector` does all KV heads of one block size at once. The oracle is another road:
blocks' bounds channel by channel, and everything in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from kernel_problem import Gate
from torch import Tensor

from prefix_kernels.block_scores import block_scores_mean_reference, block_scores_minmax_reference
from prefix_kernels.budget import budget_for_group
from prefix_kernels.low_bit import LowBitTensor, dequantize, quantize
from prefix_kernels.pooling import log_shares, pool_scores
from prefix_kernels.top_k_selection import top_k_selection_reference
from prefix_kernels.types import Selection

if TYPE_CHECKING:
    from prefix_kernels.grouped_attention import AttentionShape

BLOCK_SIZES = (16, 32, 64)
"""Of the KV heads, in turn: a third of the heads has each."""
TOKEN_CHANNELS = 32
KEEP, NUM_SINK, NUM_RECENT = 0.05, 16, 64

#: Largest error of a log-probability, in natural-log units: products and sums of some hundred terms in fp32.
SCORE_LIMIT = 1e-3
_ORACLE_ELEMENTS = 1 << 24


class Inputs:
    """A layer's queries and quantized blocks, the same for both forms.

    Attributes:
        sum_every: of how few candidates the sums of a softmax are, see `log_shares`.
        unit_rows: query rows that a kernel rounds to INT8 in one unit; 0: it takes fp16.

    Args:
        shape: of the layer.
        batch: requests of one group.
        prefix_len: tokens, a multiple of the largest block.
        device: where everything lies.
        tokens: INT4 tokens in place of INT4 blocks.
        channels: of a token that are kept.
        block_sizes: the KV heads have these in turns.
    """

    sum_every = 1
    unit_rows = 0

    def __init__(
        self,
        shape: AttentionShape,
        batch: int,
        prefix_len: int,
        device: torch.device,
        *,
        tokens: bool = False,
        channels: int = TOKEN_CHANNELS,
        block_sizes: tuple[int, ...] = BLOCK_SIZES,
    ) -> None:
        if prefix_len % max(BLOCK_SIZES):
            raise ValueError(f"expected prefix_len as a multiple of {max(BLOCK_SIZES)} tokens, got {prefix_len}")
        gen = torch.Generator(device).manual_seed(prefix_len + batch)
        heads, dim = shape.num_kv_heads, channels if tokens else shape.head_dim
        dim = min(dim, shape.head_dim)
        self.shape, self.prefix_len, self.sm_scale = shape, prefix_len, shape.head_dim**-0.5
        self.q = torch.randn(batch, shape.num_qo_heads, dim, generator=gen, device=device).to(shape.dtype)
        self.sizes = [1] * heads if tokens else [block_sizes[h % len(block_sizes)] for h in range(heads)]
        self.parts: list[tuple[LowBitTensor, ...]] = []
        for size in self.sizes:
            keys = torch.randn(prefix_len, dim, generator=gen, device=device)
            if tokens:
                self.parts.append((quantize(keys, 4),))
            else:
                low, high = keys.view(-1, size, dim).aminmax(dim=1)
                self.parts.append((quantize(low, 4), quantize(high, 4)))

    @property
    def nbytes(self) -> int:
        """Codes, scales and zeros."""
        return sum(t.nbytes for head in self.parts for part in head for t in part)

    def tile(self, head: int, num: int = 1) -> Tensor:
        """Queries of some KV heads, [batch, num * gqa, dim]."""
        return self.q[:, head * self.shape.gqa : (head + num) * self.shape.gqa]

    def by_size(self) -> Iterator[tuple[int, list[int]]]:
        """Block sizes and the KV heads that have them."""
        for size in sorted(set(self.sizes)):
            yield size, [h for h, own in enumerate(self.sizes) if own == size]

    def oracle(self, head: int) -> Tensor:
        """Pooled log-probabilities [num_blocks] of one KV head in fp64, rows in chunks."""
        parts = [dequantize(part).double() for part in self.parts[head]]
        rows = self.tile(head).double().flatten(0, 1)
        best: Tensor | None = None
        step = max(1, _ORACLE_ELEMENTS // parts[0].numel())
        for some in rows.split(step):
            products = [some[:, None] * part for part in parts]
            bound = products[0] if len(products) == 1 else torch.maximum(*products)
            own = log_shares(bound.sum(dim=2) * self.sm_scale, self.sum_every).amax(dim=0)
            best = own if best is None else torch.maximum(best, own)
        if best is None:
            raise ValueError("expected a batch of one request or more, got none")
        return best


class Estimation:
    """Queries and quantized representations -> scores pooled over the group's rows, per KV head."""

    eager_too = True

    def __init__(self, inputs: Inputs, form: str) -> None:
        self._inputs = inputs
        self.run = {"loops": self._loops, "vector": self._vector}[form]
        device = inputs.q.device
        self.scores = [torch.empty(inputs.prefix_len // size, device=device) for size in inputs.sizes]
        self.nbytes = inputs.nbytes
        self.config: dict[str, Any] = {"block_sizes": sorted(set(inputs.sizes))}
        self._by_size = [
            (size, heads, [_stacked([inputs.parts[h][i] for h in heads]) for i in range(len(inputs.parts[0]))])
            for size, heads in inputs.by_size()
        ]
        index = [
            [h * inputs.shape.gqa + i for h in heads for i in range(inputs.shape.gqa)] for _, heads in inputs.by_size()
        ]
        self._columns = [torch.tensor(own, device=device) for own in index]

    def poison(self) -> None:
        """NaN where a score is expected."""
        for scores in self.scores:
            scores.fill_(torch.nan)

    def _loops(self) -> None:
        for head, scores in enumerate(self.scores):
            parts = [dequantize(part)[None] for part in self._inputs.parts[head]]
            scores.copy_(pool_scores(_raw(self._inputs.tile(head), parts), self._inputs.sm_scale)[0])

    def _vector(self) -> None:
        for (_, heads, stacked), columns in zip(self._by_size, self._columns, strict=True):
            raw = _raw(self._inputs.q[:, columns], [dequantize(part) for part in stacked])
            for head, pooled in zip(heads, pool_scores(raw, self._inputs.sm_scale), strict=True):
                self.scores[head].copy_(pooled)

    def check(self) -> Gate:
        """Largest error of a log-probability within a factor e^8 of the best one; lower ones never rank."""
        worst = 0.0
        for head, scores in enumerate(self.scores):
            wanted = self._inputs.oracle(head)
            error = (scores.double() - wanted).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            worst = max(worst, float(error[wanted > wanted.max() - 8.0].max()))
        return Gate(worst / SCORE_LIMIT, {"log_prob": worst})


class TopK:
    """Scores per KV head -> ascending token positions under the budget, sink and recent window included."""

    eager_too = True

    def __init__(self, scores: list[Tensor], sizes: list[int], prefix_len: int, batch: int, form: str) -> None:
        budget = budget_for_group(max(NUM_SINK + NUM_RECENT + 16, round(KEEP * prefix_len)), batch)
        self._scores, self._sizes, self._prefix_len = scores, sizes, prefix_len
        self._budget = min(budget, prefix_len)
        self.run = {"loops": self._loops, "vector": self._vector}[form]
        self.positions = torch.empty(len(scores), self._budget, dtype=torch.int32, device=scores[0].device)
        self.nbytes = sum(own.nbytes for own in scores)
        self.config: dict[str, Any] = {"budget": self._budget, "num_sink": NUM_SINK, "num_recent": NUM_RECENT}

    def poison(self) -> None:
        """Positions that are none."""
        self.positions.fill_(-1)

    def _selected(self, heads: list[int], size: int) -> Tensor:
        scores = torch.stack([self._scores[h] for h in heads])
        found = top_k_selection_reference(scores, self._budget, NUM_SINK, NUM_RECENT, size, self._prefix_len)
        return found.positions

    def _loops(self) -> None:
        for head, size in enumerate(self._sizes):
            self.positions[head] = self._selected([head], size)[0]

    def _vector(self) -> None:
        for size in sorted(set(self._sizes)):
            heads = [h for h, own in enumerate(self._sizes) if own == size]
            for head, positions in zip(heads, self._selected(heads, size), strict=True):
                self.positions[head].copy_(positions)

    def check(self) -> Gate:
        """Positions valid and windows complete; the tokens outside have the best scores there are, as a multiset."""
        heads, length = len(self._scores), self._prefix_len
        counts = torch.full((heads,), self._budget, dtype=torch.int32, device=self.positions.device)
        try:
            Selection(self.positions, counts).check_integrity(length)
        except ValueError as error:
            return Gate(math.inf, {"broken": math.inf, str(error): math.inf})
        wrong = 0
        token = torch.arange(length, device=self.positions.device)
        free = (token >= NUM_SINK) & (token < length - NUM_RECENT)
        for head, size in enumerate(self._sizes):
            taken = torch.zeros(length, dtype=torch.bool, device=token.device)
            taken[self.positions[head].long()] = True
            if self._budget == length:
                wrong += int((~taken).sum())
                continue
            scores = self._scores[head].double().repeat_interleave(size)[:length]
            best = scores[free].sort(descending=True).values[: self._budget - NUM_SINK - NUM_RECENT]
            got = scores[free & taken].sort(descending=True).values
            missing = int((~taken & ~free).sum())
            wrong += missing + (int((got != best).sum()) if got.shape == best.shape else length)
        return Gate(math.inf if wrong else 0.0, {"wrong_tokens": float(wrong)})


class Both:
    """An anchor's work: estimation, then top-k on its scores."""

    eager_too = True

    def __init__(self, estimation: Estimation, top_k: TopK) -> None:
        self._parts = (estimation, top_k)
        self.nbytes = estimation.nbytes
        self.config = {**estimation.config, **top_k.config}

    def poison(self) -> None:
        """Both."""
        for part in self._parts:
            part.poison()

    def run(self) -> None:
        """Both."""
        for part in self._parts:
            part.run()

    def check(self) -> Gate:
        """The worse one."""
        gates = [part.check() for part in self._parts]
        figures = {name: value for gate in gates for name, value in gate.figures.items()}
        return Gate(max(gate.error for gate in gates), figures)


def _raw(q: Tensor, parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return block_scores_mean_reference(q, parts[0])
    return block_scores_minmax_reference(q, *parts)


def _stacked(parts: list[LowBitTensor]) -> LowBitTensor:
    return LowBitTensor(*(torch.stack(own) for own in zip(*parts, strict=True)))


def _estimation(form: str, tokens: bool) -> Callable[..., Estimation]:
    def build(shape: AttentionShape, batch: int, prefix_len: int, device: torch.device) -> Estimation:
        return Estimation(Inputs(shape, batch, prefix_len, device, tokens=tokens), form)

    return build


def _top_k(form: str) -> Callable[..., TopK]:
    def build(shape: AttentionShape, batch: int, prefix_len: int, device: torch.device) -> TopK:
        gen = torch.Generator(device).manual_seed(prefix_len + batch)
        sizes = [BLOCK_SIZES[h % len(BLOCK_SIZES)] for h in range(shape.num_kv_heads)]
        scores = [torch.randn(prefix_len // size, generator=gen, device=device) for size in sizes]
        return TopK(scores, sizes, prefix_len, batch, form)

    return build


def _anchor(form: str, tokens: bool) -> Callable[..., Both]:
    def build(shape: AttentionShape, batch: int, prefix_len: int, device: torch.device) -> Both:
        inputs = Inputs(shape, batch, prefix_len, device, tokens=tokens)
        estimation = Estimation(inputs, form)
        return Both(estimation, TopK(estimation.scores, inputs.sizes, prefix_len, batch, form))

    return build


NAIVE: dict[str, Callable[..., Any]] = {
    **{f"estimation/{form}": _estimation(form, tokens=False) for form in ("loops", "vector")},
    **{f"top_k/{form}": _top_k(form) for form in ("loops", "vector")},
    **{f"token_estimation/{form}": _estimation(form, tokens=True) for form in ("loops", "vector")},
    **{f"anchor/blocks_{form}": _anchor(form, tokens=False) for form in ("loops", "vector")},
    **{f"anchor/tokens_{form}": _anchor(form, tokens=True) for form in ("loops", "vector")},
}
