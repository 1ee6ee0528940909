"""Offload without SGLang: exact attention through pieces, who leaves host memory, and what a forward may be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefix_kernels.prefill_attention.reference import QUERY_BLOCK
from prefix_kernels.residents import to_pages
from prefix_kernels.types import PagedKV
from sglang_ext.offload.directory import OffloadDirectory, OffloadState
from sglang_ext.offload.offloading import Offloading
from sglang_ext.options import Offload
from sglang_ext.prefix.requests import Attachment
from sglang_ext.prefix.residency import State
from sglang_ext.ranks import Ranks
from tests.offload.host_memory import PlainPools
from tests.planted import dense_attention

PREFIX, HEADS, DIM, PAGE = 96, 4, 8, 16
SLOTS = 2048


class Served:
    """Offload over plain pools, with a table of slots."""

    def __init__(
        self,
        *,
        num_pages: int = 12,
        staging: int = 32,
        min_tokens: int = 32,
        folder: str | None = None,
        folder_bytes: int | None = None,
        waits_s: float = 60.0,
        ranks: Ranks | None = None,
    ) -> None:
        torch.manual_seed(3)
        self.pools = PlainPools(SLOTS, num_pages)
        self.table = torch.zeros(8, 1024, dtype=torch.int32)
        self.view: Any = SimpleNamespace(
            num_layers=2, num_kv_heads=2, head_dim=DIM, v_head_dim=DIM, kv_dtype=torch.float32,
            device=torch.device("cpu"), req_to_token=self.table, kv=self.pools.kv,
        )  # fmt: skip
        sizes = {"min_tokens": min_tokens, "staging_tokens": staging}
        self.options = Offload(host_bytes=self.pools.nbytes, folder=folder, folder_bytes=folder_bytes, **sizes)
        of_device = range(SLOTS, SLOTS), PAGE
        self.offloading = Offloading(self.options, self.view, self.pools, *of_device, waits_s=waits_s, ranks=ranks)
        self._next = PAGE
        self.runs: list[Attachment] = []
        self.offloading.running = lambda: self.runs

    def slots(self, row: int, begin: int, end: int) -> None:
        """Real slots of a row's positions."""
        self.table[row, begin:end] = torch.arange(self._next, self._next + end - begin)
        self._next += end - begin
        assert self._next <= SLOTS

    def decode(self, row: int, *ones: Attachment, length: int = 1000) -> None:
        """A decode step of the rows from one on, of so many tokens each; no other request runs."""
        self.runs[:], rows = ones, torch.arange(row, row + len(ones))
        lens = torch.full((len(ones),), length)
        batch = SimpleNamespace(req_pool_indices=rows, batch_size=len(ones), seq_lens_cpu=lens)
        self.offloading.decoding(batch, ones)

    def behind(self, row: int, one: Attachment, request: Any) -> None:
        """A request gets a row, its prefix in host memory in front."""
        found = self.offloading.wanted(request, one, PREFIX)
        assert found is not None
        assert self.offloading.slot_taken(request, row)
        self.table[row, :PREFIX] = self.offloading.virtual_slots(found, self.view.device)


def attachment(digest: str = "a", tokens: int = PREFIX) -> Attachment:
    """Of a request with an index."""
    entry: Any = SimpleNamespace(digest=digest, identity=SimpleNamespace(num_tokens=tokens))
    ready: Any = SimpleNamespace(state=State.READY)
    return Attachment("rid", None, entry, ready)


class Request:
    """Can be held weakly."""

    rid = ""


def forward(rows: list[int], lens: list[int], counts: list[int] | None = None, mode: str = "EXTEND") -> Any:
    """A batch of SGLang's."""
    return SimpleNamespace(
        batch_size=len(rows), req_pool_indices=torch.tensor(rows), seq_lens=torch.tensor(lens),
        extend_seq_lens_cpu=counts, forward_mode=SimpleNamespace(name=mode),
    )  # fmt: skip


def dense(q: torch.Tensor, kv: PagedKV, slots: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last rows of one request, row by row."""
    rows = []
    for row in range(len(q)):
        seen = slots[: len(slots) - len(q) + row + 1].long()
        rows.append(dense_attention(q[row : row + 1], kv.k_cache[seen], kv.v_cache[seen], scale).out)
    return torch.cat(rows).float()


@pytest.mark.parametrize("staging", [16, 32, 512])
def test_a_batch_attends_as_if_all_slots_were_on_the_device(staging: int) -> None:
    """Two rows behind one prefix, one behind another, one without; in an extend step of several blocks of queries, and
    in a decode step. The padding page, free host rows and places that are not filled hold NaN.
    """
    served = Served(staging=staging)
    whole = []
    for row, digest in ((0, "a"), (1, "b")):
        served.slots(row, 0, PREFIX)
        whole.append(served.table[row, :PREFIX].clone())
        served.decode(row, attachment(digest))
    lens = [PREFIX + QUERY_BLOCK + 37, PREFIX + 5, PREFIX + 21, 70]
    counts = [QUERY_BLOCK + 33, 5, 1, 33]
    requests = [Request() for _ in lens]
    expected = []
    for row, (front, length) in enumerate(zip((0, 0, 1, None), lens, strict=True), 2):
        first = 0 if front is None else PREFIX
        if front is not None:
            served.behind(row, attachment("ab"[front]), requests[row - 2])
        served.slots(row, first, length)
        own = served.table[row, first:length]
        expected.append(own if front is None else torch.cat([whole[front], own]))
    rows = list(range(2, 6))
    for mode, step_counts in (("EXTEND", counts), ("DECODE", [1] * 4)):
        step = served.offloading.begin(forward(rows, lens, counts, mode))
        assert step is not None
        for layer in range(2):
            q = torch.randn(sum(step_counts) + 3, HEADS, DIM)
            found = served.offloading.attend(step, q, layer, 0.4)
            begin, kv = 0, served.pools.kv(layer)
            for slots, count in zip(expected, step_counts, strict=True):
                part = slice(begin, begin + count)
                torch.testing.assert_close(found[part], dense(q[part], kv, slots, 0.4), rtol=1e-4, atol=1e-5)
                begin += count
            assert not found[begin:].any()
            if layer == 0:
                with pytest.raises(RuntimeError, match=r"layers \[1\] were not"):
                    served.offloading.ended(step)
        served.offloading.ended(step)
    assert served.offloading.begin(forward([0, 1, 5], [PREFIX, PREFIX, 70], [1, 1, 1])) is None


def test_only_extend_and_decode_steps_may_have_virtual_slots() -> None:
    served = Served()
    served.slots(0, 0, PREFIX)
    served.decode(0, attachment())
    request = Request()
    served.behind(1, attachment(), request)
    for mode in ("MIXED", "TARGET_VERIFY", "SPLIT_PREFILL"):
        with pytest.raises(RuntimeError, match=f"expected a decode or extend step .* got {mode}"):
            served.offloading.begin(forward([0, 1], [PREFIX, PREFIX + 1], [1, 1], mode))
    served.table[1, 0] = 77
    with pytest.raises(RuntimeError, match="expected row 1 to begin with a virtual slot; got slot 77"):
        served.offloading.begin(forward([0, 1], [PREFIX, PREFIX + 1], [1, 1]))
    served.table[1, 0] = 0
    served.table[0, 0] = 5
    with pytest.raises(RuntimeError, match="expected row 0 to begin with a real slot; got slot 5"):
        served.offloading.begin(forward([0, 1], [PREFIX, PREFIX + 1], [1, 1]))


@pytest.mark.usefixtures("by_pieces")
def test_a_prefix_is_copied_by_pieces_and_serves_when_it_is_whole() -> None:
    served = Served()
    one = attachment()
    for row in (0, 1):  # two requests of the prompt, one after the other
        served.slots(row, 0, PREFIX)
    for step, row in enumerate((0, 1, 1)):
        assert served.offloading.wanted(Request(), one, PREFIX) is None
        served.decode(row, one)
        found = served.offloading.directory.get("a")
        assert found.copied == 32 * (step + 1)
    assert found.state is OffloadState.HOST
    slots = torch.cat([served.table[0, :32], served.table[1, 32:PREFIX]]).long()
    for layer, kv in enumerate(served.pools.device):
        assert torch.equal(served.pools.layer(layer)[found.pages], to_pages(*kv[:, slots]))
    assert served.offloading.wanted(Request(), one, PREFIX - 1) is None
    assert served.offloading.wanted(Request(), one, PREFIX) is found
    assert served.offloading.wanted(Request(), Attachment("rid", "unsupported_mode", one.entry), PREFIX) is None


@pytest.mark.usefixtures("by_pieces")
def test_a_copy_that_was_cut_off_leaves_nothing() -> None:
    """By an abort, whose prefix leaves for another one; by a flush, behind which the copy begins anew."""
    served = Served(num_pages=8)
    for row in (0, 1):
        served.slots(row, 0, PREFIX)
    served.decode(0, attachment("aborted"))
    assert served.offloading.snapshot()["prefixes"] == {"copying": 1}
    served.offloading.slot_freed(0)
    served.decode(1, attachment("b"))
    assert served.offloading.directory.get("aborted") is None
    served.offloading.drop()
    assert served.offloading.snapshot()["free_pages"] == 8
    for _ in range(3):
        assert served.offloading.wanted(Request(), attachment("b"), PREFIX) is None
        served.decode(1, attachment("b"))
    found = served.offloading.wanted(Request(), attachment("b"), PREFIX)
    slots = served.table[1, :PREFIX].long()
    assert torch.equal(served.pools.layer(1)[found.pages], to_pages(*served.pools.device[1][:, slots]))
    assert served.offloading.snapshot()["problem"] is None


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [(16, "short"), (104, "page_size"), (224, "few_residents"), (208, "too_long"), (112, "host_full")],
)
def test_why_a_prefix_stays_on_the_device(tokens: int, reason: str) -> None:
    served = Served(min_tokens=32)
    served.offloading.selects = lambda tokens: tokens < 224
    served.slots(0, 0, PREFIX)
    served.decode(0, attachment("held"))
    holder = Request()
    served.behind(7, attachment("held"), holder)
    one = attachment("other", tokens)
    served.slots(1, 0, tokens)
    served.decode(1, one)
    served.decode(1, one)
    assert one.offload_refusal == reason
    assert served.offloading.figures()["offload"].get(reason) == 1
    assert served.offloading.snapshot()["free_pages"] == 6


@pytest.mark.parametrize(
    ("context_len", "fits", "said"),
    [(1024, 208, "208"), (32767, 32, "32"), (1 << 20, 100_000, "99328"), (1024, 1024, "")],
)
def test_the_start_says_which_prefixes_are_too_long(
    context_len: int, fits: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    served, asked = Served(), []
    served.offloading.selects = lambda tokens: asked.append(tokens) or tokens <= fits
    served.offloading.tell_longest(context_len)
    assert (f"prefixes of more than about {said} tokens stay" in caplog.text) if said else not caplog.text
    assert len(asked) <= 1024, "however long prompts may be"


def test_of_two_running_requests_one_has_room_and_keeps_it() -> None:
    """Neither is a user of what it copies: each step would copy a page and drop the other's."""
    served = Served(num_pages=8)
    for row in (0, 1):
        served.slots(row, 0, PREFIX)
    both = [attachment("a"), attachment("b")]
    for _ in range(8):
        served.decode(0, *both)
    assert served.offloading.figures()["offload"] == {"translated": 0, "copied": 1, "host_full": 1}
    for _ in range(128):
        served.decode(1, both[1])
    assert served.offloading.figures()["offload"] == {"translated": 0, "copied": 2, "host_full": 1, "evicted": 1}
    assert both[1].offload_refusal is None, "room is looked for again"


@pytest.mark.parametrize("why", ["by_operator", "quality_guard", "index_memory"])
def test_a_request_whose_index_does_not_serve_stays_on_the_device(why: str) -> None:
    served = Served()
    served.slots(0, 0, PREFIX)
    served.decode(0, attachment())
    assert served.offloading.wanted(Request(), attachment(), PREFIX) is not None
    refused = attachment()
    refused.reason = why
    assert served.offloading.wanted(Request(), refused, PREFIX) is None
    served.offloading.serves = lambda one: False
    assert served.offloading.wanted(Request(), attachment(), PREFIX) is None
    served.decode(0, attachment("other"))
    assert served.offloading.snapshot()["prefixes"] == {"host": 1}


def test_rows_are_asked_for_once_until_a_slot_changes() -> None:
    """Where a batch has them on the device only, asking waits for it."""
    served, asked = Served(), []
    served.slots(0, 0, PREFIX)
    for _ in range(2):
        served.decode(0, attachment())
    served.behind(3, attachment(), Request())

    def hosted(rids: str, *rows: int) -> list[bool]:
        indices = SimpleNamespace(tolist=lambda: (asked.append(rids), list(rows))[1])
        batch = SimpleNamespace(req_pool_indices=indices, batch_size=len(rids), rids=list(rids))
        return [one is not None for one in served.offloading.hosts(batch)]

    for _ in range(3):
        assert hosted("ab", 3, 4) == [True, False]
    assert hosted("ba", 4, 3) == [False, True]
    for _ in range(2):
        assert hosted("aa", 4, 3) == [False, True], "two requests of one id"
    assert asked == ["ab", "ba", "aa", "aa"]
    served.behind(5, attachment(), Request())
    assert hosted("ab", 3, 5) == [True, True]
    served.offloading.slot_freed(5)
    assert hosted("ab", 3, 5) == [True, False]


def test_rows_of_beams_behind_those_of_requests_are_attended_too() -> None:
    """From the second token on a beam search request has more rows than ids; its prefill and ours may be one batch."""
    served = Served()
    served.slots(0, 0, PREFIX)
    for _ in range(2):
        served.decode(0, attachment())
    served.behind(1, attachment(), Request())
    lens = [PREFIX + 5, 40, 40]
    served.slots(1, PREFIX, lens[0])
    for row in (2, 3):
        served.slots(row, 0, 40)
    steps = []
    for count, mode in ((2, "EXTEND"), (3, "DECODE")):
        batch = forward([1, 2, 3][:count], lens[:count], [5, 40], mode)
        batch.rids = ["ours", "beams"]
        steps.append(served.offloading.begin(batch))
    assert all(steps)
    assert [one is not None for one in served.offloading.hosts(batch)] == [True, False, False]


def test_an_id_that_two_requests_have_says_nothing_of_rows() -> None:
    """Not of one batch either: each may be alone in its own. As several tokenizer workers let it be."""
    served = Served()
    served.slots(0, 0, PREFIX)
    for _ in range(2):
        served.decode(0, attachment())
    behind, beside = Request(), Request()
    behind.rid = beside.rid = "x"
    served.behind(3, attachment(), behind)
    assert not served.offloading.slot_taken(beside, 4)
    for row in (3, 4, 3, 4):
        batch: Any = SimpleNamespace(req_pool_indices=torch.tensor([row]), batch_size=1, rids=["x"])
        assert any(one is not None for one in served.offloading.hosts(batch)) == (row == 3)


def test_a_row_that_is_shorter_than_the_prefix_is_not_copied() -> None:
    """SGLang refused the prompt that was looked up, and the overlap schedule runs one token in its place."""
    served = Served()
    served.slots(0, 0, PREFIX)
    served.decode(0, attachment(), length=PREFIX)
    assert served.offloading.snapshot()["prefixes"] == {}
    served.decode(0, attachment(), length=PREFIX + 1)
    assert served.offloading.snapshot()["prefixes"] != {}


def test_a_copy_that_fails_is_not_tried_again() -> None:
    served = Served()
    served.pools.backup = lambda *_: 1 / 0
    for _ in range(2):
        served.decode(0, attachment())
    assert served.offloading.snapshot()["prefixes"] == {"failed": 1}
    assert served.offloading.snapshot()["free_pages"] == 12
    assert served.offloading.wanted(Request(), attachment(), PREFIX) is None


def test_who_leaves_host_memory() -> None:
    """The least recently used without a user. See test_directory for what holds in any order of events."""
    directory = OffloadDirectory(PlainPools(32, 6))
    first, second, third = (directory.begin(digest, 32, ()) for digest in "abc")
    for one in (first, second, third):
        directory.copied(one, 32)
    directory.pin(first)
    directory.get("b")
    assert not isinstance(directory.begin("d", 32, ()), str)
    assert (directory.get("b"), directory.get("c")) == (second, None)
    directory.drop()
    assert directory.begin("a", 32, ()).key != first.key


def test_virtual_slots_are_never_copied_out() -> None:
    served = Served()
    served.slots(0, 0, PREFIX)
    served.decode(0, attachment())
    request = Request()
    served.behind(1, attachment(), request)
    served.offloading.drop()
    served.decode(1, attachment())
    assert served.offloading.directory.get("a") is None
    served.offloading.slot_freed(1)
    served.offloading.drop(forever=True)
    served.decode(0, attachment())
    assert served.offloading.snapshot()["free_pages"] == 12
