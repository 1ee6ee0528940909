"""What the sparse path did, counted on the host, and its export.

Prometheus names begin with `sglang:sparse_attn_`; they are exported only with SGLang's `--enable-metrics`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

logger = logging.getLogger(__name__)

#: The words under which dense decode is counted (docs/operating.md).
REASONS = (
    "no_index",
    "index_loading",
    "index_mismatch",
    "index_corrupt",
    "index_memory",
    "store_unavailable",
    "short_prefix",
    "cost_model",
    "quality_guard",
    "unsupported_layer",
    "unsupported_mode",
    "no_room",
    "offloaded",
    "by_request",
    "by_operator",
)
NO_REASON = "none"
"""Of dense tokens of a request for which no reason was counted: it shared too little, or was looked up for nothing."""

PATHS = ("sparse", "cascade", "dense")
TIERS = ("dram", "disk", "remote")
"""Where the bytes of an index are read from: a service's folder in DRAM, the store's folder, a remote store."""

OFFLOAD = (
    *("copied", "evicted", "failed", "loaded", "load_failed", "saved", "save_failed"),
    *("translated", "short", "page_size", "few_residents", "too_long", "host_full"),
)
"""Of prefixes and host memory; then of requests: served from there, and why their prefix was not copied."""
CACHE_RANK = ("served", "missed", "started")
_FAILURES = ("index_corrupt", "index_memory", "index_mismatch", "no_index", "store_unavailable")
_DAMAGES = ("bytes", "content", "foreign", "too_new", "mismatch", "error")
"""All there are, as are failures: an alert misses the first one of a series that begins with it."""
_PLACES = ("device", "store")
EVICTED = ("evicted", "evicted_bytes", "evicted_seconds")
"""Metrics of evictions, in the order of `prefix_index.Evictions`."""

PREFIX = "sglang:sparse_attn_"
PERIOD_S = 1.0

Figures: TypeAlias = Mapping[str, "float | Mapping[str, float]"]
"""By a metric's name: its value, or its values by that of its label. Counters are totals since the start."""


class Metric(NamedTuple):
    """An exported metric.

    Attributes:
        name: behind `PREFIX`; Prometheus adds `_total` to counters.
        text: help text.
        label: its label; empty for a metric of one value.
        values: of the label that are exported from the start, as 0; others once they are counted.
        gauge: a value that may fall; otherwise a counter.
    """

    name: str
    text: str
    label: str = ""
    values: tuple[str, ...] = ()
    gauge: bool = False


METRICS = (
    Metric("requests", "Requests that ended, by the best path of their decode steps.", "path", PATHS),
    Metric("decode_tokens", "Tokens decoded, by path.", "path", PATHS),
    Metric("fallback", "Requests decoded dense, by reason.", "reason", REASONS),
    Metric("dense_tokens", "Dense tokens of requests that ended, by their last reason.", "reason", (NO_REASON,)),
    Metric(
        "prefix_tokens", "Prefix tokens of sparse rows: all, attended (mean of layers).", "part", ("attended", "all")
    ),
    Metric("steps", "Decode steps, by path.", "path", PATHS),
    Metric("groups", "Groups of requests that read one prefix together, over all steps.", "path", PATHS[:2]),
    Metric("step_seconds", "Wall time between consecutive decode steps of one path.", "path", PATHS),
    Metric("timed_steps", "Decode steps in step_seconds.", "path", PATHS),
    Metric("saved_seconds", "Attention time saved by the cost model against no sharing.", "path", PATHS[:2]),
    Metric("lost_seconds", "The same of steps that cost more.", "path", PATHS[:2]),
    Metric("hit", "Requests that found an index of their prompt."),
    Metric("index_hits", "The same, by where it was.", "tier", ("device", *TIERS, "failed")),
    Metric("load", "Indexes loaded to the device.", "tier", TIERS),
    Metric("load_bytes", "Bytes of loaded indexes.", "tier", TIERS),
    Metric("load_seconds", "Seconds of loads.", "tier", TIERS),
    Metric("load_failures", "Loads that failed, by reason.", "reason", _FAILURES),
    Metric("corrupt", "Indexes found damaged at a load, by kind.", "kind", _DAMAGES),
    Metric("corrupt_bytes", "Bytes of damaged indexes.", "kind", _DAMAGES),
    Metric("corrupt_seconds", "Seconds of loads that found damage.", "kind", _DAMAGES),
    Metric("build", "Builds that ended, by status.", "status", ("built", "failed")),
    Metric("build_bytes", "Bytes of indexes that were built and stored."),
    Metric("build_seconds", "Seconds of computing in builds that were stored."),
    Metric("evicted", "Indexes evicted by this process.", "where", _PLACES),
    Metric("evicted_bytes", "Bytes of evicted indexes.", "where", _PLACES),
    Metric("evicted_seconds", "Seconds of evictions.", "where", _PLACES),
    Metric("guard_steps", "Decode steps that were attended exactly, too."),
    Metric("guard_events", "What became of indexes.", "event", ("accepted", "raised", "dense", "tried_again")),
    Metric("guard_tokens", "Next tokens compared with exact attention's, those alike.", "part", ("compared", "agreed")),
    Metric("guard_recall", "Attention mass recall, mean of the indexes.", "layer", gauge=True),
    Metric("guard_output_error", "Relative output error, mean of the indexes.", "layer", gauge=True),
    Metric("offload", "Host memory: what became of prefixes, requests served, why not copied.", "event", OFFLOAD),
    Metric("cache_rank", "Answers of the cache rank, those that did not come, its starts.", "event", CACHE_RANK),
    Metric("device_bytes", "Device bytes of indexes.", gauge=True),
    Metric("store_indexes", "Usable indexes in the store.", gauge=True),
    Metric("store_bytes", "Bytes of the indexes in the store.", gauge=True),
    Metric("store_problems", "Files and places of the store that cannot be used.", gauge=True),
)


_TOLD = (
    *("hits", "drafted", "accepted", "sparse_steps", "sparse_rows", "dense_rows", "largest_group"),
    *("cascade_steps", "cascade_rows", "recorded_steps", "recorded_graph_steps"),
)
"""Counters that a snapshot has as they are."""


class Counters:
    """Counters of one process. Not thread-safe: written by the scheduler thread, where requests run.

    Attributes:
        hits: requests that found an index, at admission.
        drafted, accepted: tokens that lossless decode drafted, and those that answers have.

    Args:
        num_layers: layers of the model.
    """

    def __init__(self, num_layers: int) -> None:
        self._attended = [0] * num_layers
        self._prefix = self._suffix_attended = self._suffix_tokens = 0
        self.hits = self.drafted = self.accepted = self.largest_group = 0
        self.sparse_steps = self.sparse_rows = self.dense_rows = 0
        self.cascade_steps = self.cascade_rows = 0
        self.recorded_steps = self.recorded_graph_steps = 0
        self.fallbacks: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._dense_tokens: Counter[str] = Counter()
        self._steps = dict.fromkeys(PATHS, 0)
        self._timed = dict.fromkeys(PATHS, 0)
        self._seconds = dict.fromkeys(PATHS, 0.0)
        self._groups = dict.fromkeys(PATHS[:2], 0)
        self._saved_us = dict.fromkeys(PATHS[:2], 0.0)
        self._lost_us = dict.fromkeys(PATHS[:2], 0.0)
        self._path: str | None = None
        self._began = 0.0
        self._store = (0, 0, 0)
        self._guard: Figures = {}

    def count_attended_suffix(self, attended: int, tokens: int) -> None:
        """One step, all layers together: attended and covered tokens of requests' own indexes."""
        self._suffix_attended += attended
        self._suffix_tokens += tokens

    def count_attended(self, attended: Sequence[int], prefix: int) -> None:
        """One step: tokens of prefixes that each layer attended, and of how many; once per request."""
        for layer, tokens in enumerate(attended):
            self._attended[layer] += tokens
        self._prefix += prefix

    def count_step(self, sparse_rows: int, dense_rows: int, largest_group: int) -> None:
        """One decode step of a batch."""
        self.sparse_rows += sparse_rows
        self.dense_rows += dense_rows
        self.sparse_steps += sparse_rows > 0
        self.largest_group = max(self.largest_group, largest_group)

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """Tokens of a request in a round of lossless decode."""
        self.drafted += drafted
        self.accepted += accepted

    def count_cascade(self, rows: int) -> None:
        """One decode step without an index: so many rows attended with the shared slots read once."""
        self.cascade_rows += rows
        self.cascade_steps += rows > 0

    def count_groups(self, path: str, groups: int, saved_us: float) -> None:
        """One step in groups: how many, and the microseconds that it saves by the cost model; below 0: loses."""
        self._groups[path] += groups
        if saved_us >= 0:
            self._saved_us[path] += saved_us
        else:
            self._lost_us[path] -= saved_us

    def begin_step(self, path: str | None, *, timed: bool = True) -> None:
        """A forward begins: a decode step of this path, or another forward (None). `timed`: it is like others.

        The time from a step to the next one is taken where both went the same way and no other forward lies between.
        With the overlap schedule a step begins while the one before it runs, so the time is a step's all the same.
        """
        now = time.perf_counter()
        if path is not None:
            self._steps[path] += 1
            if path == self._path:
                self._timed[path] += 1
                self._seconds[path] += now - self._began
        self._path, self._began = path if timed else None, now

    def count_fallback(self, reason: str) -> None:
        """One request that decodes dense for this reason."""
        self.fallbacks[reason] += 1

    def count_ended(self, steps: Mapping[str, int], reason: str | None) -> None:
        """One request that ended: its decode steps by path, and the last reason that was counted for it."""
        self._ended[next((path for path in PATHS if steps[path]), PATHS[-1])] += 1
        self._dense_tokens[reason or NO_REASON] += steps["dense"]

    def set_store(self, indexes: int, nbytes: int, problems: int) -> None:
        """What the store holds now. May be called from another thread."""
        self._store = indexes, nbytes, problems

    def figures(self) -> Figures:
        """What is exported of these counters. In any thread: of a step that runs meanwhile it may have a part."""
        layers, (indexes, nbytes, problems) = len(self._attended), self._store
        rows = self.sparse_rows, self.cascade_rows, self.dense_rows - self.cascade_rows
        return {
            "requests": dict(self._ended),
            "decode_tokens": dict(zip(PATHS, rows, strict=True)),
            "fallback": dict(self.fallbacks),
            "dense_tokens": dict(self._dense_tokens),
            "prefix_tokens": {"attended": sum(self._attended) / layers if layers else 0.0, "all": self._prefix},
            "steps": dict(self._steps),
            "groups": dict(self._groups),
            "step_seconds": dict(self._seconds),
            "timed_steps": dict(self._timed),
            "saved_seconds": {path: us / 1e6 for path, us in self._saved_us.items()},
            "lost_seconds": {path: us / 1e6 for path, us in self._lost_us.items()},
            "hit": self.hits,
            "store_indexes": indexes,
            "store_bytes": nbytes,
            "store_problems": problems,
            **self._guard,
        }

    def set_guard(self, totals: Mapping[str, Any]) -> None:
        """What the quality guard found so far: `QualityRecords.totals`."""
        self._guard = {
            "guard_steps": totals["steps"],
            "guard_events": dict(totals["events"]),
            "guard_tokens": {part: totals[part] for part in ("compared", "agreed")},
            **{
                f"guard_{name}": {str(layer): one for layer, one in enumerate(totals[name])}
                for name in ("recall", "output_error")
            },
        }

    def snapshot(self) -> dict[str, Any]:
        """All counters as plain values.

        `keep_ratio` is the mean over all layers (dense ones, sink and recent window included) of prefix tokens
        attended over prefix tokens. `suffix_keep_ratio`: of requests' suffix tokens that were selected from, over all
        layers. Both are None where there were none.
        """
        layers, suffix = len(self._attended), self._suffix_tokens
        return {
            **{name: getattr(self, name) for name in _TOLD},
            "fallbacks": dict(self.fallbacks),
            "keep_ratio": sum(self._attended) / (layers * self._prefix) if self._prefix else None,
            "attended_tokens_per_layer": list(self._attended),
            "prefix_tokens_per_layer": [self._prefix] * layers,
            "suffix_keep_ratio": self._suffix_attended / suffix if suffix else None,
        }


class Exporter:
    """Brings `METRICS` up to date once in `PERIOD_S`, on a thread of its own: a decode step pays for counting only.

    Made in the scheduler process after SGLang set up prometheus_client there. A figure that is missing stays as it is.

    Args:
        figures: gives them, in any thread.
        registry: prometheus_client's; None: its default.
    """

    def __init__(self, figures: Callable[[], Figures], registry: Any = None) -> None:
        import prometheus_client

        options = {"registry": registry or prometheus_client.REGISTRY}
        self._figures = figures
        self._metrics: dict[str, Any] = {}
        self._gauges = {metric.name for metric in METRICS if metric.gauge}
        self._told: dict[tuple[str, str], float] = {}
        self._problem: str | None = None
        for name, text, label, values, gauge in METRICS:
            kind = prometheus_client.Gauge if gauge else prometheus_client.Counter
            more = {"multiprocess_mode": "mostrecent"} if gauge else {}
            one = self._metrics[name] = kind(PREFIX + name, text, [label] if label else [], **more, **options)
            for value in values:
                one.labels(value)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparse-attn-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(PERIOD_S):
            try:
                self.export()
                self._problem = None
            except Exception as error:  # figures are late then; serving goes on
                if str(error) != self._problem:
                    logger.exception("sparse attention: metrics could not be exported")
                self._problem = str(error)

    def export(self) -> None:
        """Bring the exported metrics up to the figures as they are now."""
        for name, found in self._figures().items():
            values = found.items() if isinstance(found, Mapping) else (("", found),)
            for value, total in values:
                before = self._told.get((name, value))  # None: a gauge is exported once it is set, be it to 0
                # Of a step that runs meanwhile one part may be counted and another not: counters never fall.
                gauge = name in self._gauges
                if total == before or (total < (before or 0.0) and not gauge):
                    continue
                one = self._metrics[name].labels(value) if value else self._metrics[name]
                one.set(total) if gauge else one.inc(total - (before or 0.0))
                self._told[name, value] = total

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()
