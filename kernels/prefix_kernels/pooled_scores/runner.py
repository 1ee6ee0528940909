"""Pooled scores of the groups of a batch: planned on the host, then run in two launches without a wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefix_kernels.launching import block_of, launch
from prefix_kernels.pooled_scores.kernels import pooled_scores_kernel
from prefix_kernels.pooled_scores.tables import POOL, ScoredGroup, ScoreInputs, ScoreShape, ScoreTables, Source

__all__ = ["PooledScores", "ScoreConfig", "ScoreShape", "ScoredGroup", "Source"]


@dataclass(frozen=True)
class ScoreConfig:
    """How candidates are scored; a matter of speed only.

    Attributes:
        block_m: query rows of a tile, a power of 2 of at least 16; any with RAW, where nothing is multiplied.
        block_n: candidates of a step, a power of 2 of at least 16.
        num_warps: of a program.
        num_stages: steps that are on their way at a time.
        num_chunks: stretches of a (group, KV head).
        halves: whether rows of 24 words of 4-bit codes (96 channels) are multiplied as 16 and 8, not as 32 of which 8
            are padding. Warp-group instructions (sm_90, `block_m` from 16 on) take that as it comes; others reorder it.
    """

    block_m: int = 16
    block_n: int = 128
    num_warps: int = 4
    num_stages: int = 3
    num_chunks: int = 1
    halves: bool = False

    def arguments(self, shape: ScoreShape) -> dict[str, int]:
        """What kernels are told of it, by parameter name."""
        halves = self.halves and coded_words(shape) == 24
        return {
            "BLOCK_K": 16 if halves else block_of(shape.row_units, 16),
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            # Not of the number of chunks, on which the order of sums would depend.
            "BLOCK_CHUNKS": 32,
            # Sixteen candidates to a warp, see the kernel's sums.
            "LANES": min(self.num_warps, self.block_n // 16),
            "STAGES": self.num_stages,
        }


class PooledScores:
    """Scores of candidates, pooled over the rows of their group: log of the (largest or mean) share of attention.

    Source of the pooling: Kascade, 3.4 (after the softmax); see `pooling.pool_scores`.

    Args:
        shape: of heads and index.
        max_batch: requests of a batch, at most.
        max_groups: groups of a batch, at most.
        config: tile and schedule; `block_m` that is less than a group's rows takes several tiles.
        device: where the buffers are made.
        listed: whether candidates are named by a list (always with KEYS).

    Raises:
        ValueError: query heads that do not divide, or bits that are no code's.
    """

    def __init__(
        self,
        shape: ScoreShape,
        max_batch: int,
        max_groups: int,
        config: ScoreConfig,
        device: torch.device,
        *,
        listed: bool = False,
    ) -> None:
        self.shape = shape
        self.config = config
        self.max_batch, self.max_groups, self.device = max_batch, max_groups, device
        self._tables = ScoreTables(shape, max_batch, max_groups, device, listed=listed)
        stats = (max_groups, shape.num_kv_heads, config.num_chunks, self._tables.max_rows)
        self._peak = torch.empty(stats, dtype=torch.float32, device=device)
        self._total = torch.empty(stats, dtype=torch.float32, device=device)

    @property
    def listed(self) -> bool:
        """Whether candidates are named by a list."""
        return self._tables.listed

    def plan(self, groups: Sequence[ScoredGroup]) -> None:
        """Write the tables of the next runs. Copies to the device, without a wait, on the stream of the runs.

        Raises:
            ValueError: more groups or rows than the buffers hold, a row out of range, a group of another number of KV
                heads, or arrays that the kernel cannot read. The plan before stays in force.
        """
        self._tables.plan(groups)

    def run(
        self,
        q: Tensor,
        scores: Tensor,
        sm_scale: float,
        *,
        k_cache: Tensor | None = None,
        lists: Tensor | None = None,
        raw: Tensor | None = None,
        arrays: Tensor | None = None,
    ) -> None:
        """Score as planned: two launches. Runs of one object follow each other on one stream.

        Args:
            q: [batch, num_qo_heads, head_dim] post-RoPE queries.
            scores: fp32 arena, written at the groups' `score_begins`: natural log of the pooled share of attention
                among a KV head's candidates; -inf where no row says anything.
            sm_scale: multiplies q.k before the softmax.
            k_cache: [num_slots, num_kv_heads, head_dim], with KEYS.
            lists: int32 or int64 arena of the groups' lists.
            raw: with RAW the scores: an fp32 arena in which the groups' rows lie. Otherwise room for them, fp32
                [max_groups, num_kv_heads, rows, candidates] by its strides, worth it for few rows: the second pass
                then reads them back instead of scoring again.
            arrays: int64 [max_groups, 5], another layer's `array_addresses`; None for those of the plan.

        Raises:
            ValueError: a tensor that the source needs is missing, or of another shape.
        """
        arguments = self._tables.arguments(ScoreInputs(q, sm_scale, k_cache, lists, raw, arrays), scores)
        shape = self.shape
        arguments |= {"peak_ptr": self._peak, "total_ptr": self._total, **self.config.arguments(shape)}
        arguments["RAW_ARENA"] = shape.source is Source.RAW
        reread = shape.source is not Source.RAW and raw is not None
        second = Source.RAW if reread else shape.source
        for pool, source in ((0, shape.source), (POOL[shape.pooling], second)):
            launch(
                pooled_scores_kernel,
                (self.config.num_chunks, shape.num_kv_heads, self.max_groups),
                {**arguments, "POOL": pool, "SOURCE": int(source), "STORE_RAW": reread and pool == 0},
                num_warps=self.config.num_warps,
                num_stages=self.config.num_stages,
            )


def coded_words(shape: ScoreShape) -> int:
    """Words of 4-bit codes of a row; 0 where there are none."""
    coded = shape.source in (Source.LOW_BIT, Source.MINMAX) and shape.bits == 4
    return shape.row_units if coded else 0
