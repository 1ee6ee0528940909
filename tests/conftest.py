"""What all tests share: Ctrl-C works in what they start, hypothesis looks at no clock, and those marked `gpu` say so
where there is no CUDA device.
"""

from __future__ import annotations

import signal

import pytest
from hypothesis import HealthCheck, settings

# A shell starts its background jobs with Ctrl-C ignored, and every program that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# An example that took long was interrupted by another process as a rule. Test modules take this profile over when
# they are imported; a folder's conftest may load one of its own.
settings.register_profile("clockless", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("clockless")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
