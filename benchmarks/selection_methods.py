"""The rows of the selection benchmark: the product's methods, combined recipes and rivals behind one interface.

A method builds a layer's arrays, then names positions for many tokens at once. Tokens are independent groups and KV
heads do not depend on each other, so the tokens' queries are put as further KV heads over copies of the arrays: one
call scores all tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefix_kernels.pooling import Pooling
from prefix_kernels.types import Selection
from sglang_ext.methods import make_builder, make_selector, parse_spec
from sglang_ext.methods.arrays import join_heads, split_heads, stored_bytes
from sglang_ext.methods.base import NO_PROFILE, IndexSpec, LayerProfile, SelectArgs, Selector


class Budget(NamedTuple):
    """Tokens per KV head at one keep ratio, with the windows inside it."""

    keep_ratio: float
    tokens: int
    num_sink: int
    num_recent: int


class Step(NamedTuple):
    """What the selections of a layer's tokens have in common."""

    prefix_len: int
    sm_scale: float
    pooling: Pooling
    budgets: tuple[Budget, ...]

    def args(self, budget: Budget) -> SelectArgs:
        """As selectors take it."""
        sizes = {"budget": budget.tokens, "num_sink": budget.num_sink, "num_recent": budget.num_recent}
        return SelectArgs(prefix_len=self.prefix_len, sm_scale=self.sm_scale, pooling=self.pooling, **sizes)


class LayerInput(NamedTuple):
    """What a layer's index is built from.

    Attributes:
        keys: [prefix_len, num_kv_heads, head_dim] fp32.
        samples: [num_kv_heads, num_samples, head_dim] fp32 or None.
        offline: the channels of an offline calibration, for a rival.
    """

    keys: Tensor
    samples: Tensor | None
    offline: LayerProfile


Arrays = Mapping[str, Tensor]


@dataclass
class Method:
    """A row's method.

    Attributes:
        name: of the row.
        kind: "oracle", "method" (of one paper), "combined" or "rival"; the winner is a method or combined.
        way: an index spec of the product; None: no index, see `unread_scores`.
        sum_every: of a token index, how few tokens enter the sums of its softmax.
        generator: of random choice.
    """

    name: str
    kind: str
    way: IndexSpec | None
    sum_every: int = 1
    generator: torch.Generator | None = None

    def describe(self) -> dict[str, Any]:
        """Parameters for the row."""
        return {"method": self.name} if self.way is None else self.way.to_dict()

    def build(self, given: LayerInput) -> tuple[Arrays, float]:
        """The layer's arrays and the seconds until the device has them."""
        begun = now(given.keys.device)
        arrays: Arrays = {}
        if self.way is not None:
            profile = given.offline if self.kind == "rival" else NO_PROFILE
            arrays = make_builder(self.way, profile).build_layer(given.keys, given.samples)
        return arrays, now(given.keys.device) - begun

    def stored(self, arrays: Arrays) -> float:
        """Bytes of one KV head's index. The oracle's keys are those of the KV itself."""
        return 0.0 if self.kind == "oracle" else stored_bytes(arrays)

    def index_read(self, arrays: Arrays, q: Tensor, step: Step, budget: Budget) -> float:
        """Bytes of the index that a step reads for one KV head, mean over tokens. `arrays`, `q`: see `as_heads`."""
        if self.way is None:
            return 0.0
        if self.kind == "oracle":
            return float(step.prefix_len * q.shape[2] * 2)
        return self.way.read_bytes(arrays, q, step.prefix_len, budget.tokens)

    def select(self, arrays: Arrays, q: Tensor, num_rows: int, step: Step) -> list[Selection]:
        """A selection for each budget, with a row for each token and KV head. `arrays`, `q`: see `as_heads`.

        Scores do not depend on the budget, so they are made once, except where a selector has a `select` of its own.
        """
        steps = [step.args(budget) for budget in step.budgets]
        if self.way is None:
            scores = unread_scores(self.name, num_rows, step.prefix_len, self.generator).to(q.device)
        else:
            selector = make_selector(self.way, self.sum_every)
            if type(selector).select is not Selector.select:
                return [selector.select(arrays, q, args) for args in steps]
            scores = selector.token_scores(arrays, q, steps[0])
        return [args.top_k(scores) for args in steps]


def unread_scores(name: str, num_rows: int, prefix_len: int, generator: torch.Generator | None) -> Tensor:
    """[num_rows, prefix_len] of what looks at no query: the later the better (StreamingLLM, 2309.17453), or random."""
    if name == "random":
        return torch.rand(num_rows, prefix_len, generator=generator)
    return torch.arange(prefix_len, dtype=torch.float32).expand(num_rows, -1)


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def as_heads(arrays: Arrays, q: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Tokens as KV heads: arrays of num_tokens * num_kv_heads heads and q [1, num_tokens * num_qo_heads, head_dim]."""
    tiled = join_heads(split_heads(arrays) * q.shape[0]) if arrays else {}
    return tiled, q.reshape(1, -1, q.shape[2])


OFFLINE_CHANNELS = 16
"""Of the Double Sparsity rival: a quarter of head_dim 64."""

CSA = {"method": "csattention"}
AB = {"method": "ab_sparse"}
TOKENS = {"method": "token_index", "channel_ratio": 1.0}
TOKENS48 = {**TOKENS, "num_channels": 48}
MINMAX = {**AB, "representation": "minmax"}
FIXED = {"method": "two_level", "candidate_factor": 1.0}
THIN_FIRST = {**FIXED, "first": {**CSA, "list_ratio": 0.02}, "candidate_ratio": 0.25}
"""CSAttention with short lists names candidates."""
BLOCKS_FIRST = {**FIXED, "first": MINMAX, "second": TOKENS, "candidate_ratio": 0.25}

DEFAULT = "tokens int4 48ch"
"""Row of the project's default recipe: a token index on 75% of the channels (head_dim 64: 48)."""

TWO_LEVEL = "csa > tokens48 .25"
"""Row of `two_level` with its defaults."""

SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "oracle": ("oracle", {"method": "exact"}),
    "csa": ("method", CSA),
    "csa paper layout": ("method", {**CSA, "codec": "paper"}),
    "csa paper m8 C64 a.2": (
        "method",
        {
            **CSA,
            "num_subspaces": 8,
            "num_centroids": 64,
            "list_ratio": 0.2,
            "codec": "paper",
            "baseline": "none",
            "weighting": "uniform",
        },
    ),
    "csa a.02": ("method", {**CSA, "list_ratio": 0.02}),
    "ab mean int4": ("method", AB),
    "ab minmax int4": ("method", MINMAX),
    "tokens int4": ("method", TOKENS),
    DEFAULT: ("method", TOKENS48),
    "tokens int2": ("method", {**TOKENS, "bits": 2}),
    TWO_LEVEL: ("combined", {"method": "two_level"}),
    "minmax > tokens .5": ("combined", {**BLOCKS_FIRST, "candidate_ratio": 0.5}),
    "minmax > tokens .25": ("combined", BLOCKS_FIRST),
    "csa > tokens48 .5": ("combined", {**THIN_FIRST, "second": TOKENS48, "candidate_ratio": 0.5}),
    "csa + ab": ("combined", {"method": "union", "first": CSA, "second": AB}),
    "quest": ("rival", {**MINMAX, "quantization": "none"}),
    "arkvale": ("rival", {**AB, "representation": "ball", "block_size": 32, "quantization": "none"}),
    "double sparsity int4": ("rival", {**TOKENS, "num_channels": OFFLINE_CHANNELS}),
}
"""Rows by name: kind and spec. `a > b`: b's scores among a's candidates; `a + b`: united at equal budget. Rivals whose
parts the product has: Quest (2406.10774), ArkVale (NeurIPS 2024), Double Sparsity (2408.07092).
"""

SAMPLED = {f"{DEFAULT}, sums 1/{every}": every for every in (8, 16, 32)}
"""Rows of the default recipe whose softmax sums a sample only: one token in so many."""


def make_methods(names: Sequence[str] | None, seed: int) -> list[Method]:
    """All methods, or those of these names.

    Args:
        names: None for all.
        seed: of random choice.

    Raises:
        ValueError: an unknown name.
    """
    methods = [Method(name, kind, parse_spec(data)) for name, (kind, data) in SPECS.items()]
    methods += [Method(name, "method", parse_spec(TOKENS48), every) for name, every in SAMPLED.items()]
    generator = torch.Generator().manual_seed(seed)
    methods += [Method(name, "rival", None, generator=generator) for name in ("streaming_llm", "random")]
    known = [method.name for method in methods]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"expected methods among {', '.join(known)}, got {unknown[0]!r}; correct the name")
    return [method for method in methods if names is None or method.name in names]
