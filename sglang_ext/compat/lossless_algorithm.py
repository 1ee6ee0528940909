"""Lossless decode as SGLang knows it: a speculative algorithm of the scheduler, and of nothing else.

Drafts and their verification are ordinary decode steps of the one model: an exact step attends a request and its drafts
as so many rows of different lengths on the same slots. So the worker makes its model runner forget of speculation,
which would capture graphs of another forward mode; the scheduler must know of it, as a step gives several tokens.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from sglang_ext.compat import flags


class Lossless(CustomSpecAlgo):  # type: ignore[misc]
    """What SGLang asks of NGRAM, which has no draft model either, holds here, too."""

    create_future_map = SpeculativeAlgorithm.create_future_map

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False


def register() -> None:
    """Make the algorithm known to SGLang in this process."""
    if get_spec(flags.VERIFY) is None:
        SpeculativeAlgorithm.register(flags.VERIFY, supports_overlap=True, spec_class=Lossless)(_worker)


def _worker(_server_args: Any) -> type:
    from sglang_ext.compat.lossless_worker import LosslessWorker

    return LosslessWorker
