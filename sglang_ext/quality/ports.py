"""A free port for a server that binds it some seconds later."""

from __future__ import annotations

import contextlib
import random
import socket

_PORTS = range(11000, 22000)
"""Below those that systems hand out to whoever asks for any (Linux: from 32768 on), so nobody gets it by chance."""


def free_port() -> int:
    """A port of 11000 to 21999 that nobody listens on now.

    Raises:
        RuntimeError: a hundred of them are taken.
    """
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise RuntimeError(f"expected a free port in {_PORTS[0]} to {_PORTS[-1]}, found none in 100 attempts")
