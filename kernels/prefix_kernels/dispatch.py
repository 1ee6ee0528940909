"""Choice of an implementation: the one asked for, or an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def resolve(op: str, requested: str, available: Mapping[str, F | str]) -> F:
    """The implementation of `op` that was asked for; never another one.

    Args:
        op: name of the operation, for the message.
        requested: name of the implementation.
        available: implementations of the operation by name; text is "module:function", imported when it is asked for
            (Triton need not be installed for what does not use it).

    Raises:
        ValueError: `requested` is not one of them.
        ImportError: its module cannot be imported here.
    """
    try:
        found = available[requested]
    except KeyError:
        names = ", ".join(sorted(available))
        raise ValueError(
            f"{op} has no implementation {requested!r}; expected one of: {names}. Nothing is substituted for it"
        ) from None
    if isinstance(found, str):
        module, _, name = found.partition(":")
        implementation: F = getattr(import_module(module), name)
        return implementation
    return found
