"""What a seam is, and the check that all are in place. `seams` names them; hooks ask here, as it imports the hooks."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sglang.srt.plugins.hook_registry import HookType

from sglang_ext.compat.versions import SUPPORTED, older_than

Process = Literal["every", "scheduler"]


@dataclass(frozen=True)
class Seam:
    """One hook, and what it takes for granted: tests compare that with the real function, on each release.

    Attributes:
        target: path of SGLang's function.
        kind: when the hook runs.
        hook: ours.
        takes: names of the function's first arguments, all that the hook counts; a method's object or class left out.
        reads: attributes of the function's result that the hook reads, each with its type; under an empty name the
            type of the result itself.
        process: which processes need it: a launcher never imports the model runner for us.
        since: the first supported release of SGLang that has the function.
    """

    target: str
    kind: HookType
    hook: Callable[..., Any]
    takes: tuple[str, ...]
    reads: Mapping[str, type | tuple[type, ...]] = field(default_factory=dict)
    process: Process = "scheduler"
    since: str = SUPPORTED[0]


_declared: tuple[Seam, ...] = ()


def declare(seams: tuple[Seam, ...]) -> None:
    """Name the seams of this process, once."""
    global _declared
    _declared = seams


def here(seams: Iterable[Seam] | None = None) -> tuple[Seam, ...]:
    """Those of the installed release; None: of all that were declared."""
    return tuple(seam for seam in (_declared if seams is None else seams) if not older_than(seam.since))


def missing(seams: Iterable[Seam]) -> list[str]:
    """Targets whose hook is not in place now: not applied, or replaced by someone afterwards."""
    out = []
    for seam in here(seams):
        try:
            attribute = pkgutil.resolve_name(seam.target)
        except (AttributeError, ImportError):
            out.append(seam.target)
            continue
        if not _carries(attribute, seam.hook):
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
    """Raise RuntimeError naming every declared seam that is not in place.

    Args:
        launcher: only those that every process needs.
    """
    gone = missing(seam for seam in _declared if seam.process == "every" or not launcher)
    if gone:
        raise RuntimeError(
            "--sparse-attn: expected these SGLang functions to be hooked, found them untouched: "
            + ", ".join(gone)
            + ". Another plugin or a changed SGLang is the likely cause; see SGLang's log above for "
            "'Failed to apply hooks', or start without --sparse-attn."
        )
