"""How an anchor layer's selection is run; a matter of speed only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from prefix_kernels.launching import block_of
from prefix_kernels.pooled_scores.runner import ScoreConfig
from prefix_kernels.pooled_scores.tables import ScoreShape, Source
from prefix_kernels.pooling import Pooling

_REGISTERS = 65536
"""Of a multiprocessor, sm_80 and later."""
_HOPPER = 9
_CHANNELS = (32, 64, 96, 128)
"""That sm_90's own kernel has: pieces of 32."""


class Form(Enum):
    """How the phases of a selection are launched. The result is the same."""

    JOINED = "joined"
    """In one launch, whose programs wait for each other: all of them must fit the GPU at a time."""
    SPLIT = "split"
    """In one launch for each phase: on any GPU, and in Triton's interpreter."""


@dataclass(frozen=True)
class AnchorConfig:
    """Tile and schedule.

    Attributes:
        block_m: query rows of a tile, a power of 2 of at least 8.
        block_n: candidates of a step, a power of 2 of at least 64.
        num_warps: of a program.
        num_stages: steps that are on their way at a time.
        halves: as `ScoreConfig` says.
        programs_per_sm: programs that a multiprocessor holds at a time. Registers are bounded so that it does.
        specialized: scores by sm_90's own kernel, in a launch of its own before the others; `num_stages` and `halves`
            then say nothing. For what `fits_specialized` names.

    Raises:
        ValueError: other tiles, or a program that has fewer than 64 registers a thread; with `specialized` also fewer
            than 16 candidates a warp, more than 128 rows, or other numbers of warps than 4 and 8.
    """

    block_m: int = 16
    block_n: int = 128
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2
    halves: bool = False
    specialized: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (("block_m", self.block_m, 8), ("block_n", self.block_n, 64)):
            if value < least or value & (value - 1):
                raise ValueError(f"expected {name} as a power of 2 of at least {least}, got {value}")
        whole_groups = self.num_warps in (4, 8) and self.block_n >= 16 * self.num_warps
        if self.specialized and not (whole_groups and self.block_m <= 128):
            raise ValueError(
                "expected 4 or 8 warps, 16 candidates or more for each and at most 128 rows for sm_90's own kernel, "
                f"got {self.num_warps}, {self.block_n} and {self.block_m}"
            )
        if self.programs_per_sm < 1 or self.max_registers < 64:
            raise ValueError(
                "expected programs_per_sm from 1 to what leaves a thread 64 registers, got "
                f"{self.programs_per_sm} of {self.num_warps} warps"
            )

    @property
    def max_registers(self) -> int:
        """Registers of a thread that let `programs_per_sm` programs share those of a multiprocessor."""
        return min(255, _REGISTERS // (32 * self.num_warps * self.programs_per_sm) // 8 * 8)

    def launch_options(self, *, joined: bool) -> dict[str, int | None]:
        """Of `launching.launch`; joined: programs that wait for each other."""
        options: dict[str, int | None] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options | {"maxnreg": self.max_registers} | ({"launch_cooperative_grid": True} if joined else {})

    def scoring(self, num_chunks: int) -> ScoreConfig:
        """For the phases of scores, with so many programs of a KV head."""
        return ScoreConfig(self.block_m, self.block_n, self.num_warps, self.num_stages, num_chunks, self.halves)


def fits_specialized(shape: ScoreShape, listed: bool) -> bool:
    """Whether sm_90's own kernel has it: tokens in codes of 4 bits, all of them candidates, pooled by the maximum."""
    return (
        shape.source is Source.LOW_BIT
        and shape.bits == 4
        and shape.channels in _CHANNELS
        and shape.pooling is Pooling.MAX
        and not listed
    )


def default_config(
    shape: ScoreShape, num_rows: int, capability: tuple[int, int] = (9, 0), *, specialized: bool = False
) -> AnchorConfig:
    """What runs where nothing was tuned.

    Args:
        shape: of heads and index.
        num_rows: requests of the largest group.
        capability: of the GPU. Before (9, 0) tiles are lower: there, scores leave the registers otherwise.
        specialized: whether sm_90's own kernel may run: on such a GPU, for queries that are halves, where candidates
            are tokens and not listed.
    """
    if specialized and capability[0] == _HOPPER and fits_specialized(shape, False):
        block_m = min(128, block_of(num_rows * shape.gqa, 8))
        return AnchorConfig(block_m, 128 if block_m <= 32 else 64, 4, 3, 3 if block_m <= 16 else 2, specialized=True)
    hopper = capability >= (9, 0)
    wide = shape.source is Source.LOW_BIT and hopper
    block_m = min(128 if wide else 64 if hopper else 32, block_of(num_rows * shape.gqa, 8))
    halves = hopper and block_m >= 16
    if block_m == 128:
        # One tile of all rows: codes are read and unpacked once a phase.
        return AnchorConfig(block_m, 128, 8, 3, 1, halves)
    return AnchorConfig(block_m, 128 if wide else 64, 4, 3, 2, halves)
