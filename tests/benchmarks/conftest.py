"""The modules of benchmarks, imported as they import each other."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.benchmarks.results import BENCHMARKS


class Modules:
    """`bench.replay` is `benchmarks/replay.py`."""

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(name)


@pytest.fixture(scope="session")
def bench() -> Iterator[Modules]:
    sys.path.insert(0, str(BENCHMARKS))
    yield Modules()
    sys.path.remove(str(BENCHMARKS))
