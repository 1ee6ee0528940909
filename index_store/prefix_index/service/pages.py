"""Answers that are too long for one message, in pages."""

from __future__ import annotations

from collections.abc import Sequence

from ..store import IndexEntry, Problem
from .messages import PAGE_NBYTES, ErrorText, ProblemPage, Removed, TierEntry, encode, entry_out, problem_out


def removed_page(removed: Sequence[IndexEntry], start: int) -> Removed:
    page: list[TierEntry] = []
    nbytes = 0
    for entry in removed[start:]:
        if nbytes > PAGE_NBYTES:
            return Removed(entries=page, next=start + len(page))
        page.append(entry_out(entry))
        nbytes += len(encode(page[-1]))
    return Removed(entries=page)


def problem_page(problems: Sequence[Problem], start: int) -> ProblemPage:
    page: list[tuple[str, ErrorText]] = []
    nbytes = 0
    for problem in problems[start:]:
        if nbytes > PAGE_NBYTES:
            return ProblemPage(problems=page, next=start + len(page))
        page.append(problem_out(problem))
        nbytes += len(encode(page[-1]))
    return ProblemPage(problems=page)
