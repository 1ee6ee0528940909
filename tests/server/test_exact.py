"""All positions selected: the sparse path runs for every decode step and equals dense attention."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from scripts.needle.vocabulary import encode
from sglang_ext.compat.versions import older_than
from tests.server.harness import EXACT_CONFIG, REQUEST_SECONDS

LAYERS = 6
STEPS = 12


@pytest.fixture(
    params=[
        pytest.param("overlap", marks=pytest.mark.boot("production")),
        *(
            pytest.param(page, marks=[pytest.mark.boot(f"exact-{page}"), pytest.mark.full], id=f"serial-page-{page}")
            for page in ("1", "64")
        ),
    ]
)
def server(request: pytest.FixtureRequest) -> Any:
    """The server as people run it; at night also some without the overlap schedule, whose counts are exact, with other
    pages than the store was filled with.
    """
    if request.param == "overlap":
        return request.getfixturevalue("production")
    return request.getfixturevalue("serve")(request.getfixturevalue("store"), EXACT_CONFIG, page_size=request.param)


def test_greedy_output_with_all_positions_selected_equals_dense(server: Any, texts: Any) -> None:
    prompts = [texts.ask(texts.first, 0), texts.ask(texts.first, 1), texts.ask(texts.second, 0), texts.long]
    answers, delta = server.compared(prompts, STEPS)
    steps = sum(a.decode_steps for a in answers)
    assert steps == len(prompts) * (STEPS - 1)
    assert delta.sparse_rows in server.rows(steps, len(prompts))
    assert (delta.dense_rows, delta.hits) == (0, len(prompts))
    assert delta.fallbacks == {}
    # One group a step: asked one by one.
    assert delta.sparse_steps == delta.sparse_rows
    lengths = [1536, 1536, 1280, 2560]
    attended = delta.per_layer("attended_tokens_per_layer")
    assert (STEPS - 1) * sum(lengths) <= attended[0] <= server.rows(STEPS - 1)[-1] * sum(lengths)
    assert attended == delta.per_layer("prefix_tokens_per_layer") == attended[:1] * LAYERS


def test_logprobs_with_all_positions_selected_equal_dense(server: Any, texts: Any) -> None:
    prompt = texts.ask(texts.first, 2)
    dense, sparse = (server.generate(prompt, STEPS, sparse=s, return_logprob=True) for s in (False, True))
    pairs = zip(dense.meta["output_token_logprobs"], sparse.meta["output_token_logprobs"], strict=True)
    worst = max(abs(a[0] - b[0]) for a, b in pairs)
    assert dense.ids == sparse.ids
    assert worst < 1e-3


def test_several_answers_to_one_prompt_are_so_many_hits_and_share_its_index(server: Any, texts: Any) -> None:
    prompt = texts.ask(texts.first, 8)
    sampling = {"temperature": 0, "max_new_tokens": STEPS, "ignore_eos": True, "n": 4}
    dense = server.generate(prompt, STEPS, sparse=False)
    replies, delta = server.during(lambda: server.post("/generate", {"text": prompt, "sampling_params": sampling}))
    assert [tuple(reply["output_ids"]) for reply in replies] == [dense.ids] * 4
    assert (delta.hits, delta.dense_rows) == (4, 0)
    assert delta.sparse_rows >= 4 * (STEPS - 1)


def test_openai_answers_say_how_each_choice_was_decoded(server: Any, texts: Any) -> None:
    """In `usage` and, of one whole choice, in a header; by `meta_info`, which `test_metrics` holds against counts."""
    prompt, usage = texts.ask(texts.first, 4), {"include_usage": True}
    told = server.generate(prompt, STEPS).told
    assert told["steps"]["sparse"] == STEPS - 1

    def ask(**fields: Any) -> tuple[list[Any], Any]:
        """The list in the usage of each chunk, and in the header; which steps the guard takes is its own affair."""
        chunks, header = server.openai("/v1/completions", STEPS, **{"prompt": prompt, **fields})
        lists = [(chunk.get("usage") or {}).get("sparse_attn") for chunk in chunks]
        for one in [one for choices in (*lists, header) if choices for one in choices]:
            one["guarded_steps"] = told["guarded_steps"]
        return lists, header

    assert ask() == ([[told]], [told])
    assert ask(n=2) == ([[told, told]], None)
    for n in (1, 2):
        (*before, last), header = ask(n=n, stream=True, stream_options=usage)
        assert (last, header, set(map(str, before))) == ([told] * n, None, {"None"})
    lists, header = ask(stream=True)
    assert (header, set(map(str, lists))) == (None, {"None"})
    several: dict[str, Any] = {"prompt": [prompt, texts.ask(texts.unindexed, 4)], "n": 2}
    for fields in (several, {**several, "stream": True, "stream_options": usage}):
        lists, header = ask(**fields)
        assert ([one["index"] for one in lists[-1]], header) == ([told["index"]] * 2 + [None] * 2, None)
    lists, _ = ask(stream=True, stream_options={**usage, "continuous_usage_stats": True})
    assert lists[-3:] == [[], [told], [told]], "a choice tells when it has ended"


@pytest.mark.boot("production")
def test_openai_requests_opt_out_by_a_field_of_their_own(production: Any, texts: Any) -> None:
    prompt = texts.ask(texts.first, 4)
    asked = {
        "/v1/completions": {"prompt": prompt},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": prompt}]},
    }
    for path, fields in asked.items():
        _, header = production.openai(path, STEPS, **fields, custom_params={"sparse_attn": False})
        assert (header[0]["index"], header[0]["reasons"], header[0]["steps"]["sparse"]) == (None, ["by_request"], 0)


SAID = 'document "usage":{ note'
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": SAID}]}


def usages(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of an answer or of a stream, in their order, wherever an interface has them."""
    holders = [one for chunk in chunks for one in (chunk, chunk.get("message"), chunk.get("response"))]
    return [one["usage"] for one in holders if isinstance(one, dict) and one.get("usage")]


@pytest.mark.boot("production")
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", CHAT),
        ("/invocations", CHAT),
        ("/v1/responses", {"input": SAID, "max_output_tokens": STEPS}),
        ("/v1/messages", CHAT),
    ],
)
def test_other_answers_say_it_too_whatever_stands_in_the_messages(production: Any, path: str, fields: Any) -> None:
    if f"({path}) disabled" in production.log.read_text():
        pytest.skip("SGLang leaves the route out, as packages that it needs are missing here")
    (reply,), header = production.openai(path, STEPS, **fields)
    usage = reply["usage"]
    assert usage["sparse_attn"] == header
    tokens = usage.get("completion_tokens") or usage["output_tokens"]
    assert header[0]["steps"] == {"sparse": 0, "cascade": 0, "dense": tokens - 1}
    chunks, none = production.openai(path, STEPS, **fields, stream=True, stream_options={"include_usage": True})
    assert (usages(chunks)[-1]["sparse_attn"], none) == (header, None)
    assert all(usage["sparse_attn"] == [] for usage in usages(chunks)[:-1])


@pytest.mark.boot("production")
def test_answers_without_usage_have_the_header(production: Any) -> None:
    options = {"num_predict": STEPS}
    (reply,), header = production.openai("/api/generate", prompt=SAID, stream=False, options=options)
    assert header[0]["steps"] == {"sparse": 0, "cascade": 0, "dense": reply["eval_count"] - 1}
    assert "sparse_attn" not in reply


def test_indexed_and_unindexed_requests_and_two_prefixes_in_one_batch_equal_asking_alone(
    server: Any, texts: Any
) -> None:
    prompts = [texts.ask(doc, n) for n in range(2) for doc in (texts.first, texts.unindexed, texts.second)]
    prompts.append(texts.first.questions[1].text)
    _, delta = server.compared_together(prompts, 16, lambda found: found.sparse_steps < found.sparse_rows)
    assert delta.sparse_rows in server.rows(4 * 15, 4)
    assert delta.dense_rows in server.rows(3 * 15, 3)
    assert delta.fallbacks == {"no_index": 2}
    assert delta.sparse_steps < delta.sparse_rows, "some steps held several sparse rows"


@pytest.mark.parametrize(("tokens", "used"), [(1535, 0), (2559, 1536), (2560, 2560)])
def test_an_index_longer_than_the_prompt_is_not_used_and_the_shorter_one_is(
    server: Any, texts: Any, tokens: int, used: int
) -> None:
    # The longer prompt is in the radix cache as a whole, so the match alone would not tell.
    server.generate(texts.long, 1)
    answers, delta = server.compared([" ".join(texts.long.split()[:tokens])], STEPS)
    assert answers[0].cached_tokens >= 1472, "whole pages of at most 64 tokens"
    assert (delta.hits, delta.fallbacks) == ((1, {}) if used else (0, {"no_index": 1}))
    assert delta.sparse_rows in (server.rows(STEPS - 1) if used else [0])
    assert delta.per_layer("prefix_tokens_per_layer") == [used * delta.sparse_rows] * LAYERS


def test_an_index_is_for_its_own_extra_key(server: Any, texts: Any) -> None:
    """Of `first` there is one without a key, of `second` also one of tenant-b."""
    _, delta = server.compared([texts.ask(texts.first, 0)], STEPS, extra_key="tenant-a")
    assert (delta.hits, delta.sparse_rows, delta.fallbacks) == (0, 0, {"no_index": 1})
    _, delta = server.compared([texts.ask(texts.second, 0)], STEPS, extra_key="tenant-b")
    assert (delta.hits, delta.fallbacks) == (1, {})
    assert delta.sparse_rows in server.rows(STEPS - 1)


def test_another_cache_salt_does_not_see_the_index(server: Any, texts: Any) -> None:
    prompt = texts.ask(texts.second, 0)
    if older_than("0.5.18"):
        pytest.skip("this release has no cache_salt in /generate: it joins it into extra_key (tested above)")
    delta = server.delta()
    server.generate(prompt, 4, cache_salt="salt")
    server.generate(prompt, 4, cache_salt="tenant-b")  # the value of an extra_key, in the other field
    server.generate(prompt, 4, cache_salt="salt", extra_key="tenant-b")
    server.done(delta)
    assert (delta.hits, delta.sparse_rows, delta.fallbacks) == (0, 0, {"no_index": 3})


def test_two_simultaneous_cold_prefills_of_one_prompt_are_sparse_at_once_and_grouped_later(
    server: Any, texts: Any
) -> None:
    prompts = [texts.ask(texts.second, n) for n in (2, 3)]
    dense = [server.generate(prompt, 40, sparse=False) for prompt in prompts]
    sampling = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
    body = {"input_ids": [encode(prompt) for prompt in prompts], "sampling_params": sampling}
    for _attempt in range(10):
        server.flush()
        delta = server.delta()
        # While another request decodes, the scheduler is busy, and finds both in its queue afterwards.
        with ThreadPoolExecutor(1) as pool:
            busy = pool.submit(server.generate, texts.unindexed.questions[0].text, 4000, rid="busy")
            server.until(lambda state, before=delta.before: state["dense_rows"] > before["dense_rows"] + 3)
            replies = server.post("/generate", body)
            server.post("/abort_request", {"rid": "busy"})
            busy.exception(REQUEST_SECONDS)
        server.done(delta)
        if [reply["meta_info"]["cached_tokens"] for reply in replies] == [0, 0]:
            break
    else:
        pytest.fail("expected two cold prefills in one batch, in ten attempts")
    assert [tuple(reply["output_ids"]) for reply in replies] == [a.ids for a in dense]
    assert delta.sparse_rows in server.rows(2 * 39, 2)
    assert delta.fallbacks == {}
    # Grouped from the third step on, once a comparison has shown that both rows hold the shared slots.
    before, after = (state["metrics"]["groups"]["sparse"] for state in (delta.before, delta.after))
    assert 39 <= after - before < 45
    assert delta.sparse_steps in server.rows(39)


def test_retracted_requests_go_on_sparsely_and_equal_dense(server: Any, texts: Any) -> None:
    prompts = [texts.ask(texts.first, 9), texts.ask(texts.first, 10), texts.ask(texts.second, 9)]
    dense = [server.generate(prompt, 60, sparse=False) for prompt in prompts]
    for _attempt in range(10):  # one that came late, or was done already, was not retracted
        delta = server.delta()
        with ThreadPoolExecutor(3) as pool:
            running = [pool.submit(server.generate, prompt, 60) for prompt in prompts]
            server.until(lambda state, before=delta.before: state["sparse_rows"] > before["sparse_rows"] + 20)
            server.post("/pause_generation", {"mode": "retract"})
            try:
                if not older_than("0.5.21"):  # which flush only when nothing waits
                    server.flush()  # their KV is gone: the prefix is prefilled again, into other slots
            finally:
                server.post("/continue_generation", {})
            answers = [future.result(REQUEST_SECONDS) for future in running]
        server.done(delta)
        assert [a.ids for a in answers] == [a.ids for a in dense]
        if [a.num_retractions for a in answers] == [1, 1, 1]:
            break
    else:
        pytest.fail("expected to pause three requests halfway, in ten attempts")
    # One token of each came out of the second prefill instead of a decode step.
    assert delta.sparse_rows in server.rows(3 * (60 - 2), 3)
    assert (delta.dense_rows, delta.hits, delta.fallbacks) == (0, 3, {})


def test_an_aborted_running_request_leaves_nothing_behind(server: Any, texts: Any) -> None:
    prompt, delta = texts.ask(texts.first, 7), server.delta()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate, prompt, 4000, rid="to-abort")
        server.until(lambda state: state["sparse_rows"] > delta.before["sparse_rows"] + 5)
        server.post("/abort_request", {"rid": "to-abort"})
        try:
            aborted = running.result(REQUEST_SECONDS)
        except OSError:
            pass
        else:
            assert aborted.meta["finish_reason"]["type"] == "abort"
            assert len(aborted.ids) < 4000
    server.done(delta)
    server.compared([prompt], STEPS)


@pytest.mark.boot("exact-1")
@pytest.mark.skipif(older_than("0.5.23"), reason="this release has no beam search")
def test_a_beam_search_request_is_dense_and_uses_no_index(serve: Any, store: Any, texts: Any) -> None:
    server = serve(store, EXACT_CONFIG, page_size="1")
    prompt, sampling = texts.ask(texts.first, 0), {"max_new_tokens": STEPS, "beam_width": 3, "ignore_eos": True}
    reply, delta = server.during(lambda: server.post("/generate", {"text": prompt, "sampling_params": sampling}))
    (told,) = reply["meta_info"]["sparse_attn"]
    assert (told["index"], told["reasons"], told["steps"]["sparse"]) == (None, ["unsupported_mode"], 0)
    assert (delta.hits, delta.sparse_rows, delta.fallbacks) == (0, 0, {"unsupported_mode": 1})


def test_two_live_requests_with_one_id_do_not_harm_the_server(server: Any, texts: Any) -> None:
    prompts = [texts.ask(texts.first, 0), texts.ask(texts.second, 0)]
    dense = [server.generate(prompt, 32, sparse=False) for prompt in prompts]

    def ask(prompt: str) -> Any:
        try:
            return server.generate(prompt, 32, rid="same")
        except OSError as error:
            return error

    replies, _ = server.during(lambda: server.together([lambda p=p: ask(p) for p in prompts]))
    for reply, expected in zip(replies, dense, strict=True):
        assert isinstance(reply, OSError) or reply.ids == expected.ids
