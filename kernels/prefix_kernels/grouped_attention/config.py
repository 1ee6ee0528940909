"""Launch parameters of the attention kernel, by the shape of a tile."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from prefix_kernels.launching import check_power_of_2
from prefix_kernels.types import PagedKV

MIN_BLOCK_M = 16
"""Rows of the least tile that tensor cores take."""
MAX_BLOCK_M = 128
SPECIALIZED_ROWS = 64
"""Of one group of multiplying warps on Hopper."""
_WIDE = 256
"""Channels of a key; wider ones are latent: shared memory has room for no values beside them."""
_HOPPER = 9
_SPECIALIZED_REGISTERS = {64: 112, 128: 168}


@dataclass(frozen=True)
class AttentionConfig:
    """How one tile is computed: a matter of speed only.

    Attributes:
        block_m: rows of a tile: requests times query heads of a KV head; a power of 2 of at least 16.
        block_n: keys of one step; a power of 2 of at least 16.
        num_warps: of a program.
        num_stages: steps whose keys and values are on their way at a time.
        programs_per_sm: programs that fill one multiprocessor.
        max_registers: of a thread, at most; None leaves it to the compiler. With 65,536 of a multiprocessor over the
            threads of two programs, one's softmax hides behind the other's products.
        specialized: sm_90's own kernel (`sm90_kernels`). Tiles of 64 or 128 rows; num_warps is 4, of each of its
            groups, and num_stages the blocks that its ring holds.

    Raises:
        ValueError: a block that is no power of 2 or too small, or one that the specialized kernel does not have.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    max_registers: int | None = None
    specialized: bool = False

    def __post_init__(self) -> None:
        check_power_of_2("block_m", self.block_m, MIN_BLOCK_M)
        check_power_of_2("block_n", self.block_n, MIN_BLOCK_M)
        if self.specialized and (self.block_m not in (64, 128) or self.num_warps != 4 or self.num_stages < 2):
            raise ValueError(
                "expected block_m of 64 or 128, num_warps of 4 and num_stages of 2 or more of a specialized kernel, "
                f"got {self.block_m}, {self.num_warps} and {self.num_stages}"
            )
        least = _SPECIALIZED_REGISTERS.get(self.block_m, 0)
        if self.specialized and self.max_registers is not None and self.max_registers < least:
            # Its warps share the registers out among them: with fewer, one group would wait for them for ever.
            raise ValueError(
                f"expected max_registers of at least {least} or None, got {self.max_registers}; raise it, or lower "
                "programs_per_sm"
            )


def block_m_for(rows: int, gqa: int) -> int:
    """The least tile that holds so many requests of `gqa` rows each, at most 128 rows unless one request has more."""
    rows = max(min(rows * gqa, MAX_BLOCK_M), gqa, MIN_BLOCK_M)
    return 1 << math.ceil(math.log2(rows))


def default_config(
    shape: AttentionShape, rows: int, *, specialized: bool = False, short: bool = False
) -> AttentionConfig:
    """For tiles of `rows` requests, at most as many as fit one tile.

    Specialized ones were searched on an H200 (heads of 128, bf16). On an H100 a search finds nothing that is faster
    over all cases, with heads of 64 as with 128 (docs/kernels.md). Others fit the registers and the shared memory
    (163 KB) of sm_80. In fp32, which is there to be exact, and in wide heads tiles are lower than asked for: more of
    them, and each in registers.

    Args:
        shape: of the layers.
        rows: requests of a group.
        specialized: whether the device has sm_90's own kernel (`has_specialized`), which runs where it has the shape.
        short: lists are of some thousand tokens, as selected ones are: what a program waits for counts more than what
            two tiles of one list read twice.
    """
    block_m = block_m_for(rows, shape.gqa)
    tile = max(block_m, SPECIALIZED_ROWS)
    if specialized and tile <= MAX_BLOCK_M and shape.fits_specialized(tile):
        in_two = short and tile > SPECIALIZED_ROWS and shape.fits_specialized(SPECIALIZED_ROWS)
        tile = SPECIALIZED_ROWS if in_two else tile
        # Two programs on a multiprocessor hide each other's chains.
        programs, registers = (2, 128) if in_two or block_m <= MIN_BLOCK_M else (1, None)
        return AttentionConfig(tile, 64, 4, 3, programs, registers, specialized=True)
    exact = shape.dtype is torch.float32
    if shape.head_dim > _WIDE and not exact:
        # Of 64 rows a sum alone fills half of the registers: only Hopper's instructions leave room for them.
        block_m = max(min(block_m, SPECIALIZED_ROWS if specialized else 32), block_m_for(1, shape.gqa))
        return AttentionConfig(block_m, 64, 8, 2, 1)
    if exact or shape.head_dim > 128:
        block_m = max(min(block_m, 16 if exact else 32), block_m_for(1, shape.gqa))
        return AttentionConfig(block_m, 16 if exact else 32, 8 if exact or block_m >= 32 else 4, 3, 1)
    return AttentionConfig(block_m, 64, 8 if block_m >= 128 else 4, 3, 2)


def passes_for(
    shape: AttentionShape, rows: int, *, specialized: bool = False, short: bool = False
) -> list[AttentionConfig]:
    """For a group of `rows` requests and for single ones: a specialized one does for both, in one launch."""
    group = default_config(shape, rows, specialized=specialized, short=short)
    return [group, group if group.specialized else default_config(shape, 1)]


def has_specialized(device: torch.device) -> bool:
    """Whether a device can run sm_90's own kernel."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER


def check_hopper(device: torch.device) -> None:
    """Raise ValueError where sm_90's own kernels cannot run; not of a CPU, for which they can be compiled only."""
    if device.type == "cuda" and not has_specialized(device):
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"expected sm_90 for its own kernel, got {name}; use a configuration that is not specialized")


def check_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless queries and keys of these dtypes can be multiplied on a device.

    Raises:
        ValueError: fp8 keys before sm_89, or another pair of dtypes.
    """
    if kv_dtype is torch.float8_e4m3fn:
        good = dtype in (torch.float16, torch.bfloat16)
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            raise ValueError(
                f"expected sm_89 or later for fp8 keys, got {torch.cuda.get_device_name(device)}; keep the KV in bf16"
            )
    else:
        good = dtype == kv_dtype and dtype in (torch.float32, torch.float16, torch.bfloat16)
    if not good:
        raise ValueError(
            "expected queries and keys of one dtype (fp32, fp16 or bf16), or fp16 or bf16 queries and fp8-e4m3 keys, "
            f"got {dtype} and {kv_dtype}"
        )


@dataclass(frozen=True)
class AttentionShape:
    """What stays the same from step to step.

    Attributes:
        num_qo_heads: query heads, a multiple of num_kv_heads.
        num_kv_heads: KV heads.
        head_dim: channels of a key.
        v_head_dim: channels of a value.
        dtype: of queries and output: fp32, fp16 or bf16.
        kv_dtype: of keys and values: `dtype`, or float8_e4m3fn.

    Raises:
        ValueError: query heads that do not divide.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_qo_heads < 1 or self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"expected num_qo_heads as a multiple of num_kv_heads, got {self.num_qo_heads} and {self.num_kv_heads}"
            )

    @property
    def gqa(self) -> int:
        """Query heads of a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    def fits_specialized(self, block_m: int) -> bool:
        """Whether sm_90's own kernel has tiles of so many rows of it: bf16 or fp16, also the KV, 64 or 128 channels."""
        halves = self.dtype in (torch.bfloat16, torch.float16) and self.kv_dtype is self.dtype
        return halves and self.head_dim in (64, 128) and self.v_head_dim in (64, 128) and self.gqa <= block_m

    @classmethod
    def of(cls, q: Tensor, kv: PagedKV) -> AttentionShape:
        """The shape of these tensors. Raises ValueError where they cannot be used together."""
        check_dtypes(q.dtype, kv.k_cache.dtype, q.device)
        return cls(q.shape[1], kv.num_kv_heads, kv.head_dim, kv.v_cache.shape[2], q.dtype, kv.k_cache.dtype)
