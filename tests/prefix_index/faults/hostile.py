"""What somebody else puts in the way: keys that are paths, links, pipes and devices under the store's own names."""

from __future__ import annotations

import os
import random
import shutil
import socket
import stat
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import msgspec

from prefix_index import FileStore, IndexStoreError, InvalidPayload, Retention
from prefix_index.folder import PARTIAL
from tests.prefix_index.balance import balanced

from .outcome import Campaign, Outcome
from .tools import SOON, Tally, folder, identity_of, in_child, opened, payload_of, read_fill

MINE: Final = identity_of(0).digest
OTHER: Final = identity_of(1).digest


def hostile_keys(count: int, rng: random.Random) -> list[Any]:
    """Paths, huge strings, other types, and strings one step from a digest."""
    keys: list[Any] = ["", ".", "..", "/", "\0", "../" * 20 + "outside", f"../{MINE}", f"{MINE}/", f"{MINE}.pfxindex"]
    keys += [
        "0" * 1_000_000,
        "../" * 400_000,
        MINE.upper(),
        MINE + "\n",
        MINE[:-1] + "\0",
        " " + MINE[1:],
        "\u0660" * 64,
    ]
    keys += [None, 7, 0.5, b"0" * 64, MINE.encode(), ("a",), ["a"], {"digest": MINE}, object(), Path(MINE), True]
    keys += ["\ud800" * 64, "é" * 64, f"{MINE[:2]}/{MINE[2:-1]}", f".lease-{MINE}", f"{MINE}.pfxkeep", ".partial-1-x"]
    alphabet = "0123456789abcdef/.\0\n~%$ABCDEFé*?-"
    while len(keys) < count:
        near = list(MINE)
        for _ in range(rng.randrange(1, 4)):
            near[rng.randrange(64)] = rng.choice(alphabet[16:])
        keys.append(rng.choice(("".join(near), "".join(rng.choices(alphabet, k=rng.randrange(200))))))
    return [key for key in keys if key != MINE]


def keys(count: int, seed: int) -> Outcome:
    """Keys that are paths, huge, or no text: each method refuses each; nothing is touched in the folder or outside."""
    tally, rng = Tally("hostile_keys"), random.Random(seed)
    with folder() as path, opened(path / "store") as store:
        store.put(payload_of(0, 1))
        (path / "outside").write_text("outside")
        before = snapshot(path)
        methods: list[Callable[[Any], object]] = [
            store.get,
            store.contains,
            store.delete,
            store.lease,
            store.path_of,
            lambda key: store.retain(key, Retention(pinned=True)),
        ]
        for key in hostile_keys(-(-count // len(methods)), rng):
            for method in methods:
                tally.raises(InvalidPayload, partial(method, key))
        for name, value in product(
            ("namespace", "profile_digest", "prefix_hash"), ("../" * 9, "x\0y", "z" * 1_000_000)
        ):
            tally.tried += 1
            try:
                bad = msgspec.structs.replace(identity_of(0), **{name: value})
                store.put(payload_with(bad))
                store.delete(bad)
            except (InvalidPayload, ValueError):
                pass
            except Exception as err:
                tally.err(f"identity with {name} {value[:9]!r}: {type(err).__name__}: {str(err)[:100]}")
        after = snapshot(path)
        after = {name: kept for name, kept in after.items() if name in before or not shard_only(name)}
        tally.expect(before == after, f"files changed: {sorted(before.items() ^ after.items())[:2]}")
        if read_fill(store, 0) != 1:
            tally.lose("the index beside")
    return tally.outcome("each of 6 methods with each key; 9 identities")


def shard_only(name: str) -> bool:
    return len(Path(name).name) == 2


def payload_with(identity: Any) -> Any:
    made = payload_of(0, 2)
    return type(made)(identity, made.arrays, stats=made.stats, info=made.info)


def snapshot(path: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Every file below, with mode, size, mtime and bytes; folders with their mode only."""
    found = {}
    for one in sorted(path.rglob("*")):
        status = one.lstat()
        regular = stat.S_ISREG(status.st_mode)
        times = (status.st_size, status.st_mtime_ns) if regular else (0, 0)
        found[str(one.relative_to(path))] = (status.st_mode, *times, one.read_bytes() if regular else b"")
    return found


ROLES: Final[dict[str, Callable[[Path], Path]]] = {
    "shard folder": lambda store: store / MINE[:2],
    "index": lambda store: store / MINE[:2] / f"{MINE}.pfxindex",
    "sidecar": lambda store: store / MINE[:2] / f"{MINE}.pfxkeep",
    "lease": lambda store: store / MINE[:2] / f".lease-{MINE}",
    "partial": lambda store: store / MINE[:2] / f"{PARTIAL}1-0011223344556677",
    "foreign name": lambda store: store / MINE[:2] / "notes",
}


def link_to(target: str) -> Callable[[Path, Path], None]:
    return lambda at, outside: at.symlink_to(outside / target)


def full_folder(at: Path, _: Path) -> None:
    at.mkdir()
    (at / "inside").write_text("x")


def bound_socket(at: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        here = os.getcwd()
        os.chdir(at.parent)
        one.bind(at.name)
        os.chdir(here)


PLANTS: Final[dict[str, Callable[[Path, Path], None]]] = {
    "link to an index": link_to("whole.pfxindex"),
    "link to text": link_to("text"),
    "link to a sidecar": link_to("keep"),
    "link to a folder": link_to("folder"),
    "link to nothing": link_to("nothing"),
    "link to a pipe": link_to("pipe"),
    "pipe": lambda at, _: os.mkfifo(at),
    "folder": full_folder,
    "socket": bound_socket,
    "device": lambda at, _: os.mknod(at, stat.S_IFCHR | 0o666, os.makedev(1, 5)),
    "terminal": lambda at, _: os.mknod(at, stat.S_IFCHR | 0o666, os.makedev(5, 0)),
}
if os.geteuid() != 0:
    del PLANTS["device"], PLANTS["terminal"]


def lease_and_release(store: FileStore) -> object:
    lease = store.lease(MINE)
    if lease is not None:
        lease.release()
    return lease


CALLS: Final[dict[str, Callable[[FileStore], object]]] = {
    "get": lambda store: read_fill(store, 0),
    "contains": lambda store: store.contains(MINE),
    "rescan": lambda store: store.rescan(full=True),
    "put": lambda store: store.put(payload_of(0, 2)),
    "put with retention": lambda store: store.put(payload_of(0, 2), retention=Retention(pinned=True)),
    "retain": lambda store: store.retain(MINE, Retention(pinned=True, expires=4e9)),
    "lease": lease_and_release,
    "collect": lambda store: store.collect(),
    "clean_partials": lambda store: store._clean_partials(0.0),
    "delete": lambda store: store.delete(MINE),
}


def prepare(path: Path, role: str, plant: str, early: bool) -> FileStore:
    """A store with two indexes, then something else in the place of one of its files; opened before or after."""
    outside = path / "outside"
    (outside / "folder").mkdir(parents=True)
    with opened(path / "source") as source:
        shutil.copy(source.put(payload_of(0, 9)).path or "", outside / "whole.pfxindex")
    for name in ("whole.pfxindex",):
        shutil.copy(outside / name, outside / "folder" / f"{MINE}.pfxindex")
    (outside / "text").write_text("outside")
    (outside / "keep").write_text('{"pinned":true,"expires":1.0}')
    os.mkfifo(outside / "pipe")
    store = FileStore(path / "store", create=True, partial_grace_s=0.0)
    store.open()
    store.put(payload_of(0, 1), retention=Retention(pinned=True))
    store.put(payload_of(1, 1))
    at = ROLES[role](path / "store")
    if not early:
        store.close()
    if at.is_dir():
        shutil.rmtree(at)
    elif at.exists():
        at.unlink()
    PLANTS[plant](at, outside)
    return store


def planted(count: int, seed: int) -> Outcome:
    """Links, pipes, devices, sockets, folders under the store's names: never followed, never waited for, nothing
    outside changed.
    """
    tally, rng = Tally("planted_files"), random.Random(seed)
    cases = [*product(ROLES, PLANTS, CALLS, (True, False))]
    if count < len(cases):
        cases = rng.sample(cases, count)
    for role, plant, call, early in cases:
        where = f"{plant} as {role}, {call} of a store opened {'before' if early else 'after'}"
        tally.tried += 1
        with folder() as path:
            store = prepare(path, role, plant, early)
            before = snapshot(path / "outside")
            said = in_child(partial(one_call, store, call), SOON)
            if said is None:
                tally.hang(where)
            elif said != "fine":
                tally.err(f"{where}: {said}")
            tally.expect(snapshot(path / "outside") == before, f"{where}: changed a file outside")
    return tally.outcome(f"{len(PLANTS)} kinds of files in {len(ROLES)} roles, {len(CALLS)} calls each")


def one_call(store: FileStore, name: str) -> str:
    """In a child: the call gives an error of ours or no error; the index beside is there; ours is 1 or 2 or a miss."""
    store.open()
    try:
        result = CALLS[name](store)
    except IndexStoreError as err:
        result = err
    if name == "get" and result == 9:
        return "get followed the link"
    if name.startswith("put") and not isinstance(result, Exception) and read_fill(store, 0) != 2:
        return "put was acknowledged but get gives another index"
    for number in (0, 1):
        try:
            fill = read_fill(store, number)
            if fill == 9:
                return f"{name}, then get gave what lies outside"
        except IndexStoreError as err:
            if number == 1:
                return f"the index beside: {err}"
    store.rescan(full=True)
    balanced(store)
    return "fine"


CAMPAIGNS = {
    "hostile_keys": Campaign(keys, full=20_000, quick=1_000),
    "planted_files": Campaign(planted, full=1 << 20, quick=250),
}
