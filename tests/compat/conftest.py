"""What SGLang's modules need on a machine without an accelerator, and a process that has them with the plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.compat.sglang_process import plugged_sglang


@pytest.fixture(scope="session")
def plugged() -> Iterator[Callable[..., Any]]:
    """As `in_sglang`, in a fork of one process for all tests of its group."""
    with plugged_sglang() as call:
        yield call


@pytest.fixture
def mends() -> None:
    from sglang_ext.compat import cpu

    if cpu._no_accelerator():
        cpu._stub_rope_operation()
