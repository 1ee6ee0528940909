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
    from triton.language import core
    from triton.runtime import interpreter

    replace, replace_all, language = interpreter._patch_builtin, interpreter._patch_lang, (interpreter.tl, core)
    firsts: dict[Any, str | None] = {}
    seen: dict[Any, list[Any]] = {}

    def are_left(of: Any) -> bool:
        if of not in firsts:
            firsts[of] = next((name for name, member in getmembers(of) if core.is_builtin(member)), None)
        first = firsts[of]
        return first is not None and core.is_builtin(getattr(of, first))

    def replace_what_is_left(of: Any, *arguments: Any) -> None:
        if are_left(of):
            replace(of, *arguments)

    def replace_all_where_any_is_left(function: Any) -> Any:
        if function not in seen:
            seen[function] = [one for one in function.__globals__.values() if any(one is other for other in language)]
        if seen[function] and not any(map(are_left, seen[function])):
            return interpreter._LangPatchScope()  # nothing to put back
        return replace_all(function)

    interpreter._patch_builtin, interpreter._patch_lang = replace_what_is_left, replace_all_where_any_is_left


if INTERPRETED:
    _look_for_builtins_once()
