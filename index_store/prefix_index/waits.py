"""What a composed store's ``get`` waits for, and the checks of what its users say about that."""

from __future__ import annotations

import math
from enum import Enum

from .errors import InvalidPayload


class Wait(str, Enum):
    """What ``get`` does while an index is only in the slow tier (SGLang HiCache's words).

    ``best_effort``    serves from slow at once, copies to fast in the background
    ``wait_complete``  copies to fast first, serves that; from slow where copying failed
    ``timeout``        as ``wait_complete``, for at most ``timeout_s`` seconds
    """

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


def wait_of(word: Wait | str) -> Wait:
    """The policy of that name. Raises InvalidPayload."""
    try:
        return Wait(word)
    except ValueError:
        words = " or ".join(w.value for w in Wait)
        raise InvalidPayload("wait", expected=words, found=repr(word), remedy="choose one of them") from None


def check_seconds(name: str, seconds: float) -> None:
    """Raises InvalidPayload unless ``seconds`` is finite and not negative."""
    if not (math.isfinite(seconds) and seconds >= 0):
        expected, found = "finite seconds, 0 or more", repr(seconds)
        raise InvalidPayload(name, expected=expected, found=found, remedy="correct it")
