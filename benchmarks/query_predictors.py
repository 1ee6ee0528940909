"""Predictors of the next decode step's query from the queries of the steps before it: the references in plain torch.

Layers, rows of a batch and query heads are leading dimensions:
no value of one influences another. Nothing in serving uses a predictor; `query_prediction.py` measures them.

Source: AsyncSpade, 4.2 (ridge regression); the others are its rivals.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Predictor(ABC):
    """Predicts a query from those of the steps before."""

    @property
    @abstractmethod
    def reach(self) -> int:
        """Queries that are read, at most."""

    @abstractmethod
    def predict(self, queries: Tensor, held: Tensor) -> Tensor:
        """The next step's query.

        Args:
            queries: [..., num_lags >= 1, head_dim] floating, post-RoPE, newest first: that of lag i was computed i
                steps before the step that is predicted. Not written.
            held: int64, of the leading dimensions of `queries` or broadcast to them, each at least 1: how many of the
                lags exist. Behind them `queries` may hold anything, NaN included.

        Returns:
            [..., head_dim], new, in the dtype of `queries`.
        """


@dataclass(frozen=True)
class Combination(Predictor):
    """A linear combination of held queries, with weights whose sum is 1.

    Attributes:
        window: queries that are combined, at most.

    Raises:
        ValueError: a window below 1.
    """

    window: int

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"expected a window of at least 1 query, got {self.window}")

    @property
    def reach(self) -> int:
        return self.window

    def predict(self, queries: Tensor, held: Tensor) -> Tensor:
        queries = queries[..., : self.reach, :]
        exists = torch.arange(queries.shape[-2], device=queries.device) < held[..., None]
        queries = queries.where(exists[..., None], 0.0)
        weights = self.weights(queries, exists)
        return (weights[..., None, :] @ queries[..., : weights.shape[-1], :]).squeeze(-2)

    @abstractmethod
    def weights(self, queries: Tensor, exists: Tensor) -> Tensor:
        """What each lag counts.

        Args:
            queries: [..., num_lags <= reach, head_dim], zero where a lag does not exist.
            exists: bool [..., num_lags] or broadcast to it.

        Returns:
            [..., at most num_lags] in the dtype of `queries`, 0 for lags that do not exist.
        """


class Lag(Combination):
    """The query of lag `window`, used unchanged; the oldest one where there are fewer. Lag 1 is the last query."""

    def weights(self, queries: Tensor, exists: Tensor) -> Tensor:
        oldest = exists & ~torch.nn.functional.pad(exists, (0, 1))[..., 1:]
        return oldest.to(queries.dtype)


class Mean(Combination):
    """The mean of the last `window` queries."""

    def weights(self, queries: Tensor, exists: Tensor) -> Tensor:
        return _normalized(exists.to(queries.dtype))


class Exponential(Combination):
    """The exponential average of the last `window` queries: lag i counts (1 - a)^i, a = 2 / (window + 1)."""

    def weights(self, queries: Tensor, exists: Tensor) -> Tensor:
        lag = torch.arange(exists.shape[-1], device=queries.device, dtype=queries.dtype)
        return _normalized(exists * (1 - 2 / (self.window + 1)) ** lag)


class Linear(Combination):
    """The line of least squares through the last `window` queries, one step further; of two: 2 q_t - q_(t-1)."""

    def weights(self, queries: Tensor, exists: Tensor) -> Tensor:
        count = exists.sum(-1, keepdim=True).to(queries.dtype)
        lag = torch.arange(1, exists.shape[-1] + 1, device=queries.device, dtype=queries.dtype)
        slope = 6 * ((count + 1) / 2 - lag) / (count * (count - 1)).clamp(min=1)
        return (1 / count + slope) * exists


@dataclass(frozen=True)
class Ridge(Combination):
    """Softmax-normalised ridge regression, averaged over the windows 1 to `window`. Source: AsyncSpade, Eq. 2 to 5.

    With Q_t the newest query, window k solves (G + r I) w = b, G[i, j] = Q_(t-i) . Q_(t-j), b[i] = Q_(t-i) . Q_t, for i
    and j from 1 to k. The softmax of w weighs the queries one step later: lag i counts what regressed Q_t by Q_(t-i).
    Windows that reach behind the held queries do not exist; window 1 is always the last query.

    The sign is that of Eq. 2. Algorithm 1, line 16, prints softmax(-w), which weighs most what resembles Q_t least.

    Attributes:
        epsilon: r is epsilon times the mean squared length of the regressors. The paper's r is an absolute number that
            it does not give; queries of layers differ in length by more than a factor of ten.
    """

    epsilon: float = 0.01

    @property
    def reach(self) -> int:
        return self.window + 1

    def weights(self, queries: Tensor, exists: Tensor) -> Tensor:
        if queries.shape[-2] == 1:
            return torch.ones_like(queries[..., 0])
        solutions = self.solutions(queries)
        inside = torch.ones_like(solutions, dtype=torch.bool).tril()
        shares = solutions.masked_fill(~inside, -torch.inf).softmax(-1)
        windows = exists[..., 1:].clone()
        windows[..., 0] = True
        return (_normalized(windows.to(queries.dtype))[..., None, :] @ shares).squeeze(-2)

    def solutions(self, queries: Tensor) -> Tensor:
        """[..., num_lags - 1, num_lags - 1]: row k - 1 holds w of window k, zero behind its k entries.

        With G + r I = L L^T, the factor of a window is the leading part of L, and so is its inverse M. So
        w_k = M_k^T (M b)_k: the sum of the first k rows of M, row j times (M b)_j.
        """
        newest, before = queries[..., :1, :], queries[..., 1:, :]
        gram = before @ before.mT
        lengths = gram.diagonal(dim1=-2, dim2=-1)
        mean = lengths.sum(-1) / (lengths > 0).sum(-1).clamp(min=1)
        # A row without any regressor has a mean of 0; its factor must exist all the same.
        ridge = (self.epsilon * mean).where(mean > 0, 1.0)
        identity = torch.eye(gram.shape[-1], device=gram.device, dtype=gram.dtype)
        factor = torch.linalg.cholesky(gram + ridge[..., None, None] * identity)
        inverse = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
        projected = inverse @ (before @ newest.mT)
        return (projected * inverse).cumsum(-2)


@dataclass(frozen=True, eq=False)
class Rotated(Predictor):
    """Another predictor with RoPE undone and redone: each held query is turned to the position that is predicted.

    A query of lag i stands i positions before it. So it is turned by i positions, wherever the request is.

    Attributes:
        inner: gets the turned queries.
        frequencies: [head_dim / 2] radians a position, of RoPE that turns channels i and i + head_dim / 2 together.
    """

    inner: Predictor
    frequencies: Tensor

    @property
    def reach(self) -> int:
        return self.inner.reach

    def predict(self, queries: Tensor, held: Tensor) -> Tensor:
        queries = queries[..., : self.reach, :]
        lag = torch.arange(1, queries.shape[-2] + 1, device=queries.device, dtype=self.frequencies.dtype)
        return self.inner.predict(turned(queries, lag, self.frequencies), held)


def turned(vectors: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """RoPE of vectors [..., num_positions, head_dim] by so many positions [num_positions] further; negative undoes."""
    angle = (positions[:, None] * frequencies).to(vectors.dtype)
    cos, sin = angle.cos(), angle.sin()
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _normalized(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)
