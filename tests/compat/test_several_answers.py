"""What a request is taken for when it is admitted. Of several answers to one prompt, SGLang has the prompt prefilled
first: which of its requests count as a hit. And of its own parameters, however many these are.
"""

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


def test_however_many_parameters_a_request_has_few_are_looked_at_and_the_opt_out_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All other requests wait meanwhile: 100,000 keys took a second."""
    looked: list[str] = []
    monkeypatch.setattr(scheduler_hooks, "get_close_matches", lambda key, *_, **__: looked.append(key) or [])
    custom: dict[str, Any] = {f"sparse_{number:x}": 1 for number in range(1000)}

    def refusal() -> Any:
        req = SimpleNamespace(sampling_params=SamplingParams(custom_params=custom))
        return scheduler_hooks._refusal(req, SimpleNamespace())

    assert refusal() is None
    assert len(looked) == scheduler_hooks.MAX_KEYS
    custom["sparse_attn"] = False
    assert refusal() == ("by_request", "custom_params.sparse_attn is false")
