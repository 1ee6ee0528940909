"""Offload in one scheduler process: which prefixes are copied out, which requests have one in front, how they attend.

A request whose prefix lies in host memory has *virtual* slots in its first P entries of `req_to_token`: entry i is
i % page_size, a slot of SGLang's padding page, which nothing may read. SGLang's prefix cache and allocator see what
stands behind them only (`compat.offload_tree`). A forward with such a row is attended here, or raises.

Tensor-parallel ranks keep their own KV heads, each in its own memory and files, and decide alike: by what SGLang gives
to all of them, and by what they have agreed on (`offload.agreement`).
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from prefix_kernels.prefill_attention import Span
from sglang_ext.config import PAGE_TOKENS
from sglang_ext.decode.sparse import SparseDecode
from sglang_ext.decode.swap import HostKV, SwapIn
from sglang_ext.decode.types import HostPrefix
from sglang_ext.model_view import ModelView, on_host
from sglang_ext.offload.agreement import NOTHING, WAIT_S, OffloadAgreement, Word
from sglang_ext.offload.attention import StagedAttention, StagedStep
from sglang_ext.offload.directory import Offload, OffloadDirectory, OffloadState
from sglang_ext.offload.host import HostPool
from sglang_ext.offload.kv_files import KVFiles
from sglang_ext.offload.selecting import Behind, PrefillSelection
from sglang_ext.options import Offload as Options
from sglang_ext.prefix.requests import Attachment
from sglang_ext.prefix.residency import ResidentIndex, State
from sglang_ext.ranks import EVERY, Ranks

logger = logging.getLogger(__name__)

_Request = TypeVar("_Request", bound=Hashable)

_RETRY_STEPS = 128
"""Decode steps, until room is looked for again for a prefix that had none."""
_ASKED = 1024
"""Most lengths of prefixes that the start asks about."""
COPY_BYTES = 256 << 20
"""Most bytes that one decode step copies out: some 5 ms of a PCIe 5 link."""


class Offloading:
    """Used by the scheduler's thread only. Copies out are queued on the stream that runs the forwards. What was read
    from files is copied to layers that attend all on the scheduler's own stream, for which the next forward waits.

    Attributes:
        directory: of the prefixes in host memory.
        page_size: SGLang's.
        refused: requests whose prefix was not copied out, by reason; once for each.
        translated: requests that got their slots behind a prefix in host memory.
        selected: prefills behind one that selected what they attend.
        swap: of steps that select; told of host pages that are another prefix's from now on. None: no step does.
        serves: whether steps select by a request's index, as far as is known now; else its prefix stays on the device.
        loading: whether an index is on its way to the device: steps without it are slow behind host memory.
        running: of the requests that have a slot.
        selects: whether a step can select behind a prefix of so many tokens; else it stays on the device.

    Args:
        options: checked.
        view: of the model runner.
        pool: of host memory.
        residents: rows of the KV pool's tensors, of all layers, that SGLang's allocator does not know.
        page_size: SGLang's; a prefix is a multiple of it.
        waits_s: seconds that a request waits while its prefix is read from a file, and its index loads, at most; behind
            them it is prefilled.
        ranks: of the tensor-parallel group.

    Raises:
        OSError: the folder for files cannot be made.
    """

    def __init__(
        self,
        options: Options,
        view: ModelView,
        pool: HostPool,
        residents: range,
        page_size: int,
        *,
        waits_s: float = 0.0,
        ranks: Ranks | None = None,
    ) -> None:
        self._options, self._view, self._pool = options, view, pool
        self._alone = ranks is None or ranks.size == 1
        self._residents = residents
        self._attention = StagedAttention(pool, options.staging_tokens, view.num_layers, view.device)
        if view.device.type == "cuda":
            self._attention.warm(view.num_qo_heads, view.head_dim, view.dtype)
        self.directory = OffloadDirectory(pool)
        self.page_size = page_size
        self._matched: weakref.WeakKeyDictionary[Hashable, Offload] = weakref.WeakKeyDictionary()
        self._rows: dict[int, Offload] = {}
        self._begun = set[int]()  # rows whose prefill a forward has begun
        self._ids: dict[int, str] = {}  # of all requests that have a row
        self._told_apart = True  # by their ids; if not, a batch's ids say nothing of its rows
        self._last: tuple[tuple[str, ...], list[Offload | None]] = (), []
        per_token = 2 * view.num_layers * view.num_kv_heads * view.head_dim * view.kv_dtype.itemsize
        self._piece = max(1, COPY_BYTES // (per_token * PAGE_TOKENS)) * PAGE_TOKENS
        self.refused: Counter[str] = Counter()
        self.translated = self.selected = 0
        self.swap: SwapIn | None = None
        self.serves: Callable[[Attachment], bool] = lambda attachment: True
        self.selects: Callable[[int], bool] = lambda tokens: True
        self.loading: Callable[[str], bool] = lambda digest: False
        self.running: Callable[[], Iterable[Attachment]] = lambda: ()
        self._off = False
        self._waits_s, self._fresh = min(waits_s, WAIT_S), list[Tensor]()
        self._looks = self._steps = 0
        self._waiting: dict[str, bool] = {}  # digest -> whether a request with it has room without it
        self._files = None if options.folder is None else KVFiles(options, view, ranks)
        self._agreed = OffloadAgreement(ranks or Ranks(), self, self.directory, self._files, pool, view.device)

    # -- files -----------------------------------------------------------------------------------------------

    def before_batch(self, waiting: Sequence[tuple[_Request, Attachment | None]], most: int) -> list[_Request]:
        """Before SGLang looks for requests to prefill, when none is matched: take what was read and written, and read
        what waiting requests begin with.

        Args:
            waiting: all requests that do, in their order.
            most: tokens of a prompt from which on it has no room in the KV pool.

        Returns:
            Those that wait on, as their prefix is being read.
        """
        self._looks += 1
        self._waiting.clear()
        if not waiting and not (self._agreed.moves and (self._looks % EVERY == 0 or not any(self.running()))):
            return []  # plain decode steps do without a collective
        self._agreed.settle([one for _, one in waiting])
        for _, one in waiting:
            digest = self._agreed.word(one).digest
            if one is not None and digest is not None:
                copies = one.prompt_len < most and self._copies(one)
                self._waiting[digest] = self._waiting.get(digest, False) or copies
        if self._files is None or self._off:
            return []
        held, live, refused = [], self._live(), 2**63
        for request, attachment in waiting:
            word = self._agreed.word(attachment)
            if attachment is None or attachment.entry is None or word.digest is None or not word.may:
                continue
            digest, tokens = word.digest, attachment.entry.identity.num_tokens
            if attachment.prompt_len <= tokens:
                continue  # its last token is prefilled in any case
            found = self.directory.get(digest)
            readable = (found is None or found.state is OffloadState.COPYING) and self._readable(word)
            if found is not None and readable and not word.copied:
                self.directory.leave(found)  # the request that had it copied out has ended
                found = None
            if found is None and readable and self._unfit(tokens) is None:
                begun = "" if tokens >= refused else self.directory.begin(digest, tokens, live, OffloadState.LOADING)
                if isinstance(begun, str):
                    refused = min(refused, tokens)  # nor has a longer one room
                else:
                    found = begun
                    self._fresh.append(found.pages)
                    self._agreed.move(found, loads=True)
            if found is None or self._agreed.now >= found.moved_at + self._waits_s:
                continue
            if found.state is OffloadState.LOADING or not word.loaded:
                held.append(request)
        return held

    def is_copied(self, digest: str) -> bool:
        """Whether a request that runs has the prefix copied out, as this rank sees it."""
        ones = (one for one in self.running() if one.entry is not None and one.entry.digest == digest)
        return any(one.offload_refusal is None and self.may(one) for one in ones)

    def filled(self, offload: Offload) -> None:
        """A prefix was read from its file."""
        self._pool.restore(offload.pages)
        offload.host = self._host_of(offload)

    def _live(self) -> set[str]:
        """Digests of requests that wait, as of the last look at them, or run."""
        digests = (self._agreed.known(one).digest for one in self.running())
        return self._waiting.keys() | {digest for digest in digests if digest is not None}

    def _copies(self, one: Attachment) -> bool:
        return one.offload_refusal is None and self._agreed.word(one).may

    def _readable(self, word: Word) -> bool:
        return word.filed and not self._agreed.hangs(loads=True)

    # -- from match to slot ----------------------------------------------------------------------------------

    def wanted(self, request: Hashable, attachment: Attachment | None, limit: int) -> Offload | None:
        """What a waiting request has in front, if its prefix lies in host memory now. Asked at each match; the last
        one before it gets its slot counts. Nothing leaves the host in between: room is made in decode steps, and before
        SGLang looks for requests to prefill.

        Args:
            request: SGLang's request object.
            attachment: what is known of it.
            limit: tokens that its match may cover.
        """
        self._matched.pop(request, None)
        word = NOTHING if self._off else self._agreed.word(attachment)
        if word.digest is None or not word.may:
            return None
        found = self.directory.get(word.digest)
        if found is None or found.state is not OffloadState.HOST or found.prefix_len > limit:
            return None
        self._matched[request] = found
        return found

    def front(self, attachment: Attachment | None, limit: int) -> tuple[int, bool]:
        """What a waiting request has in front, or may have once its file is read, or it is copied out.

        Args:
            attachment: what is known of it.
            limit: tokens that its match may cover.

        Returns:
            Tokens, and whether they are in host memory now. (0, False): nothing, for as long as is known.
        """
        word = NOTHING if self._off else self._agreed.word(attachment)
        if attachment is None or attachment.entry is None or word.digest is None or not word.may:
            return 0, False
        tokens, found = attachment.entry.identity.num_tokens, self.directory.get(word.digest)
        if found is None:
            coming = word.filed and tokens <= self._pool.num_pages * PAGE_TOKENS and self._unfit(tokens) is None
        else:
            coming = found.state is not OffloadState.FAILED
        if not coming or tokens > limit:
            return 0, False
        return tokens, found is not None and found.state is OffloadState.HOST

    def overdue(self, attachment: Attachment) -> str | None:
        """Why what a waiting request may have in front is not waited for any longer, in words; None where it is. Asked
        behind `before_batch`. For room, which requests give back that end, it waits as long as for room in the KV pool.
        """
        word = self._agreed.word(attachment)
        assert word.digest is not None
        found = self.directory.get(word.digest)
        if found is None:
            if self._agreed.hangs(loads=True) or self._agreed.hangs(loads=False):
                return f"a file in offload.folder is read or written for more than {WAIT_S:.0f} s"
        elif found.state is OffloadState.LOADING:
            waits_s = self._waits_s or WAIT_S  # who waits for nothing is prefilled, but has no room for it
            if self._agreed.now >= max(found.moved_at, self._agreed.progress[True]) + waits_s:
                return f"no more of its file was read within {waits_s:g} s"
        copies = self._waiting.get(word.digest, False) or word.copied
        if found is not None and found.state is OffloadState.COPYING and not (copies or self._readable(word)):
            return "the requests that had it copied out have ended"
        return None

    def virtual_slots(self, offload: Offload, device: torch.device) -> Tensor:
        """[prefix_len] int64: entry i is i % page_size, so that the page behind them begins anew for SGLang."""
        return torch.arange(offload.prefix_len, dtype=torch.int64, device=device) % self.page_size

    def matched(self, request: Hashable) -> Offload | None:
        """What the last match of a request without a slot had in front."""
        return self._matched.get(request)

    def slot_taken(self, request: Hashable, row: int) -> bool:
        """A request has a slot: what its last match had in front stays in host memory until the slot is given back.
        Called at each chunk of a prefill; the first counts.

        Returns:
            Whether it has virtual slots.
        """
        self._ids[row] = getattr(request, "rid", str(row))
        self._told_apart = len(set(self._ids.values())) == len(self._ids)
        found = self._matched.pop(request, None)
        if found is None:
            return row in self._rows
        if found.state is not OffloadState.HOST or found.dropped or row in self._rows:
            raise RuntimeError(
                f"offload: expected the prefix that a request was matched with to be in host memory; it is "
                f"{'dropped' if found.dropped else found.state.value}. Please report this with the server's log"
            )
        self.directory.pin(found)
        self._rows[row], self._last = found, ((), [])
        self.translated += 1
        return True

    def slot_freed(self, row: int) -> None:
        """A row is given back: finish, abort and retraction alike."""
        self._last = (), []
        self._begun.discard(row)
        self._ids.pop(row, None)
        self._told_apart = len(set(self._ids.values())) == len(self._ids)
        found = self._rows.pop(row, None)
        if found is not None:
            self.directory.unpin(found)

    def of_row(self, row: int) -> Offload | None:
        """What a row of `req_to_token` has in front; None where all its slots are real."""
        return self._rows.get(row)

    def drop(self, *, forever: bool = False) -> None:
        """The cache was flushed; or, `forever`, weights were changed: what is in host memory is of the old ones."""
        self._off = self._off or forever
        self._matched.clear()
        self.directory.drop()

    # -- a forward -------------------------------------------------------------------------------------------

    def hosts(self, forward_batch: Any) -> list[HostPrefix | None]:
        """Per row of a decode step, what steps that select need to know of its prefix; empty where no row has one."""
        fronts = self._fronts(forward_batch)
        return [None if one is None else one.host for one in fronts] if any(fronts) else []

    def host_kv(self) -> HostKV:
        """The pool, as steps that select see it."""
        residents = self._residents
        return HostKV(self._pool.num_pages, self._pool.layer, residents.start, len(residents))

    def _fronts(self, forward_batch: Any) -> list[Offload | None]:
        """Per row, what it has in front; empty where no row has anything. Batches of 0.5.16 name rows on the device
        only: there the first of several steps of the same requests waits for it. Their rows do not change in between.
        """
        if not self._rows:
            return []
        rids = tuple(getattr(forward_batch, "rids", None) or ())
        named = self._told_apart and len(set(rids)) == forward_batch.batch_size  # rows of beams have no ids
        if named and rids == self._last[0]:
            return self._last[1]
        fronts = [self._rows.get(row) for row in self._rows_of(forward_batch)]
        if named:
            self._last = rids, fronts
        return fronts

    def _rows_of(self, forward_batch: Any) -> list[int]:
        return on_host(forward_batch, "req_pool_indices")[: forward_batch.batch_size]

    def begin(self, forward_batch: Any, attachments: Sequence[Attachment | None] = ()) -> StagedStep | None:
        """How a forward is attended a layer at a time; None: no row of it has virtual slots.

        Args:
            forward_batch: SGLang's.
            attachments: of a prefill's rows: those of few tokens may select. Empty: all rows attend exactly.

        Raises:
            RuntimeError: one has, and there is no way here to attend this kind of forward.
        """
        fronts = self._fronts(forward_batch)
        if not any(fronts):
            return None
        rows = self._rows_of(forward_batch)
        mode = forward_batch.forward_mode.name
        if mode not in ("DECODE", "EXTEND"):
            raise RuntimeError(
                f"offload: expected a decode or extend step for rows whose prefix lies in host memory; got {mode}. "
                "SGLang's own kernels must not read their slots: remove offload from --sparse-attn-config"
            )
        lens = on_host(forward_batch, "seq_lens")
        counts, indexes = [1] * len(rows), list[ResidentIndex | None]([None] * len(rows))
        if mode == "EXTEND":
            counts = on_host(forward_batch, "extend_seq_lens")
            self._check_rows(rows, fronts)
            if attachments and self._attention.selection is not None:
                whole = self._whole(rows, lens, attachments)
                indexes = list(map(self._selects_with, fronts, counts, whole))
            self._begun.update(rows)
        return self._staged(rows, lens, counts, fronts, indexes)

    def _whole(
        self, rows: Sequence[int], lens: Sequence[int], attachments: Sequence[Attachment | None]
    ) -> list[Attachment | None]:
        """Of rows whose prefill is not in chunks: how many tokens these have, others of their batches decide."""
        given = zip(rows, lens, attachments, strict=True)
        return [
            None if one is None or row in self._begun or length < one.prompt_len else one for row, length, one in given
        ]

    def _selects_with(self, front: Offload | None, tokens: int, one: Attachment | None) -> ResidentIndex | None:
        """The index that a prefill's row of so many new tokens selects with; None: it attends all."""
        most = self._options.select_prefill_tokens
        if front is None or one is None or one.index is None or most is None or tokens > most or not self.may(one):
            return None
        # Of decode steps ranks vote on an index behind the prefill: of this one all have said that they loaded theirs.
        ready = one.index.state is State.READY and (self._alone or self._agreed.known(one).loaded)
        return one.index if ready and one.index.entry.digest == front.digest else None

    def _check_rows(self, rows: Sequence[int], fronts: Sequence[Offload | None]) -> None:
        """A row has virtual slots exactly where it is known to have them; waits for the device."""
        first = self._view.req_to_token[torch.as_tensor(list(rows), device=self._view.device), 0].tolist()
        for row, slot, front in zip(rows, first, fronts, strict=True):
            if (slot < self.page_size) != (front is not None):
                raise RuntimeError(
                    f"offload: expected row {row} to begin with a {'real' if front is None else 'virtual'} slot; got "
                    f"slot {slot}, page size {self.page_size}. Please report this with the server's log"
                )

    def _staged(
        self,
        rows: Sequence[int],
        lens: Sequence[int],
        counts: Sequence[int],
        fronts: Sequence[Offload | None],
        indexes: Sequence[ResidentIndex | None],
    ) -> StagedStep:
        spans, whole_spans, begin = list[Span](), list[Span](), 0
        queries = dict[tuple[Offload, ResidentIndex | None], list[Tensor]]()
        for row, length, count, front, index in zip(rows, lens, counts, fronts, indexes, strict=True):
            first = 0 if front is None else front.prefix_len
            slots = self._view.req_to_token[row, first:length].to(torch.int64)
            spans.append(Span(slice(begin, begin + count), slots))
            if front is not None and self._pool.dense_layers:
                assert front.host is not None
                assert front.host.dense_slots is not None
                slots = torch.cat([front.host.dense_slots, slots])
            whole_spans.append(Span(slice(begin, begin + count), slots))
            if front is not None:
                queries.setdefault((front, index), []).append(torch.arange(begin, begin + count))
            begin += count
        wanted = [Behind(front, index, torch.cat(of)) for (front, index), of in queries.items() if index is not None]
        selection = self._attention.selection
        selecting = [] if selection is None else selection.fitting(wanted)
        for one in selecting:
            self.selected += len(queries.pop((one.offload, one.by)))
        whole = dict[Offload, list[Tensor]]()
        for (front, _), of in queries.items():
            whole.setdefault(front, []).extend(of)
        groups = [(front, torch.cat(of)) for front, of in whole.items()]
        return self._attention.plan(spans, whole_spans, groups, selecting)

    def attend(self, step: StagedStep, q: Tensor, layer: int, sm_scale: float) -> Tensor:
        """One layer of it; see `StagedAttention.run`."""
        return self._attention.run(step, q, self._view.kv(layer), layer, sm_scale)

    def ended(self, step: StagedStep) -> None:
        """Behind the layers. Raises RuntimeError where one of them was attended elsewhere, from virtual slots."""
        missing = sorted(set(range(self._view.num_layers)) - step.layers)
        if missing:
            raise RuntimeError(
                f"offload: expected all layers of a step with virtual slots to be attended here; layers {missing} were "
                "not. Their output is wrong: remove offload from --sparse-attn-config, and report the model and flags"
            )

    # -- copying out -----------------------------------------------------------------------------------------

    def decoding(self, forward_batch: Any, attachments: Sequence[Attachment | None]) -> None:
        """Before a decode step: copy a piece of one prefix that a row of it has on the device. The row's request runs,
        so its lock keeps these slots; what is queued later and overwrites them comes behind the copy. A collective for
        each piece.

        Args:
            forward_batch: SGLang's.
            attachments: of its rows; None where not all ranks may use the row's index.
        """
        if self.swap is not None:
            for pages in self._fresh:
                self.swap.forget(pages)
        self._fresh.clear()
        if self._off:
            return
        virtual = {place for place, front in enumerate(self._fronts(forward_batch)) if front is not None}
        self._steps += 1
        refused = (None, "host_full") if self._steps % _RETRY_STEPS == 0 else (None,)
        lens = forward_batch.seq_lens_cpu
        for place, one in enumerate(attachments):
            if place in virtual or one is None or one.entry is None or one.offload_refusal not in refused:
                continue
            digest = self._agreed.word(one).digest
            if digest is None or not self.may(one):  # alike on all ranks, of an index that they use
                continue
            tokens = one.entry.identity.num_tokens
            if int(lens[place]) <= tokens:
                continue  # not the prompt that was looked up: SGLang refused it, and runs a token in its place
            found = self.directory.get(digest)
            if found is not None and found.state is not OffloadState.COPYING:
                continue
            begun = self._unfit(tokens) or found or self.directory.begin(digest, tokens, self._live())
            if isinstance(begun, str):
                self.refused[begun] += one.offload_refusal is None
                one.offload_refusal = begun
                continue
            one.offload_refusal = None
            if found is None and self.swap is not None:
                self.swap.forget(begun.pages)
            self._copy(begun, forward_batch.req_pool_indices[place : place + 1])
            return

    def may(self, one: Attachment) -> bool:
        """Whether a request may be served by its index, as this rank sees it."""
        return one.reason is None and self.serves(one)

    def _unfit(self, tokens: int) -> str | None:
        """Why a prefix of so many tokens is never in host memory, in a word."""
        if tokens < self._options.min_tokens:
            return "short"
        if tokens % self.page_size:
            return "page_size"
        return None if self.selects(tokens) else "few_residents"

    def _copy(self, offload: Offload, row: Tensor) -> None:
        tokens = min(self._piece, offload.prefix_len - offload.copied)
        part = slice(offload.copied, offload.copied + tokens)
        pages = offload.pages[part.start // PAGE_TOKENS : part.stop // PAGE_TOKENS]
        copied = True
        try:
            self._pool.backup(self._view.req_to_token.index_select(0, row)[0, part].to(torch.int64), pages)
        except Exception as error:  # the server lives on
            logger.error("sparse attention: a prefix cannot be copied to host memory", exc_info=error)
            copied = False
        if not all(self._agreed.least([copied])):
            self.directory.failed(offload)
            return
        self.directory.copied(offload, tokens)
        if offload.state is OffloadState.HOST:
            offload.host = self._host_of(offload)
            if self._files is not None:
                self._agreed.move(offload, loads=False)

    def _host_of(self, offload: Offload) -> HostPrefix:
        if self._pool.dense_begin is None:
            return HostPrefix(offload.pages)
        rows = self._pool.dense_begin + offload.pages[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)
        return HostPrefix(offload.pages, rows.flatten().int().to(self._view.device))

    def select_by(self, sparse: SparseDecode) -> None:
        """What steps select with, once that is made: of rows behind host memory, and of prefills."""
        self.swap, self.selects = sparse.swap, sparse.swaps
        longest = int(self._view.req_to_token.shape[1])
        if self._options.select_prefill_tokens is not None and sparse.layer_plan.anchor_layers:
            sizes = self._view.num_kv_heads, longest, self._view.device
            self._attention.selection = selection = PrefillSelection(sparse, self._pool, *sizes)
            selection.warm(self._view.num_qo_heads, self._view.head_dim, self._view.dtype)
        self.tell_longest(longest)

    def tell_longest(self, context_len: int) -> None:
        """Log, at the start, which prefixes are too long for the residents; `selects` is in place."""
        step = PAGE_TOKENS * -(-context_len // (PAGE_TOKENS * _ASKED))
        asked = range(step, context_len, step)
        fits = [tokens for tokens in asked if self.selects(tokens)]
        if len(fits) < len(asked):
            logger.warning(
                "sparse attention: offload: prefixes of more than about %d tokens stay on the device, as their steps "
                "select more tokens than %d: raise offload.resident_tokens, or lower the budget",
                max(fits, default=0),
                len(self._residents),
            )

    # -- what others see -------------------------------------------------------------------------------------

    def summary(self) -> str:
        """One line for people, at the start."""
        tokens = self._pool.num_pages * PAGE_TOKENS
        residents, least = self._residents, self._options.min_tokens
        return (
            f"{self._pool.nbytes:,} bytes of host memory for {tokens:,} tokens of prefixes of {least:,} or more; "
            f"{len(residents):,} rows of the KV tensors behind SGLang's, from {residents.start:,} on, for residents; "
            f"{self._attention.places.nbytes:,} bytes for pieces of a prefix that is attended exactly"
        )

    def figures(self) -> dict[str, Any]:
        """What is exported, by metric."""
        selected = {"selected": self.selected} if self._attention.selection is not None else {}
        return {"offload": {"translated": self.translated, **selected, **self.directory.events, **self.refused}}

    def snapshot(self) -> dict[str, Any]:
        """State as plain values; with several ranks as of the last collective, as this is none."""
        if self._alone:
            self._agreed.settle(())
        counts: dict[str, Any] = {"translated": self.translated, "refused": dict(self.refused), "rows": len(self._rows)}
        counts["selected"] = self.selected
        counts["residents"] = None if self.swap is None else self.swap.counted()
        counts["problem"] = self.directory.problem()
        return {**self.directory.snapshot(), "events": dict(self.directory.events), **counts}
