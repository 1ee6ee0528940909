"""Memory that an inference rank and its cache rank see: queries, what they name, and words that say which are there.

All of it is the inference rank's. So it reads and writes its own memory only, whatever becomes of the other process.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from prefix_kernels.peer_lists import AskingSide, answer, copy_lists, copy_words, group_table
from prefix_kernels.types import SelectionGroup
from sglang_ext.decode.cache_rank.messages import Address, name_of
from sglang_ext.decode.select_op import AheadOp, OpContext

_WORDS, _ANSWER = 4096, 3
"""Bytes of the words, and which of them is the answer, on a CPU. The first three are those of `AskingSide`."""
_HEADER = 256
_WAIT_US = 500
"""For an answer: naming candidates oneself takes no longer."""


class Mailbox(Protocol):
    """The inference rank's side.

    Attributes:
        address: what the other side opens.
        descriptor: of the memory of the host, which the other process inherits.
        queries: [num_layers * max_batch, num_qo_heads, head_dim], written before `ask`.
        words: int64 on the host: the last question, answers that came, answers that did not.
        nbytes: device memory.
    """

    address: Address
    descriptor: int
    queries: Tensor
    words: Tensor
    nbytes: int

    def plan(self, number: int, groups: Sequence[SelectionGroup]) -> None:
        """Groups of the next questions; see `AskingSide.plan`."""

    def ask(self) -> None:
        """What `queries` hold is the question."""

    def forget(self) -> None:
        """Wait for no answer next time."""

    def take(self, named: Sequence[Tensor]) -> None:
        """Wait a little for the answer; what comes goes to `named`, else these stay as they are."""

    def close(self) -> None:
        """Let go of the memory of the host."""


def make_mailbox(op: AheadOp, context: OpContext) -> Mailbox:
    """The inference rank's side, on the device of its operation.

    Args:
        op: whose candidates are named.
        context: that it was made for.
    """
    return HostMailbox(context) if context.device.type == "cpu" else DeviceMailbox(op, context)


def queries_of(context: OpContext) -> tuple[int, ...]:
    """Lengths of the axes of all layers' queries."""
    shape, sizes = context.shape, context.sizes
    return (len(sizes.ahead) * sizes.max_batch, shape.num_qo_heads, shape.head_dim)


class _Words:
    """Memory of the host without a name, that ends with the processes: the words, and on a CPU all else."""

    def __init__(self, size: int) -> None:
        self.descriptor = os.memfd_create("sglang-ext-cache-rank")
        os.truncate(self.descriptor, size)
        self.path = f"/proc/self/fd/{self.descriptor}"
        self.all = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)
        self.words = self.all[:_WORDS].view(torch.int64)

    def close(self) -> None:
        os.close(self.descriptor)


class HostMailbox:
    """Of a CPU: see `Mailbox`."""

    def __init__(self, context: OpContext) -> None:
        queries, dtype, sizes = queries_of(context), context.shape.dtype, context.sizes
        size, lists = math.prod(queries) * dtype.itemsize, len(sizes.ahead) * context.shape.num_kv_heads * sizes.room
        self._file = _Words(_WORDS + size + lists)
        self.descriptor = self._file.descriptor
        self.words, self._lists = self._file.words, self._file.all[_WORDS + size :]
        self.queries = self._file.all[_WORDS : _WORDS + size].view(dtype).view(queries)
        self.address = Address(self._file.path, b"", (name_of(dtype), queries), lists)
        self._plan = self._number = self._expected = self.nbytes = 0

    def plan(self, number: int, groups: Sequence[SelectionGroup]) -> None:
        self._plan = number

    def ask(self) -> None:
        self._number += 1
        word = self._plan << 32 | self._number & 0xFFFFFFFF
        self._expected = word if self._plan else 0
        self.words[0] = word

    def forget(self) -> None:
        self._expected = 0

    def take(self, named: Sequence[Tensor]) -> None:
        expected, self._expected = self._expected, 0
        if not expected:
            return
        until = time.monotonic() + 1000 * _WAIT_US / 1e6  # a CPU is not fast
        while int(self.words[_ANSWER]) != expected and time.monotonic() < until:
            time.sleep(1e-5)
        came = int(self.words[_ANSWER]) == expected
        self.words[1 if came else 2] += 1
        if came:
            for one, stretch in stretches(self._lists, named):
                one.copy_((stretch != 0).view(one.shape))  # masks of tokens

    def close(self) -> None:
        self._file.close()


def stretches(lists: Tensor, named: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each tensor with its bytes among the lists, one behind the other."""
    sizes = [one.nbytes for one in named]
    return list(zip(named, torch.split(lists[: sum(sizes)], sizes), strict=True))


class DeviceMailbox:
    """Of a GPU: see `Mailbox`. Its own memory apart, as the handle of an allocation opens all of it."""

    def __init__(self, op: AheadOp, context: OpContext) -> None:
        queries, dtype, device = queries_of(context), context.shape.dtype, context.device
        (named,) = op.named_ahead()
        used, lists = math.prod(queries) * dtype.itemsize, named.nbytes
        size = -(-used // _HEADER) * _HEADER
        self._file, self._op, self._context = _Words(_WORDS), op, context
        self.nbytes = _HEADER + size + lists
        memory, handle = allocate(self.nbytes, device)
        self.words, self.descriptor = self._file.words, self._file.descriptor
        self.queries = memory[_HEADER : _HEADER + used].view(dtype).view(queries)
        self._inbox = memory[_HEADER + size :].view(torch.int32)
        self.address = Address(self._file.path, handle, (name_of(dtype), queries), lists)
        came = memory[:8].view(torch.int64)
        self._side = AskingSide(registered(self.words), came, context.sizes.max_groups, _WAIT_US)

    def plan(self, number: int, groups: Sequence[SelectionGroup]) -> None:
        self._side.plan(number, self._op.first_groups(groups), self._context.shape.num_kv_heads)

    def ask(self) -> None:
        self._side.ask()

    def forget(self) -> None:
        self._side.forget()

    def take(self, named: Sequence[Tensor]) -> None:
        (lists,) = named
        self._side.take(self._inbox, lists, len(self._context.sizes.ahead))

    def close(self) -> None:
        torch.cuda.cudart().cudaHostUnregister(self.words.data_ptr())  # type: ignore[no-untyped-call]
        self._file.close()


class HostPeer:
    """The cache rank's side on a CPU.

    Attributes:
        words: as of `Mailbox`.
    """

    def __init__(self, address: Address, op: AheadOp, context: OpContext) -> None:
        dtype, axes = getattr(torch, address.queries[0]), address.queries[1]
        size = math.prod(axes) * dtype.itemsize
        total = _WORDS + size + address.lists
        memory = torch.from_file(address.path, shared=True, size=total, dtype=torch.uint8)
        self.words = memory[:_WORDS].view(torch.int64)
        self._queries, self._lists = memory[_WORDS : _WORDS + size].view(dtype).view(axes), memory[_WORDS + size :]
        self._op, self._count = op, len(context.sizes.ahead)

    def plan(self, size: int, groups: Sequence[SelectionGroup], sm_scale: float) -> None:
        """What the next questions are about."""
        self._size, self._scale = size, sm_scale

    def answer(self, word: int) -> None:
        """Name the candidates of a question, and say so."""
        count = self._count
        queries = self._queries[: count * self._size].view(count, self._size, *self._queries.shape[1:])
        self._op.look_ahead(self._size, list(queries), self._scale)
        for one, stretch in stretches(self._lists, self._op.named_ahead()):
            stretch.copy_(one.contiguous().view(-1).view(torch.uint8))
        self.words[_ANSWER] = word


class DevicePeer:
    """The cache rank's side on a GPU, which reads the queries where they are and writes lists where they are wanted."""

    def __init__(self, address: Address, op: AheadOp, context: OpContext) -> None:
        dtype, axes, device = getattr(torch, address.queries[0]), address.queries[1], context.device
        size = -(-math.prod(axes) * dtype.itemsize // _HEADER) * _HEADER
        self._file = torch.from_file(address.path, shared=True, size=_WORDS, dtype=torch.uint8)
        self.words, self._op, self._context = self._file.view(torch.int64), op, context
        self._base = opened(address.handle)
        self._inbox = self._base + _HEADER + size
        self._queries = torch.zeros(axes, dtype=dtype, device=device)
        (named,) = op.named_ahead()
        self._named, self._always = named, torch.ones(1, dtype=torch.int64, device=device)
        self._groups = torch.zeros(context.sizes.max_groups, 3, dtype=torch.int32, device=device)
        self._graphs: dict[tuple[int, float], Any] = {}

    def plan(self, size: int, groups: Sequence[SelectionGroup], sm_scale: float) -> None:
        """What the next questions are about; the first plan of a size captures its graph."""
        heads = self._context.shape.num_kv_heads
        self._groups.copy_(group_table(self._op.first_groups(groups), heads, len(self._groups)))
        key = size, sm_scale
        if key not in self._graphs:
            self._run(size, sm_scale)
            answer(self._always.clone().data_ptr(), 1 << 32)  # no question waits for a compiler
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._run(size, sm_scale)
            self._graphs[key] = graph
        self._graph = self._graphs[key]
        torch.cuda.synchronize()

    def _run(self, size: int, sm_scale: float) -> None:
        count = len(self._context.sizes.ahead)
        queries = self._queries[: count * size]
        copy_words(self._base + _HEADER, queries.data_ptr(), queries.nbytes // 4)
        self._op.look_ahead(size, list(queries.view(count, size, *queries.shape[1:])), sm_scale)
        named = self._named
        copy_lists(self._always, named.data_ptr(), self._inbox, self._groups, count, len(named) // count)

    def answer(self, word: int) -> None:
        """Name the candidates of a question, and say so."""
        self._graph.replay()
        answer(self._base, word)
        torch.cuda.current_stream().synchronize()


def make_peer(address: Address, op: AheadOp, context: OpContext) -> HostPeer | DevicePeer:
    """The cache rank's side, on the device of its operation."""
    kind = HostPeer if context.device.type == "cpu" else DevicePeer
    return kind(address, op, context)


def cuda_runtime() -> Any:
    """CUDA's own Python module, which torch brings on a GPU. Raises RuntimeError without it."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise RuntimeError(
            f"cache_device: expected the package cuda-bindings, got: {error}; install it, or set cache_device to null"
        ) from error
    return runtime


def check(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call of the CUDA runtime gave.

    Raises:
        RuntimeError: an error.
    """
    runtime = cuda_runtime()
    error, *found = result
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"cache_device: expected memory that two GPUs see, got {error}; set cache_device to null")
    return tuple(found)


class _Memory:
    """Of the CUDA runtime, to be a tensor."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def allocate(size: int, device: torch.device) -> tuple[Tensor, bytes]:
    """uint8 [size], zeros, for as long as the process lives, and the handle that opens it in another process."""
    runtime = cuda_runtime()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # a context
        (address,) = check(runtime.cudaMalloc(size))
        (handle,) = check(runtime.cudaIpcGetMemHandle(address))
        memory = torch.as_tensor(_Memory(int(address), size), device=device)
    memory.zero_()
    return memory, bytes(handle.reserved)


def opened(handle: bytes) -> int:
    """Address, for the current device, of another process's memory."""
    runtime = cuda_runtime()
    torch.cuda.current_stream().synchronize()
    own = runtime.cudaIpcMemHandle_t()
    own.reserved = handle
    (address,) = check(runtime.cudaIpcOpenMemHandle(own, runtime.cudaIpcMemLazyEnablePeerAccess))
    return int(address)


def registered(words: Tensor) -> int:
    """Address at which the current device writes words of the host; pinned from now on."""
    mapped = 2
    code = torch.cuda.cudart().cudaHostRegister(words.data_ptr(), words.nbytes, mapped)  # type: ignore[no-untyped-call]
    if int(code):
        raise RuntimeError(
            f"cache_device: expected words of the host that a GPU writes, got error {int(code)}; set it to null"
        )
    return words.data_ptr()
