"""Requests on a runtime without SGLang: a model in plain tensors, and steps whose outputs are compared with dense ones.

Most tests begin where a request has its slot.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from prefix_index import PAGE_TOKENS, page_hashes
from prefix_kernels.types import PagedKV
from sglang_ext.prefix.requests import Attachment, RequestTable
from sglang_ext.prefix.residency import Residency, State
from sglang_ext.runtime import SparseRuntime
from tests.planted import dense_attention

LAYERS, KV_HEADS, GQA, DIM = 3, 2, 2, 16
NAMESPACE: dict[str, str | None] = {"extra_key": None}
PROMPT, OTHER = list(range(64)), list(range(2000, 2064))


def hashes(tokens: Sequence[int]) -> tuple[bytes, ...]:
    return tuple(page_hashes(tokens, PAGE_TOKENS))


class Request:
    """As SGLang's: compared by identity, and weakly referenceable."""


def entered(table: RequestTable, attachment: Attachment) -> Request:
    """A new request with its slot, which the table holds weakly."""
    request = Request()
    table.add(request, attachment)
    table.enter(request)
    return request


def check_books(residency: Residency) -> None:
    """No index has fewer users than none, or other bytes than its tensors."""
    for index in residency.resident().values():
        is_ready = index.state is State.READY  # before the bytes are looked at
        held = sum(tensor.nbytes for arrays in index.layers for tensor in arrays.values())
        assert index.users >= 0
        assert not is_ready or held == index.nbytes


class Clock:
    """Seconds, as a test sets them."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Model:
    """A model runner in plain tensors: what `ModelView` asks for. It has some of the KV heads, as a rank does."""

    num_layers, head_dim, v_head_dim = LAYERS, DIM, DIM
    dtype = kv_dtype = torch.float32
    num_slots, max_requests, decode_graphs = 1024, 8, False
    kv_bytes = 1 << 30
    tp_rank, tp_size = 0, 1
    has_kv_scales = True
    device = torch.device("cpu")

    def __init__(self, fingerprint: Any, heads: slice = slice(KV_HEADS)) -> None:
        self._fingerprint = fingerprint
        gen = torch.Generator().manual_seed(0)
        pools = [torch.randn(2, 1024, KV_HEADS, DIM, generator=gen)[:, :, heads] for _ in range(LAYERS)]
        self.num_kv_heads = pools[0].shape[2]
        self.num_qo_heads = GQA * self.num_kv_heads
        self.caches = [PagedKV(*pool, k_scale=0.5, v_scale=4.0) for pool in pools]
        self.req_to_token = torch.randperm(1024, generator=gen)[: 8 * 120].reshape(8, 120).to(torch.int32)

    def kv(self, layer: int) -> PagedKV:
        return self.caches[layer]

    def write_kv(self, layer: Any, forward_batch: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        cache = self.caches[layer.layer_id]
        cache.k_cache[forward_batch.out_cache_loc] = k / cache.k_scale
        cache.v_cache[forward_batch.out_cache_loc] = v / cache.v_scale

    def fingerprint(self) -> Any:
        return self._fingerprint

    def absorption(self, layer: Any) -> None:
        return None


class Runtime(SparseRuntime):
    """`admit` gives a request its slot, too; `wait` leaves it in the queue, as SGLang does until it has one."""

    wait = SparseRuntime.admit

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: list[Request] = []

    def admit(self, request: Hashable, *args: Any, **kwargs: Any) -> None:
        super().admit(request, *args, **kwargs)
        self.slot_taken(request)

    def came(self, rid: str, tokens: Sequence[int] = (*PROMPT, 7), **options: Any) -> Request:
        """A new request with its slot. It is kept, as SGLang keeps those that run."""
        request = Request()
        self.held.append(request)
        self.admit(request, rid, list(tokens), NAMESPACE, **options)
        return request

    def share_slots(self, *rows: int) -> None:
        """The prefix cache gives these rows the first row's slots of `PROMPT`."""
        for row in rows:
            self.view.req_to_token[row, : len(PROMPT)] = self.view.req_to_token[0, : len(PROMPT)]


def mode(name: str) -> Any:
    """SGLang's of a forward; a mixed one is an extend, too."""
    extends = name in ("extend", "mixed")
    asked = {"is_decode": name == "decode", "is_extend": extends, "is_mixed": name == "mixed"}
    return SimpleNamespace(name=name.upper(), **{ask: lambda answer=answer: answer for ask, answer in asked.items()})


def extend_batch(rid: str, count: int, first: int = 0) -> Any:
    """SGLang's batch of a prefill step of one request."""
    return SimpleNamespace(
        forward_mode=mode("extend"), rids=[rid], extend_seq_lens_cpu=[count], extend_prefix_lens_cpu=[first]
    )


def prefill_layers(runtime: SparseRuntime, batch: Any, count: int, gen: torch.Generator | None = None) -> None:
    """All layers of a prefill step, which SGLang attends itself."""
    for number in range(LAYERS):
        q = torch.randn(count, KV_HEADS * GQA * DIM, generator=gen)
        assert runtime.forwards.attend(q, None, None, layer_of(number), batch, True, None) is None


def prefill(runtime: SparseRuntime, rid: str, count: int, first: int = 0) -> None:
    with runtime.forwards.step(batch := extend_batch(rid, count, first)):
        prefill_layers(runtime, batch, count)


def decode_batch(runtime: SparseRuntime, rids: list[str], lens: list[int], rows: list[int] | None = None) -> Any:
    indices = torch.tensor(rows or list(range(len(rids))))
    last = runtime.view.req_to_token[indices, torch.tensor(lens) - 1].long()
    return SimpleNamespace(
        forward_mode=mode("decode"),
        rids=rids,
        batch_size=len(rids),
        req_pool_indices=indices,
        seq_lens_cpu=torch.tensor(lens),
        seq_lens=torch.tensor(lens),
        out_cache_loc=last,
    )


def planned(runtime: SparseRuntime, rids: list[str], lens: list[int]) -> bool:
    """Whether a decode step is attended here; its layers do not run."""
    with runtime.forwards.step(decode_batch(runtime, rids, lens)):
        return runtime.forwards.planned


def layer_of(number: int) -> Any:
    """SGLang's attention layer of this number."""
    return SimpleNamespace(layer_id=number, scaling=DIM**-0.5)


def decode_layers(
    runtime: SparseRuntime, batch: Any, gen: torch.Generator | None = None, scale: float = 1.0
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """All layers of a decode step: number, queries, keys, and the output; None where SGLang attends."""
    for number in range(LAYERS):
        q = scale * torch.randn(batch.batch_size, KV_HEADS * GQA * DIM, generator=gen)
        k, v = (torch.randn(batch.batch_size, KV_HEADS * DIM, generator=gen) for _ in "kv")
        yield number, q, k, runtime.forwards.attend(q, k, v, layer_of(number), batch, True, None)


def check_dense(out: torch.Tensor, q: torch.Tensor, kv: PagedKV, slots: torch.Tensor) -> None:
    """One row's output against dense attention of its slots."""
    heads, keys, values = q.reshape(1, KV_HEADS * GQA, DIM), kv.keys(slots, q.dtype), kv.values(slots, q.dtype)
    expected = dense_attention(heads, keys, values, DIM**-0.5).out.reshape(-1)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)


def run_step(runtime: SparseRuntime, batch: Any) -> list[bool]:
    """Whether each layer of a decode step is attended here; if so, its output is compared with dense attention."""
    attended = []
    gen = torch.Generator().manual_seed(int(batch.seq_lens_cpu.sum()))
    with runtime.forwards.step(batch):
        for number, q, k, result in decode_layers(runtime, batch, gen):
            attended.append(result is not None)
            if result is None:
                continue
            kv = runtime.view.kv(number)
            torch.testing.assert_close(kv.keys(batch.out_cache_loc, k.dtype).flatten(1), k)
            for row, (slot, length) in enumerate(zip(batch.req_pool_indices, batch.seq_lens_cpu, strict=True)):
                check_dense(result[row], q[row], kv, runtime.view.req_to_token[slot, :length].long())
    return attended


def ours(runtime: SparseRuntime, rids: list[str], lens: list[int], rows: list[int] | None = None) -> bool:
    """Whether a decode step, all of its layers, is attended here and not by SGLang."""
    attended = run_step(runtime, decode_batch(runtime, rids, lens, rows))
    assert len(set(attended)) == 1
    return attended[0]


def report(runtime: SparseRuntime) -> list[dict[str, Any]]:
    """The lines of the build report."""
    path = Path(str(runtime.config.build_report))
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found
