"""Our selection kernels on the inputs of the naive forms: estimation, top-k, and both as an anchor layer's work.

`tokens_index` is the default recipe: the token index on 3/4 of the channels, scanned whole; with `sums16` its softmax
sums one token in 16. The other `tokens` are 32 channels, as the naive forms have them. `blocks` are of 16, 32 and 64
tokens, the KV heads in turns, `blocks16` of 16. `exact` is Kascade's anchor pass over the keys themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from kernel_naive import BLOCK_SIZES, NUM_RECENT, NUM_SINK, SCORE_LIMIT, Both, Estimation, Inputs, TopK
from kernel_problem import Gate
from kernel_rounding import half_a_unit, rounded_oracle, rounding_limit
from torch import Tensor

from prefix_kernels.anchor_selection import AnchorConfig, AnchorSelection, Form, default_config
from prefix_kernels.low_bit import LowBitTensor
from prefix_kernels.pooled_scores import PooledScores, ScoreConfig, ScoredGroup, ScoreShape, Source
from prefix_kernels.pooled_scores.tables import ScoreInputs
from prefix_kernels.top_k_selection import SelectionGroup, TopKSelection

if TYPE_CHECKING:
    from prefix_kernels.grouped_attention import AttentionShape

#: Scores of a KV head begin at multiples of this, so that they are read 16 bytes at a time.
_ALIGNED = 4


class OurEstimation(Estimation):
    """As the naive estimation, in two launches; the scores of all heads lie in one arena."""

    eager_too = False

    def __init__(self, inputs: Inputs, block_m: int = 0) -> None:
        super().__init__(inputs, "loops")
        shape, batch, device = inputs.shape, inputs.q.shape[0], inputs.q.device
        tokens = len(inputs.parts[0]) == 1
        counts = tuple(len(head[0].packed) for head in inputs.parts)
        stride = -(-max(counts) // _ALIGNED) * _ALIGNED
        begins = tuple(stride * head for head in range(shape.num_kv_heads))
        self.arena = torch.empty(stride * shape.num_kv_heads, device=device)
        self.stride = stride
        self.scores = [self.arena[begin : begin + count] for begin, count in zip(begins, counts, strict=True)]
        # Naive parts are the minimum and the maximum; the kernel takes the maximum first.
        parts = [_joined([head[i] for head in inputs.parts]) for i in reversed(range(len(inputs.parts[0])))]
        arrays: list[Tensor | None] = [None]
        for part in parts:
            arrays += [part.packed, part.scale]
        first_rows = tuple(sum(counts[:head]) for head in range(shape.num_kv_heads))
        nothing = (0,) * shape.num_kv_heads
        config = _config(batch * shape.gqa, shape.num_kv_heads, device, block_m)
        source = Source.LOW_BIT if tokens else Source.MINMAX
        channels = parts[0].scale.shape[1]
        self.score_shape = ScoreShape(
            shape.num_qo_heads, shape.num_kv_heads, source, channels, sum_every=inputs.sum_every
        )
        self._scoring = PooledScores(self.score_shape, batch, 1, config, device)
        self.group = ScoredGroup(tuple(range(batch)), counts, first_rows, nothing, begins, tuple(arrays))
        self._scoring.plan([self.group])
        self.run = self._run
        self.config = {**self.config, **vars(config), "sum_every": inputs.sum_every}

    def _run(self) -> None:
        self._scoring.run(self._inputs.q, self.arena, self._inputs.sm_scale)

    def check(self) -> Gate:
        """Errors within a factor e^8 of the best: beside rounded queries, and beside the queries themselves."""
        share, figures = 0.0, {"log_prob": 0.0, "log_prob_rounded": 0.0, "rounding_limit": 0.0}
        for head, scores in enumerate(self.scores):
            rounding = rounding_limit(self._inputs, head)
            figures["rounding_limit"] = max(figures["rounding_limit"], rounding)
            for name, wanted, limit in (
                ("log_prob", self._inputs.oracle(head), SCORE_LIMIT + rounding + half_a_unit(self._inputs, head)),
                ("log_prob_rounded", rounded_oracle(self._inputs, head), SCORE_LIMIT + half_a_unit(self._inputs, head)),
            ):
                error = (scores.double() - wanted).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
                worst = float(error[wanted > wanted.max() - 8.0].max())
                figures[name] = max(figures[name], worst)
                share = max(share, worst / limit)
        return Gate(share, figures)


class OurTopK(TopK):
    """As the naive top-k, on an arena of scores; keys of 16 bits where scores are log-probabilities."""

    eager_too = False

    def __init__(
        self, arena: Tensor, stride: int, scores: list[Tensor], sizes: list[int], prefix_len: int, batch: int, bits: int
    ) -> None:
        super().__init__(scores, sizes, prefix_len, batch, "loops")
        heads, device = len(scores), arena.device
        programs = None if device.type == "cuda" else 2 * heads
        self._arena = arena
        self._select = TopKSelection(
            1, heads, prefix_len, self._budget, device, key_bits=bits, num_programs=programs, max_block_size=max(sizes)
        )
        group = SelectionGroup(prefix_len, self._budget, 0, stride, tuple(sizes), NUM_SINK, NUM_RECENT)
        self.group = group
        self._select.plan([group])
        self._lists = self._select.new_lists()
        self.positions = self._lists.positions[0]
        self.run = self._run
        self._bits = bits
        self.config["key_bits"] = bits

    def _run(self) -> None:
        self._select.run(self._arena, self._lists, pad=False)

    def check(self) -> Gate:
        """As the naive form's; scores are compared as the keys tell them apart: by steps, rounded down."""
        if self._bits == 32:
            return super().check()
        kept = self._scores
        steps = torch.tensor(65533 / 44.0, dtype=torch.float32, device=kept[0].device)
        self._scores = [((own.clamp(-44.0, 0.0) + 44.0) * steps).floor().clamp_max(65533.0) for own in kept]
        try:
            return super().check()
        finally:
            self._scores = kept


class OurAnchor(Both):
    """Estimation, then top-k: an anchor layer's lists."""

    eager_too = False


class JoinedAnchor(OurAnchor):
    """Both in one launch, or two; the checks are those of its parts. On a CPU in four, with two programs a KV head."""

    def __init__(
        self, inputs: Inputs, estimation: OurEstimation, top_k: OurTopK, config: AnchorConfig | None = None
    ) -> None:
        super().__init__(estimation, top_k)
        (batch, _, _), device, shape = inputs.q.shape, inputs.q.device, estimation.score_shape
        on_gpu = device.type == "cuda"
        capability = torch.cuda.get_device_capability(device) if on_gpu else (9, 0)
        halves = on_gpu and inputs.q.dtype is not torch.float32
        config = config or default_config(shape, batch, capability, specialized=halves)
        inputs.unit_rows = config.block_m if config.specialized else 0
        self._select = AnchorSelection(
            shape,
            batch,
            1,
            inputs.prefix_len,
            top_k.group.count,
            config,
            device,
            max_block_size=max(inputs.sizes),
            form=Form.JOINED if on_gpu else Form.SPLIT,
            num_programs=None if on_gpu else 2 * shape.num_kv_heads,
        )
        self._select.plan([estimation.group], [top_k.group])
        rows = batch * shape.gqa
        self._raw: Tensor | None = None
        if keep_raw(rows) and not config.specialized and inputs.sum_every == 1:
            room = torch.empty(1, shape.num_kv_heads, max(estimation.group.counts), rows, device=device)
            self._raw = room.transpose(2, 3)
        self._inputs = ScoreInputs(inputs.q, inputs.sm_scale, raw=self._raw)
        self._scores, self._lists = estimation.arena, self._select.new_lists()
        top_k.positions = self._lists.positions[0]
        sums = {"sum_every": inputs.sum_every}
        self.config = {**top_k.config, **vars(config), "raw_kept": self._raw is not None, **sums}

    def run(self) -> None:
        """One launch, or two."""
        self._select.run(self._inputs, self._scores, self._lists, pad=False)


def keep_raw(rows: int) -> bool:
    """Whether raw scores of a group's rows are written and read, in place of codes that are scored twice."""
    return 8 * rows <= 64


class Exact:
    """Scores from the keys themselves, in bf16 pages of one token; then top-k."""

    eager_too = False

    def __init__(self, shape: AttentionShape, batch: int, prefix_len: int, device: torch.device) -> None:
        gen = torch.Generator(device).manual_seed(prefix_len + batch)

        def randn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=gen, device=device).to(shape.dtype)

        self.inputs = _ExactInputs(shape, randn(batch, shape.num_qo_heads, shape.head_dim))
        self.keys = randn(prefix_len, shape.num_kv_heads, shape.head_dim)
        self._lists = torch.randperm(prefix_len, generator=torch.Generator().manual_seed(0)).to(device).int()
        stride = -(-prefix_len // _ALIGNED) * _ALIGNED
        begins = tuple(stride * head for head in range(shape.num_kv_heads))
        self.arena = torch.empty(stride * shape.num_kv_heads, device=device)
        self.scores = [self.arena[begin : begin + prefix_len] for begin in begins]
        nothing = (0,) * shape.num_kv_heads
        rows = batch * shape.gqa
        # Raw scores of few rows are kept, and read back in place of the keys.
        few = 8 * rows <= 2 * shape.head_dim
        self._raw = torch.empty(1, shape.num_kv_heads, prefix_len, rows, device=device).transpose(2, 3) if few else None
        config = _config(rows, shape.num_kv_heads, device, 0)
        self._scoring = PooledScores(
            ScoreShape(shape.num_qo_heads, shape.num_kv_heads, Source.KEYS, shape.head_dim), batch, 1, config, device
        )
        counts = (prefix_len,) * shape.num_kv_heads
        self._scoring.plan([ScoredGroup(tuple(range(batch)), counts, nothing, nothing, begins)])
        sizes = [1] * shape.num_kv_heads
        self._top_k = OurTopK(self.arena, stride, self.scores, sizes, prefix_len, batch, 16)
        self.nbytes = self.keys.nbytes
        self.config: dict[str, Any] = {**vars(config), **self._top_k.config, "raw_kept": few}

    def poison(self) -> None:
        """Scores and lists."""
        self.arena.fill_(torch.nan)
        self._top_k.poison()

    def run(self) -> None:
        """Two launches of scores, three of top-k."""
        q, sm_scale = self.inputs.q, self.inputs.sm_scale
        self._scoring.run(q, self.arena, sm_scale, k_cache=self.keys, lists=self._lists, raw=self._raw)
        self._top_k.run()

    def check(self) -> Gate:
        """The lists against the scores, the scores against fp64."""
        worst = 0.0
        for head, scores in enumerate(self.scores):
            wanted = self.inputs.oracle(head, self.keys[self._lists.long(), head])
            error = (scores.double() - wanted).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
            worst = max(worst, float(error[wanted > wanted.max() - 8.0].max()))
        lists = self._top_k.check()
        return Gate(max(worst / 1e-2, lists.error), {"log_prob": worst, **lists.figures})


class _ExactInputs:
    def __init__(self, shape: AttentionShape, q: Tensor) -> None:
        self.shape, self.q, self.sm_scale = shape, q, shape.head_dim**-0.5

    def oracle(self, head: int, keys: Tensor) -> Tensor:
        """Pooled log-probabilities [prefix_len] of one KV head in fp64, row by row."""
        best = torch.full((keys.shape[0],), -torch.inf, dtype=torch.float64, device=keys.device)
        gqa = self.shape.gqa
        for row in self.q[:, head * gqa : (head + 1) * gqa].flatten(0, 1):
            best = torch.maximum(best, (keys.double() @ row.double() * self.sm_scale).log_softmax(dim=0))
        return best


class TokenInputs(Inputs):
    """INT4 tokens on 3/4 of the channels."""

    def __init__(
        self, shape: AttentionShape, batch: int, prefix_len: int, device: torch.device, sum_every: int = 1
    ) -> None:
        super().__init__(shape, batch, prefix_len, device, tokens=True, channels=shape.head_dim * 3 // 4)
        self.sum_every = sum_every


def _config(rows: int, num_kv_heads: int, device: torch.device, block_m: int) -> ScoreConfig:
    """Two programs for every multiprocessor; on a CPU two for every KV head."""
    places = 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    block_m = block_m or min(64, max(16, 1 << (rows - 1).bit_length()))
    return ScoreConfig(block_m, 128, 4, 3, max(2, places // num_kv_heads))


def _joined(heads: list[LowBitTensor]) -> LowBitTensor:
    """Rows of all heads one after the other, scales head by head."""
    packed = torch.cat([head.packed for head in heads])
    return LowBitTensor(packed, torch.stack([h.scale for h in heads]), torch.stack([h.zero for h in heads]))


def _estimation(tokens: bool) -> Callable[..., OurEstimation]:
    def build(shape: AttentionShape, batch: int, prefix_len: int, device: torch.device) -> OurEstimation:
        return OurEstimation(Inputs(shape, batch, prefix_len, device, tokens=tokens))

    return build


def _top_k(shape: AttentionShape, batch: int, prefix_len: int, device: torch.device) -> OurTopK:
    gen = torch.Generator(device).manual_seed(prefix_len + batch)
    sizes = [BLOCK_SIZES[h % len(BLOCK_SIZES)] for h in range(shape.num_kv_heads)]
    stride = prefix_len // min(sizes)
    arena = torch.randn(stride * shape.num_kv_heads, generator=gen, device=device)
    scores = [arena[stride * head :][: prefix_len // size] for head, size in enumerate(sizes)]
    return OurTopK(arena, stride, scores, sizes, prefix_len, batch, 32)


def _anchor(inputs: Callable[..., Inputs]) -> Callable[..., OurAnchor]:
    def build(shape: AttentionShape, batch: int, prefix_len: int, device: torch.device) -> OurAnchor:
        made = inputs(shape, batch, prefix_len, device)
        ours = OurEstimation(made)
        return OurAnchor(ours, OurTopK(ours.arena, ours.stride, ours.scores, made.sizes, prefix_len, batch, 16))

    return build


def _joined_anchor(inputs: Callable[..., Inputs]) -> Callable[..., JoinedAnchor]:
    def build(shape: AttentionShape, batch: int, prefix_len: int, device: torch.device) -> JoinedAnchor:
        made = inputs(shape, batch, prefix_len, device)
        ours = OurEstimation(made)
        top_k = OurTopK(ours.arena, ours.stride, ours.scores, made.sizes, prefix_len, batch, 16)
        return JoinedAnchor(made, ours, top_k)

    return build


OURS: dict[str, Callable[..., Any]] = {
    "estimation/ours": _estimation(tokens=False),
    "top_k/ours": _top_k,
    "token_estimation/ours": _estimation(tokens=True),
    "anchor/blocks": _anchor(Inputs),
    "anchor/tokens": _anchor(lambda *of: Inputs(*of, tokens=True)),
    "anchor/tokens_index": _anchor(TokenInputs),
    "anchor/blocks_joined": _joined_anchor(Inputs),
    "anchor/blocks16_joined": _joined_anchor(lambda *of: Inputs(*of, block_sizes=(16,))),
    "anchor/tokens_index_joined": _joined_anchor(TokenInputs),
    "anchor/tokens_index_sums8": _joined_anchor(lambda *of: TokenInputs(*of, sum_every=8)),
    "anchor/tokens_index_sums16": _joined_anchor(lambda *of: TokenInputs(*of, sum_every=16)),
    "anchor/exact": Exact,
}
