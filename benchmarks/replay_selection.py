"""Do a server's selections agree with the reference's? For `replay.py --store` the stored index and the reference of
decode select again, by the queries of the server, which its trace holds, and by the replay's own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prefix_index import IndexEntry
from prefix_kernels.pooling import Pooling
from prefix_kernels.types import Selection
from sglang_ext.config import parse_profiled
from sglang_ext.decode.select_op import ReferenceOp, selection_group
from sglang_ext.decode.trace import Selected
from sglang_ext.methods import SelectArgs, make_selector, method_specs
from sglang_ext.methods.layer_plan import LayerPlan
from sglang_ext.prefix.residency import Residency, ResidentIndex, State
from sglang_ext.storage import configured_store

_SAME_SCORE = 1e-4
"""Of the last selected score: positions whose scores are that near are equally good."""


class Reselection:
    """Selects again what a server selected, by the reference of decode, from the index in the server's store.

    Args:
        store: the server's, a folder.
        config: its --sparse-attn-config.
        model: the model's folder: its profile completes the configuration, as in the server.
        plan: role of each layer.
        device: to select on.
    """

    def __init__(self, store: str, config: dict[str, Any], model: Path, plan: LayerPlan, device: torch.device) -> None:
        self._config, _ = parse_profiled(json.dumps(config), str(model))
        layers, heads = len(plan), plan.num_kv_heads
        spec = method_specs(self._config)[self._config.method]
        self._selector = make_selector(spec, self._config.summed_every)
        self._op = ReferenceOp(self._selector, Pooling(self._config.pooling))
        self._store = configured_store(store, self._config)
        self._residency = Residency(self._store, spec, layers, heads, device, 1 << 30)
        self._entries: dict[str, IndexEntry] = {}
        self._device, self._heads = device, heads

    @property
    def alone(self) -> bool:
        """Whether each step of the server selected by its own queries alone."""
        return self._config.search_period == 1 and not self._config.select_ahead

    def compare(self, step: Selected, queries: Mapping[int, Tensor]) -> Counter[str] | None:
        """Verdicts on (anchor layer, KV head) of one step: "equal" position by position, "equal scores": but for
        positions that are equally good, or "other". None: the store does not hold the index.

        Args:
            step: what the server selected.
            queries: by anchor layer, [num_rows, num_qo_heads, head_dim]: to select by.

        Raises:
            RuntimeError: the index cannot be loaded.
        """
        index = self._index(step.digest)
        if index is None:
            return None
        found: Counter[str] = Counter()
        for layer, q in queries.items():
            found.update(self._compare(step, index, layer, q.to(self._device)))
        return found

    def close(self) -> None:
        """Let go of indexes and store."""
        self._residency.close()
        self._store.close()

    def _index(self, digest: str) -> ResidentIndex | None:
        if digest not in self._entries:
            self._entries = {entry.digest: entry for entry in self._store.list()}
        if digest not in self._entries:
            return None
        index = self._residency.acquire(self._entries[digest])
        assert index.loaded is not None
        index.loaded.result()
        self._residency.release(index)
        if index.state is not State.READY:
            raise RuntimeError(f"expected index {digest} to load, got {index.state.name}: {index.detail}")
        return index

    def select(self, index: ResidentIndex, layer: int, q: Tensor) -> Selection:
        """What a layer selects of an index by the queries [num_rows, num_qo_heads, head_dim] of a group."""
        length = index.prefix_len
        group = selection_group(self._config, length, self._config.group_budget(length, len(q)))
        return self._op.select(q, group, index, layer, q.shape[2] ** -0.5, self._heads)

    def _compare(self, step: Selected, index: ResidentIndex, layer: int, q: Tensor) -> list[str]:
        wanted, scale = self.select(index, layer, q), q.shape[2] ** -0.5
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
                args = SelectArgs(prefix_len=step.prefix_len, sm_scale=scale, pooling=Pooling(self._config.pooling))
                scores = self._selector.token_scores(index.layers[layer], q, args)
            verdicts.append(_by_scores(scores[head], own, theirs))
        return verdicts


class SelectionCheck:
    """Collects the queries of a replay, then compares. Only groups all of whose rows were replayed: scores are pooled
    over them.

    Args:
        reselection: selects again. Owned; closed with the result.

    Raises:
        ValueError: a search period above 1, or `select_ahead`: a step then has another one's selection, or candidates.
    """

    def __init__(self, reselection: Reselection) -> None:
        if not reselection.alone:
            reselection.close()
            raise ValueError("expected search_period 1 and select_ahead false to compare selections; leave --store out")
        self._reselection = reselection
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
        """Counts of (step, anchor layer, KV head) by verdict; steps left out because a row was not replayed, or the
        store does not hold the index. The same of the same steps by the server's queries, where the trace holds them,
        and `max_query_off`: the largest difference between these and the replay's, over the largest of the replay's.
        """
        by_own: list[Counter[str]] = []
        by_servers: list[Counter[str]] = []
        off: list[Tensor] = []
        missing = gone = 0
        for step, rows in self._rows.values():
            if set(rows) != set(step.rids):
                missing += 1
                continue
            own = {layer: torch.stack([rows[rid][layer] for rid in step.rids]) for layer in step.bits}
            found = self._reselection.compare(step, own)
            if found is None:
                gone += 1
                continue
            by_own.append(found)
            servers = servers_queries(step, next(iter(own.values())).shape[2] if own else 1)
            again = self._reselection.compare(step, servers) if servers else None
            if again is not None:
                by_servers.append(again)
            for layer, q in servers.items():
                off.append((q.to(own[layer].device) - own[layer]).abs().max() / own[layer].abs().max())
        self._reselection.close()
        row = {**tally(by_own), "rows missing": missing, "index gone": gone}
        if by_servers:
            row |= {"by the server's queries": tally(by_servers), "max_query_off": float(torch.stack(off).max())}
        return row


def tally(steps: Sequence[Counter[str]]) -> dict[str, Any]:
    """Verdicts of steps, summed, as a result file has them. Shares are None where nothing was compared."""
    of = {name: sum(step[name] for step in steps) for name in ("equal", "equal scores", "other")}
    every = sum(of.values())
    by_position = of["equal"] / every if every else None
    equal = (of["equal"] + of["equal scores"]) / every if every else None
    return {**of, "steps": len(steps), "share_by_position": by_position, "share_equal": equal}


def servers_queries(step: Selected, head_dim: int) -> dict[int, Tensor]:
    """By anchor layer that searched in this step, [num_rows, num_qo_heads, head_dim]: what the server searched by."""
    return {layer: step.query(layer, head_dim) for layer in step.queries}


def _by_scores(scores: Tensor, own: Tensor, theirs: Tensor) -> str:
    """Whether as many were selected, and all that differ have the score of the last one that the reference took."""
    other = scores[own ^ theirs]
    last = scores[theirs & ~own].min() if bool((theirs & ~own).any()) else other.min()
    near = bool(((other - last).abs() <= _SAME_SCORE * last.abs()).all())
    return "equal scores" if near and int(own.sum()) == int(theirs.sum()) else "other"
