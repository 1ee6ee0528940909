"""What `offload.py churn` measures: how many pages a step wants that the step before did not, in a real model's decode.

Queries, keys and values are those of dense decode (`query_capture.py`). A layer selects `tokens` by the exact scores of
its true query, or `blocks` of 16 by their INT4 means, as `ab_sparse` does; maximum over the query heads of a KV head,
sink and window inside the budget, as serving does. Layer 0 does not select. What a step wants are the pages of 16
tokens with a selected token; the residents' reference counts.

    wanted       pages that a list names tokens of, as a share of the prefix's pages: |M_t|
    churn        |M_t - M_{t-1}| / |M_t|: what residents that hold M_{t-1} alone must fetch
    transferred  |T_t| / |M_t| of residents that hold so large a share of the prefix's pages
    missed       of the wanted pages, those for which such residents have no cell

The first step, which fetches all, does not count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from engines import Row
from query_capture import Answered, Captured
from torch import Tensor

from prefix_kernels.block_scores import block_scores_mean
from prefix_kernels.pooling import pool_scores
from prefix_kernels.residents import PAGE_TOKENS, Mode, ResidentGroup, ResidentShape
from prefix_kernels.residents.reference import look_up
from prefix_kernels.residents.state import ResidentState
from prefix_kernels.top_k_selection import rank_by_keys, top_k_selection
from prefix_kernels.top_k_selection.plan import SelectionGroup
from prefix_kernels.types import SelectedLists
from sglang_ext.methods.ab_sparse import ABSparseBuilder, ABSparseSelector, ABSparseSpec
from sglang_ext.methods.base import SelectArgs
from sglang_ext.options import SparseAttnConfig

SELECTED = ("tokens", "blocks")


def selected(
    captured: Captured, answer: Answered, layer: int, budgets: Sequence[int], what: str = "tokens"
) -> list[list[Tensor]]:
    """Of each budget and step: positions [num_kv_heads, budget] int32; `what`: tokens, or blocks."""
    config, keys = SparseAttnConfig(), captured.keys[layer]
    sizes = {"num_sink": config.num_sink_tokens, "num_recent": 16 * config.num_recent_pages}
    args = SelectArgs(prefix_len=keys.shape[1], sm_scale=keys.shape[-1] ** -0.5, **sizes)
    arrays = ABSparseBuilder(ABSparseSpec()).build_layer(keys.transpose(0, 1), None) if what == "blocks" else {}
    found: list[list[Tensor]] = [[] for _ in budgets]
    for query in answer.queries[:, layer].split(1):
        if what == "blocks":
            scores = ABSparseSelector(ABSparseSpec()).token_scores(arrays, query, args)
        else:
            scores = pool_scores(block_scores_mean(query, keys), args.sm_scale)
        for number, budget in enumerate(budgets):
            found[number].append(top_k_selection(rank_by_keys(scores), budget, **sizes).positions)
    return found


def replay(positions: Sequence[Tensor], prefix_len: int, num_cells: int) -> list[int]:
    """Pages that residents of one layer counted behind the first step: see `Counter`."""
    heads, budget = positions[0].shape
    pages = prefix_len // PAGE_TOKENS
    shape = ResidentShape(1, heads, num_cells, pages, 0, Mode.EXACT)
    state, table = ResidentState.empty(shape, torch.device("cpu")), torch.arange(pages, dtype=torch.int32)
    group = ResidentGroup(0, SelectionGroup(prefix_len, budget, head_stride=budget))
    first = state.counters
    for step, wanted in enumerate(positions):
        lists = SelectedLists(
            wanted.flatten().clone(), torch.full((1, heads), budget, dtype=torch.int32), wanted.flatten().clone()
        )
        look_up(shape, state, 0, [group], table, lists)
        if step == 0:
            first = state.counters.clone()
    return [int(one) for one in (state.counters - first).sum((0, 1))]


def churn(positions: Sequence[Tensor], pages: int) -> tuple[float, float]:
    """(wanted, churn), means over steps and KV heads."""
    masks = torch.zeros(len(positions), len(positions[0]), pages, dtype=torch.bool)
    for mask, wanted in zip(masks, positions, strict=True):
        mask.scatter_(1, wanted.long() // PAGE_TOKENS, True)
    sizes = masks[1:].sum(-1)
    return float(sizes.double().mean() / pages), float((masks[1:] & ~masks[:-1]).sum() / sizes.sum())


def rows(captured: Captured, answer: Answered, kept: Sequence[float], cells: Sequence[float]) -> Iterator[Row]:
    """Of each layer and share kept.

    Args:
        captured: the document.
        answer: one of its answers.
        kept: budgets, as shares of the prefix.
        cells: of residents, as shares of the prefix's pages.
    """
    prefix_len = captured.keys.shape[2] // PAGE_TOKENS * PAGE_TOKENS
    whole = Captured(captured.name, captured.keys[:, :, :prefix_len], captured.values, [], captured.frequencies)
    pages, budgets = prefix_len // PAGE_TOKENS, [int(one * prefix_len) for one in kept]
    shared = {"task": answer.task, "document": captured.name, "prefix_len": prefix_len, "steps": len(answer.queries)}
    for layer, what in itertools.product(range(1, answer.queries.shape[1]), SELECTED):
        of_budgets = selected(whole, answer, layer, budgets, what)
        for share, budget, positions in zip(kept, budgets, of_budgets, strict=True):
            wanted, changed = churn(positions, pages)
            row = {**shared, "bench": "churn", "selected": what, "layer": layer, "kept": share, "budget": budget}
            row |= {"wanted": round(wanted, 4), "churn": round(changed, 4), "transferred": {}, "missed": {}}
            for size in cells:
                want, moved, missed = replay(positions, prefix_len, max(1, int(size * pages)))
                row["transferred"][str(size)] = round(moved / want, 4)
                row["missed"][str(size)] = round(missed / want, 4)
            yield row
