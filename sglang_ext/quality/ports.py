"""Free ports for a server that binds them some seconds later."""

from __future__ import annotations

import contextlib
import random
import socket

_PORTS = range(11000, 22000)
"""Below those that systems usually hand out to whoever asks for any (Linux: from 32768 on)."""


def free_ports(count: int) -> list[int]:
    """Different ports of 11000 to 21999 that nobody listens on now.

    Raises:
        RuntimeError: not so many among a hundred.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(
        f"expected {count} free ports in {_PORTS[0]} to {_PORTS[-1]}, found {len(found)} in 100 attempts"
    )


def free_port() -> int:
    """One of `free_ports`."""
    return free_ports(1)[0]
