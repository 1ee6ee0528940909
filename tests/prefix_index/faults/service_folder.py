"""The folder of a running store service goes, and comes back."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

from prefix_index import IndexNotFound, IndexStoreError
from prefix_index.service import StoreClient

from .outcome import Campaign, Outcome
from .service_process import CALL_S, Service, client_of
from .tools import SMALL, Tally, folder, payload_of, read_fill, remove


def service_folder_gone(count: int, seed: int) -> Outcome:
    """The folder is deleted under a service: misses and clear errors, right bytes; it works once the folder is back."""
    tally, rng = Tally("service_folder_gone"), random.Random(seed)
    with folder() as path, Service(path) as service, client_of(service) as client:
        for i in range(count):
            tally.tried += 1
            client.put(payload_of(0, 2 * i, SMALL))
            tally.expect(read_fill(client, 0) == 2 * i, f"try {i}: bytes before")
            remove(path / "store")
            for _ in range(rng.randrange(1, 4)):
                without_folder(tally, client, i)
            (path / "store").mkdir()
            back_again(tally, client, i)
            tally.expect(Path(f"/proc/{service.pid}").exists(), f"try {i}: the service has ended")
        tally.expect(service.stop() == 0, "the service did not end with 0")
    return tally.outcome("one client, one service, its folder deleted and made again")


def without_folder(tally: Tally, client: StoreClient, i: int) -> None:
    """Each call ends in time, with the right bytes, a miss, or an error of the store."""
    began = time.monotonic()
    with contextlib.suppress(IndexStoreError):
        tally.expect(read_fill(client, 0) == 2 * i, f"try {i}: wrong bytes while the folder is away")
    try:
        client.put(payload_of(1, i, SMALL))
        tally.err(f"try {i}: a put was acknowledged without a folder")
    except IndexNotFound as err:
        tally.err(f"try {i}: a put says {err}")
    except IndexStoreError:
        pass
    with contextlib.suppress(IndexStoreError):
        client.rescan()
    if time.monotonic() - began > CALL_S:
        tally.hang(f"try {i}: {time.monotonic() - began:.1f} s without the folder")


def back_again(tally: Tally, client: StoreClient, i: int) -> None:
    """The same service and client store and serve again."""
    client.put(payload_of(0, 2 * i + 1, SMALL))
    if read_fill(client, 0) != 2 * i + 1:
        tally.lose(f"try {i}: what was put after the folder came back")


CAMPAIGNS = {"service_folder_gone": Campaign(service_folder_gone, full=200, quick=15)}
