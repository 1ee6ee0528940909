"""The folder of a server's indexes is removed while it serves. Last of its server: the store is gone afterwards."""

from __future__ import annotations

import shutil
from typing import Any

import msgspec
import pytest

from prefix_index import ModelFingerprint
from tests.server.faults import Faults

pytestmark = pytest.mark.boot("production")
STEPS = 8


def test_a_store_that_disappears_leaves_the_server_alive(production: Any, faults: Faults, texts: Any) -> None:
    """What is resident is still used; what is not is no index any more."""
    prompt = texts.ask(texts.second, 3)
    dense = production.generate(prompt, STEPS, sparse=False)
    production.generate(prompt, STEPS)
    shutil.rmtree(faults.store)
    delta = production.delta()
    for _ in range(3):
        assert production.generate(prompt, STEPS).ids == dense.ids
    assert production.done(delta).hits == 3
    delta = production.delta()
    production.generate(texts.ask(texts.unindexed, 0), STEPS, extra_key="unseen")
    assert production.done(delta).fallbacks == {"no_index": 1}
    assert any(str(faults.store) in problem for problem in production.state()["store_problems"])
    assert production.alive
    assert isinstance(msgspec.convert(production.state()["model"], ModelFingerprint), ModelFingerprint)
