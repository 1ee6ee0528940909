"""Plugin of pytest for `sanitize.py`: says at the end how often each Triton kernel was launched."""

from __future__ import annotations

from collections import Counter
from typing import Any

_launched: Counter[str] = Counter()


def pytest_configure() -> None:
    """Count from now on, before any kernel is launched."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        _launched[kernel.fn.__name__] += 1
        return run(kernel, *args, **kwargs)

    JITFunction.run = counted


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each kernel."""
    for name, times in sorted(_launched.items()):
        terminalreporter.write_line(f"launched {name} {times} times")
