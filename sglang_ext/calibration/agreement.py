"""How far a server's next-token distributions are from another's, at the same tokens: teacher-forced agreement.

A file of `Steps` is what one request left (`sglang_ext.compat.forced_tokens`). All logarithms are natural.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_LEAST = 1e-12
"""Of the probability behind the top tokens: what rounding leaves of less is not known."""


@dataclass(frozen=True, eq=False)
class Steps:
    """One request's steps. Read only.

    Attributes:
        ids: [steps, top] int64, token ids of a step: the reference's best ones.
        logprobs: [steps, top] fp32, their log-probabilities.
        best: [steps] int64, the most probable token of each step.
        tokens: [steps] int64, what was generated.
        token_logprobs: [steps] fp32, its log-probability.
        rows: [steps] int64, requests that decoded in the step together.
    """

    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    best: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    token_logprobs: npt.NDArray[np.float32]
    rows: npt.NDArray[np.int64]


def load_steps(path: str | Path) -> Steps:
    """Read a file of steps; raises OSError where it is missing."""
    with np.load(path) as arrays:
        return Steps(**{name: arrays[name] for name in Steps.__dataclass_fields__})


def check_generated(path: str | Path, output_ids: Sequence[int]) -> None:
    """Raise ValueError unless a request generated what its file says: else its steps are not those of its tokens."""
    tokens = load_steps(path).tokens.tolist()
    if tokens != list(output_ids):
        raise ValueError(
            f"expected the tokens of {path} to be generated, got others: steps were lost or counted twice; prefill "
            "each request in one chunk (--chunked-prefill-size), and give the server room (--max-total-tokens)"
        )


def kl_divergence(reference: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """KL(reference || other) of each step in nats, over the reference's top tokens and all others as one bin.

    A lower bound of the divergence over the whole vocabulary, and never below 0.

    Args:
        reference: [steps, top] log-probabilities at the reference's own top tokens.
        other: [steps, top], at the same tokens.

    Returns:
        [steps] fp64.
    """
    log_p, log_q = reference.astype(np.float64), other.astype(np.float64)
    p, q = np.exp(log_p), np.exp(log_q)
    rest_p, rest_q = (np.maximum(1.0 - part.sum(axis=1), _LEAST) for part in (p, q))
    total = (p * (log_p - log_q)).sum(axis=1) + rest_p * np.log(rest_p / rest_q)
    return np.asarray(np.maximum(total, 0.0))


@dataclass(frozen=True)
class Agreement:
    """Means over steps.

    Attributes:
        steps: how many.
        kl: `kl_divergence`, nats.
        top1: share of steps whose most probable token is the reference's.
        delta: |log-probability of the forced token less the reference's|, nats.
    """

    steps: int
    kl: float
    top1: float
    delta: float


def agreement(reference: Steps, other: Steps, least_rows: int = 1) -> Agreement | None:
    """Compare two requests over the same tokens. The first token is left out: prefill made it.

    Args:
        reference: whose tokens were forced on the other.
        other: of the same steps.
        least_rows: only steps of `other` that so many requests or more decoded together.

    Returns:
        None where no step is left.

    Raises:
        ValueError: they generated different tokens.
    """
    if not np.array_equal(reference.tokens, other.tokens) or not np.array_equal(reference.ids, other.ids):
        raise ValueError("expected the reference's tokens forced on the other, got different ones; force them again")
    kept = other.rows >= least_rows
    kept[0] = False
    if not kept.any():
        return None
    return Agreement(
        steps=int(kept.sum()),
        kl=float(kl_divergence(reference.logprobs, other.logprobs)[kept].mean()),
        top1=float((reference.best == other.best)[kept].mean()),
        delta=float(np.abs(reference.token_logprobs - other.token_logprobs)[kept].mean()),
    )
