"""What SGLang's modules need on a machine without an accelerator."""

from __future__ import annotations

import pytest


@pytest.fixture
def mends() -> None:
    from sglang_ext.compat import cpu

    if cpu._no_accelerator():
        cpu._stub_rope_operation()
