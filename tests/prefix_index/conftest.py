"""Settings of the store's tests, and the tiny index whose bytes are the format's golden ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from prefix_index import ArrayKey, BuildInfo, IndexPayload
from prefix_index.testing import sample_identity

settings.register_profile(
    "prefix_index", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("prefix_index")


@pytest.fixture(scope="session")
def fixture_file() -> Path:
    """An index file as version 1 wrote it on the day it was released. Never regenerate it."""
    return Path(__file__).parent / "fixtures" / "v1.pfxindex"


@pytest.fixture(scope="session")
def tiny_payload() -> IndexPayload:
    """What ``fixture_file`` holds."""
    scores = ArrayKey("csa.scores", 0, 1)
    packed = ArrayKey("blocks", 1, 0)
    return IndexPayload(
        identity=sample_identity(),
        arrays={
            scores: np.array([0x3F80, 0x4000, 0xC000], dtype=np.uint16),
            ArrayKey("csa.ids", 0, 1): np.arange(6, dtype=np.int32).reshape(2, 3),
            packed: np.array([[0x21], [0x43]], dtype=np.uint8),
            ArrayKey("empty"): np.empty((0, 4), dtype=np.float16),
        },
        dtypes={scores: "bfloat16", packed: "int4x2"},
        spec={"method": "csattention", "budget": 0.05, "layers": ["dense", "anchor"], "seed": None},
        stats={"recall": 0.993},
        info=BuildInfo(created=1_700_000_000.25, build_seconds=12.5),
    )
