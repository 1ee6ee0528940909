"""Lossless decode, and SGLang's own objects: which requests draft, and what the scheduler is told of a round."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_ext.compat import flags, lossless_algorithm, lossless_worker
from sglang_ext.decode.draws import Sampling
from sglang_ext.metrics import Counters
from sglang_ext.prefix.requests import Attachment, RequestTable
from tests.compat.sglang_process import GROUP, in_sglang

pytestmark = GROUP

GREEDY: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.0, "stop": "a", "n": 2}]
GREEDY += [{"top_k": 1, "top_p": 0.8, "min_p": 0.1}]
DRAWN: list[dict[str, Any]] = [{}, {"temperature": 0.5, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "sampling_seed": 3}]
OTHERS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logit_bias": {"3": 1.0}},
    {"temperature": 0.5, "frequency_penalty": 0.5},
    *({"temperature": 0.0, name: 0.5} for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")),
    *({"temperature": 0.0, name: "a"} for name in ("json_schema", "regex", "ebnf", "structural_tag")),
    {"temperature": 0.0, "min_new_tokens": 2},
]
ASKED = ({"return_logprob": True}, {"grammar": "g"}, {"custom_logit_processor": "p"})


def request(given: dict[str, Any], **asked: Any) -> Any:
    nothing = {"return_logprob": False, "grammar": None, "custom_logit_processor": None}
    return SimpleNamespace(sampling_params=SamplingParams(**given), **nothing | asked)


def drafts(given: dict[str, Any], **asked: Any) -> bool:
    """Whether a request with these parameters does."""
    return lossless_worker.may_draft(request(given, **asked))


def test_requests_draft_whose_next_token_follows_from_what_the_model_says() -> None:
    """The most probable one, or drawn, in the order of the backend's filters."""
    assert all(map(drafts, GREEDY + DRAWN))
    assert not any(lossless_worker.samplings([*map(request, GREEDY)], "flashinfer"))
    plain, with_min_p = Sampling(1.0, TOP_K_ALL), Sampling(0.5, 20, 0.8, 0.1)
    both = [*map(request, DRAWN)]
    assert lossless_worker.samplings(both, "pytorch") == [plain, with_min_p]
    assert lossless_worker.samplings(both[:1], "flashinfer") == [plain]
    chained = [one._replace(chained=True) for one in (plain, with_min_p)]
    assert lossless_worker.samplings(both, "flashinfer") == chained, "as SGLang's sampler, of all where one has a min_p"
    assert [drafts(one) for one in OTHERS] == [False] * len(OTHERS)
    assert not any(drafts(of, **one) for one in ASKED for of in (GREEDY[0], DRAWN[0]))
    assert set(SamplingParams.__struct_fields__) >= lossless_worker._NO_CHOICE, "names that this SGLang does not have"


def test_drafts_are_kept_as_far_as_the_exact_step_says_the_same() -> None:
    """Of one request the first draft of three, though the third was said, too; of one without drafts one token; both of
    two drafts.
    """
    said, drafted = torch.tensor([5, 6, 7, 8, 4, 1, 2, 9]), torch.tensor([3, 5, 0, 7, 3, 0, 1, 2])
    exact, kept = lossless_worker._kept(said, drafted, [3, 0, 2])
    assert exact.view(3, -1).tolist() == [[5, 6, 7, 8], [4, -1, -1, -1], [1, 2, 9, -1]]
    assert kept.tolist() == [2, 1, 3]


def test_the_next_round_begins_with_the_last_token_that_was_kept() -> None:
    result, published = SimpleNamespace(), list[torch.Tensor]()
    tokens = torch.tensor([7, 8, -1, 4, 5, 6, 9, -1, -1], dtype=torch.int32)  # as SGLang samples
    lens, seq_lens = torch.tensor([2, 3, 1], dtype=torch.int32), torch.tensor([10, 20, 30])
    lossless_worker._told(result, tokens, lens, seq_lens, published.append)
    kept = result.next_draft_input
    assert result.speculative_num_draft_tokens == 3
    assert kept.accept_tokens.tolist() == [8, 6, 9]
    assert kept.accept_tokens.dtype is torch.int64, "the overlap schedule of 0.5.23 keeps them as the first one's type"
    kept.filter_batch(torch.tensor([0, 2]))
    assert (kept.accept_tokens.tolist(), kept.new_seq_lens.tolist()) == ([8, 9], [10, 30])
    assert [one.tolist() for one in published] == [[10, 20, 30]]


def test_sglang_takes_the_algorithm_for_one_without_a_draft_model() -> None:
    for _ in range(2):  # as a process that loads plugins twice does
        lossless_algorithm.register()
    algorithm = SpeculativeAlgorithm.from_string(flags.VERIFY.lower())
    assert not algorithm.is_none()
    assert not algorithm.has_draft_kv()
    assert algorithm.create_worker is not None


#: Tokens are letters: 0 is "a". The most tokens of an answer, and what ends it beside the token 25.
ENDS: list[dict[str, Any]] = [
    {"max_new_tokens": most, **more}
    for most in (3, 5, 9)
    for more in (
        {},
        {"stop_token_ids": [2]},
        {"stop": ["ef"]},
        {"stop": ["fg", "cd"]},
        {"stop": ["cd", "fg"], "stop_token_ids": [1]},
        {"stop_regex": "d|b", "stop_token_ids": [4]},
    )
]


def ended(ends: list[dict[str, Any]], tokens: list[int]) -> list[list[Any]]:
    """How a request ends that is given tokens one by one, and in each two rounds: a list for each of `ends`."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_ext.compat import scheduler_hooks

    requests, counters = RequestTable(), Counters(1)
    scheduler_hooks._runtime = SimpleNamespace(
        planner=SimpleNamespace(drafts=False), requests=requests, counters=counters
    )
    letters = SimpleNamespace(
        decode=lambda ids: "".join(chr(97 + one) for one in ids),
        encode=lambda text, **_: list(text),
        eos_token_id=25,
        additional_stop_token_ids=None,
    )

    # The token that ends reasoning; from 0.5.17 on it is a list of them.
    thought: Any = [4] if "think_end_ids" in signature(Req.update_reasoning_tokens).parameters else 4

    def told(end: dict[str, Any], rounds: list[list[int]]) -> list[Any]:
        params = SamplingParams(temperature=0.0, **end)
        params.normalize(letters)
        req = Req("a", "", [1], params, vocab_size=26)
        req.tokenizer = letters
        kept = req if hasattr(req, "kv_committed_len") else SimpleNamespace()
        req.kv, kept.kv_committed_len = kept, 0
        index: Any = SimpleNamespace()
        attachment, drafted, before = Attachment("a", index=index), 0, counters.accepted
        requests.add(req, attachment)
        for one in rounds:
            if not req.finished():
                attachment.drafts = tuple(count + len(one) - 1 for count in attachment.drafts)
                counters.accepted += len(one) - 1
                req.output_ids.extend(one)
                req.update_reasoning_tokens(one, thought)
                kept.kv_committed_len += len(one)
                had = len(req.output_ids) - len(one)
                req.update_finish_state(len(one))
                drafted += min(len(one) - 1, len(req.output_ids) - had)
        ids = list(req.output_ids)
        assert attachment.drafts[1] == counters.accepted - before == drafted, "of drafts those that the answer has"
        assert ids == list(req.output_ids_through_stop)
        reason = req.finished() and str(req.finished_reason.to_json())
        return [reason, ids, kept.kv_committed_len, req.reasoning_tokens]

    rounds = [[[one] for one in tokens], *([tokens[:n], tokens[n:]] for n in range(1, len(tokens)))]
    return [[told(end, one) for one in rounds] for end in ends]


def test_a_round_ends_a_request_where_one_token_after_another_does() -> None:
    found = in_sglang("tests.compat.test_lossless:ended", ENDS, [0, 1, 2, 3, 25, 4, 5, 6])
    assert {len(one) for one in found} == {8}
    assert [[answer for answer in one if answer != one[0]] for one in found] == [[]] * len(ENDS)


def sampled_by(model: str) -> str:
    """By which backend a worker takes it that SGLang samples, where no flag says so."""
    from sglang_ext.compat.engine import checked_record

    record = checked_record(
        ["--model-path", model, "--device", "cpu", "--sparse-attn", "--sparse-attn-config", '{"exactness": "verify"}']
    )
    target = SimpleNamespace(model_runner=SimpleNamespace())
    return lossless_worker.LosslessWorker(server_args=record, target_worker=target)._sampling_backend


def test_the_backend_that_samples_is_the_one_that_sglang_chose() -> None:
    """0.5.23 leaves the flag as it was given: not at all."""
    model = Path(__file__).parents[2] / "models" / "needle"
    assert in_sglang("tests.compat.test_lossless:sampled_by", str(model)) == "pytorch"
