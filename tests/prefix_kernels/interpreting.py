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


def _know_dtypes() -> None:
    """NumPy's dtype of each of Triton's is asked for in every operation, and looked up in a table that is made anew."""
    from triton.runtime import interpreter

    look_up, block_type, known = interpreter._get_np_dtype, interpreter.tl.block_type, dict[str, Any]()

    def of(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, block_type) else dtype
        if element.name not in known:
            known[element.name] = look_up(element)
        return known[element.name]

    interpreter._get_np_dtype = of


if INTERPRETED:
    _look_for_builtins_once()
    _know_dtypes()
