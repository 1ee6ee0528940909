"""Which sparse decode steps search, and which use what an earlier one found."""

from __future__ import annotations

from collections.abc import Hashable


class SearchTurns:
    """Counts the sparse decode steps that may use one search: so many, the searching one included.

    Attributes:
        period: steps that use one search, at most.
        searches: whether the last step that was taken searches.

    Args:
        period: see above.
    """

    def __init__(self, period: int) -> None:
        self.period = period
        self._uses = 0
        self._searched: Hashable | None = None
        self._groups: Hashable | None = None
        self._steps = 0
        self.searches = True

    def steps_of(self, groups: Hashable | None) -> int:
        """Steps over which the cost of a search is to be spread: the period, but no more than there have been with
        these groups, the next one included. Groups that come and go may not stay for the rest of it either.

        Args:
            groups: as for `take`.
        """
        return min(self.period, 1 + (self._steps if groups is not None and groups == self._groups else 0))

    def take(self, groups: Hashable | None, *, must: bool = False) -> None:
        """The next decode step is a sparse one: it searches where the last search was for others, or has served long
        enough.

        Args:
            groups: what makes two selections the same but for the queries. None: its slots may still change, so that
                lists would hold those of before.
            must: it searches in any case.
        """
        self.searches = must or groups is None or groups != self._searched or self._uses == self.period
        self._uses = 1 if self.searches else self._uses + 1
        self._searched = groups
        self._count(groups)

    def skip(self, groups: Hashable | None = None) -> None:
        """The next decode step attends otherwise: what was found before it is too old behind it.

        Args:
            groups: as for `take`, where they are known.
        """
        self._searched = None
        self._count(groups)

    def begin(self, *, searches: bool) -> None:
        """Forget the last search; until the next step `searches` is as said."""
        self.skip()
        self.searches = searches

    def _count(self, groups: Hashable | None) -> None:
        self._steps = self._steps + 1 if groups is not None and groups == self._groups else 1
        self._groups = groups
