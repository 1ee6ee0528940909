"""What a RemoteStore knows without asking: entries, generations and problems, as of its last look or change."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ..catalog import Catalog, inconsistent
from ..errors import IndexForeign, IndexFormatError, IndexNotFound, IndexStoreError
from ..served import Served
from ..store import Problem
from .transfer import Found, not_found
from .values import Manifest


class _Bad(NamedTuple):
    """A problem, and the generation it is about (None: look again whenever something changed). What a reader
    ``reported`` stands; what ``get`` found itself it looks at again.
    """

    error: IndexStoreError
    generation: str | None
    reported: bool = False


class Books:
    """The mirror of one remote store. All methods may be called from several threads; none does I/O.

    A listing takes time, and this process goes on meanwhile: what it learned of a digest since ``begin_scan`` is
    newer than the listing, which then says nothing about that digest.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.lock = threading.RLock()
        self.catalog = Catalog(clock)
        self._manifests: dict[str, Manifest] = {}
        self._problems: dict[str, _Bad] = {}
        self._served: Served[str] = Served()
        self._seen: dict[str, Found] = {}
        self._touched: dict[str, int] = {}
        self._ticks = itertools.count(1)

    def clear(self) -> None:
        with self.lock:
            self.catalog.clear()
            self._served.clear()
            for book in (self._manifests, self._problems, self._seen, self._touched):
                book.clear()

    def learn(self, manifest: Manifest, *, unless_bad: bool = False) -> None:
        """There is an index of this manifest. ``unless_bad``: if this generation is a problem, it stays one."""
        digest = manifest.entry.identity.digest
        with self.lock:
            if unless_bad and self.is_bad(manifest):
                return
            self._touch(digest)
            self._problems.pop(digest, None)
            self.catalog.add(digest, manifest.listed)
            self._manifests[digest] = manifest

    def forget(self, digest: str) -> None:
        with self.lock:
            self._touch(digest)
            self._problems.pop(digest, None)
            self.catalog.remove(digest)
            self._manifests.pop(digest, None)

    def add_problem(self, digest: str, error: IndexStoreError, manifest: Manifest | None = None) -> None:
        """The index is offered no more, until another generation of it (``manifest``, or the one known) comes."""
        with self.lock:
            manifest = manifest or self._manifests.get(digest)
            self.forget(digest)
            self._problems[digest] = _Bad(error, None if manifest is None else manifest.generation)

    def offered(self, digest: str) -> Manifest | None:
        """Of the index, unless it is a problem."""
        with self.lock:
            return self._manifests.get(digest)

    def gave(self, manifest: Manifest) -> None:
        """A reader has this generation."""
        with self.lock:
            self._served.gave(manifest.entry.identity.digest, manifest.generation)

    def gave_only(self, manifest: Manifest) -> bool:
        """Whether nobody was given another generation than this one."""
        with self.lock:
            return self._served.only(manifest.entry.identity.digest, manifest.generation)

    def report(self, manifest: Manifest, error: IndexStoreError) -> None:
        """Hides this generation, if it is the one that is offered, until another one comes."""
        digest = manifest.entry.identity.digest
        with self.lock:
            known = self._manifests.get(digest)
            if known is not None and known.generation == manifest.generation:
                self.forget(digest)
                self._problems[digest] = _Bad(error, manifest.generation, reported=True)

    def verdict(self, manifest: Manifest) -> IndexStoreError | None:
        """What was reported about this generation."""
        with self.lock:
            bad = self._problems.get(manifest.entry.identity.digest)
            return bad.error if bad is not None and bad.reported and bad.generation == manifest.generation else None

    def is_bad(self, manifest: Manifest) -> bool:
        """Whether this generation of the index is a problem."""
        with self.lock:
            bad = self._problems.get(manifest.entry.identity.digest)
            return bad is not None and bad.generation == manifest.generation

    def is_known(self, manifest: Manifest) -> bool:
        with self.lock:
            return self._manifests.get(manifest.entry.identity.digest) == manifest

    def problems(self) -> tuple[Problem, ...]:
        with self.lock:
            return tuple(Problem(name, bad.error) for name, bad in sorted(self._problems.items()))

    def incomplete(self) -> list[str]:
        """Digests of indexes of which chunks were lost."""
        with self.lock:
            return [digest for digest, bad in self._problems.items() if isinstance(bad.error, IndexNotFound)]

    def begin_scan(self) -> int:
        """To be passed to ``end_scan``; call it before the listing begins."""
        return next(self._ticks)

    def news(self, found: Mapping[str, Found], *, full: bool) -> list[str]:
        """Digests whose manifest is to be read."""
        with self.lock:
            return [d for d, names in found.items() if names.tag is not None and (full or self._seen.get(d) != names)]

    def end_scan(
        self,
        begun: int,
        found: Mapping[str, Found],
        outcomes: Mapping[str, Manifest | IndexNotFound | IndexFormatError],
        strays: Iterable[str],
    ) -> None:
        with self.lock:
            there = {digest for digest, names in found.items() if names.tag is not None}
            for digest in {*self._manifests, *self._problems} - there:
                if self._touched.get(digest, 0) < begun:
                    self.forget(digest)
            for digest, outcome in outcomes.items():
                if self._touched.get(digest, 0) < begun:
                    self._take_in(digest, outcome, found[digest])
                    self._seen[digest] = found[digest]
            for name in strays:
                self._problems[name] = _Bad(_stray(name), None)

    def check_integrity(self, outcomes: Mapping[str, Manifest | IndexNotFound | IndexFormatError]) -> None:
        """Raises StoreInconsistent where the books and all manifests of the store disagree."""
        with self.lock:
            self.catalog.check_integrity()
            there = {d: m for d, m in outcomes.items() if isinstance(m, Manifest) and d not in self._problems}
            if self._manifests != there:
                raise inconsistent("manifests", there, self._manifests)
            held, listed = dict(self.catalog.all_held()), {d: m.listed for d, m in there.items()}
            if held != listed:
                raise inconsistent("entries", listed, held)

    def _touch(self, digest: str) -> None:
        self._touched[digest] = next(self._ticks)
        self._seen.pop(digest, None)

    def _take_in(self, digest: str, outcome: Manifest | IndexNotFound | IndexFormatError, names: Found) -> None:
        if isinstance(outcome, IndexNotFound):
            self.forget(digest)
        elif isinstance(outcome, IndexFormatError):
            self.forget(digest)
            self._problems[digest] = _Bad(outcome, None)
        elif not names.is_whole(outcome):
            self.forget(digest)
            there = len(names.chunks.get(outcome.generation, ()))
            found = f"{there} of its {len(outcome.chunks)} chunks (evicted, or lost with their machine)"
            self._problems[digest] = _Bad(not_found(digest, found, "build it again; collect() removes the rest"), None)
        else:
            self.learn(outcome, unless_bad=True)


def _stray(name: str) -> IndexForeign:
    remedy = "give the store a folder of its own"
    return IndexForeign("name in the store's folder", expected="one of ours", found=name[:100], remedy=remedy)
