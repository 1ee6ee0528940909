"""Lossless decode in a real server: every token is dense decoding's, whatever an index says."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.needle.vocabulary import encode
from tests import index_faults
from tests.server.harness import MODEL, SPARSE_CONFIG, Answer, Pool, Server, by_transformers
from tests.server.jobs import Prebuilt
from tests.server.test_schedules import SMALL_POOL, retracted

CONFIG: dict[str, Any] = {
    **SPARSE_CONFIG, "exactness": "verify", "draft_tokens": 3, "share_prefixes": True, "min_shared_tokens": 512,
}  # fmt: skip
FLAGS = {"disable_overlap_schedule": None, "max_running_requests": "32"}
TOKENS = 28


@pytest.fixture
def spoilt(built: Prebuilt, tmp_path: Path) -> Path:
    """A store in which `large` and `second` have shuffled positions; `first` is whole."""
    store = Path(shutil.copytree(built.store, tmp_path / "store"))
    for name in ("large", "second"):
        index_faults.shuffle(store, built.line(name)["digest"])
    return store


@pytest.mark.boot("lossless")
def test_tokens_are_those_of_dense_decoding_whatever_an_index_says(serve: Pool, spoilt: Path, texts: Any) -> None:
    """One server's life: alone, together, beside requests that draft nothing; at the end of an answer; sampled."""
    server = serve(spoilt, CONFIG, fresh=True, **FLAGS)
    whole, hostile = ([texts.ask(one, n) for n in range(2)] for one in (texts.first, texts.large))
    dense = server.generate(whole[0], TOKENS, sparse=False).ids
    assert [dense] == by_transformers(MODEL, [encode(whole[0])], TOKENS), "also dense answers come from the worker"
    for prompts in (whole, hostile):
        answers, delta = server.compared(prompts, TOKENS)
        counts = [one.told for one in answers]
        assert delta.drafted == sum(one.get("drafted", 0) for one in counts) > 0
        assert delta.accepted == sum(one.get("accepted", 0) for one in counts)
        if prompts is hostile:
            assert delta.accepted < delta.drafted / 2, "expected a shuffled index to draft badly"
        else:
            assert delta.accepted > delta.drafted / 2
            assert all(one.meta["spec_accept_length"] > 1.5 for one in answers)
    # Together, of different lengths, one prompt without an index among them.
    jobs = [(prompt, 5 + 6 * n) for n, prompt in enumerate([*whole, *hostile, texts.ask(texts.unindexed, 0)])]
    _, delta = server.compared_together(jobs, TOKENS, lambda found: found.cascade_steps > 5, times=2)
    assert delta.drafted >= delta.accepted > 0  # by now those behind the shuffled index may draft nothing
    assert delta.cascade_steps > 5, "expected rows of requests and their drafts to share reads"
    for count in range(1, 6):
        server.compared(whole[:1], count)
    _judges_each_token(server, whole[0])
    _ends_alike(server, whole[0])
    _draws(server, whole[1], texts.ask(texts.second, 0))
    _drafts_nothing(server, whole[1])


def _judges_each_token(server: Server, prompt: str) -> None:
    """`Server.behind`: nothing of an answer of dense decoding; of another token, that token alone and what follows."""
    ids = encode(prompt)
    dense = server.generate(ids, 8, sparse=False)
    other = replace(dense, ids=(*dense.ids[:5], 3 if dense.ids[5] != 3 else 4, *dense.ids[6:]))
    assert max(server.behind(ids, dense)) < 1e-3
    behind = server.behind(ids, other)
    assert max(behind[:5]) < 1e-3 < behind[5]


def _both(server: Server, prompt: str, sampling: dict[str, Any], **fields: Any) -> list[Any]:
    """What a dense request and one that may draft are answered."""
    sampling = {"temperature": 0.0, **sampling}
    dense = {**sampling, "custom_params": {"sparse_attn": False}}
    return [server.post("/generate", {"text": prompt, "sampling_params": one, **fields}) for one in (dense, sampling)]


def _ends_alike(server: Server, prompt: str) -> None:
    """At its own end, at a string, at a token, where a round may have more."""
    long = server.generate(prompt, TOKENS, sparse=False)
    ends: list[dict[str, Any]] = [{}]
    ends += [{"stop": [word]} for word in dict.fromkeys(long.text.split()[2:6])]
    ends += [{"stop_token_ids": [token]} for token in dict.fromkeys(long.ids[3:7])]
    # Within one round: a stop token, and the most tokens or a string behind it; the later of two strings named first.
    ends += [{"stop_token_ids": [long.ids[2]], "max_new_tokens": most} for most in (4, 5)]
    ends += [{"stop": long.text.split()[n : n + 2][::-1], "stop_token_ids": [long.ids[n]]} for n in (1, 2, 3)]
    for end in ends:
        dense, drafted = _both(server, prompt, {"max_new_tokens": TOKENS, **end})
        assert drafted["text"] == dense["text"]
        assert drafted["output_ids"] == dense["output_ids"]
        for name in ("finish_reason", "completion_tokens"):
            assert drafted["meta_info"][name] == dense["meta_info"][name]
        [told] = drafted["meta_info"]["sparse_attn"]
        assert told.get("accepted", 0) < drafted["meta_info"]["completion_tokens"], "the first token is no draft"


def _draws(server: Server, whole: str, hostile: str) -> None:
    """Requests with a temperature draft, too, alone and beside greedy ones. Where no token but the most probable one
    may be drawn, answers are those of greedy decoding.
    """
    dense = {prompt: server.generate(prompt, TOKENS, sparse=False).ids for prompt in (whole, hostile)}
    only = {"temperature": 0.7, "min_p": 0.99}

    def drawn(prompt: str, sampling: dict[str, float]) -> list[int]:
        """Drafts of the answer, and those that were kept."""
        fields = {"max_new_tokens": TOKENS, "ignore_eos": True, **sampling}
        answer = server.post("/generate", {"text": prompt, "sampling_params": fields})
        assert len(answer["output_ids"]) == TOKENS
        assert sampling is not only or answer["output_ids"] == list(dense[prompt])
        (counts,) = answer["meta_info"]["sparse_attn"]
        return [counts.get("drafted", 0), counts.get("accepted", 0)]

    drafted, accepted = drawn(hostile, only)
    assert drafted / 2 > accepted
    drafted, accepted = drawn(whole, only)
    assert drafted >= accepted > drafted / 2
    drafted, accepted = drawn(whole, {"temperature": 0.8, "top_k": 20, "top_p": 0.9})
    assert drafted >= accepted > drafted / 4
    with ThreadPoolExecutor(4) as pool:
        greedy = pool.submit(server.generate, whole, TOKENS)
        (drafted, accepted), _ = pool.map(lambda prompt: drawn(prompt, only), (whole, hostile))
        assert drafted >= accepted > drafted / 2
        assert greedy.result().ids == dense[whole]


def _drafts_nothing(server: Server, prompt: str) -> None:
    """Requests that ask more of a step than its next token: each round decodes one token, exactly."""
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"temperature": 0.8, "repetition_penalty": 1.1}, {}),
        ({"repetition_penalty": 1.3}, {}),
        ({"frequency_penalty": 0.7}, {}),
        ({"min_new_tokens": 6}, {}),
        ({"logit_bias": {"7": 5.0}}, {}),
        ({}, {"return_logprob": True, "top_logprobs_num": 2}),
    ]
    for more, fields in asked:
        dense, exact = _both(server, prompt, {"max_new_tokens": 8, "ignore_eos": True, **more}, **fields)
        assert "drafted" not in exact["meta_info"]["sparse_attn"][0], more
        assert exact["meta_info"]["spec_verify_ct"] == exact["meta_info"]["completion_tokens"] - 1
        if "temperature" not in more:
            assert exact["output_ids"] == dense["output_ids"], more
        for name in ("output_token_logprobs", "output_top_logprobs") if fields else ():
            pairs = zip(_flat(exact["meta_info"][name]), _flat(dense["meta_info"][name]), strict=True)
            assert all(abs(one[0] - other[0]) < 1e-4 and one[1] == other[1] for one, other in pairs)
    masked = {"text": prompt, "sampling_params": {"top_k": 5}, "return_sampling_mask": True}
    with pytest.raises(OSError, match=r"HTTP 400: .*return_sampling_mask is not supported with speculative decoding"):
        server.post("/generate", masked)


def _flat(found: list[Any]) -> list[Any]:
    return [one for item in found for one in (item if isinstance(item[0], list) else [item])]


@pytest.mark.full
@pytest.mark.boot("lossless-dense")
def test_tokens_are_those_of_a_server_without_the_plugin(serve: Pool, spoilt: Path, texts: Any) -> None:
    """Long answers behind a whole index, a shuffled one and none; the lossless server without the overlap schedule."""
    prompts = [texts.ask(one, n) for one in (texts.first, texts.large, texts.unindexed) for n in range(2)]
    server = serve(None, page_size="16")
    dense = [server.generate(prompt, 160) for prompt in prompts]
    server = serve(spoilt, {**CONFIG, "share_prefixes": False, "draft_tokens": 7}, max_running_requests="32")
    for drafted in (
        [server.generate(prompt, 160) for prompt in prompts],
        server.together([lambda p=prompt: server.generate(p, 160) for prompt in prompts]),
    ):
        assert [one.ids for one in drafted] == [one.ids for one in dense]
        assert [one.text for one in drafted] == [one.text for one in dense]


@pytest.mark.full
@pytest.mark.boot("lossless-small")
def test_retracted_and_aborted_requests_leave_nothing_behind(serve: Pool, store: Path, texts: Any) -> None:
    server = serve(store, CONFIG, **SMALL_POOL)
    prompts = [texts.ask(texts.first, n) for n in range(4)]
    delta, _ = retracted(server, prompts)
    assert delta.drafted > 0
    with ThreadPoolExecutor(len(prompts)) as pool:
        delta = server.delta()
        running = [pool.submit(server.generate, prompt, 200, rid=f"one-{n}") for n, prompt in enumerate(prompts)]
        server.until(lambda state: state["drafted"] > delta.before["drafted"])
        server.post("/abort_request", {"abort_all": True})
        ended = [future.exception(120) or future.result() for future in running]
    assert any(isinstance(one, Answer) and one.meta["finish_reason"]["type"] == "abort" for one in ended)
    server.done(delta)
    server.compared(prompts[:1], 30)
