"""Rounds of lossless decode by the overlap schedule: a scheduler and a model of a few lines, and the worker itself."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from torch import Tensor

from sglang_ext.compat import lossless_worker, scheduler_hooks
from sglang_ext.decode.drafts import Drafting
from sglang_ext.decode.types import StepPath

CONTEXT, VOCAB = 160, 29
"""Tokens of a request; numbers that tokens are."""
BAD = "12"
"""Last letters of some requests."""


def said(tokens: Sequence[int]) -> int:
    return (7 * sum(tokens) + 5 * len(tokens) + 3 * tokens[-1]) % VOCAB


@dataclass
class Logits:
    """As of SGLang's output."""

    next_token_logits: Tensor
    next_token_logprobs: Any = None
    customized_info: Any = None


class Request(SimpleNamespace):
    """What the worker reads of SGLang's."""

    def __init__(self, rid: str, row: int, prompt: list[int], tokens: int) -> None:
        super().__init__(rid=rid, row=row, origin_input_ids=prompt, output_ids=[said(prompt)], kv=SimpleNamespace())
        self.kv.kv_allocated_len = self.committed = self.length = len(prompt)
        self.last = torch.tensor(self.output_ids[-1])
        self.sampling_params = SamplingParams(temperature=0.0, max_new_tokens=tokens)
        self.return_logprob, self.grammar, self.custom_logit_processor = False, None, None


class Model:
    """Its next token is `said` of the tokens whose K and V lie in a row's slots; of drafts it is another now and then.

    Slot 0 is nobody's.
    """

    def __init__(self, rows: int) -> None:
        self.table = torch.zeros(rows, CONTEXT + 32, dtype=torch.int64)
        self.held = torch.full((rows * (CONTEXT + 32) + 1,), -1)
        self.free = list(range(1, len(self.held)))
        self.drafting = self.ahead = self.full = False
        self.drafts = self.late = self.rounds = 0
        self.took: StepPath | None = None
        self.max_running_requests, self.model_config = 32, SimpleNamespace(context_len=CONTEXT)

    def allocate(self, request: Request, length: int) -> None:
        for place in range(int((self.table[request.row] > 0).sum()), length):
            self.table[request.row, place] = self.free.pop()
        request.kv.kv_allocated_len = max(request.kv.kv_allocated_len, length)

    def forward(self, step: Any) -> Any:
        if self.ahead and self.full:
            return None
        assert bool((step.out_cache_loc > 0).all()), "a slot that nobody has allocated is written"
        assert int(step.seq_lens.max()) <= CONTEXT, "the model has no such position"
        self.held[step.out_cache_loc] = step.input_ids
        logits = torch.zeros(len(step.input_ids), VOCAB)
        for n, (row, length) in enumerate(zip(step.req_pool_indices, step.seq_lens.tolist(), strict=True)):
            assert int(step.seq_lens_cpu[n]) >= length
            self.late += int(step.seq_lens_cpu[n]) > length
            tokens = self.held[self.table[row, :length]].tolist()
            assert -1 not in tokens
            logits[n, (said(tokens) + (self.drafting and length % 4 == 0)) % VOCAB] = 1.0
        self.drafts += self.drafting
        self.took = StepPath.SPARSE if self.drafting else StepPath.CASCADE
        return SimpleNamespace(logits_output=Logits(logits), can_run_graph=False, next_token_ids=logits.argmax(dim=1))

    def release(self, request: Request) -> None:
        slots = self.table[request.row]
        self.free += slots[slots > 0].tolist()
        self.held[slots] = -1
        slots.zero_()

    def sample(self, output: Any, _step: Any) -> Tensor:
        return output.next_token_logits.argmax(dim=1)


class Rounds:
    """Draws how many tokens a round drafts."""

    def __init__(self, rng: random.Random, most: int) -> None:
        self.rng, self.most, self.open = rng, most, 0

    def begin(self, _tokens: int, *, anew: bool = True) -> None:
        assert anew or self.open, "it went on from a round that has not begun"
        self.open = 1

    def ended(self, _drafted: int) -> None:
        assert self.open, "a round ends that has not begun"
        self.open = 0

    def drafts(self, may: Sequence[Drafting | None]) -> list[int]:
        count = self.rng.choice((0, 1, 2, self.most, self.most))
        return [0 if one is None else min(one.most, count) for one in may]


@pytest.fixture(params=[1, 3])
def worker(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """That drafts up to so many tokens."""
    model, rng, most = Model(rows=5), random.Random(0), request.param

    @contextmanager
    def drafting(*, ahead: bool) -> Iterator[None]:
        model.drafting, model.ahead = True, ahead
        yield
        model.drafting = model.ahead = False

    class Forwards(SimpleNamespace):
        took = property(lambda _self: model.took)

    def begin_round(step: Any) -> list[Drafting | None]:
        """Some requests' index drafts badly: it is tried in every eighth round."""
        model.rounds += 1
        tried = {rid: int(model.rounds % 8 == 0) if rid[-1] in BAD else most for rid in step.rids}
        return [None if rid.startswith("dense") else Drafting(tried[rid], 0.9) for rid in step.rids]

    planner = SimpleNamespace(drafting=drafting)
    forwards = Forwards(rounds=Rounds(rng, most), begin_round=begin_round)
    monkeypatch.setattr(scheduler_hooks, "_runtime", SimpleNamespace(forwards=forwards, planner=planner))
    monkeypatch.setattr(lossless_worker, "record_stream_for_v2_verify", lambda *_of: None)
    monkeypatch.setattr(lossless_worker.ForwardBatch, "init_new", lambda step, _runner, **_more: step)
    target = SimpleNamespace(model_runner=model, set_hicache_consumer=lambda _index: None)
    target.forward_batch_generation = lambda _batch, forward_batch: model.forward(forward_batch)
    made = object.__new__(lossless_worker.LosslessWorker)
    made._target_worker, made._sampling_backend, made._ahead = target, "pytorch", None
    made._rounds = lossless_worker.deque()
    return SimpleNamespace(made=made, model=model, rng=rng, most=most)


class Scheduler:
    """Requests come and go at random; results are read a round late where it overlaps.

    Attributes:
        running: requests of the next round.
        drafted, accepted, of_bad: tokens of rounds that were read; drafted by requests of `BAD`.
    """

    def __init__(self, model: Model, rng: random.Random, most: int, page: int) -> None:
        self._model, self._rng, self._most, self._page = model, rng, most, page
        self._rows, self.came = list(range(5)), 0
        self.running: list[Request] = []
        self.drafted = self.accepted = self.of_bad = 0

    def batch(self) -> Any:
        """Of the next round, with the slots that SGLang takes for two."""
        if self._rows and (not self.running or self._rng.random() < 0.1):
            self._admit()
        for one in self.running:
            self._model.allocate(one, -(-(one.committed + 2 * (self._most + 1)) // self._page) * self._page)
        lens = torch.tensor([one.length for one in self.running])
        return SimpleNamespace(
            reqs=list(self.running), device="cpu", forward_mode=ForwardMode.DECODE, hicache_consumer_index=-1,
            req_pool_indices=torch.tensor([one.row for one in self.running]), multimodal_inputs=None,
            seq_lens=lens, seq_lens_cpu=lens.clone(), orig_seq_lens=lens.int(),
            spec_info=SimpleNamespace(accept_tokens=torch.stack([one.last for one in self.running])),
            req_to_token_pool=SimpleNamespace(req_to_token=self._model.table),
        )  # fmt: skip

    def _admit(self) -> None:
        prompt = [self._rng.randrange(VOCAB) for _ in range(self._rng.randrange(3, 20))]
        rid, tokens = f"{'dense' if self.came % 5 == 4 else 'r'}{self.came}", self._rng.randrange(60, CONTEXT)
        one = Request(rid, self._rows.pop(), prompt, min(tokens, CONTEXT - len(prompt) - 1))  # as SGLang bounds it
        self.came += 1
        self._model.allocate(one, len(prompt))
        self._model.held[self._model.table[one.row, : len(prompt)]] = torch.tensor(prompt)
        self.running.append(one)

    def ran(self, result: Any) -> None:
        """A round was launched: what the next one begins with."""
        for one, length, last in zip(
            self.running, result.new_seq_lens, result.next_draft_input.accept_tokens, strict=True
        ):
            one.length, one.last = int(length), last

    def read(self, batch: Any, result: Any, counts: list[int]) -> None:
        """A round's tokens come to the host: the model's own."""
        self.drafted += sum(counts)
        self.accepted += int(result.accept_lens.sum()) - len(counts)
        self.of_bad += sum(count for one, count in zip(batch.reqs, counts, strict=True) if one.rid[-1] in BAD)
        tokens_of = result.next_token_ids.view(len(counts), -1)
        for one, kept, tokens in zip(batch.reqs, result.accept_lens.tolist(), tokens_of.tolist(), strict=True):
            if one not in self.running:
                continue
            one.output_ids += tokens[:kept]
            one.committed += kept
            whole, most = [*one.origin_input_ids, *one.output_ids], one.sampling_params.max_new_tokens
            assert all(said(whole[:at]) == whole[at] for at in range(len(one.origin_input_ids), len(whole)))
            assert len(one.output_ids) <= most, "a token was drafted that the request cannot have"
            if len(one.output_ids) == most or self._rng.random() < 0.02:
                self.running.remove(one)
                self._rows.append(one.row)
                self._model.release(one)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("overlaps", [True, False])
def test_requests_that_come_and_go_get_the_models_own_tokens(worker: Any, page: int, overlaps: bool) -> None:
    """Each round's first draft is launched behind the round before, where there is a slot for it; a batch that changes
    drafts anew. Of two drafts and more one is left out where else there were no slot.
    """
    made, model, most = worker.made, worker.model, worker.most
    scheduler, pending = Scheduler(model, worker.rng, most, page), []
    used = launched = wanted = 0
    for number in range(160):
        model.full = number % 16 == 9  # no index serves a draft ahead
        batch, told = scheduler.batch(), list[Tensor]()
        before, drafts = made._ahead, model.drafts
        result = made.forward_batch_generation(batch, told.append if overlaps else None)
        assert len(told) == overlaps
        assert model.drafts - drafts <= most + 1
        if before is not None and before.rids == [one.rid for one in batch.reqs]:
            used += bool(before.first)
            for one, count, chosen in zip(batch.reqs, made._rounds[-1][1], before.wanted, strict=True):
                left = len(one.origin_input_ids) + one.sampling_params.max_new_tokens - one.length - 2
                assert (count > 0) == (chosen > 0 and left > 0)
        launched += made._ahead is not None and bool(made._ahead.first)
        wanted += made._ahead is not None and any(made._ahead.wanted) and not model.full
        scheduler.ran(result)
        pending.append((batch, result))
        if len(pending) > overlaps:
            scheduler.read(*pending.pop(0), made._rounds.popleft()[1])
    assert scheduler.came > 8
    assert scheduler.accepted > scheduler.drafted / 2
    assert scheduler.of_bad > 0
    if overlaps:
        assert launched == wanted > 40 if most > 1 else 20 < launched < wanted
        assert used > launched / 2
        assert model.late > (20 if most > 1 else 5), "lengths on the host are bounds"
    else:
        assert (launched, model.late) == (0, 0)


def test_a_request_that_ended_when_its_round_was_ready_drafts_nothing(worker: Any) -> None:
    """Beside a grammar SGLang reads a round when the next one's batch is made: who ended holds no slots, and nothing
    is known of it.
    """
    made, model = worker.made, worker.model
    scheduler = Scheduler(model, worker.rng, worker.most, page=16)
    for _ in range(4):
        scheduler._admit()
    for _ in range(16):
        batch = scheduler.batch()
        ended = SimpleNamespace(**vars(batch.reqs[0]) | {"rid": "dense", "kv": None})
        batch.reqs[0] = ended
        result = made.forward_batch_generation(batch, lambda _lens: None)
        assert made._rounds.popleft()[1][0] == 0
        assert result.accept_lens[0] == 1
    assert model.drafts > 8, "others draft"
