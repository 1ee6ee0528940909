"""Whether kernels run in Triton's interpreter; where they do, a third faster for whoever imports this."""

from __future__ import annotations

import os
from inspect import getmembers
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _look_for_builtins_once() -> None:
    """The interpreter puts its own in the place of Triton's builtins at a launch, and looks again for builtins among
    all members of the language at every call of a function within a kernel, where none is left: a third of its time.

    They are replaced and put back together, so the first one tells whether there is anything to do.
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    replace = interpreter._patch_builtin
    firsts: dict[Any, str | None] = {}

    def replace_what_is_left(of: Any, *arguments: Any) -> None:
        if of not in firsts:
            firsts[of] = next((name for name, member in getmembers(of) if is_builtin(member)), None)
        first = firsts[of]
        if first is not None and is_builtin(getattr(of, first)):
            replace(of, *arguments)

    interpreter._patch_builtin = replace_what_is_left


if INTERPRETED:
    _look_for_builtins_once()
