"""A disk whose sectors cannot be read any more, and one that somebody else fills while a floor is to stay free."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np

from prefix_index import IndexFile, IndexStoreError, Retention, StoreFull
from tests.prefix_index.balance import balanced

from .mounts import can_mount, ext4, run, tmpfs
from .outcome import Campaign, Outcome
from .tools import (
    MEDIUM,
    SMALL,
    SOON,
    Tally,
    array_of,
    fill_of,
    folder,
    identity_of,
    in_child,
    opened,
    payload_of,
    read_fill,
)

KEYS = 6
PINNED = Retention(pinned=True)
NEEDS_ROOT = "not run: needs root and loop devices"


def verified(index: IndexFile) -> dict[Any, Any]:
    index.verify()
    return {}


READS: Final[dict[str, Callable[[IndexFile], dict[Any, Any]]]] = {
    "verify": verified,
    "read_many": lambda index: index.read_many(),
    "payload": lambda index: {key: array.load() for key, array in index.payload().arrays.items()},  # type: ignore[union-attr]
    "read_many without O_DIRECT": lambda index: index.read_many(direct=False),
    "array": lambda index: {key: index.array(*key) for key in index.keys},
}


def read_once(open_index: Callable[[], IndexFile], number: int, read: Callable[[IndexFile], dict[Any, Any]]) -> str:
    """One index, all of it: ``right``, or the class of the error; anything else is wrong."""
    try:
        index = open_index()
        size, fill = int(index.stats["size"]), int(index.stats["fill"])
        for key, found in read(index).items():
            assert np.array_equal(found, array_of(number, fill, key.layer, size)), f"bytes of {tuple(key)}"
    except IndexStoreError as err:
        return type(err).__name__
    return "right"


def io_error(count: int, seed: int) -> Outcome:
    """Sectors that cannot be read: the right bytes or an error."""
    tally, rng, seen = Tally("io_error"), random.Random(seed), Counter[str]()
    if not (can_mount() and shutil.which("mkfs.ext4")):
        return Outcome("io_error", 1, detail=NEEDS_ROOT)
    with folder() as path:
        while tally.tried < count:
            place = path / f"disk-{tally.tried}"
            with ext4(place, 24 * MEDIUM) as mounted, opened(mounted / "store") as store:
                for number in range(KEYS):
                    store.put(payload_of(number, 1, 2 * MEDIUM))
                opened_before = [store.get(identity_of(number)) for number in range(KEYS)]
                run("sync", "--file-system", str(mounted))
                os.truncate(place.with_suffix(".img"), rng.randrange(3 * MEDIUM, 14 * MEDIUM))
                for number, (name, read) in product(range(KEYS), READS.items()):
                    drop_from_cache(store.path_of(identity_of(number)))
                    for index in (partial(opened_before.__getitem__, number), partial(store.get, identity_of(number))):
                        tally.tried += 1
                        said = in_child(partial(read_once, index, number, read), SOON) or "stuck"
                        seen[f"{name}: {said}"] += 1
                        # IndexCorrupt: a loop device fills a short read with zeros, as a broken disk may.
                        fine = said in ("right", "IndexUnreadable", "IndexCorrupt")
                        tally.expect(fine, f"{name} of a broken disk: {said}")
                for one in opened_before:
                    one.close()
            place.with_suffix(".img").unlink()
    return tally.outcome(", ".join(f"{what} {n}" for what, n in sorted(seen.items())))


def drop_from_cache(path: Path) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def free_floor(count: int, seed: int) -> Outcome:
    """Somebody else fills and frees the disk: a put fits above ``min_free_bytes`` or says StoreFull; pins stay."""
    tally, rng, seen = Tally("free_floor"), random.Random(seed), Counter[str]()
    if not can_mount():
        return Outcome("free_floor", 1, detail=NEEDS_ROOT)
    floor = 4 * MEDIUM
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(tmpfs(stack.enter_context(folder()) / "disk", 24 * MEDIUM))
        with opened(place / "store", min_free_bytes=floor) as store:
            pinned = range(3)
            for number in pinned:
                store.put(payload_of(number, 1), retention=PINNED)
            for step in range(count):
                tally.tried += 1
                ballast(place / "ballast", rng.choice((0, 4, 8, 14, 18)) * MEDIUM)
                try:
                    entry = store.put(payload_of(rng.randrange(3, 40), step, rng.choice((SMALL, MEDIUM, 3 * MEDIUM))))
                    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
                    tally.expect(free >= floor, f"step {step}: {free} bytes are left free, {floor} asked for")
                    tally.expect(store.contains(entry.digest), f"step {step}: gone at once")
                    seen["stored"] += 1
                except StoreFull:
                    seen["refused"] += 1
                for number in pinned:
                    if not store.contains(identity_of(number)):
                        others = [e for e in store.list() if not e.retention.pinned]
                        if len(others) > 1:  # the one just stored may have pushed out all others
                            tally.lose(f"step {step}: pinned index {number} before {len(others)} that are not")
                        ballast(place / "ballast", 0)
                        store.put(payload_of(number, 1), retention=PINNED)
                        seen["pins given up last"] += 1
                balanced(store)
            ballast(place / "ballast", 0)
            for number in pinned:
                tally.expect(read_fill(store, number) == 1, f"bytes of {number}")
            for entry in store.list():
                with store.get(entry.digest) as index:
                    fill_of(index)
    return tally.outcome(", ".join(f"{n} {what}" for what, n in seen.items()))


def ballast(path: Path, nbytes: int) -> None:
    """Somebody else's file: as much of ``nbytes`` as there is room for."""
    with path.open("wb") as file, contextlib.suppress(OSError):
        if nbytes:
            os.posix_fallocate(file.fileno(), 0, nbytes)


CAMPAIGNS = {
    "io_error": Campaign(io_error, full=300, quick=30),
    "free_floor": Campaign(free_floor, full=1_000, quick=100),
}
