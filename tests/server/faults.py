"""A store of which some indexes are damaged."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np

from prefix_index import (
    ArrayKey,
    BuildInfo,
    FileStore,
    IndexIdentity,
    IndexPayload,
    namespace_digest,
    page_hashes,
)
from scripts.needle.vocabulary import encode
from tests.server.harness import Texts
from tests.server.jobs import Prebuilt


class Faults:
    """Of the `damaged` documents the first one's index is cut, the second one's has a wrong byte in an array, the third
    one's is no index at all; files of somebody's lie among them, one with a name that is no text, an index of `tail` by
    another model, and in a namespace of its own an index of the first one, whole but with a channel that no key has.
    """

    HOSTILE = "hostile"
    """The namespace's `extra_key`."""

    def __init__(self, store: Path, built: Prebuilt, texts: Texts) -> None:
        self.store = store
        self.cut, self.wrong, self.foreign = (
            next(store.rglob(Path(built.line(f"damaged-{n}")["path"]).name)) for n in range(3)
        )
        self._hostile(self.cut.stem)
        self.cut.write_bytes(self.cut.read_bytes()[:-5000])
        raw = bytearray(self.wrong.read_bytes())
        raw[len(raw) // 2] ^= 0xFF
        self.wrong.write_bytes(raw)
        self.foreign.write_bytes(b"not an index at all" * 100)
        self.notes = store / "notes.txt"
        self.notes.write_text("somebody's notes")
        (store / os.fsdecode(b"N\xe9\n\x1b[2J")).write_text("a name that is no text")
        self._other_model(texts)

    def _hostile(self, digest: str) -> None:
        """Right checksums, and a channel number that would read far behind a query."""
        with FileStore(self.store) as store, store.get(digest) as index:
            arrays = dict(index.read_many())
            for key, array in arrays.items():
                if key.name == "token_index.channels" and key.layer > 0:
                    array[-1] = 32767
            identity = msgspec.structs.replace(index.identity, namespace=namespace_digest({"extra_key": self.HOSTILE}))
            store.put(IndexPayload(identity, arrays, spec=index.spec, stats=index.stats, info=index.info))

    def _other_model(self, texts: Texts) -> None:
        """An index of `tail` by a model in another dtype."""
        with FileStore(self.store) as store:
            own = store.list()[0].identity
            identity = IndexIdentity.for_prefix(
                namespace=namespace_digest({}),
                page_hashes=page_hashes(encode(texts.tail.text)),
                model=msgspec.structs.replace(own.model, kv_dtype="bfloat16"),
                profile_digest=own.profile_digest,
            )
            arrays = {ArrayKey("exact.keys", 0, 0): np.zeros(4, np.float32)}
            info = BuildInfo(created=1.0, build_seconds=1.0)
            store.put(IndexPayload(identity=identity, arrays=arrays, spec={}, stats={}, info=info))
