"""What requests of a round of lossless decode say next: the most probable token, or one that is drawn.

With a number e ~ Exp(1) for each token of the vocabulary, argmax(p / e) is a sample of p. A draft is drawn from a
sparse step's distribution. The exact step's token of the same place is drawn from the exact step's own, by the same
numbers. Both tokens are the same with a probability of at least (1 - TV) / (1 + TV), TV half the sum of the differences
of both distributions (Daliri, Musco, Suresh, 2408.07978). A request keeps the exact step's tokens. The numbers of a
place do not depend on the tokens before it, so the tokens kept are samples of the exact step's distribution, whatever
was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Sampling(NamedTuple):
    """How a request's tokens are drawn, as SGLang's sampling backends draw them.

    Attributes:
        temperature: above 0.
        top_k: at least 1; as many of the most probable tokens count.
        top_p: at most 1; tokens count as long as those before them have no more than this together.
        min_p: tokens count that have at least this part of the most probable one's.
        chained: whether `top_p` is of what `top_k` leaves, as in SGLang's batches with a `min_p` where flashinfer
            samples; else of all tokens.
    """

    temperature: float
    top_k: int
    top_p: float = 1.0
    min_p: float = 0.0
    chained: bool = False


class Draws:
    """Of one round.

    Args:
        sampling: per request; None: its most probable token.
    """

    def __init__(self, sampling: Sequence[Sampling | None]) -> None:
        self._sampling = sampling
        self._noise: dict[tuple[int, int], Tensor] = {}

    def tokens(self, logits: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
        """What is said next, by a step's logits.

        Args:
            logits: [rows, vocab_size] floating.
            places: per row, the request, and drafts that stand before it. The same place has the same numbers.

        Returns:
            [rows] int64, new memory.
        """
        tokens = logits.argmax(dim=-1)
        drawn = [row for row, (request, _) in enumerate(places) if self._sampling[request] is not None]
        if drawn:
            rows = placed(drawn, logits.device)
            tokens[rows] = self._drawn(logits[rows], [places[row] for row in drawn])
        return tokens

    def _drawn(self, logits: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
        """As `tokens`, of requests with a temperature. Writes over the logits."""
        size = logits.shape[1]
        asked = [one for request, _ in places if (one := self._sampling[request]) is not None]
        asked = [one._replace(top_k=min(one.top_k, size)) for one in asked]
        fields = placed(list(zip(*asked, strict=True)), logits.device, torch.float32)
        temperature, top_k, top_p, min_p, chained = fields[..., None]
        probs = logits.float().div_(temperature).softmax(dim=-1)
        some = [row for row, one in enumerate(asked) if one[1:4] != (size, 1.0, 0.0)]
        if some:
            rows = placed(some, logits.device)
            best, tokens = probs[rows].topk(max(asked[row].top_k for row in some))
            left = torch.arange(best.shape[1], device=probs.device) >= top_k[rows]
            most = top_p[rows]
            if any(asked[row].chained for row in some):
                most = most * torch.where(chained[rows] > 0, best.masked_fill(left, 0.0).sum(-1, keepdim=True), 1.0)
            left |= (best.cumsum(dim=-1) - best > most) | (best < best[:, :1] * min_p[rows])
            probs[rows] = 0.0
            probs[rows[:, None], tokens] = best.masked_fill_(left, 0.0)
        new = [place for place in places if place not in self._noise]
        made = probs.new_empty(len(new), size).exponential_().clamp_(min=torch.finfo(torch.float32).tiny)
        self._noise.update(zip(new, made, strict=True))
        return probs.div_(torch.stack([self._noise[place] for place in places])).argmax(dim=-1)


def placed(numbers: Sequence[object], device: torch.device | str, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers of the host on a device, without a wait for what runs there."""
    on_host = torch.tensor(numbers, dtype=dtype, pin_memory=torch.device(device).type == "cuda")
    return on_host.to(device, non_blocking=True)
