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

pytest.importorskip("sglang")

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from torch import Tensor

from sglang_ext.compat import lossless_worker, scheduler_hooks
from sglang_ext.decode.drafts import Drafting
from sglang_ext.decode.types import StepPath

MOST, CONTEXT, VOCAB = 3, 160, 29
"""Drafts of a round; tokens of a request; numbers that tokens are."""
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

    def __init__(self, rid: str, row: int, prompt: list[int]) -> None:
        super().__init__(rid=rid, row=row, prompt=prompt, output_ids=[said(prompt)], kv=SimpleNamespace())
        self.kv.kv_allocated_len, self.committed = len(prompt), len(prompt)
        self.sampling_params = SamplingParams(temperature=0.0, max_new_tokens=CONTEXT)
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

    def sample(self, output: Any, _step: Any) -> Tensor:
        return output.next_token_logits.argmax(dim=1)


class Rounds:
    """Draws how many tokens a round drafts."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.open = rng, 0

    def begin(self, _tokens: int, *, anew: bool = True) -> None:
        assert anew or self.open, "it went on from a round that has not begun"
        self.open = 1

    def ended(self, _drafted: int) -> None:
        assert self.open, "a round ends that has not begun"
        self.open = 0

    def drafts(self, may: Sequence[Drafting | None]) -> list[int]:
        count = self.rng.choice((0, 1, 2, MOST, MOST))
        return [0 if one is None else min(one.most, count) for one in may]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    model, rng = Model(rows=5), random.Random(0)

    @contextmanager
    def drafting(*, ahead: bool) -> Iterator[None]:
        model.drafting, model.ahead = True, ahead
        yield
        model.drafting = model.ahead = False

    class Runtime(SimpleNamespace):
        took = property(lambda _self: model.took)

    def begin_round(step: Any) -> list[Drafting | None]:
        """Some requests' index drafts badly: it is tried in every eighth round."""
        model.rounds += 1
        most = {rid: int(model.rounds % 8 == 0) if rid[-1] in BAD else MOST for rid in step.rids}
        return [None if rid.startswith("dense") else Drafting(most[rid], 0.9) for rid in step.rids]

    planner = SimpleNamespace(drafting=drafting)
    runtime = Runtime(rounds=Rounds(rng), begin_round=begin_round, planner=planner)
    monkeypatch.setattr(scheduler_hooks, "_runtime", runtime)
    monkeypatch.setattr(lossless_worker, "record_stream_for_v2_verify", lambda *_of: None)
    monkeypatch.setattr(lossless_worker.ForwardBatch, "init_new", lambda step, _runner, **_more: step)
    target = SimpleNamespace(model_runner=model, set_hicache_consumer=lambda _index: None)
    target.forward_batch_generation = lambda _batch, forward_batch: model.forward(forward_batch)
    made = object.__new__(lossless_worker.LosslessWorker)
    made._target_worker, made._sampling_backend, made._ahead = target, "pytorch", None
    made._rounds = lossless_worker.deque()
    return SimpleNamespace(made=made, model=model, rng=rng)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("overlaps", [True, False])
def test_requests_that_come_and_go_get_the_models_own_tokens(worker: Any, page: int, overlaps: bool) -> None:
    """Results are read a round late. Each round's first draft is launched behind the round before, where SGLang's slots
    suffice and the batch stays; a batch that changes drafts anew.
    """
    made, model, rng = worker.made, worker.model, worker.rng
    running: list[Request] = []
    pending: list[tuple[list[Request], Any]] = []
    lens: dict[str, int] = {}
    last: dict[str, Tensor] = {}
    rows, names, used, launched, wanted = list(range(5)), 0, 0, 0, 0
    drafted, accepted, of_bad = 0, 0, 0
    for number in range(160):
        model.full = number % 16 == 9
        if rows and (not running or rng.random() < 0.1):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(3, 20))]
            one = Request(f"{'dense' if names % 5 == 4 else 'r'}{names}", rows.pop(), prompt)
            names += 1
            model.allocate(one, len(prompt))
            model.held[model.table[one.row, : len(prompt)]] = torch.tensor(prompt)
            running.append(one)
            lens[one.rid], last[one.rid] = len(prompt), torch.tensor(one.output_ids[-1])
        for one in running:
            model.allocate(one, -(-(one.committed + 2 * (MOST + 1)) // page) * page)
        batch = SimpleNamespace(
            reqs=list(running), device="cpu", forward_mode=ForwardMode.DECODE, hicache_consumer_index=-1,
            req_pool_indices=torch.tensor([one.row for one in running]), multimodal_inputs=None,
            seq_lens=torch.tensor([lens[one.rid] for one in running]),
            seq_lens_cpu=torch.tensor([lens[one.rid] for one in running]),
            orig_seq_lens=torch.tensor([lens[one.rid] for one in running], dtype=torch.int32),
            spec_info=SimpleNamespace(accept_tokens=torch.stack([last[one.rid] for one in running])),
            req_to_token_pool=SimpleNamespace(req_to_token=model.table),
        )  # fmt: skip
        told: list[Tensor] = []
        before, drafts = made._ahead, model.drafts
        result = made.forward_batch_generation(batch, told.append if overlaps else None)
        assert len(told) == overlaps
        if before is not None and before.rids == [one.rid for one in running]:
            used += bool(before.first)
            assert [count > 0 for count in made._rounds[-1][1]] == [count > 0 for count in before.wanted]
        launched += made._ahead is not None and bool(made._ahead.first)
        wanted += made._ahead is not None and any(made._ahead.wanted) and not model.full
        assert model.drafts - drafts <= MOST + 1
        for one, length, token in zip(running, result.new_seq_lens, result.next_draft_input.accept_tokens, strict=True):
            lens[one.rid], last[one.rid] = int(length), token
        pending.append((list(running), result))
        if len(pending) > overlaps:
            of, found = pending.pop(0)
            width = len(found.next_token_ids) // len(of)
            rids, counts = made._rounds.popleft()
            drafted, accepted = drafted + sum(counts), accepted + int(found.accept_lens.sum()) - len(of)
            of_bad += sum(count for rid, count in zip(rids, counts, strict=True) if rid[-1] in BAD)
            for n, (one, kept) in enumerate(zip(of, found.accept_lens.tolist(), strict=True)):
                if one not in running:
                    continue
                one.output_ids += found.next_token_ids[n * width :][:kept].tolist()
                one.committed += kept
                tokens = [*one.prompt, *one.output_ids]
                assert all(said(tokens[:at]) == tokens[at] for at in range(len(one.prompt), len(tokens)))
                if len(tokens) > CONTEXT - 20 or rng.random() < 0.02:
                    running.remove(one)
                    rows.append(one.row)
                    slots = model.table[one.row]
                    model.free += slots[slots > 0].tolist()
                    model.held[slots] = -1
                    slots.zero_()
    assert names > 8
    assert accepted > drafted / 2, (accepted, drafted)
    assert of_bad > 0
    if overlaps:
        assert wanted > 40
        assert launched == wanted
        assert (used > launched / 2, model.late > 20) == (True, True), (launched, used)
    else:
        assert (launched, model.late) == (0, 0)
