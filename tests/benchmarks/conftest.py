"""The modules of benchmarks, imported as they import each other."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import pytest

from tests.benchmarks.results import BENCHMARKS


@pytest.fixture(scope="session")
def load() -> Iterator[Callable[..., SimpleNamespace]]:
    """`load("replay", "replay_model")`: (replay=, replay_model=)."""

    def loaded(*names: str) -> SimpleNamespace:
        found: dict[str, ModuleType] = {name: importlib.import_module(name) for name in names}
        return SimpleNamespace(**found)

    sys.path.insert(0, str(BENCHMARKS))
    yield loaded
    sys.path.remove(str(BENCHMARKS))
