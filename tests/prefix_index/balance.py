"""Whether a store's books balance: what it says that it holds against what is really there."""

from __future__ import annotations

import contextlib
from functools import partial

from prefix_index import Ask, FileStore, IndexStore, IndexUnreadable, Retention, SharedStore, StoreUnavailable
from prefix_index.folder import shard_fd
from prefix_index.remote import RemoteStore
from prefix_index.remote.values import Manifest
from prefix_index.retention import read_retention
from prefix_index.store import IndexSource


def balanced(store: IndexSource) -> None:
    """Raises AssertionError with both sides. Meaningful while nobody else changes what is there."""
    if isinstance(store, SharedStore):
        balanced(store.local)
        if store._teller.settle(60):
            for link in store._links:
                with contextlib.suppress(StoreUnavailable):
                    link.ask(partial(balanced, link.store))
    elif isinstance(store, FileStore):
        store.rescan()
        _files(store)
    elif isinstance(store, RemoteStore):
        _values(store)
    for entry in store.list() if isinstance(store, IndexStore) else ():
        identity = entry.identity
        hashes = [*[bytes(32)] * (identity.num_tokens // identity.page_tokens - 1), bytes.fromhex(identity.prefix_hash)]
        ask = Ask(identity.namespace, hashes, identity.model, identity.profile_digest, identity.page_tokens)
        assert store.longest(ask) is not None, f"{entry.digest} is listed only"


def _files(store: FileStore) -> None:
    """Names, sizes and retentions, but for what the system refused: of that, what was known stays."""
    problems = {
        problem.path: problem.error for problem in store.problems() if problem.path not in store._books.unremovable
    }
    shards = [
        path for path in store.folder.iterdir() if len(path.name) == 2 and path.is_dir() and not path.is_symlink()
    ]
    files = [path for shard in shards if str(shard) not in problems for path in shard.glob("[!.]*.pfxindex")]
    there = {path.stem: path.lstat().st_size for path in files if str(path) not in problems}
    held = {d: e for d, e in store.catalog.all_held() if str(store.path_of(d).parent) not in problems}
    assert {digest: entry.nbytes for digest, entry in held.items()} == there, "files"
    for digest, entry in held.items():
        problem = problems.get(str(store.path_of(digest).with_suffix(".pfxkeep")))
        if not isinstance(problem, IndexUnreadable):
            with shard_fd(store.folder, digest[:2]) as fd:
                kept = Retention() if problem is not None else read_retention(fd, digest)
            assert entry.retention == kept, f"retention of {digest}"


def _values(store: RemoteStore) -> None:
    found = store._scan(full=False)
    outcomes = store._values.manifests([d for d, names in found.items() if names.tag is not None])
    there = {d: m.listed for d, m in outcomes.items() if isinstance(m, Manifest) and d not in store.catalog.problems}
    assert dict(store.catalog.all_held()) == there, "entries"
