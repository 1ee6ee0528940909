"""What clients are writing now: room that was promised, until it is used, given back, or its writer is dead."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Final

from .folder import Reservation, ServedFolder, has_writer
from .messages import unavailable

_MAX_RESERVATIONS: Final = 256


class Reservations:
    """Those of one folder, by their partial file's name; any thread may use it.

    Whoever takes a reservation out of the table closes its descriptor; so one that is in the table is open.
    ``grace_s``: seconds that a writer may take to open the file that was reserved for it.
    """

    def __init__(self, folder: ServedFolder, grace_s: float) -> None:
        self._folder = folder
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._held: dict[str, Reservation] = {}

    def sizes(self) -> list[int]:
        """Bytes of each."""
        with self._lock:
            return [reservation.nbytes for reservation in self._held.values()]

    def make(self, digest: str, nbytes: int) -> Reservation:
        """Raises StoreUnavailable for one too many, and as ``ServedFolder.reserve``."""
        with self._lock:
            if len(self._held) >= _MAX_RESERVATIONS:
                found = f"{len(self._held)} already"
                raise unavailable(found, expected=f"at most {_MAX_RESERVATIONS} indexes being written")
        reservation = self._folder.reserve(digest, nbytes)
        with self._lock:
            self._held[reservation.name] = reservation
        return reservation

    def drop(self, partial: str) -> None:
        """Ends one, its file included if it has not got its name; of one that is not there: nothing happens."""
        with self._lock:
            reservation = self._held.pop(partial, None)
        if reservation is not None:
            self._folder.abandon(reservation)

    def sweep(self) -> None:
        """Drops what writers left that died, or never came."""
        now = time.monotonic()
        old: list[tuple[str, int]] = []
        with self._lock, contextlib.suppress(OSError):  # without descriptors left: the next time
            for reservation in self._held.values():
                if now - reservation.began > self._grace_s:
                    # One of our own: a commit may close that one at any time, and another file get its number.
                    old.append((reservation.name, os.dup(reservation.fd)))
        for name, fd in old:
            try:
                written = has_writer(fd)
            finally:
                os.close(fd)
            if not written:
                self.drop(name)

    def close(self) -> None:
        """Forgets all. Their files stay: a writer may live on, and commit to the next service."""
        with self._lock:
            left, self._held = list(self._held.values()), {}
        for reservation in left:
            os.close(reservation.fd)
