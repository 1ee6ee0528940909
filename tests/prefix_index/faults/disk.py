"""A disk that is full or read-only, a folder that goes away under a running store."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from prefix_index import FileStore, IndexNotFound, IndexStoreError, Retention, StoreFolderError, StoreFull
from prefix_index.folder import PARTIAL
from tests.prefix_index.balance import balanced

from .mounts import can_mount, ext4, remount, tmpfs
from .outcome import Campaign, Outcome
from .tools import (
    MEDIUM,
    SMALL,
    SOON,
    Line,
    Tally,
    folder,
    fork,
    identity_of,
    opened,
    payload_of,
    read_fill,
    reap,
    remove,
    stored_files,
)

NOBODY = 65534


def check_all(tally: Tally, where: str, store: FileStore, acked: dict[int, int]) -> None:
    """Every acknowledged index is there with the bytes that were acknowledged."""
    for number, fill in acked.items():
        try:
            found = read_fill(store, number)
        except (IndexStoreError, AssertionError) as err:
            tally.lose(f"{where}: index {number}: {err}")
        else:
            tally.expect(found == fill, f"{where}: index {number} has fill {found}, acknowledged {fill}")


def small_disks(path: Path) -> Iterator[tuple[str, Callable[[], contextlib.AbstractContextManager[Path]]]]:
    """What can be filled here: file systems of 24 MiB, one that runs out of inodes, or a limit of the process."""
    if can_mount():
        yield "tmpfs", lambda: tmpfs(path / "tmpfs", 24 * MEDIUM)
        if shutil.which("mkfs.ext4"):
            yield "ext4", lambda: ext4(path / "ext4", 24 * MEDIUM)
            yield "ext4 of 512 inodes", lambda: ext4(path / "inodes", 24 * MEDIUM, "-N", "512")
    yield "RLIMIT_FSIZE", lambda: limited(path / "limited")


@contextlib.contextmanager
def limited(path: Path) -> Iterator[Path]:
    """No file of more than 1 MiB can be written; every third of the campaign's is larger."""
    path.mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEDIUM, before[1]))
    try:
        yield path
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill_up(tally: Tally, where: str, path: Path, refusals: int, rng: random.Random) -> None:
    """Puts, replaces and now and then deletes until ``refusals`` puts were refused for want of room."""
    acked: dict[int, int] = {}
    refused = puts = 0
    with opened(path / "store") as store:
        while refused < refusals and puts < 2000 + 200 * refusals:
            puts += 1
            number = rng.randrange(1000)
            nbytes = SMALL if "inodes" in where else rng.choice((SMALL, MEDIUM // 2, 2 * MEDIUM))
            try:
                store.put(payload_of(number, puts, nbytes))
                acked[number] = puts
                continue
            except StoreFull as err:
                tally.expect("No space" in str(err) or "too large" in str(err), f"{where}: {err}")
            except Exception as err:
                tally.err(f"{where}: {type(err).__name__}: {err}")
            refused += 1
            if acked:
                full_for_the_rest(tally, where, store, rng.choice(sorted(acked)))
            left = [name for name in stored_files(path / "store") if name.startswith(PARTIAL)]
            tally.expect(not left, f"{where}: partial files stay: {left[:2]}")
            if refused % 8 == 0:
                check_all(tally, where, store, acked)
                for number in rng.sample(sorted(acked), min(len(acked), 3)):
                    tally.expect(store.delete(identity_of(number)), f"{where}: delete of {number}")
                    del acked[number]
                balanced(store)
        tally.tried += refused
        tally.expect(refused == refusals, f"{where}: only {refused} of {puts} puts were refused")
        check_all(tally, where, store, acked)
        balanced(store)
        for number in list(acked)[: len(acked) // 2 + 1]:
            store.delete(identity_of(number))
            del acked[number]
        store.put(payload_of(number, 1, SMALL))
        acked[number] = 1
    with opened(path / "store", partial_grace_s=0.0) as store:
        tally.expect(len(store.list()) == len(acked) and not store.problems(), f"{where}: after opening again")
        check_all(tally, where, store, acked)
        balanced(store)


def full_for_the_rest(tally: Tally, where: str, store: FileStore, number: int) -> None:
    """On a full disk a retention is kept as it was or as it was asked for, and a lease is given or refused."""
    digest = identity_of(number).digest
    before = next(e.retention for e in store.list() if e.digest == digest)
    wanted = Retention(pinned=not before.pinned, expires=4e9)
    try:
        store.retain(digest, wanted)
    except StoreFull:
        wanted = before
    with contextlib.suppress(StoreFull):
        lease = store.lease(digest)
        if lease is not None:
            lease.release()
    store.rescan(full=True)
    found = next((e.retention for e in store.list() if e.digest == digest), None)
    tally.expect(found == wanted, f"{where}: retention {found}, expected {wanted}")
    store.collect()


def disk_full(count: int, seed: int) -> Outcome:
    """Puts that find no room fail with StoreFull; everything stored stays; after a delete there is room again."""
    tally, rng, kinds = Tally("disk_full"), random.Random(seed), []
    with folder() as path:
        for kind, make in small_disks(path):
            kinds.append(kind)
            with make() as place:
                fill_up(tally, kind, place, -(-count // 4), rng)
    return tally.outcome(f"refused puts on {', '.join(kinds)}")


def refuses_writes(tally: Tally, where: str, store: FileStore, acked: dict[int, int], rng: random.Random) -> None:
    """Each write fails clearly; each read works."""
    number = rng.choice(sorted(acked))
    tally.raises(StoreFolderError, lambda: store.put(payload_of(number, 99)))
    tally.raises(StoreFolderError, lambda: store.put(payload_of(rng.randrange(1000, 2000), 99)))
    tally.raises(StoreFolderError, lambda: store.delete(identity_of(number)))
    tally.expect(store.contains(identity_of(number)), f"{where}: contains after a refused delete")
    store.rescan(full=rng.random() < 0.5)
    tally.expect(len(store.list()) == len(acked), f"{where}: {len(store.list())} of {len(acked)} listed")
    check_all(tally, where, store, acked)
    balanced(store)


def read_only(count: int, seed: int) -> Outcome:
    """A file system that turns read-only under a running store, and folders without permission to write."""
    tally, rng = Tally("read_only"), random.Random(seed)
    kinds = []
    rounds = max(1, count // 6)
    with folder() as path:
        if can_mount():
            kinds.append("tmpfs remounted read-only")
            with tmpfs(path / "tmpfs", 24 * MEDIUM) as place, opened(place / "store") as store:
                acked = {number: 1 for number in range(4) if store.put(payload_of(number, 1))}
                for _ in range(rounds):
                    remount(place, "ro")
                    refuses_writes(tally, kinds[0], store, acked, rng)
                    opens_or_says_why(tally, kinds[0], place / "store")
                    remount(place, "rw")
                    store.put(payload_of(rng.randrange(4), 1))
        kinds.append("mode 0555 as another user" if os.geteuid() == 0 else "mode 0555")
        without_permission(tally, kinds[-1], path / "modes", rounds, seed)
    return tally.outcome(f"writes refused on {', '.join(kinds)}")


def opens_or_says_why(tally: Tally, where: str, path: Path) -> None:
    """A new store on a folder that cannot be written to works for reading, or says that it does not."""
    tally.tried += 1
    try:
        with opened(path, create=False) as store:
            tally.expect(bool(store.list()), f"{where}: a new store lists nothing")
    except StoreFolderError as err:
        tally.expect("writ" in str(err) or "ermission" in str(err), f"{where}: {err}")


def without_permission(tally: Tally, where: str, path: Path, rounds: int, seed: int) -> None:
    """In a child that is nobody: its own folder, then without the right to write to it."""
    path.mkdir()
    os.chmod(path.parent, 0o755)
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    line = Line()

    def work() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        rng, inner = random.Random(seed), Tally("")
        with opened(path / "store") as store:
            acked = {number: 1 for number in range(4) if store.put(payload_of(number, 1))}
            for _ in range(rounds):
                folders = [path / "store", *(path / "store").iterdir()]
                for one in folders:
                    one.chmod(0o555)
                refuses_writes(inner, where, store, acked, rng)
                opens_or_says_why(inner, where, path / "store")
                for one in folders:
                    one.chmod(0o755)
                store.put(payload_of(rng.randrange(4), 1))
        said = inner.outcome("").detail.replace("\n", " ")
        line.say(f"{inner.tried} {inner.lost} {inner.wrong} {said}")

    code = reap(fork(work), 5 * SOON + rounds)
    said = line.close()
    if code is None:
        tally.hang(where)
    elif not said:
        tally.err(f"{where}: exit {code}")
    else:
        tried, lost, wrong, text = said[0].split(" ", 3)
        tally.tried += int(tried)
        for _ in range(int(lost)):
            tally.lose(text)
        for _ in range(int(wrong)):
            tally.err(text)


def folder_gone(count: int, seed: int) -> Outcome:
    """The folder is deleted, moved or replaced by another while a store uses it and a second process writes."""
    tally, rng = Tally("folder_gone"), random.Random(seed)
    with folder() as path:
        for i in range(count):
            place, other = path / "store", path / "other"
            with opened(other) as store:
                store.put(payload_of(50, i))
            with opened(place) as store:
                for number in range(3):
                    store.put(payload_of(number, i))
                reader = store.get(identity_of(0))
                pid = fork(partial(put_until_gone, place, i))
                time.sleep(rng.uniform(0, 0.01))
                (lambda place, _: remove(place), replace, replace_shard)[i % 3](place, other)
                gone_under(tally, f"try {i}", store, replaced=i % 3 == 1)
                reader.verify()
                reader.close()
                code = reap(pid, SOON)
                if code is None:
                    tally.hang(f"try {i}: a writer in another process")
                tally.expect(code == 0, f"try {i}: a writer in another process failed otherwise ({code})")
                place.mkdir(exist_ok=True)
                store.rescan(full=True)
                store.put(payload_of(7, i))
                tally.expect(read_fill(store, 7) == i, f"try {i}: after the folder came back")
                balanced(store)
            for one in (place, other, path / "moved"):
                shutil.rmtree(one, ignore_errors=True)
    return tally.outcome(f"{count} folders deleted, replaced, or a shard swapped for a file")


def put_until_gone(place: Path, fill: int) -> None:
    """A writer that meets the deletion in the middle; StoreFolderError is how it should end."""
    with contextlib.suppress(StoreFolderError), opened(place, create=False) as store:
        for _ in range(10):
            store.put(payload_of(3, fill, MEDIUM))


def replace(place: Path, other: Path) -> None:
    place.rename(place.parent / "moved")
    other.rename(place)


def replace_shard(place: Path, other: Path) -> None:
    """The shard of index 0 becomes a file."""
    shard = place / identity_of(0).digest[:2]
    while not shard.is_file():
        shutil.rmtree(shard, ignore_errors=True)
        with contextlib.suppress(OSError):
            shard.write_text("not a folder")


def gone_under(tally: Tally, where: str, store: FileStore, *, replaced: bool) -> None:
    """Reads miss, writes say why, and nothing of the old folder is offered any more."""
    tally.raises(IndexNotFound, lambda: store.get(identity_of(0)))
    tally.tried += 1
    tally.expect(not store.contains(identity_of(0)), f"{where}: contained")
    with contextlib.suppress(StoreFolderError):
        tally.expect(not store.delete(identity_of(0)), f"{where}: deleted")
    with contextlib.suppress(StoreFolderError):
        store.rescan()
        tally.expect(identity_of(0).digest not in {e.digest for e in store.list()}, f"{where}: listed")
    if replaced:
        tally.expect(store.contains(identity_of(50)), f"{where}: the new folder's index")
        tally.expect(identity_of(50).digest in {e.digest for e in store.list()}, f"{where}: not listed")
        read_fill(store, 50)
    else:
        tally.raises(StoreFolderError, lambda: store.put(payload_of(0, 1)))


CAMPAIGNS = {
    "disk_full": Campaign(disk_full, full=300, quick=32),
    "read_only": Campaign(read_only, full=300, quick=36),
    "folder_gone": Campaign(folder_gone, full=200, quick=24),
}
