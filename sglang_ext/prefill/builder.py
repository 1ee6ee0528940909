"""From the keys and recorded queries of a prompt to a stored, verified index."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefix_index import (
    ArrayKey,
    BuildInfo,
    BuildLease,
    IndexEntry,
    IndexIdentity,
    IndexPayload,
    IndexStore,
    ModelFingerprint,
    canonical_digest,
    page_hashes,
)
from sglang_ext.methods import make_builder, make_selector, method_specs
from sglang_ext.methods.arrays import (
    ContentError,
    IndexSize,
    check_forms,
    check_layer,
    join_heads,
    layer_batches,
    split_heads,
)
from sglang_ext.methods.base import IndexBuilder, IndexSpec, SelectArgs
from sglang_ext.methods.profile import Profile, layer_profile, stacked_profile, used_by_builders
from sglang_ext.options import SparseAttnConfig

logger = logging.getLogger(__name__)

#: Raised whenever a builder changes what its arrays mean: older indexes are then another profile's.
_BUILDERS_VERSION = 3

TOKENS = ArrayKey("prefix.tokens")
"""The one array of an index that is no method's: int32 [num_tokens], the prefix's token ids. Only people are told by it
where a prompt differs; look-ups go by hashes."""

#: Query rows per layer that the sampled recall is measured on: a search each, while the scheduler waits.
_RECALL_ROWS = 4


def profile_digest(config: SparseAttnConfig, profile: Profile | None = None) -> str:
    """Digest of how indexes are built: two configurations with equal digests build and read the same. Of a profile
    counts only what the builders use; sampling of queries counts where keys of any width take them.

    Raises ProfileError where the methods do not go with the profile.
    """
    specs = method_specs(config)
    sampled = need_queries(specs, profile, head_dim=0)
    content: dict[str, Any] = {
        "builders": _BUILDERS_VERSION,
        "methods": {name: spec.to_dict() for name, spec in specs.items()},
        "queries": {"query_samples": config.query_samples, "seed": config.seed} if sampled else {},
    }
    used = used_by_builders(specs.values(), profile)
    return canonical_digest({**content, "profile": used} if used else content)


def need_queries(specs: Mapping[str, IndexSpec], profile: Profile | None, head_dim: int) -> bool:
    """Whether one of the methods is built from sampled queries, for keys of so many channels."""
    return any(make_builder(spec, layer_profile(profile, 0)).needs_queries(head_dim) for spec in specs.values())


class IndexFactory:
    """Builds and stores the indexes of one configuration, with the block sizes and channels of a profile, if there is
    one.

    Attributes:
        store: open, and not owned.
    """

    def __init__(self, store: IndexStore, config: SparseAttnConfig, profile: Profile | None = None) -> None:
        self.store, self._config, self._profile = store, config, profile
        self.specs = method_specs(config)
        self._digest = profile_digest(config, profile)

    def identity(self, model: ModelFingerprint, namespace: str, hashes: Sequence[bytes]) -> IndexIdentity:
        """Of the index of a prefix, by the digest of its namespace and its pages' hashes."""
        return IndexIdentity.for_prefix(
            namespace=namespace, page_hashes=hashes, model=model, profile_digest=self._digest
        )

    def take_lease(self, identity: IndexIdentity) -> BuildLease | dict[str, Any]:
        """The lease to build an index under, or why not: fields of a report's line. May block until the store's time
        limits; raises what the store raises.
        """
        exists = {"status": "exists", "digest": identity.digest, "num_tokens": identity.num_tokens}
        if self.store.contains(identity):
            return exists
        lease = self.store.lease(identity)
        if lease is None:
            detail = "expected nobody else to build this index, found its lease held; wait for it, or ask again"
            return {"status": "skipped", "reason": "building_elsewhere", "digest": identity.digest, "detail": detail}
        try:
            if not self.store.contains(identity):
                return lease
        except BaseException:
            lease.release()
            raise
        lease.release()  # its last holder was done a moment ago
        return exists

    def needs_queries(self, model: ModelFingerprint) -> bool:
        """Whether one of the methods is built from sampled queries."""
        return need_queries(self.specs, self._profile, model.head_dim)

    def builders(self, layers: range, heads: range) -> Iterator[tuple[str, IndexBuilder[IndexSpec]]]:
        """Of each method, for the given KV heads of the given layers as if they were one layer's."""
        profile = stacked_profile(self._profile, layers, heads)
        return ((name, make_builder(spec, profile)) for name, spec in self.specs.items())

    def assemble(
        self,
        identity: IndexIdentity,
        keys_of: Callable[[int], Tensor],
        queries: Tensor | None,
        sm_scale: float,
        heads: range | None = None,
    ) -> tuple[IndexAssembly, dict[str, float]]:
        """Build all layers of some KV heads, while the caller waits.

        Args:
            identity: of the prefix; its num_tokens is the prefix length.
            keys_of: layer -> [prefix_len, number of heads, head_dim] post-RoPE keys.
            queries: [num_layers, number of heads, num_samples, head_dim], or None without a recording.
            sm_scale: attention scale of the layers, for the sampled recall.
            heads: None: all.

        Returns:
            What was built, and per method the sampled recall: attention mass of recorded queries inside the selection
            at the configured budget, over the whole prefix, as in decode; mean over layers, rows and heads. Without
            queries there is none.

        Raises:
            ValueError: a method needs queries and there are none, or the inputs are not finite.
        """
        assembly = IndexAssembly(self, identity)
        recall = dict.fromkeys(self.specs, 0.0)
        num_layers = identity.model.num_layers
        for layers in layer_batches(num_layers, identity.num_tokens):
            parts = [keys_of(layer) for layer in layers]
            keys = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            del parts  # before anything is built
            own = None if queries is None else queries[layers.start : layers.stop].flatten(0, 1)
            built = assembly.add(layers, heads, keys, own)
            if own is not None:
                for name, spec in self.specs.items():
                    recall[name] += self._recall(spec, built[name], keys, own, sm_scale) * len(layers) / num_layers
        return assembly, recall if queries is not None else {}

    def keep(
        self, assembly: IndexAssembly, recall: Mapping[str, float], tokens: Sequence[int]
    ) -> tuple[IndexEntry, dict[str, Any]]:
        """Store a whole index, read it back and verify it; may be called in any thread.

        Args:
            assembly: with all layers and KV heads.
            tokens: of a prompt that begins with the prefix; those of the prefix are kept in the index.
            recall: by method, for the index's statistics; empty where it was not measured.

        Returns:
            The store's entry and what was measured (also kept in the index): seconds, bytes, recall.

        Raises:
            ContentError: it would not be loaded again; nothing was stored.
            ValueError: the prompt does not begin with the prefix; nothing was stored.
            IndexStoreError: storing or verifying failed.
        """
        assembly.check()
        identity, seconds = assembly.identity, assembly.seconds
        prefix = np.asarray(tokens[: identity.num_tokens], dtype=np.int32)
        if [one.hex() for one in page_hashes(prefix)[-1:]] != [identity.prefix_hash]:
            raise ValueError(f"expected the tokens of the prefix of {identity.num_tokens}, got {len(prefix)} others")
        stats = {
            "kv_bytes": assembly.kv_bytes,
            "recall": dict(recall),
            "recall_budget": self._config.budget(identity.num_tokens),
        }
        entry = self.store.put(
            IndexPayload(
                identity=identity,
                arrays={**assembly.arrays, TOKENS: prefix},
                spec={name: spec.to_dict() for name, spec in self.specs.items()},
                stats=stats,
                info=BuildInfo(created=time.time(), build_seconds=sum(seconds.values())),
            )
        )
        with self.store.get(identity) as file:
            file.verify()
        times = {"build_seconds": sum(seconds.values()), "method_seconds": seconds}
        return entry, {**stats, "index_bytes": entry.nbytes, **times, "method_bytes": assembly.method_bytes()}

    def _recall(
        self, spec: IndexSpec, built: Mapping[str, Tensor], keys: Tensor, queries: Tensor, sm_scale: float
    ) -> float:
        num_kv_heads, samples, _ = queries.shape
        rows = queries[:, :: max(1, samples // _RECALL_ROWS)][:, :_RECALL_ROWS]
        scores = torch.matmul(rows.float(), keys.float().permute(1, 2, 0)) * sm_scale
        mass = scores.softmax(dim=-1)  # [num_kv_heads, rows, prefix_len]
        selector = make_selector(spec)
        budget = self._config.budget(keys.shape[0])
        sink = min(self._config.num_sink_tokens, budget)
        args = SelectArgs(prefix_len=keys.shape[0], budget=budget, num_sink=sink, sm_scale=sm_scale)
        total = 0.0
        for row in range(rows.shape[1]):  # one query head per KV head, each with a selection of its own
            selection = selector.select(built, rows[:, row][None], args)
            taken = mass[:, row].gather(1, selection.positions.long().clamp(min=0))
            total += float((taken * (selection.positions >= 0)).sum() / num_kv_heads)
        return total / rows.shape[1]


class IndexAssembly:
    """An index while it is built, by a factory's methods: any layers, any KV heads, in any order.

    Attributes:
        arrays: what is there, in host memory.
        seconds: spent building, by method, the device's work on the current stream included.
        kv_bytes: of the prefix's keys and values in the KV pool; 0 before the first piece.
    """

    def __init__(self, factory: IndexFactory, identity: IndexIdentity) -> None:
        self._factory = factory
        self.identity = identity
        self.arrays: dict[ArrayKey, Any] = {}
        self.seconds = dict.fromkeys(factory.specs, 0.0)
        self.kv_bytes = 0

    def add(
        self, layers: range, heads: range | None, keys: Tensor, queries: Tensor | None
    ) -> dict[str, dict[str, Tensor]]:
        """Build some KV heads (None: all) of some layers. Waits for the device.

        Args:
            keys: [prefix_len, len(layers) * number of heads, head_dim] post-RoPE, layer by layer.
            queries: [len(layers) * number of heads, num_samples, head_dim]; None without a sample.

        Returns:
            Per method what the builder made, on the keys' device. Raises as `IndexBuilder.build_layer`.
        """
        model = self.identity.model
        heads = heads or range(model.num_kv_heads)
        built = {}
        for name, builder in self._factory.builders(layers, heads):
            begun = time.perf_counter()
            built[name] = builder.build_layer(keys, queries)
            if keys.is_cuda:
                torch.cuda.current_stream(keys.device).synchronize()
            self.seconds[name] += time.perf_counter() - begun
            host = {array: tensor.cpu() for array, tensor in built[name].items()}
            for place, pieces in enumerate(split_heads(host)):
                layer, head = layers[place // len(heads)], heads[place % len(heads)]
                for array, piece in pieces.items():
                    self.arrays[ArrayKey(f"{name}.{array}", layer, head)] = piece.numpy()
        dtype: torch.dtype = getattr(torch, model.kv_dtype)
        width = model.num_kv_heads * model.kv_width
        self.kv_bytes = model.num_layers * self.identity.num_tokens * width * dtype.itemsize
        return built

    def check(self) -> None:
        """Raise ContentError unless each KV head of each layer, and no other, has what a server wants of it."""
        model = self.identity.model
        size, whole = IndexSize(self.identity.num_tokens, model.head_dim), dict[tuple[str, int, int], Any]()
        for key, array in self.arrays.items():
            method, _, name = key.name.partition(".")
            whole.setdefault((method, key.layer, key.kv_head), {})[name] = array
        for method, spec in self._factory.specs.items():
            forms = spec.forms(size)
            for layer in range(model.num_layers):
                heads = [whole.pop((method, layer, head), {}) for head in range(model.num_kv_heads)]
                for head, arrays in enumerate(heads):
                    found = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
                    check_forms(forms, found, f"layer {layer}, KV head {head}")
                tensors = [{name: torch.from_numpy(array) for name, array in arrays.items()} for arrays in heads]
                check_layer(spec, join_heads(tensors), size, f"layer {layer}")
        if whole:
            raise ContentError("method, layer and KV head", "those of the model", sorted(whole))

    def method_bytes(self) -> dict[str, int]:
        """Bytes of the arrays that are there, by method."""
        methods: Counter[str] = Counter()
        for key, array in self.arrays.items():
            methods[key.name.split(".")[0]] += array.nbytes
        return methods


def covered_tokens(prompt_len: int, align: int) -> int:
    """Tokens of a prompt that an index covers: the largest multiple of `align` (a multiple of a page)."""
    return prompt_len // align * align


def short_refusal(prompt_len: int, config: SparseAttnConfig) -> str | None:
    """Why a prompt of so many tokens is too short for an index, and what to do; None where the prompt is not."""
    least, tokens = config.min_sparse_prompt_len, covered_tokens(prompt_len, config.build_align)
    if tokens >= least:
        return None
    cut = f" ({prompt_len} cut to a multiple of build_align={config.build_align})" if tokens < prompt_len else ""
    todo = "give a longer prompt, or lower min_sparse_prompt_len"
    return f"expected at least min_sparse_prompt_len={least} tokens, got {tokens}{cut}; {todo}"


def give_back(lease: BuildLease | None) -> None:
    """Release a lease, if there is one. Raises nothing: one that cannot be given back must not keep what follows."""
    try:
        if lease is not None:
            lease.release()
    except Exception:
        logger.exception("sparse attention: a build lease could not be given back")
