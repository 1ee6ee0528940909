"""Acceptance of a real model's drafts in a server with random weights, which say nothing of how likely drafts are kept.

A plugin of SGLang. `answers.py --kept` records with it: responses say which of their drafts were kept. `decode.py`
replays with it. Rounds of lossless decode cost what they cost; which drafts are kept is replayed: of a request's n-th
draft, whether the n-th one of a real model's was kept, one request of these after the other, from another place on for
each row of a batch. The model goes on with the tokens that were kept.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from torch import Tensor

SETTINGS = "LOSSLESS_REPLAY"
"""Environment variable: argument of `Replay`; without it, drafts are recorded."""
_STEP = 977
"""Drafts between the places at which two rows of a batch begin."""


class Replay:
    """Which drafts are kept.

    Args:
        kept: of a real model's drafts one after the other, "1" where it was kept, else "0"; or the share that is kept.
    """

    def __init__(self, kept: str) -> None:
        if "." in kept:
            rng, share = random.Random(0), float(kept)
            kept = "".join("01"[rng.random() < share] for _ in range(1 << 16))
        self._kept = kept
        self._at: dict[int, int] = {}

    def counts(self, drafted: Sequence[int]) -> list[int]:
        """Drafts of a round that are kept, by those that each row of the batch made."""
        found = []
        for row, count in enumerate(drafted):
            at = self._at.setdefault(row, row * _STEP)
            bits = [self._kept[(at + n) % len(self._kept)] for n in range(count)]
            kept = len(list(takewhile("1".__eq__, bits)))
            self._at[row] = at + min(count, kept + 1)
            found.append(kept)
        return found

    def said(self, tokens: Tensor, drafted: Sequence[int], said: Tensor) -> Tensor:
        """What the exact step is made to say behind each row's token.

        Args:
            tokens: [rows], those of a round: of each request its last one, and its drafts.
            drafted: per request, its drafts: one less than its rows.
            said: [rows], what the exact step says; changed, and returned.
        """
        first = 0
        for kept, count in zip(self.counts(drafted), drafted, strict=True):
            said[first : first + kept] = tokens[first + 1 : first + 1 + kept]
            if kept < count:
                said[first + kept] = (tokens[first + kept + 1] + 1) % 1000 + 10
            first += count + 1
        return said


def judged(drafted: int, accepted: int) -> str:
    """A round's drafts as `Replay` takes them. Those behind the first one that was not kept are not judged."""
    return "1" * accepted + "0" * (accepted < drafted)


def record(forwards: Any, attachment: Any) -> None:
    """What a response says of lossless decode has `kept`, too: the request's drafts, as `Replay` takes them.

    Args:
        forwards, attachment: the plugin's classes. What they count is recorded: nothing of requests that ended.
    """
    verified, told = forwards.verified, attachment.told

    def noted(self: Any, rids: Sequence[str], *counts: Sequence[int]) -> None:
        found = [self.requests.get(rid) for rid in rids]
        before = [one and one.drafts for one in found]
        verified(self, rids, *counts)
        for one, drafts, *tokens in zip(found, before, *counts, strict=True):
            if one is not None and one.drafts != drafts:
                one.kept = getattr(one, "kept", "") + judged(*tokens)

    def judged_drafts(self: Any, tokens: int) -> dict[str, Any]:
        kept = getattr(self, "kept", "")
        while kept.count("1") > self.drafts[1]:  # behind the answer's end
            kept = kept[: kept.rindex("1")]
        return {**told(self, tokens), "kept": kept}

    forwards.verified = noted
    attachment.told = judged_drafts


def replay(kept: str) -> None:
    """What is kept of a round is replayed; `kept` as `Replay` has it."""
    from sglang_ext.compat import lossless_worker

    replayed, kept_of = Replay(kept), lossless_worker._kept

    def stead(said: Tensor, tokens: Tensor, counts: Sequence[int], *more: Any) -> Any:
        return kept_of(replayed.said(tokens, counts, said.clone()), tokens, counts, *more)

    lossless_worker._kept = stead


def register() -> None:
    """SGLang's plugin."""
    if SETTINGS in os.environ:
        replay(os.environ[SETTINGS])
        return
    from sglang_ext.forwards import Forwards
    from sglang_ext.prefix.requests import Attachment

    record(Forwards, Attachment)
