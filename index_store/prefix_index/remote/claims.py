"""Build leases between machines: a small value that only one can create, kept alive by its holder.

The value says who holds the lease and until when by the holder's clock; a thread renews it every third of its
``ttl_s``. One whose time has passed by *our* clock is taken over. Where clocks are further apart than ``ttl_s`` / 3,
and in the moment of a takeover, two machines may build the same index: work is wasted, nothing is lost. Stores that
cannot create a value only where there is none (Mooncake) arbitrate within this process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from typing import Final

from ..errors import IndexFormatError, IndexStoreError
from ..lease import LocalLeases
from ..store import BuildLease
from .values import LEASE, LEASES, LeaseRecord, Values, new_generation, pack_record, unpack_record

_GENERATION: Final = new_generation(0)


class SharedLeases:
    """Leases of one remote store. Times are seconds."""

    def __init__(self, values: Values, *, ttl_s: float) -> None:
        self._values, self._ttl_s = values, ttl_s
        self._local = LocalLeases()

    def acquire(self, digest: str) -> BuildLease | None:
        """None while somebody holds it. Raises StoreUnavailable."""
        local = self._local.acquire(digest)
        if local is None:
            return None
        holder = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            claimed = self._claim(digest, holder)
        except BaseException:
            local.release()
            raise
        if claimed:
            stop = threading.Event()
            # It refers to no lease object, so that a forgotten one ends.
            beat = threading.Thread(target=self._beat, args=(digest, holder, stop), name="build lease", daemon=True)
            beat.start()
            return BuildLease(digest, local.release, beat.join, stop.set, forgotten=stop.set)
        if claimed is None:
            return local
        local.release()
        return None

    def remove_expired(self, digest: str, *, grace_s: float) -> None:
        """Removes a lease value whose time passed more than ``grace_s`` ago, and one that cannot be read."""
        record = self._read(digest)
        if record is None or record.expires + grace_s < time.time():
            self._values.remove(_name(digest))

    def _claim(self, digest: str, holder: str) -> bool | None:
        """None where the store cannot arbitrate."""
        raw = self._pack(digest, holder)
        created = self._values.create(_name(digest), raw)
        if created is not False:
            return created
        record = self._read(digest)
        if record is not None and time.time() < record.expires < time.time() + 10 * self._ttl_s:
            return False
        self._values.remove(_name(digest))
        return self._values.create(_name(digest), raw)

    def _beat(self, digest: str, holder: str, stop: threading.Event) -> None:
        """Keeps a lease alive until it ends, or is somebody else's."""
        while not stop.wait(self._ttl_s / 3):
            # A store that does not answer now is asked again at the next beat.
            with contextlib.suppress(IndexStoreError):
                record = self._read(digest)
                if record is not None and record.holder != holder:
                    return
                self._values.write(_name(digest), self._pack(digest, holder))
        with contextlib.suppress(IndexStoreError):
            record = self._read(digest)
            if record is not None and record.holder == holder:
                self._values.remove(_name(digest))

    def _pack(self, digest: str, holder: str) -> bytes:
        return pack_record(LEASE, digest, _GENERATION, LeaseRecord(holder=holder, expires=time.time() + self._ttl_s))

    def _read(self, digest: str) -> LeaseRecord | None:
        """None where there is none, and for a value that is none of ours."""
        raw = self._values.fetch(_name(digest))
        try:
            return None if raw is None else unpack_record(LEASE, digest, raw, LEASES)[1]
        except IndexFormatError:
            return None


def _name(digest: str) -> str:
    return f"{digest}.lease"
