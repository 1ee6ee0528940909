"""What the sparse path did, counted on the host.

Prometheus names begin with `sglang:sparse_attn_`; they are exported only with SGLang's `--enable-metrics`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: The words under which dense decode is counted (docs/architecture.md).
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
    "by_request",
    "by_operator",
)


class Counters:
    """Counters of one process. Not thread-safe: written by the scheduler thread, where requests run.

    Attributes:
        hits: requests that found an index, at admission.

    Args:
        num_layers: layers of the model.
        prometheus: export counters through prometheus_client as well.
    """

    def __init__(self, num_layers: int, prometheus: bool = False) -> None:
        self._attended = [0] * num_layers
        self._prefix = self._suffix_attended = self._suffix_tokens = 0
        self.sparse_steps = 0
        self.sparse_rows = 0
        self.dense_rows = 0
        self.hits = 0
        self.largest_group = 0
        self.cascade_steps = 0
        self.cascade_rows = 0
        self.recorded_steps = 0
        self.recorded_graph_steps = 0
        self.fallbacks: Counter[str] = Counter()
        self._prometheus = _Prometheus() if prometheus else None

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

    def count_cascade(self, rows: int) -> None:
        """One decode step without an index: so many rows attended with the shared slots read once."""
        self.cascade_rows += rows
        self.cascade_steps += rows > 0

    def count_fallback(self, reason: str) -> None:
        """One request that decodes dense for this reason."""
        self.fallbacks[reason] += 1

    def export(self, resident_bytes: Callable[[], int]) -> None:
        """Bring the exported figures up to these, and to the device bytes of indexes. Once in a forward."""
        if self._prometheus is not None:
            rows = {"sparse": self.sparse_rows, "cascade": self.cascade_rows}
            rows["dense"] = self.dense_rows - self.cascade_rows
            layers = len(self._attended)
            tokens = {"attended": sum(self._attended) / layers if layers else 0.0, "all": self._prefix}
            self._prometheus.export(self.hits, rows, tokens, self.fallbacks, resident_bytes())

    def set_store(self, indexes: int, nbytes: int) -> None:
        """What the store holds now. May be called from another thread."""
        if self._prometheus:
            self._prometheus.store_indexes.set(indexes)
            self._prometheus.store_bytes.set(nbytes)

    def snapshot(self) -> dict[str, Any]:
        """All counters as plain values.

        `keep_ratio` is the mean over all layers (dense ones, sink and recent window included) of prefix tokens
        attended over prefix tokens. `suffix_keep_ratio`: of requests' suffix tokens that were selected from, over all
        layers. Both are None where there were none.
        """
        layers, suffix = len(self._attended), self._suffix_tokens
        return {
            "hits": self.hits,
            "sparse_steps": self.sparse_steps,
            "sparse_rows": self.sparse_rows,
            "dense_rows": self.dense_rows,
            "largest_group": self.largest_group,
            "cascade_steps": self.cascade_steps,
            "cascade_rows": self.cascade_rows,
            "recorded_steps": self.recorded_steps,
            "recorded_graph_steps": self.recorded_graph_steps,
            "fallbacks": dict(self.fallbacks),
            "keep_ratio": sum(self._attended) / (layers * self._prefix) if self._prefix else None,
            "attended_tokens_per_layer": list(self._attended),
            "prefix_tokens_per_layer": [self._prefix] * layers,
            "suffix_keep_ratio": self._suffix_attended / suffix if suffix else None,
        }


class _Prometheus:
    """The exported counters. Made in the scheduler process after SGLang set up prometheus_client there."""

    def __init__(self) -> None:
        from prometheus_client import Counter as PrometheusCounter
        from prometheus_client import Gauge

        self.hits = PrometheusCounter("sglang:sparse_attn_hit", "Requests that found an index of their prompt.")
        self.rows = PrometheusCounter(
            "sglang:sparse_attn_decode_tokens", "Tokens decoded, by path (sparse, cascade or dense).", ["path"]
        )
        self.prefix_tokens = PrometheusCounter(
            "sglang:sparse_attn_prefix_tokens",
            "Tokens of indexed prefixes over all sparse steps: all, and those attended, mean over the layers.",
            ["part"],
        )
        self.device_bytes = Gauge(
            "sglang:sparse_attn_device_bytes", "Device bytes of indexes.", multiprocess_mode="mostrecent"
        )
        self.fallbacks = PrometheusCounter(
            "sglang:sparse_attn_fallback", "Requests decoded dense, by reason.", ["reason"]
        )
        self.store_indexes = Gauge(
            "sglang:sparse_attn_store_indexes", "Usable indexes in the store.", multiprocess_mode="mostrecent"
        )
        self.store_bytes = Gauge(
            "sglang:sparse_attn_store_bytes", "Bytes of the indexes in the store.", multiprocess_mode="mostrecent"
        )
        self._told: dict[tuple[str, str], float] = {}

    def export(
        self,
        hits: int,
        rows: Mapping[str, int],
        tokens: Mapping[str, float],
        fallbacks: Mapping[str, int],
        device_bytes: int,
    ) -> None:
        """Totals so far, of rows by path, tokens by part and fallbacks by reason."""
        self._tell(self.hits, ("hits", ""), hits)
        for path, count in rows.items():
            self._tell(self.rows.labels(path=path), ("rows", path), count)
        for part, total in tokens.items():
            self._tell(self.prefix_tokens.labels(part=part), ("tokens", part), total)
        for reason, count in fallbacks.items():
            self._tell(self.fallbacks.labels(reason=reason), ("fallbacks", reason), count)
        self.device_bytes.set(device_bytes)

    def _tell(self, counter: Any, name: tuple[str, str], total: float) -> None:
        counter.inc(total - self._told.get(name, 0.0))
        self._told[name] = total
