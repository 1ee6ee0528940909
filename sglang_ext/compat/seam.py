"""What a seam is, and the check that all are in place. `seams` names them; hooks ask here, as it imports the hooks."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sglang.srt.plugins.hook_registry import HookType

from sglang_ext.compat.versions import SUPPORTED, older_than


@dataclass(frozen=True)
class Seam:
    """One hook.

    Attributes:
        target: path of SGLang's function.
        kind: when the hook runs.
        hook: ours; its arguments have the names of the function's (tests compare them on each release).
        process: which processes need it: a launcher never imports the model runner for us.
        since: the first supported release of SGLang that has the function.
    """

    target: str
    kind: HookType
    hook: Callable[..., Any]
    process: Literal["every", "scheduler"] = "scheduler"
    since: str = SUPPORTED[0]


declared: list[Seam] = []
"""All of them; `seams` fills it."""


def here() -> list[Seam]:
    """Those of the installed release."""
    return [seam for seam in declared if not older_than(seam.since)]


def missing(*, launcher: bool = False) -> list[str]:
    """Targets whose hook is not in place now: not applied, or replaced by someone afterwards.

    Args:
        launcher: only of those that every process needs.
    """
    out = []
    for seam in here():
        if launcher and seam.process != "every":
            continue
        try:
            in_place = _carries(pkgutil.resolve_name(seam.target), seam.hook)
        except (AttributeError, ImportError):
            in_place = False
        if not in_place:
            out.append(seam.target)
    return out


def _carries(attribute: Any, hook: Callable[..., Any]) -> bool:
    """Whether calling `attribute` reaches `hook`: SGLang's wrappers hold their hook in a closure cell."""
    function = getattr(attribute, "__func__", attribute)
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def assert_in_place(*, launcher: bool = False) -> None:
    """Raise RuntimeError naming every seam of `missing`."""
    gone = missing(launcher=launcher)
    if gone:
        raise RuntimeError(
            "--sparse-attn: expected these SGLang functions to be hooked, found them untouched: "
            + ", ".join(gone)
            + ". Another plugin or a changed SGLang is the likely cause; see SGLang's log above for "
            "'Failed to apply hooks', or start without --sparse-attn."
        )
