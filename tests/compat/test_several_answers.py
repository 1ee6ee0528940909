"""Of several answers to one prompt, SGLang has the prompt prefilled first: which of its requests count as a hit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.compat import scheduler_hooks


@pytest.mark.parametrize(
    ("sampling", "counted", "repeats"),
    [
        ({"n": 1}, True, False),
        ({"n": 3, "max_new_tokens": 0}, False, False),
        ({"n": 3}, True, True),
    ],
)
def test_a_prompt_of_several_answers_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any], counted: bool, repeats: bool
) -> None:
    told: dict[str, Any] = {}
    runtime = SimpleNamespace(
        requests=SimpleNamespace(of=lambda req: None), admit=lambda *admitted, **more: told.update(more)
    )
    monkeypatch.setattr(scheduler_hooks, "_runtime", runtime)
    req = SimpleNamespace(rid="a", origin_input_ids=[1, 2], sampling_params=SamplingParams(**sampling))

    class Key:
        __slots__ = ()

    scheduler_hooks._admit(req, Key())
    assert told == {"counted": counted, "repeats": repeats}
