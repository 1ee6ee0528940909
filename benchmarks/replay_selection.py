"""Do a server's selections agree with the reference's? For `replay.py --store`: the stored index and the reference of
decode select again, by the replay's own float32 queries.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prefix_kernels.pooling import Pooling
from sglang_ext.attention.decode import GroupedDecode
from sglang_ext.attention.plan import Group
from sglang_ext.attention.trace import Selected
from sglang_ext.config import parse_profiled
from sglang_ext.indexing import make_selector
from sglang_ext.indexing.layer_plan import LayerPlan
from sglang_ext.metrics import Counters
from sglang_ext.prefill.builder import method_specs
from sglang_ext.prefix.residency import Residency, ResidentIndex, State
from sglang_ext.storage import configured_store

_SAME_SCORE = 1e-4
"""Of the last selected score: positions whose scores are that near are equally good."""


class SelectionCheck:
    """Collects queries, then compares. Only groups all of whose rows were replayed: scores are pooled over them.

    Args:
        store: the server's, a folder.
        config: its --sparse-attn-config.
        model: the model's folder: its profile completes the configuration, as in the server.
        plan: role of each layer.
        device: to select on.

    Raises:
        ValueError: a search period above 1: a step then has another one's selection.
    """

    def __init__(self, store: str, config: dict[str, Any], model: Path, plan: LayerPlan, device: torch.device) -> None:
        self._config, _ = parse_profiled(json.dumps(config), str(model))
        if self._config.search_period != 1:
            raise ValueError(f"expected search_period 1 to compare selections, got {self._config.search_period}")
        layers, heads = len(plan), plan.num_kv_heads
        spec = method_specs(self._config)[self._config.method]
        self._selector = make_selector(spec, self._config.summed_every)
        self._decode = GroupedDecode(self._config, self._selector, plan, Counters(layers, device))
        self._store = configured_store(store, self._config)
        self._residency = Residency(self._store, self._config.method, layers, heads, device, 1 << 30)
        self._entries = {entry.digest: entry for entry in self._store.list()}
        self._device, self._heads = device, heads
        self._rows: dict[int, tuple[Selected, dict[str, dict[int, Tensor]]]] = {}

    def take(self, rid: str, queries: dict[int, Tensor], steps: Sequence[Selected | None]) -> None:
        """Queries of one request.

        Args:
            rid: its id.
            queries: by anchor layer, [rows, num_qo_heads, head_dim].
            steps: per row, what its step selected; None for a dense one.
        """
        for row, step in enumerate(steps):
            if step is not None:
                of_step = self._rows.setdefault(id(step), (step, {}))[1]
                of_step[rid] = {layer: q[row].clone() for layer, q in queries.items()}

    def result(self) -> dict[str, Any]:
        """Counts of (step, anchor layer, KV head): equal, equal but for positions of equal scores, and others; steps
        left out because a row was not replayed, or the index has left the store.
        """
        found = {"equal": 0, "equal scores": 0, "other": 0, "steps": 0, "rows missing": 0, "index gone": 0}
        for step, rows in self._rows.values():
            if set(rows) != set(step.rids):
                found["rows missing"] += 1
                continue
            index = self._index(step.digest)
            if index is None:
                found["index gone"] += 1
                continue
            found["steps"] += 1
            for layer in step.bits:
                q = torch.stack([rows[rid][layer] for rid in step.rids])
                for verdict in self._compare(step, index, layer, q):
                    found[verdict] += 1
        triples = found["equal"] + found["equal scores"] + found["other"]
        share = (found["equal"] + found["equal scores"]) / triples if triples else None
        self._residency.close()
        self._store.close()
        return {**found, "share_equal": share}

    def _index(self, digest: str) -> ResidentIndex | None:
        if digest not in self._entries:
            return None
        index = self._residency.acquire(self._entries[digest])
        assert index.loaded is not None
        index.loaded.result()
        self._residency.release(index)
        return index if index.state is State.READY else None

    def _compare(self, step: Selected, index: ResidentIndex, layer: int, q: Tensor) -> list[str]:
        scale = q.shape[2] ** -0.5
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        group = Group(index, nothing, nothing, len(q))
        wanted = self._decode.select(q, group, self._heads, layer, scale)
        mask, scores = step.mask(layer), None
        assert mask is not None
        verdicts = []
        for head in range(self._heads):
            own = torch.from_numpy(mask[head]).to(q.device)
            theirs = torch.zeros_like(own)
            theirs[wanted.positions[head, : int(wanted.counts[head])].long()] = True
            if bool((own == theirs).all()):
                verdicts.append("equal")
                continue
            if scores is None:
                scores = self._selector.token_scores(
                    index.layers[layer],
                    q,
                    prefix_len=step.prefix_len,
                    sm_scale=scale,
                    pooling=Pooling(self._config.pooling),
                )
            verdicts.append(_by_scores(scores[head], own, theirs))
        return verdicts


def _by_scores(scores: Tensor, own: Tensor, theirs: Tensor) -> str:
    """Whether as many were selected, and all that differ have the score of the last one that the reference took."""
    other = scores[own ^ theirs]
    last = scores[theirs & ~own].min() if bool((theirs & ~own).any()) else other.min()
    near = bool(((other - last).abs() <= _SAME_SCORE * last.abs()).all())
    return "equal scores" if near and int(own.sum()) == int(theirs.sum()) else "other"
