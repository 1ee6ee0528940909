"""How many connections a service takes: each is a descriptor, and libzmq ends the process that has none left for one
more. So there is a bound below the limit of descriptors, and a client beyond it is told so.
"""

from __future__ import annotations

import contextlib
import resource
import socket
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

_OTHERS: Final = 512
"""Descriptors for what is no connection: reservations of clients that write, files that workers read, libraries."""
_SPARE: Final = 64
"""Connections beyond the bound that stay open for as long as it takes to tell them."""
_WANTED: Final = 1 << 16


def raise_descriptor_limit() -> None:
    """Raises this process's soft limit of descriptors, as far as is of use and the hard one goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections(wanted: int) -> int:
    """As many as wanted, or as the limit of descriptors leaves room for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - min(_OTHERS, soft // 2) - _SPARE))


class Admission:
    """Counts the connections of a listening socket, by what libzmq tells of it. Used by the service's loop only."""

    def __init__(self, listening: zmq.Socket[bytes], wanted: int) -> None:
        self.most = most_connections(wanted)
        self._listening = listening
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        self.monitor: zmq.Socket[bytes] = listening.get_monitor_socket(events)
        """Readable when connections came or went: ``update()`` then."""
        self._open: set[int] = set()

    @property
    def count(self) -> int:
        return len(self._open)

    @property
    def is_full(self) -> bool:
        """Whether there are more connections than may be."""
        return len(self._open) > self.most

    def update(self) -> int:
        """Takes in what happened; ends connections that are too many to be even told so. Returns how many."""
        ended = 0
        while True:
            try:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            except zmq.Again:
                return ended
            fd = event["value"]
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._open.discard(fd)
                continue
            self._open.add(fd)
            if len(self._open) > self.most + _SPARE:
                _end(fd)
                ended += 1

    def close(self) -> None:
        self._listening.disable_monitor()
        self.monitor.close(linger=0)


def _end(fd: int) -> None:
    """Shuts a connection down, which libzmq then closes. It may have closed it already, and the number be another
    file's by now, which is no socket: there are no others in this process but those of its clients.
    """
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=fd)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()
