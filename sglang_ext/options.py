"""The options of `--sparse-attn-config`: their names, types, defaults and meaning. `config` reads and checks them."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from prefix_kernels.budget import BudgetGrowth, budget_for_group
from prefix_kernels.pooling import Pooling


class Build(str, Enum):
    """What this process makes of prompts that it prefills."""

    OFF = "off"
    SHARED = "shared"
    PREFILL = "prefill"
    CAPTURE = "capture"


class PrefetchPolicy(str, Enum):
    """What a request does while its index, or the file of its KV, is still loading (SGLang's words)."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


class DecodePath(str, Enum):
    """Of decode steps inside CUDA graphs: the fastest by measured costs, SGLang's own, all attended, or selected."""

    AUTO = "auto"
    STOCK = "stock"
    CASCADE = "cascade"
    SPARSE = "sparse"


class Exactness(str, Enum):
    """Whether answers are those of steps by an index, or of dense steps that verify what such steps drafted."""

    SELECTED = "selected"
    VERIFY = "verify"


SUM_EVERY = 64
"""Where a method samples its sums (`Method.samples_sums`): what more saves is little (docs/kernels.md), what it costs
docs/selection.md says.
"""


KEEP_RATIO, TOP_K, LEAST_RATIO = 1 / 8, 2048, 1 / 20
"""Of the default budget: docs/selection.md has the answers."""

KV_PER_INDEX_BYTE = 20
"""Bytes of the KV pool for each byte of indexes, where `index_gpu_bytes` is not given."""


class Offload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `offload` says: KV of indexed prefixes in host memory.

    Attributes:
        host_bytes: host memory for it, of all tensor-parallel ranks together, taken at the start; pinned on CUDA.
        min_tokens: shorter prefixes stay on the device.
        staging_tokens: of a piece of a prefix that is attended exactly: four of them, of one layer, are on the device.
        resident_tokens: rows behind SGLang's KV pool that hold what steps select: of a layer and KV head, for all
            prefixes of a batch. Budgets of groups shrink to it; a step whose requests alone select more attends
            exactly.
        select_prefill_tokens: most new tokens of a request, in one chunk, whose prefill behind such a prefix selects
            what it attends, as decode steps do. A longer prefill attends all of the prefix, which passes the link;
            with null every prefill does.
        folder: where their KV is kept on disk, too: a server that starts anew serves them without a prefill. None:
            nowhere.
        folder_bytes: of its files, those of all ranks, at most; what was used longest ago leaves. None: no limit.
    """

    host_bytes: int
    min_tokens: int = 8192
    staging_tokens: int = 8192
    resident_tokens: int = 32768
    select_prefill_tokens: int | None = None
    folder: str | None = None
    folder_bytes: int | None = None


class SparseAttnConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings behind `--sparse-attn-config`. All lengths are tokens, all sizes bytes.

    Attributes:
        method: which index selects: `token_index`, `ab_sparse`, `csattention`, `two_level`, `union`, or `exact` (an
            oracle for tests).
        keep_ratio: budget of one request as a fraction of its prefix, sink and recent window included.
        top_k: budget in tokens; beside `keep_ratio` the smaller of the two. Where neither is given, here or by the
            profile: an eighth of the prefix, but at most 2,048 tokens or a twentieth, whichever is more.
        min_top_k: fewest tokens of a budget by `keep_ratio` (Kascade: k = min(max(0.1 L, 128), L)).
        share_prefixes: whether requests on the same slots decode as a group, exactly, without an index; null: on a GPU.
            `false` also keeps indexes out of decode graphs.
        min_shared_tokens: reads that such groups must save in a step, at least: shared tokens times members less one.
        decode_path: what decode steps inside CUDA graphs run on: `auto`, or one path (`stock`, `cascade`, `sparse`).
        exactness: `selected`: steps by an index answer. `verify`: they draft, an exact step keeps what dense
            decoding would have said. See docs/lossless.md.
        draft_tokens: with `verify`: tokens that a request drafts for one exact step, at most.
        search_period: decode steps, or drafts, that use one selection of an anchor layer (CSAttention, 4.3). A group
            whose members change searches anew. null: 1; with `verify` the drafts of a round.
        select_ahead: whether a step's anchor layers select among candidates that the step before named, by its queries,
            for all layers at once. Of `two_level` only, with `search_period` 1. A step whose groups changed names its
            own.
        cache_device: with `select_ahead`: the other device, such as `cuda:1`, on which a process of its own names the
            candidates (see docs/selection.md). null: each step does.
        offload: KV of indexed prefixes in host memory, as an object: `host_bytes`, and, where the defaults are not
            right, `min_tokens` (8192), `staging_tokens` (8192), `resident_tokens` (32768),
            `select_prefill_tokens`, `folder` and `folder_bytes` (null). null: off. See docs/offload.md.
        suffix_dense_tokens: of a request's suffix behind an indexed prefix the last so many, or half of them, are
            attended in full; the others are selected from, by the rules of a prefix. null: all in full. Of
            `token_index` only.
        suffix_index_bytes: device bytes for indexes of such tokens, promised with that key only; the longest ones
            have them, the others' tokens are attended in full.
        max_keep_ratio: cap of a group's grown budget, as a fraction of the prefix.
        group_growth: growth of the budget with the group size (`none` or `sqrt`).
        pooling: pooling over a group's query rows (`max` or `mean`).
        sum_every: of the tokens behind the first 64, one in at most so many enters the sums of a selection's softmax,
            at least 512 in all; 1: all. Of token indexes, with `token_index` and `two_level` only, where null is
            64. See `pooling.pool_scores`.
        num_sink_tokens: leading prefix positions that are always attended.
        num_recent_pages: trailing pages of the prefix that are always attended (16 tokens each).
        min_sparse_prompt_len: shorter prefixes stay dense (`short_prefix`).
        layer_plan: per layer `"dense"`, `"anchor"` or `{"reuse": anchor layer, "head_map": [...]}`;
            empty: layer 0 dense, all others anchors.
        methods: specs of the index parts that are built, by method name; empty: `method` with its defaults.
        profile: the model's profile, which completes `method`, `methods`, `keep_ratio` and `layer_plan` where they are
            not given: a path, null (the file that lies in the model's folder, if any), or "none". See `profiles`.
        query_samples: recorded query rows per layer and KV head (reservoir size). Of a KV head with more than 64 query
            heads (MLA) as many tokens are recorded as of one with 64.
        seed: of the reservoir and of k-means.
        build: `off` (serve), `shared` (index what requests turn out to share, beside serving), `prefill` (index every
            prompt that this process prefills from its first token on, while it waits) or `capture` (write down queries
            and keys of every prompt: `sglang-ext calibrate` uses it).
        build_after_hits: with `shared`: requests that found a prefix in the prefix cache before its index is built; the
            request that prefilled the prefix is none of them.
        build_share: with `shared`: share of the time that builds may take, of the GPU and of the process, at most.
        sample_host_bytes: with `shared`: host memory for sampled queries; the least recently used leave first.
        build_align: a built index covers the prompt rounded down to this many tokens.
        build_report: file that receives one JSON line per prompt built, captured or refused.
        capture_folder: where captures are written; needed for `capture`.
        capture_tail: last tokens of a prompt that a capture keeps beside the sample.
        capture_steps: decode steps that a capture keeps.
        guard_every: of decode steps with an index one in so many is also attended exactly, and compared; 0: none. The
            first steps of an index are compared more often.
        guard_share: share of the decode steps' time that this may take, at most.
        quality_slo: largest relative error of the attention output that an index may make, mean over the layers that
            select; beyond, its budget is raised, then it is not used (`quality_guard`). null: it is only measured.
        quality_recovery_s: seconds until such an index is tried again.
        trace_folder: where selections of requests 'trace-...' are written, for debugging: `decode.trace`. null: off.
        prefetch_policy: what a decode step does while the index is loading: `best_effort` (dense), `wait_complete`,
            or `timeout` (dense after `prefetch_timeout_s`).
        prefetch_timeout_s: seconds from a load's begin.
        index_gpu_bytes: device bytes for resident indexes; least recently used ones leave first. null: 5% of the KV
            pool. Promised only where indexes can be used.
        store_max_bytes: most bytes of all indexes in the store's folder; null: no bound of its own.
        store_min_free_bytes: bytes of the store's disk that indexes leave free. At this limit and at `store_max_bytes`
            the least recently used leave first.
        store_mode: octal mode of folders that are made in the store; its files have it without execution.
        store_group: group that they belong to; null: the process's own.
        store_remote: URL of a remote store, or several, fastest first: `s3://BUCKET/PREFIX`, `gs://`, `az://`,
            `file:///SHARED/FOLDER`, `mooncake://HOST:PORT`. The folder is the truth of this machine; what it lacks is
            fetched from there, what is built here is published there.
        store_timeout_s: seconds that an answer of a service or the remote store may take. Longer fetches go on behind.
    """

    method: str = "token_index"
    keep_ratio: float | None = None
    top_k: int | None = None
    min_top_k: int = 128
    share_prefixes: bool | None = None
    min_shared_tokens: int = 8192
    decode_path: DecodePath = DecodePath.AUTO
    exactness: Exactness = Exactness.SELECTED
    draft_tokens: int = 7
    search_period: int | None = None
    select_ahead: bool = False
    cache_device: str | None = None
    offload: Offload | None = None
    suffix_dense_tokens: int | None = None
    suffix_index_bytes: int = 1 << 30
    max_keep_ratio: float = 1.0
    group_growth: BudgetGrowth = BudgetGrowth.NONE
    pooling: Pooling = Pooling.MAX
    sum_every: int | None = None
    num_sink_tokens: int = 16
    num_recent_pages: int = 4
    min_sparse_prompt_len: int = 1024
    layer_plan: list[str | dict[str, Any]] = []
    methods: dict[str, dict[str, Any]] = {}
    profile: str | None = None
    query_samples: int = 2048
    seed: int = 0
    build: Build = Build.OFF
    build_after_hits: int = 2
    build_share: float = 0.05
    sample_host_bytes: int = 2 << 30
    build_align: int = 64
    build_report: str | None = None
    capture_folder: str | None = None
    capture_tail: int = 64
    capture_steps: int = 64
    guard_every: int = 2048
    guard_share: float = 0.005
    quality_slo: float | None = None
    quality_recovery_s: float = 600.0
    trace_folder: str | None = None
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.BEST_EFFORT
    prefetch_timeout_s: float = 2.0
    index_gpu_bytes: int | None = None
    store_max_bytes: int | None = None
    store_min_free_bytes: int = 1 << 30
    store_mode: str = "0700"
    store_group: str | None = None
    store_remote: str | list[str] | None = None
    store_timeout_s: float = 5.0

    @property
    def waits_s(self) -> float:
        """Seconds from a load's begin that a request waits for it; inf: until it has ended."""
        waits = {PrefetchPolicy.BEST_EFFORT: 0.0, PrefetchPolicy.WAIT_COMPLETE: float("inf")}
        return waits.get(self.prefetch_policy, self.prefetch_timeout_s)

    @property
    def steps_per_search(self) -> int:
        """Decode steps, or drafts, that use one selection, at most."""
        if self.search_period is not None:
            return self.search_period
        return self.draft_tokens if self.exactness is Exactness.VERIFY and not self.select_ahead else 1

    def budget(self, prefix_len: int) -> int:
        """Prefix tokens that one request attends per KV head, sink and recent window included."""
        ratio, most = self.keep_ratio, self.top_k
        if ratio is None and most is None:
            ratio, most = KEEP_RATIO, max(TOP_K, int(LEAST_RATIO * prefix_len), self.min_top_k)
        wanted = prefix_len if ratio is None else max(int(ratio * prefix_len), self.min_top_k)
        return max(1, min(wanted, prefix_len if most is None else most, prefix_len))

    def group_budget(self, prefix_len: int, num_rows: int) -> int:
        """Prefix tokens that a group of so many requests attends per KV head, never more than the prefix has."""
        one = self.budget(prefix_len)
        cap = max(one, int(self.max_keep_ratio * prefix_len))
        return min(budget_for_group(one, num_rows, BudgetGrowth(self.group_growth), cap), prefix_len)

    def index_bytes(self, kv_bytes: int) -> int:
        """Device bytes for resident indexes of a rank whose KV pool may have so many bytes."""
        return kv_bytes // KV_PER_INDEX_BYTE if self.index_gpu_bytes is None else self.index_gpu_bytes
