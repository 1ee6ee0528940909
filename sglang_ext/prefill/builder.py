"""From the keys and recorded queries of a prompt to a stored, verified index."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from prefix_index import (
    ArrayKey,
    BuildInfo,
    IndexEntry,
    IndexIdentity,
    IndexPayload,
    IndexStore,
    canonical_digest,
)
from prefix_kernels.pooling import Pooling
from sglang_ext.config import SparseAttnConfig
from sglang_ext.indexing import METHODS, make_builder, make_selector
from sglang_ext.indexing.base import IndexBuilder, IndexSpec
from sglang_ext.indexing.heads import split_heads
from sglang_ext.indexing.preparation import at_layers, build_layer, layer_batches, prepare
from sglang_ext.indexing.profile import Profile
from sglang_ext.indexing.profile_use import layer_profile, stacked_profile, used_by_builders

#: Raised whenever a builder changes what its arrays mean: older indexes are then another profile's.
_BUILDERS_VERSION = 3

#: Query rows per layer that the sampled recall is measured on: a search each, while the scheduler waits.
_RECALL_ROWS = 4


def built_methods(config: SparseAttnConfig) -> dict[str, dict[str, Any]]:
    """Raw specs of the methods that an index holds: those named, or the serving method alone."""
    return config.methods or {config.method: {}}


def method_specs(config: SparseAttnConfig) -> dict[str, IndexSpec]:
    """The checked specs of all methods that an index of this configuration holds."""
    return {name: METHODS[name].spec.from_dict(spec) for name, spec in sorted(built_methods(config).items())}


def profile_digest(config: SparseAttnConfig, profile: Profile | None = None) -> str:
    """Digest of how indexes are built: two configurations with equal digests build and read the same.

    Args:
        config: methods, sample sizes.
        profile: the model's; of it counts only what the builders use (`used_by_builders`).

    Raises:
        ProfileError: the methods do not go with this profile.
    """
    specs = method_specs(config)
    sampled = any(make_builder(spec, layer_profile(profile, 0)).needs_queries for spec in specs.values())
    content: dict[str, Any] = {
        "builders": _BUILDERS_VERSION,
        "methods": {name: spec.to_dict() for name, spec in specs.items()},
        "queries": {"query_samples": config.query_samples, "seed": config.seed} if sampled else {},
    }
    used = used_by_builders(specs.values(), profile)
    return canonical_digest({**content, "profile": used} if used else content)


class IndexFactory:
    """Builds and stores the indexes of one configuration.

    Args:
        store: open store; not owned.
        config: methods, sample sizes.
        profile: the model's; its block sizes and channels go to the builders that use them.
    """

    def __init__(self, store: IndexStore, config: SparseAttnConfig, profile: Profile | None = None) -> None:
        self._store = store
        self._config = config
        self._profile = profile
        self._specs = method_specs(config)

    def build(
        self,
        identity: IndexIdentity,
        keys_of: Callable[[int], Tensor],
        queries: Tensor | None,
        sm_scale: float,
    ) -> tuple[IndexEntry, dict[str, Any]]:
        """Build, store, read back and verify one index.

        Args:
            identity: of the prefix; its num_tokens is the prefix length.
            keys_of: layer -> [prefix_len, num_kv_heads, head_dim] post-RoPE keys.
            queries: [num_layers, num_kv_heads, num_samples, head_dim], or None without a recording.
            sm_scale: attention scale of the layers, for the sampled recall.

        Returns:
            The store's entry and what was measured (also kept in the index): seconds, bytes, and per method
            the sampled recall: attention mass of recorded queries inside the selection at the configured
            budget, mean over layers, rows and heads; queries later than a key cannot tell, so this is over
            the whole prefix, as in decode.

        Raises:
            ValueError: a method needs queries and there are none, or the inputs are not finite.
            IndexStoreError: storing or verifying failed.
        """
        seconds = dict.fromkeys(self._specs, 0.0)
        prepared = {}
        for name in self._specs:
            begun = time.perf_counter()
            prepared[name] = prepare(self._builder(name, range(1)), queries)
            _wait_for(queries)
            seconds[name] += time.perf_counter() - begun
        arrays: dict[ArrayKey, Any] = {}
        recall = dict.fromkeys(self._specs, 0.0)
        num_layers, heads = identity.model.num_layers, identity.model.num_kv_heads
        for layers in layer_batches(num_layers, identity.num_tokens):
            keys = _side_by_side([keys_of(layer) for layer in layers])
            own = None if queries is None else queries[layers.start : layers.stop].flatten(0, 1)
            for name, spec in self._specs.items():
                begun = time.perf_counter()
                built = build_layer(self._builder(name, layers), keys, own, at_layers(prepared[name], layers))
                _wait_for(keys)
                seconds[name] += time.perf_counter() - begun
                if own is not None:
                    recall[name] += self._recall(spec, built, keys, own, sm_scale) * len(layers) / num_layers
                host = {array: tensor.cpu() for array, tensor in built.items()}
                for place, pieces in enumerate(split_heads(host)):
                    layer, head = layers[place // heads], place % heads
                    for array, piece in pieces.items():
                        arrays[ArrayKey(f"{name}.{array}", layer, head)] = piece.numpy()
        stats = {
            "kv_bytes": self._kv_bytes(identity, keys),
            "recall": recall if queries is not None else {},
            "recall_budget": self._config.budget(identity.num_tokens),
        }
        entry = self._store.put(
            IndexPayload(
                identity=identity,
                arrays=arrays,
                spec={name: spec.to_dict() for name, spec in self._specs.items()},
                stats=stats,
                info=BuildInfo(created=time.time(), build_seconds=sum(seconds.values())),
            )
        )
        with self._store.get(identity) as file:
            file.verify()
        times = {"build_seconds": sum(seconds.values()), "method_seconds": seconds}
        return entry, {**stats, "index_bytes": entry.nbytes, **times, **self._sizes(arrays)}

    def _builder(self, name: str, layers: range) -> IndexBuilder:
        return make_builder(self._specs[name], stacked_profile(self._profile, layers))

    def _recall(
        self, spec: IndexSpec, built: Mapping[str, Tensor], keys: Tensor, queries: Tensor, sm_scale: float
    ) -> float:
        num_kv_heads, samples, _ = queries.shape
        rows = queries[:, :: max(1, samples // _RECALL_ROWS)][:, :_RECALL_ROWS]
        scores = torch.matmul(rows.float(), keys.float().permute(1, 2, 0)) * sm_scale
        mass = scores.softmax(dim=-1)  # [num_kv_heads, rows, prefix_len]
        selector = make_selector(spec)
        budget = self._config.budget(keys.shape[0])
        total = 0.0
        for row in range(rows.shape[1]):  # one query head per KV head, each with a selection of its own
            selection = selector.select(
                built,
                rows[:, row][None],
                prefix_len=keys.shape[0],
                budget=budget,
                num_sink=min(self._config.num_sink_tokens, budget),
                num_recent=0,
                sm_scale=sm_scale,
                pooling=Pooling.MAX,
            )
            taken = mass[:, row].gather(1, selection.positions.long().clamp(min=0))
            total += float((taken * (selection.positions >= 0)).sum() / num_kv_heads)
        return total / rows.shape[1]

    @staticmethod
    def _kv_bytes(identity: IndexIdentity, keys: Tensor) -> int:
        model = identity.model
        width = model.num_kv_heads * (model.head_dim + model.v_head_dim)
        return model.num_layers * identity.num_tokens * width * keys.element_size()

    @staticmethod
    def _sizes(arrays: Mapping[ArrayKey, Any]) -> dict[str, Any]:
        methods: dict[str, int] = {}
        for key, array in arrays.items():
            method = key.name.split(".")[0]
            methods[method] = methods.get(method, 0) + array.nbytes
        return {"method_bytes": methods}


def _side_by_side(keys: Sequence[Tensor]) -> Tensor:
    """Keys of some layers as one layer's, with the KV heads of all of them."""
    return keys[0] if len(keys) == 1 else torch.cat(list(keys), dim=1)


def _wait_for(tensor: Tensor | None) -> None:
    """Until the device has done what was asked of it: a time taken then is that of the work."""
    if tensor is not None and tensor.is_cuda:
        torch.cuda.synchronize()


def covered_tokens(prompt_len: int, align: int) -> int:
    """Tokens of a prompt that an index covers: the largest multiple of `align` (a multiple of a page)."""
    return prompt_len // align * align
