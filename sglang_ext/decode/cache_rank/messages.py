"""What an inference rank and its cache rank tell each other; queries and lists go by memory of both (`mailbox`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from prefix_kernels.grouped_attention import AttentionShape
from prefix_kernels.types import SelectionGroup
from sglang_ext.decode.select_op import ListSizes, OpContext
from sglang_ext.methods import parse_spec
from sglang_ext.methods.base import IndexSpec
from sglang_ext.options import SparseAttnConfig

Array = tuple[str, tuple[int, ...], bytes]
"""Type, shape and content."""


class Address(msgspec.Struct, frozen=True):
    """Where memory that both sides see is.

    Attributes:
        path: of the words, and on a CPU of all else: memory whose descriptor the cache rank inherits.
        handle: of the inference rank's device memory, to open it in another process; empty on a CPU.
        queries: dtype, then lengths of their axes.
        lists: bytes of what is named.
    """

    path: str
    handle: bytes
    queries: tuple[str, tuple[int, ...]]
    lists: int


class Setup(msgspec.Struct, tag=True, frozen=True):
    """The first message: what the cache rank makes its operation for.

    Attributes:
        spec: of the method.
        shape: heads, channels of keys and of values, and types, as of `AttentionShape`.
        config, num_layers, sizes: as of `OpContext`.
        device: of the cache rank.
        captured: whether decode steps replay graphs.
        address: of the mailbox.
    """

    spec: dict[str, Any]
    shape: tuple[int, int, int, int, str, str]
    config: SparseAttnConfig
    num_layers: int
    sizes: ListSizes
    device: str
    captured: bool
    address: Address

    @classmethod
    def of(cls, spec: IndexSpec, context: OpContext, device: str, address: Address, *, captured: bool) -> Setup:
        """For an inference rank's operation; the cache rank's is the same on another device."""
        of = context.shape
        heads, widths = (of.num_qo_heads, of.num_kv_heads), (of.head_dim, of.v_head_dim)
        shape = (*heads, *widths, name_of(of.dtype), name_of(of.kv_dtype))
        config, sizes = context.config, context.sizes
        return cls(spec.to_dict(), shape, config, context.num_layers, sizes, device, captured, address)

    def made_for(self) -> tuple[IndexSpec, OpContext]:
        """The spec, and the context of the cache rank's operation."""
        dtype, kv_dtype = self.shape[4:]
        shape = AttentionShape(*self.shape[:4], getattr(torch, dtype), getattr(torch, kv_dtype))
        context = OpContext(shape, self.config, self.num_layers, self.sizes, torch.device(self.device))
        return parse_spec(self.spec), context


class Load(msgspec.Struct, tag=True, frozen=True):
    """A layer of an index, in order: the index's number and tokens, the layer, its arrays that name candidates."""

    number: int
    prefix_len: int
    layer: int
    arrays: dict[str, Array]


class Drop(msgspec.Struct, tag=True, frozen=True):
    """The inference rank has let an index go."""

    number: int


class Plan(msgspec.Struct, tag=True, frozen=True):
    """What the next questions are about; arguments as of `SelectOp.plan`, and the attention scale.

    Attributes:
        number: of the plan; others' questions are left unanswered.
        indexes: numbers of those that were loaded.
    """

    number: int
    size: int
    rows: list[tuple[int, ...]]
    groups: list[SelectionGroup]
    indexes: list[int]
    sm_scale: float


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The cache rank has made its operation."""


class Planned(msgspec.Struct, tag=True, frozen=True):
    """Questions of a plan are answered from now on."""

    number: int


class Timed(msgspec.Struct, tag=True, frozen=True):
    """Answers so far, and nanoseconds from where a question was seen to its answer, all together."""

    answers: int
    nanoseconds: int


class Problem(msgspec.Struct, tag=True, frozen=True):
    """A message could not be followed; the cache rank goes on.

    Attributes:
        text: why.
        lacks: numbers of indexes that it has not, or not whole.
    """

    text: str
    lacks: list[int] = []


Told = Setup | Load | Drop | Plan
Reply = Ready | Planned | Timed | Problem


def name_of(dtype: torch.dtype) -> str:
    """As `getattr(torch, name)` takes it."""
    return str(dtype).removeprefix("torch.")


def packed(arrays: Mapping[str, Tensor]) -> dict[str, Array]:
    """Arrays of any device as they travel; waits for it."""
    host = {name: array.detach().cpu().contiguous() for name, array in arrays.items()}
    return {
        name: (name_of(one.dtype), tuple(one.shape), one.view(-1).view(torch.uint8).numpy().tobytes())
        for name, one in host.items()
    }


def unpacked(arrays: Mapping[str, Array], device: torch.device) -> dict[str, Tensor]:
    """What `packed` made, on a device.

    Raises:
        ValueError, RuntimeError, AttributeError: bytes, shape and type do not fit.
    """
    found = {}
    for name, (dtype, shape, content) in arrays.items():
        flat = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        found[name] = flat.view(getattr(torch, dtype)).view(shape).to(device)
    return found
