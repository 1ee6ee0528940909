"""Plugin of pytest for `sanitize.py`: says at the end how often each Triton kernel was launched, and whether what its
warp groups hand each other at their start is written and read at different times (`sanitize_races.phases`)."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from sanitize_races import APART, parts, phases

_launched: Counter[str] = Counter()
_variants: dict[Any, dict[int, str]] = defaultdict(dict)
"""By kernel, the PTX of what was launched."""


def pytest_configure() -> None:
    """Count from now on, before any kernel is launched."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        _launched[kernel.fn.__name__] += 1
        compiled = run(kernel, *args, **kwargs)
        if kernel.is_gluon() and hasattr(compiled, "asm"):
            _variants[kernel.fn].setdefault(id(compiled), compiled.asm["ptx"])
        return compiled

    JITFunction.run = counted


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each kernel, and one more for each that starts warp groups apart."""
    for name, times in sorted(_launched.items()):
        terminalreporter.write_line(f"launched {name} {times} times")
    for kernel, variants in _variants.items():
        path = Path(kernel.__code__.co_filename)
        lines = parts(path.read_text(), kernel.__name__)
        if not lines:
            continue
        found = [phases(ptx, path, lines) for ptx in variants.values()]
        how = "apart" if all(one == APART for one in found) else f"not apart: {found}"
        terminalreporter.write_line(f"dispatch of {kernel.__name__}, {len(found)} variants: {how}")
