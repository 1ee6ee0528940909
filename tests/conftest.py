"""What all tests share: Ctrl-C works in what they start, hypothesis looks at no clock, those marked `gpu` say so where
there is no CUDA device, tests of one module run in one process, and products of parameters are thinned out by day.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Hashable, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from tests import examples  # noqa: F401 (registers the profiles)

# A shell starts its background jobs with Ctrl-C ignored, and every program that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Test modules take over the profile that is loaded when they are imported. `--hypothesis-profile` comes after this.
settings.load_profile("day")


def each_value_once(cases: Sequence[Collection[Hashable]]) -> set[int]:
    """Which of a parametrized test's cases run by day: few, such that each value of each parameter occurs.

    Args:
        cases: the values of each case.
    """
    missing, taken = set().union(*cases), set[int]()
    while missing:
        best = max(range(len(cases)), key=lambda n: (len(missing.intersection(cases[n])), -n))
        taken.add(best)
        missing.difference_update(cases[best])
    return taken


def values_of(item: pytest.Item) -> set[Hashable]:
    """What a case is made of: a value for each `parametrize`, and for each fixture that has parameters."""
    given: dict[str, object] = dict(item.callspec.params)
    values: set[Hashable] = set()
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        # The same object in all cases that have it. One parametrize of a fixture's name stands in params, too.
        values.add(tuple((name, id(given.pop(name))) for name in names if name in given))
    return values | {(name, id(value)) for name, value in given.items()}


def mark_products(items: Sequence[pytest.Item]) -> None:
    """Of products of parameters a few run by day, and all in `make test-all`."""
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("full") is None:
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for family in families.values():
        taken = each_value_once([values_of(item) for item in family])
        for number, item in enumerate(family):
            if number not in taken:
                item.add_marker(pytest.mark.full)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Groups are kept together by their names in test ids, or each process would start every server."""
    if session.config.getoption("loadgroup", False) and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError(
            f"expected test ids that end with @group, got others with pytest {pytest.__version__}: servers would be "
            "started once per process. Run `make venv` for a pytest below 9.2, or leave out --dist loadgroup"
        )


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_products(items)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(Path(str(item.path)).stem))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
