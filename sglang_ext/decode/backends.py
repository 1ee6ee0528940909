"""Making what attends decode steps here: the exact backend, the sparse one, and the guard that compares them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from prefix_kernels.grouped_attention import AttentionShape, check_dtypes
from sglang_ext.config import PAGE_TOKENS
from sglang_ext.decode.cache_rank.client import cache_rank_for
from sglang_ext.decode.cascade import CascadeDecode
from sglang_ext.decode.costs import StepCosts
from sglang_ext.decode.grouping import SlotTracker
from sglang_ext.decode.guard import QualityGuard
from sglang_ext.decode.select_op import ListSizes, OpContext, SelectOp, graph_refusal, make_op
from sglang_ext.decode.sparse import SparseDecode
from sglang_ext.decode.swap import HostKV
from sglang_ext.methods.base import IndexSpec
from sglang_ext.methods.layer_plan import LayerPlan
from sglang_ext.model_view import ModelView
from sglang_ext.options import DecodePath, Exactness, SparseAttnConfig
from sglang_ext.ranks import Ranks

logger = logging.getLogger(__name__)

_ARENA_POOLS = 2
"""Slots of all lists over those of the KV pool: every slot twice, as lists of requests that are not grouped overlap."""


class Backends(NamedTuple):
    """What was made; None: the settings, the model or the device have no use for it.

    Attributes:
        cascade: attends groups exactly.
        sparse: attends by indexes.
        guard: compares steps with indexes now and then.
    """

    cascade: CascadeDecode | None = None
    sparse: SparseDecode | None = None
    guard: QualityGuard | None = None


def refusal_of(config: SparseAttnConfig, view: ModelView) -> str | None:
    """Why no decode step is attended here, which the log says; None: some may be."""
    level, why = logging.INFO, _turned_off(config, view)
    if why is None and view.device.type == "cuda":
        try:
            check_dtypes(view.dtype, view.kv_dtype, view.device)
        except ValueError as error:
            level, why = logging.WARNING, str(error)
    if why is not None:
        logger.log(level, "sparse attention: decode steps are left to SGLang's own backend: %s", why)
    return why


def _turned_off(config: SparseAttnConfig, view: ModelView) -> str | None:
    """Which setting leaves all steps to SGLang; None: no one does."""
    if config.decode_path is DecodePath.STOCK:
        return "decode_path is stock"
    return "share_prefixes is off" if view.decode_graphs and not _shares(config, view) else None


def _shares(config: SparseAttnConfig, view: ModelView) -> bool:
    """Whether slots that requests share are read once in exact steps, too."""
    return view.device.type == "cuda" if config.share_prefixes is None else config.share_prefixes


class Given(NamedTuple):
    """What backends are made of.

    Attributes:
        config, view, spec, layer_plan, ranks, host: as of `DecodePlanner`.
        tracker: of the slots that requests share.
        costs: by size of batch; filled when they are measured.
    """

    config: SparseAttnConfig
    view: ModelView
    spec: IndexSpec
    layer_plan: LayerPlan
    ranks: Ranks
    host: HostKV | None
    tracker: SlotTracker
    costs: dict[int, StepCosts]


def make_backends(given: Given, *, trial: bool, publish: Callable[[dict[str, Any]], None]) -> Backends:
    """All that the settings ask for, where steps are not refused. Where indexes cannot be used the log says why.

    Args:
        trial: as of `DecodePlanner`.
        publish: takes the guard's figures.
    """
    config, view, tracker = given.config, given.view, given.tracker
    shape = AttentionShape(
        view.num_qo_heads, view.num_kv_heads, view.head_dim, view.v_head_dim, view.dtype, view.kv_dtype
    )
    arena_size, graphs = _ARENA_POOLS * view.num_slots, view.decode_graphs
    cascade = sparse = None
    if _shares(config, view):
        cascade = CascadeDecode(shape, tracker, arena_size, view.device, given.costs, captured=graphs)
    if given.host is not None:
        arena_size += given.host.num_pages * PAGE_TOKENS  # whose slots are not the pool's
    if not graphs:  # a ready index is always used: each request alone has room
        arena_size = max(arena_size, tracker.max_batch * view.req_to_token.shape[1])
    if config.decode_path is not DecodePath.CASCADE:
        sparse = _make_sparse(given, shape, arena_size, cascade)
    selects = given.layer_plan.anchor_layers  # where no layer does, there is nothing to compare
    if sparse is None or not config.guard_every or not selects or config.exactness is Exactness.VERIFY:
        return Backends(cascade, sparse)
    exact = cascade or CascadeDecode(shape, tracker, arena_size, view.device)
    backends = sparse, exact, tracker.max_batch, view.device
    guard = QualityGuard(config, given.layer_plan, *backends, trial=trial, ranks=given.ranks, publish=publish)
    return Backends(cascade, sparse, guard)


def _make_sparse(
    given: Given, shape: AttentionShape, arena_size: int, cascade: CascadeDecode | None
) -> SparseDecode | None:
    """What attends by indexes; None, and a warning, where decode graphs cannot hold it or its spec."""
    config, view, spec, layer_plan = given.config, given.view, given.spec, given.layer_plan
    graphs = view.decode_graphs

    def context(sizes: ListSizes) -> OpContext:
        return OpContext(shape, config, len(layer_plan), sizes, view.device)

    def made(sizes: ListSizes) -> SelectOp:
        return make_op(spec, context(sizes), captured=graphs)

    message = graph_refusal(spec.method) if graphs else None
    if message is None:
        try:
            sparse = SparseDecode(
                shape,
                config,
                made,
                layer_plan,
                given.tracker,
                arena_size=arena_size,
                max_prefix_len=view.req_to_token.shape[1],
                device=view.device,
                costs=given.costs,
                captured=graphs,
                beside=cascade.attentions if cascade is not None else None,
                ranks=given.ranks,
                host=given.host,
            )
        except ValueError as error:
            message = str(error)
        else:
            sparse.cache_rank = cache_rank_for(spec, context(sparse.sizes), sparse.op, captured=graphs)
            return sparse
    logger.warning("sparse attention: indexes are not used: %s", message)
    return None
