"""What SGLang's scheduler calls in place of its worker for lossless decode.

A round: requests whose prefix has an index draft some tokens by sparse decode steps. Then one exact decode step has a
row for each request and each of its drafts: row j is the request's sequence with j drafts. In each layer it writes the
K and V of all rows anew, before it attends. A request keeps its drafts as far as the exact step says the same, and one
token more. Whatever an index selects, all tokens come out of exact steps; `decode.draws` has those with a temperature.

With the overlap schedule the next round's first draft is launched behind the exact step, for what that keeps on the
device: while it runs, the host learns how many tokens these are, and prepares what follows.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import record_stream_for_v2_verify
from torch import Tensor

from sglang_ext.compat import flags, scheduler_hooks
from sglang_ext.compat.checkpoint import resolved
from sglang_ext.compat.server_args import settings_of
from sglang_ext.decode.drafts import Drafting
from sglang_ext.decode.draws import Draws, Sampling, placed
from sglang_ext.decode.planner import MAX_BATCH
from sglang_ext.decode.types import StepPath

_NO_CHOICE = {
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "ignore_eos", "no_stop_trim", "n", "stream_interval"),
    *("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "custom_params", "is_normalized"),
    *("temperature", "top_p", "top_k", "min_p", "sampling_seed"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
}
"""Parameters that do not change what a request says next, or that `Sampling` has. One that a release adds is not among
them."""
_OF_ALL_ROWS = ("return_hidden_states", "return_routed_experts", "return_indexer_topk")
"""What a request may ask of each token's step that a round does not give: the batch of such a one drafts nothing."""


class _Rows(NamedTuple):
    """What the runtime reads of a decode step, before there is one: the round's requests.

    Attributes:
        rids, batch_size: of the requests.
        req_pool_indices: [batch_size].
        seq_lens, seq_lens_cpu: [batch_size], as in a decode step without speculation.
    """

    rids: list[str]
    batch_size: int
    req_pool_indices: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor


class _Ahead(NamedTuple):
    """What a round has launched of the next one.

    Attributes:
        rids: of the next round's requests; of any other batch it is no use.
        wanted: per request, tokens that it drafts.
        draws: how they are drawn.
        first: of each request that drafts, by its row, the first draft, [] int64; empty: none was launched.
    """

    rids: list[str]
    wanted: list[int]
    draws: Draws
    first: dict[int, Tensor]


def may_draft(req: Any) -> bool:
    """Whether a request's next token is the most probable one by the model, or drawn as `Sampling` says, and nothing
    else is asked of its step.

    Args:
        req: SGLang's.
    """
    params = req.sampling_params
    defaults = SamplingParams()
    fields = (name for name in params.__struct_fields__ if name not in _NO_CHOICE)
    asked = req.return_logprob or req.grammar is not None or req.custom_logit_processor
    return not asked and all(getattr(params, f) == getattr(defaults, f) for f in fields)


def samplings(reqs: Sequence[Any], backend: str) -> list[Sampling | None]:
    """How the tokens of a batch's requests are drawn; None: each is the most probable one.

    Args:
        reqs: SGLang's.
        backend: that samples, as --sampling-backend names it. All but pytorch's chain the filters of all requests where
            one of them has a min_p.
    """
    chained = backend != "pytorch" and any(req.sampling_params.min_p > 0 for req in reqs)
    params = [req.sampling_params for req in reqs]
    return [None if p.top_k == 1 else Sampling(p.temperature, p.top_k, p.top_p, p.min_p, chained) for p in params]


class LosslessWorker(BaseSpecWorker):  # type: ignore[misc]
    """See the module.

    Args:
        target_worker: SGLang's own.
    """

    def __init__(self, *, server_args: Any, target_worker: Any, **_places: Any) -> None:
        super().__init__()
        if settings_of(server_args) is None:
            raise RuntimeError(f"expected --sparse-attn, with exactness verify, for {flags.VERIFY}; got none of it")
        self._target_worker = target_worker
        self._sampling_backend = str(resolved(server_args).sampling_backend)
        self.model_runner.spec_algorithm = SpeculativeAlgorithm.NONE  # before it captures graphs
        self._rounds: deque[tuple[list[str], list[int]]] = deque()
        self._ahead: _Ahead | None = None

    @property
    def draft_worker(self) -> None:
        """There is no draft model."""
        return None

    @property
    def model_runner(self) -> Any:
        return self._target_worker.model_runner

    def update_weights_from_disk(self, _request: Any) -> tuple[bool, str]:
        """The target's are all there are."""
        return True, "Succeeded to update model weights."

    update_weights_from_ipc = update_weights_from_disk

    def update_weights_from_tensor(self, request: Any) -> Any:
        """SGLang asks one of both workers."""
        return self._target_worker.update_weights_from_tensor(request)

    def forward_batch_generation(self, batch: Any, on_publish: Any = None, **more: Any) -> Any:
        """One prefill step, or a round.

        Args:
            batch: SGLang's; its sequences are one token shorter than in a decode step without speculation.
            on_publish: takes the sequences' new lengths as soon as they are known.
        """
        stream = torch.get_device_module(batch.device).current_stream()
        record_stream_for_v2_verify(batch, None, stream)
        ahead, self._ahead = self._ahead, None
        if batch.forward_mode.is_decode():
            result, may = self._round(batch, ahead, on_publish)
            scheduler_hooks.runtime().forwards.rounds.ended(max(self._rounds[-1][1]))
            if on_publish is not None:
                self._ahead = self._draft_ahead(batch, may, result)
        else:
            result = self._target_worker.forward_batch_generation(batch, **more)
            result = _told(result, result.next_token_ids, _ones(batch), batch.seq_lens.clone(), on_publish)
        scheduler_hooks.keep_waiting(self.model_runner)
        return result

    def _round(self, batch: Any, ahead: _Ahead | None, on_publish: Any) -> tuple[Any, list[Drafting | None]]:
        """What the scheduler takes of the round, and what its requests may draft."""
        self._target_worker.set_hicache_consumer(batch.hicache_consumer_index)
        rows = list(range(len(batch.reqs)))
        last = batch.spec_info.accept_tokens
        if ahead is None or ahead.rids != [req.rid for req in batch.reqs]:
            # What was launched for another batch took its time all the same.
            known = int(batch.seq_lens_cpu.sum()) + len(rows)
            scheduler_hooks.runtime().forwards.rounds.begin(known, anew=ahead is None)
            ahead = None
        draws = self._draws(batch) if ahead is None else ahead.draws
        may, drafts = self._drafts(batch, last, draws, ahead, overlaps=on_publish is not None)
        counts = [len(one) for one in drafts]
        self._rounds.append(([req.rid for req in batch.reqs], counts))
        step = self._step(batch, rows, [0] * len(rows), last, whole=True)
        if not any(counts):
            lens = batch.seq_lens + 1
            if on_publish is not None:
                on_publish(lens)  # before the step: the next one is prepared beside it
            result = self._target_worker.forward_batch_generation(None, forward_batch=step)
            _list_logprobs(result.logits_output)
            return _told(result, result.next_token_ids, _ones(batch), lens), may
        places = [(row, depth) for row, count in enumerate(counts) for depth in range(count + 1)]
        tokens = torch.stack([last[row] if not depth else drafts[row][depth - 1] for row, depth in places])
        verify = self._step(batch, [row for row, _ in places], [depth for _, depth in places], tokens)
        out = self.model_runner.forward(verify)
        logits = out.logits_output.next_token_logits
        said = draws.tokens(logits, places)
        first = placed([n for n, (_, depth) in enumerate(places) if not depth], batch.device)
        sampled = replace(out.logits_output, next_token_logits=logits[first], customized_info=None)
        alone = placed([row for row, count in enumerate(counts) if not count], batch.device)
        if len(alone):
            said[first[alone]] = self.model_runner.sample(sampled, step)[alone].to(said.dtype)
            _list_logprobs(sampled)
        exact, lens = _kept(said, tokens, counts)
        result = GenerationBatchResult(logits_output=sampled, can_run_cuda_graph=out.can_run_graph)
        return _told(result, exact, lens, batch.seq_lens + lens, on_publish), may

    def on_verify_complete_cpu(self, accepted: list[int], batch_size: int = 0) -> None:
        """SGLang has a round's outcome on the host: of each request, drafts that were kept."""
        rids, drafted = self._rounds.popleft()
        scheduler_hooks.runtime().forwards.verified(rids, drafted, accepted)

    def _draws(self, batch: Any) -> Draws:
        """Of a round of its requests."""
        return Draws(samplings(batch.reqs, self._sampling_backend))

    def _drafts(
        self, batch: Any, last: Tensor, draws: Draws, ahead: _Ahead | None, *, overlaps: bool
    ) -> tuple[list[Drafting | None], list[list[Tensor]]]:
        """Per request, what it may draft, and its drafted tokens, each [] int64."""
        drafts: list[list[Tensor]] = [[] for _ in batch.reqs]
        forwards = scheduler_hooks.runtime().forwards
        lens = batch.seq_lens + 1, batch.seq_lens_cpu + 1
        step = _Rows([req.rid for req in batch.reqs], len(batch.reqs), batch.req_pool_indices, *lens)
        may = forwards.begin_round(step)
        if ahead is None:
            wanted = forwards.rounds.drafts(self._allowed(batch, may, lens[1]))
        else:  # as was chosen then: asked again, an index that drafts badly may want to draft nothing this time
            chosen = [one and one._replace(most=count) for one, count in zip(may, ahead.wanted, strict=True)]
            wanted = [0 if one is None else one.most for one in self._allowed(batch, chosen, lens[1])]
        if overlaps:
            # Leave a slot for the next round's first draft, but draft. Beside a grammar some have ended by now.
            wanted = [
                min(count, max(1, int(req.kv.kv_allocated_len) - int(length) - 1)) if count else 0
                for count, req, length in zip(wanted, batch.reqs, lens[1], strict=True)
            ]
        for depth in range(max(wanted)):
            rows = [row for row, count in enumerate(wanted) if count > depth]
            if depth == 0 and ahead is not None and ahead.first:
                said = [ahead.first[row] for row in rows]
            else:
                tokens = torch.stack([drafts[row][-1] if depth else last[row] for row in rows])
                said = self._draft(self._step(batch, rows, [depth] * len(rows), tokens), rows, depth, draws)
            for row, token in zip(rows, said, strict=True):
                drafts[row].append(token)
            if forwards.took not in (StepPath.SPARSE, StepPath.KEPT):
                break  # it was an exact step, no faster than verifying
        return may, drafts

    def _draft(self, step: Any, rows: Sequence[int], depth: int, draws: Draws, *, ahead: bool = False) -> list[Tensor]:
        """What a step that drafts says behind each of its rows, which are these of the round. Empty where it is `ahead`
        and indexes do not serve it: others' steps need the lengths.
        """
        with scheduler_hooks.runtime().planner.drafting(ahead=ahead):
            out = self.model_runner.forward(step)
        scheduler_hooks.keep_waiting(self.model_runner)
        if out is None:
            return []
        return list(draws.tokens(out.logits_output.next_token_logits, [(row, depth) for row in rows]))

    def _draft_ahead(self, batch: Any, may: Sequence[Drafting | None], result: Any) -> _Ahead:
        """Behind a round, of the same requests' next one: what it drafts, and the first drafts, if there is room.

        Args:
            batch: of the round that was launched.
            may: what its requests may draft.
            result: of the round, as the scheduler takes it. Only the device knows how many tokens were kept.
        """
        rounds = scheduler_hooks.runtime().forwards.rounds
        most = batch.seq_lens_cpu + torch.tensor(self._rounds[-1][1]) + 1  # tokens of each, at most
        rounds.begin(int(most.sum()) + len(most))
        least = batch.seq_lens_cpu + 2  # of each, with the one token that a round keeps at least
        wanted = rounds.drafts(self._allowed(batch, may, least))
        ahead = _Ahead([req.rid for req in batch.reqs], wanted, self._draws(batch), {})
        rows = [row for row, count in enumerate(wanted) if count]
        limit = int(self.model_runner.model_config.context_len)
        room = [min(limit, int(batch.reqs[row].kv.kv_allocated_len)) - int(most[row]) for row in rows]
        if min(room, default=0) <= 0:
            return ahead
        behind = copy.copy(batch)
        behind.seq_lens, behind.seq_lens_cpu = result.new_seq_lens, most
        last = result.next_draft_input.accept_tokens[placed(rows, batch.device)]
        said = self._draft(self._step(behind, rows, [0] * len(rows), last), rows, 0, ahead.draws, ahead=True)
        return ahead._replace(first=dict(zip(rows, said, strict=False)))

    def _allowed(self, batch: Any, may: Sequence[Drafting | None], lens: Tensor) -> list[Drafting | None]:
        """Per request, what it may draft: rows of the exact step are no more than requests that may run, and no draft
        follows the last token that a request may have. A request's `output_ids` are a round behind.

        Args:
            batch: of the round.
            may: per request, what its index may draft.
            lens: [requests] on the host, tokens of each with its prompt, or fewer.
        """
        single = any(getattr(req, name, False) for req in batch.reqs for name in _OF_ALL_ROWS)
        pairs = zip(may, batch.reqs, strict=True)
        free = [one if one is not None and may_draft(req) else None for one, req in pairs]
        drafting = 0 if single else sum(one is not None and one.most > 0 for one in free)
        room = min(int(self.model_runner.max_running_requests), MAX_BATCH) - len(may)
        found: list[Drafting | None] = []
        for req, one, length in zip(batch.reqs, free, lens.tolist(), strict=True):
            left = len(req.origin_input_ids) + req.sampling_params.max_new_tokens - length - 1
            most = max(0, min(room // drafting, one.most, left)) if one is not None and drafting else 0
            found.append(None if one is None else one._replace(most=most))
        return found

    def _step(
        self, batch: Any, rows: Sequence[int], depths: Sequence[int], tokens: Tensor, *, whole: bool = False
    ) -> Any:
        """A decode step in SGLang's form.

        Args:
            batch: of the round.
            rows, depths: per row of the step, the request's row of the batch, and drafts that its token follows.
            tokens: [len(rows)] int64, what the step is given.
            whole: whether the rows are the requests, whose tokens are sampled.
        """
        on_host = batch.seq_lens_cpu[torch.tensor(rows)] + torch.tensor(depths)
        at, behind = placed([rows, depths], batch.device)
        begins = batch.seq_lens[at] + behind
        step = copy.copy(batch)
        step.forward_mode, step.input_ids = ForwardMode.DECODE, tokens
        step.spec_algorithm, step.spec_info = SpeculativeAlgorithm.NONE, None
        step.reqs = [batch.reqs[row] for row in rows]
        if batch.multimodal_inputs is not None:
            step.multimodal_inputs = [batch.multimodal_inputs[row] for row in rows]
        step.req_pool_indices = batch.req_pool_indices[at]
        step.seq_lens, step.seq_lens_cpu, step.seq_lens_sum = begins + 1, on_host + 1, None
        step.orig_seq_lens = (begins + 1).to(batch.orig_seq_lens.dtype)
        table = batch.req_to_token_pool.req_to_token
        step.out_cache_loc = table[step.req_pool_indices, begins].to(torch.int64)
        if not whole:
            step.sampling_info = step.top_logprobs_nums = step.token_ids_logprobs = None
            step.return_logprob = step.has_grammar = False
        return ForwardBatch.init_new(step, self.model_runner, return_hidden_states_before_norm=False)


def _ones(batch: Any) -> Tensor:
    return torch.ones(len(batch.reqs), dtype=torch.int32, device=batch.device)


def _kept(said: Tensor, tokens: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What requests keep of a round.

    Args:
        said, tokens: [rows] int64, what the exact step says behind each row's token, and that token; a request's rows
            follow each other.
        counts: per request, its drafts: one less than its rows.

    Returns:
        [requests * width] int64, per request the tokens that it goes on with, and behind them whatever there is; and
        [requests] int32, how many they are: drafts that were said, too, and one token more.
    """
    width = max(counts) + 1
    places = [row * width + depth for row, count in enumerate(counts) for depth in range(count + 1)]
    at = placed(places, said.device)
    exact, drafted = (said.new_full((len(counts) * width,), nothing) for nothing in (-1, -2))
    exact[at], drafted[at] = said, tokens
    alike = exact.view(-1, width)[:, :-1] == drafted.view(-1, width)[:, 1:]
    return exact, (1 + alike.to(torch.int32).cumprod(dim=1).sum(dim=1)).to(torch.int32)


def _list_logprobs(output: Any) -> None:
    """Log-probabilities of tokens as SGLang takes them of a round: a list per request, here of its first token. One
    whose log-probabilities are asked for drafts nothing.
    """
    if output.next_token_logprobs is not None:
        output.next_token_logprobs = output.next_token_logprobs[:, None]


def _told(result: Any, tokens: Tensor, lens: Tensor, seq_lens: Tensor, on_publish: Any = None) -> Any:
    """What the scheduler takes of a step.

    Args:
        result: of the forward.
        tokens: [requests * width], per request its next tokens, and behind them whatever there is.
        lens: [requests] int32, how many they are.
        seq_lens: [requests], tokens that K and V are there of now.
        on_publish: see `LosslessWorker.forward_batch_generation`; None: it was told before, or there is none.
    """
    width = len(tokens) // len(lens)
    last = tokens.to(torch.int64).view(-1, width).gather(1, lens[:, None].to(torch.int64) - 1)[:, 0]
    result.next_token_ids, result.accept_lens, result.new_seq_lens = tokens, lens, seq_lens
    result.speculative_num_draft_tokens = width
    result.next_draft_input = NgramVerifyInput(
        draft_token_num=1, new_seq_lens=seq_lens, accept_tokens=last, accept_lens=torch.ones_like(lens)
    )
    if on_publish is not None:
        on_publish(seq_lens)
    return result
