"""The forwards of the target model: what the layers of the one that runs have to do. Knows SGLang only by what it is
given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sglang_ext.decode.drafts import Drafting, Rounds
from sglang_ext.decode.planner import DecodePlanner, PlannedStep
from sglang_ext.decode.trace import StepTrace
from sglang_ext.decode.types import HostPrefix, StepPath
from sglang_ext.metrics import Counters
from sglang_ext.model_view import ModelView
from sglang_ext.offload.attention import StagedStep
from sglang_ext.offload.offloading import Offloading
from sglang_ext.prefill.captures import PrefillCaptures
from sglang_ext.prefill.recorder import Chunk, Recording
from sglang_ext.prefix.requests import Readiness, RequestTable
from sglang_ext.ranks import Ranks


@dataclass
class Step:
    """The forward that runs now: what its layers have to do.

    Attributes:
        planned: of a decode step that is attended here.
        chunks: of what is recorded.
        staged: of a step with rows whose prefix lies in host memory, that is attended exactly.
        virtual: whether it has such rows: nothing but what was planned may attend them.
        captured: whether SGLang captures a decode graph of it.
    """

    planned: PlannedStep | None = None
    chunks: Sequence[Chunk] = ()
    staged: StagedStep | None = None
    virtual: bool = False
    captured: bool = False


@dataclass(eq=False, kw_only=True)
class Forwards:
    """Of one process, one after the other.

    Attributes:
        view, ranks, requests, counters, ready, planner, offload: of the process.
        builds: makes something of the prompts that are prefilled; None: nothing does, or no more.
        rounds: of lossless decode.
        trace: of steps; None: none is written.
        took: how the last decode step was attended here; None: it was not.
    """

    view: ModelView
    ranks: Ranks
    requests: RequestTable
    counters: Counters
    ready: Readiness
    planner: DecodePlanner
    offload: Offloading | None
    builds: Recording | None
    rounds: Rounds
    trace: StepTrace | None
    took: StepPath | None = field(default=None, init=False)
    _step: Step = field(default_factory=Step, init=False)

    @contextmanager
    def step(self, forward_batch: Any) -> Iterator[None]:
        """Around one forward of the target model: plan a decode batch, arm the recorder for a prefill."""
        mode = forward_batch.forward_mode
        staged = None
        if mode.is_decode():
            if self.planner.drafts is None:
                self._settle(forward_batch.rids)
            if self.offload is not None and forward_batch.rids:
                self.offload.decoding(forward_batch, self.ready.serving(forward_batch.rids))
            hosts = [] if self.offload is None else self.offload.hosts(forward_batch)
            planned = self._planned(forward_batch, hosts)
            if self.offload is not None and hosts and planned is None:
                self.planner.offloaded(forward_batch.rids or ())
                staged = self.offload.begin(forward_batch)
            self.ready.took("stock" if planned is None else planned.name, forward_batch.batch_size)
            counted = (self.planner.cascade, self.planner.sparse)  # others' rows count as dense
            path = planned.path.counted if planned is not None and planned.backend in counted else "dense"
            if planned is not None or not self.planner.ahead:
                self.counters.begin_step(path, timed=planned is None or planned.guarded is None)
            builds = self.builds if self.planner.drafts is None else None
            chunks = () if builds is None else builds.decode(forward_batch)
            self._step = Step(planned, chunks, staged, virtual=bool(hosts))
            self.took = self.path
        else:
            self.counters.begin_step(None)
            if mode.is_mixed():  # running requests get a token of SGLang's here
                self.planner.step_elsewhere()
            if self.offload is not None:
                staged = self.offload.begin(forward_batch, list(map(self.requests.get, forward_batch.rids or ())))
            builds = self.builds if mode.is_extend() else None
            self._step = Step(None, () if builds is None else builds.prefill(forward_batch), staged)
        guard = self.planner.guard if mode.is_decode() else None
        try:
            if guard is not None:
                guard.runs()
            yield
            if guard is not None:
                guard.ran()
            if self.offload is not None and staged is not None:
                self.offload.ended(staged)
            if self.trace is not None:
                sparse = self.planner.sparse
                self.trace.note(forward_batch, self.path, sparse.copies if sparse is not None else None)
        finally:
            self._step = Step()

    def run(self, original: Callable[[], Any], tokens_of: Callable[[Any], Tensor | None]) -> Any:
        """The forward of the running step; before it, where next tokens are compared, one that attends exactly. The one
        that counts then writes over the K and V that the other wrote.

        Args:
            original: SGLang's forward of the batch.
            tokens_of: [rows], the most probable next tokens by what it gives, new memory.
        """
        step = self._step
        guarded = None if step.planned is None else step.planned.guarded
        if guarded is None or not guarded.predicts:
            return original()
        self._step = Step(PlannedStep(guarded.exact, StepPath.CASCADE))
        try:
            expected = tokens_of(original())
        finally:
            failed = self._step.planned is None
            self._step = Step(None, step.chunks) if failed else step
        output = original()
        tokens = tokens_of(output)
        if expected is not None and tokens is not None:
            guarded.compare(expected, tokens)
        return output

    def begin_round(self, forward_batch: Any) -> list[Drafting | None]:
        """A round of lossless decode begins (see docs/lossless.md): what is done once for each decode step of others.

        Args:
            forward_batch: as of a decode step whose rows are the round's requests.

        Returns:
            Per row, what it may draft; None where no index of its prefix is ready.
        """
        self.requests.are_as_long(forward_batch.rids, forward_batch.seq_lens_cpu.tolist())
        self._settle(forward_batch.rids)
        if self.builds is not None:
            self.builds.decode(forward_batch)
        try:
            digests = self.planner.drafters(forward_batch, self.ready.usable)
        except Exception as error:
            self._step_failed(forward_batch.rids, error)
            return [None] * forward_batch.batch_size
        return self.rounds.may(digests)

    def verified(self, rids: Sequence[str], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """A round ended: tokens that each request drafted, and how many of them the exact step said, too. Of a request
        that ended before, as the overlap schedule runs a round ahead, nothing is counted.
        """
        for rid, *tokens in zip(rids, drafted, accepted, strict=True):
            attachment = self.requests.get(rid)
            if attachment is not None and attachment.index is not None:
                attachment.drafts = tuple(map(sum, zip(attachment.drafts, tokens, strict=True)))
                self.rounds.lengths.verified(attachment.index.entry.digest, *tokens)
                self.counters.count_drafts(*tokens)

    def _settle(self, rids: Sequence[str] | None) -> None:
        """A collective with several ranks: nothing that differs between them decides whether this line is reached."""
        if problem := self.ready.settle(rids or (), refused=self.planner.refusal is not None):
            self.refuse(problem)

    def refuse(self, why: str, reason: str = "unsupported_mode") -> None:
        """No step is attended here any more: from now on requests decode dense for this named reason."""
        self.planner.refuse(why)
        self.ready.refused = self.ready.refused or reason

    def _planned(self, forward_batch: Any, hosts: Sequence[HostPrefix | None]) -> PlannedStep | None:
        try:
            return self.planner.prepare(forward_batch, self.ready.usable, hosts)
        except Exception as error:
            self._step_failed(forward_batch.rids, error)
            self.counters.count_step(0, 0 if self.planner.ahead else forward_batch.batch_size, 0)
            return None

    def _step_failed(self, rids: Sequence[str] | None, error: Exception) -> None:
        """SGLang's own backend attends a decode step, and from now on its requests, but no others."""
        if self.ranks.size > 1:
            raise error  # other ranks may have prepared it, and would replay another graph: wrong answers
        self.planner.step_elsewhere(self.ready.step_failed(rids or (), error))

    @contextmanager
    def capturing(self, size: int, path: StepPath) -> Iterator[None]:
        """Within the block SGLang captures a decode graph of a path, for batches of that size."""
        with self.planner.capturing(size, path) as planned:
            self._step = Step(planned, captured=True)
            try:
                yield
            finally:
                self._step = Step()

    @property
    def path(self) -> StepPath | None:
        """How the running decode step is attended here; None where it is not."""
        return None if self._step.planned is None else self._step.planned.path

    def prefilled(self, *, in_graph: bool) -> None:
        """The running forward is done; counts recorded prefill steps that a CUDA graph replayed."""
        if self._step.chunks:
            assert self.builds is not None
            self.builds.prefilled(self._step.chunks)
            self.counters.recorded_steps += 1
            self.counters.recorded_graph_steps += in_graph

    def observe(self, layer: int, x: Tensor, y: Tensor) -> None:
        """The residual stream around one layer's attention block, in a process that captures.

        Args:
            x, y: [num_tokens, hidden_size] before and behind the block.
        """
        if self._step.chunks and isinstance(self.builds, PrefillCaptures):
            self.builds.observe(self._step.chunks, layer, x, y)

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        refusal: str | None,
    ) -> Tensor | None:
        """One layer of the running forward; None means that SGLang's own backend has to run it.

        Args:
            q: [num_tokens, num_qo_heads * head_dim] or with the heads apart; likewise k and v.
            refusal: why this layer must stay dense, from `RunnerView.layer_refusal`.
        """
        step = self._step
        if step.chunks and self.builds is not None:
            self.builds.record(step.chunks, layer, q)
        if (step.staged is not None or step.virtual) and refusal is not None:
            raise RuntimeError(
                f"offload: expected layer {layer.layer_id} to be attended from host memory; it has {refusal}. Remove "
                "offload from --sparse-attn-config"
            )
        if step.staged is None and (step.planned is None or not forward_batch.forward_mode.is_decode()):
            return None
        if refusal is not None:
            self.refuse(f"layer {layer.layer_id} has {refusal}", "unsupported_layer")
            for one in map(self.requests.get, forward_batch.rids or ()):
                self.ready.usable(one, waits=False)  # counts it
            self._step = Step(None, step.chunks)  # what a later layer would reuse is not there
            return None
        if k is not None and v is not None and save_kv_cache:
            k, v = (x.view(x.shape[0], self.view.num_kv_heads, -1) for x in (k, v))
            self.view.write_kv(layer, forward_batch, k, v)
        heads = q.reshape(q.shape[0], self.view.num_qo_heads, -1)
        if step.staged is not None:
            assert self.offload is not None
            return self.offload.attend(step.staged, heads, layer.layer_id, float(layer.scaling)).flatten(1)
        assert step.planned is not None
        kv, scale = self.view.kv(layer.layer_id), float(layer.scaling)
        try:
            return step.planned.run(heads, kv, layer.layer_id, scale).flatten(1)
        except Exception as error:
            if step.virtual or step.captured:
                raise  # no one else may attend it; or the start fails
            self._step_failed(forward_batch.rids, error)
            self._step = Step(None, step.chunks)
            return None

    @property
    def eager(self) -> bool:
        """Whether no graph holds the running forward: it attends twice, or exactly behind host memory."""
        step = self._step
        return step.staged is not None or (step.planned is not None and step.planned.guarded is not None)

    @property
    def planned(self) -> bool:
        """Whether the running forward is attended here."""
        return self._step.planned is not None or self._step.staged is not None
