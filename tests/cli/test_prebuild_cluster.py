"""What the actors of `prebuild --ray` make of nodes where no engine starts: Ray's part, which is in no environment of
these tests, is played by a few lines. tests/server/test_prebuild_ray.py has the real one.
"""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.cli import prebuild_ray
from sglang_ext.cli.prebuild_ray import Cluster
from sglang_ext.compat.engine import EngineDiedError, EngineStartError

BAD, LOST = EngineStartError("node b: no model folder"), RuntimeError("the actor died")


class SimpleRef:
    def __init__(self, value: Any) -> None:
        self.value = value


class Ray:
    """References are what `get` gives, or raises; actors start with `starts`, one after another."""

    exceptions = SimpleNamespace(RayError=RuntimeError)
    now = 0.0

    def __init__(self, starts: list[Any]) -> None:
        self.starts, self.killed = iter(starts), 0

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._actor))

    def _actor(self) -> Any:
        def line(prompt: Any, *_: Any) -> Any:
            return SimpleRef({"id": prompt.id} if prompt.id != "lost" else LOST)

        start = SimpleNamespace(remote=lambda *_: SimpleRef(next(self.starts)))
        return SimpleNamespace(start=start, line=SimpleNamespace(remote=line))

    def wait(self, refs: list[Any], timeout: float) -> Any:
        assert refs, "a job without engines would wait for ever"
        Ray.now += 40.0
        return refs[:1], refs[1:]

    def get(self, ref: Any) -> Any:
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    def kill(self, _: Any) -> None:
        self.killed += 1


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(starts: list[Any], *prompts: str, count: int = 2) -> list[str]:
        monkeypatch.setitem(sys.modules, "ray", Ray(starts))
        monkeypatch.setattr(prebuild_ray, "time", SimpleNamespace(monotonic=lambda: Ray.now))
        cluster = Cluster(argparse.Namespace(), SimpleNamespace(dump=str), count, 0)  # type: ignore[arg-type]
        tasks: Any = [(SimpleNamespace(id=prompt), "digest", 0.0) for prompt in prompts]
        return [line["id"] for _, line in cluster.lines(tasks)]

    return run


def test_a_node_where_no_engine_starts_leaves_the_job_to_the_others(lines: Any, capsys: Any) -> None:
    for starts in ([BAD, None], [None, BAD], [None, LOST, LOST, LOST], [LOST, None, LOST, LOST, LOST]):
        assert sorted(lines(starts, *"abcdef")) == [*"abcdef"]
    assert "one engine less: node b: no model folder" in capsys.readouterr().err


def test_a_job_ends_when_no_engine_is_left(lines: Any) -> None:
    with pytest.raises(EngineStartError, match="node b"):
        lines([BAD, BAD], "a")
    with pytest.raises(EngineDiedError, match="node b"):
        lines([BAD, None, BAD], "lost", "a")
    with pytest.raises(EngineDiedError, match="expected engines to start"):
        lines([LOST, LOST, LOST], "a", count=1)


def test_it_is_said_that_no_node_has_room_where_that_lasts_only(lines: Any, capsys: Any) -> None:
    lines([None, None, None, None], *"abcdef", "lost", count=1)  # each successor starts within the time
    assert "no node has room" not in capsys.readouterr().err
    lines([LOST, LOST, None], "a", count=1)
    assert capsys.readouterr().err.count("or no node has room for it") == 1
