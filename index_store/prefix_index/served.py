"""Which version of each index a store handed out: whether a report can be about one that was replaced since."""

from __future__ import annotations

from typing import Generic, TypeVar

Version = TypeVar("Version")


class Served(Generic[Version]):
    """One small entry for each index that was ever served; its owner locks."""

    def __init__(self) -> None:
        self._versions: dict[str, Version | None] = {}

    def clear(self) -> None:
        self._versions.clear()

    def gave(self, digest: str, version: Version) -> None:
        if self._versions.setdefault(digest, version) != version:
            self._versions[digest] = None  # several: a reader of an old one may still be at it

    def only(self, digest: str, version: Version) -> bool:
        """Whether nobody was given another version than this one."""
        return self._versions.get(digest, version) == version
