"""What an index will take, before it is built: computed of the forms of its arrays, which each method's spec knows."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefix_index import ArrayKey, BuildInfo, IndexIdentity, IndexPayload, IndexWriter, LazyArray, ModelFingerprint
from sglang_ext.methods import method_specs
from sglang_ext.methods.arrays import IndexSize, indptr_name, is_ragged
from sglang_ext.methods.base import IndexSpec, LayerProfile
from sglang_ext.methods.layer_plan import heads_of_rank
from sglang_ext.methods.profile import Profile, layer_profile, used_by_builders
from sglang_ext.options import SparseAttnConfig
from sglang_ext.prefill.builder import TOKENS

_LONGEST = 1 / 3
"""A number in an index's statistics that takes as many characters as any."""


class IndexSizes(NamedTuple):
    """Bytes of one index.

    Attributes:
        file: of its container, up to 4 KiB more than the written one: the header's numbers differ in length.
        device: of the arrays of the serving method on one tensor-parallel rank, the one that holds most.
    """

    file: int
    device: int


def index_sizes(
    config: SparseAttnConfig, profile: Profile | None, model: ModelFingerprint, tokens: int, tp_size: int = 1
) -> IndexSizes:
    """Of the index of a prefix.

    Args:
        config, profile: of the server.
        model: that is served; its digests do not matter.
        tokens: of the prefix, whole pages.
        tp_size: tensor-parallel ranks.

    Raises:
        ProfileError: a method needs a profile, and there is none.
    """
    specs = method_specs(config)
    used_by_builders(specs.values(), profile)
    size, digest = IndexSize(tokens, model.head_dim), "0" * 64
    layers = [layer_profile(profile, layer) for layer in range(model.num_layers)]
    arrays = {TOKENS: LazyArray("int32", (tokens,), _never)}
    for name, spec in specs.items():
        for number, layer in enumerate(layers):
            for head in range(model.num_kv_heads):
                for array, (dtype, shape) in head_arrays(spec, size, layer, head).items():
                    arrays[ArrayKey(f"{name}.{array}", number, head)] = LazyArray(dtype, shape, _never)
    # What `IndexFactory.keep` stores, with numbers of the greatest length.
    payload = IndexPayload(
        identity=IndexIdentity(
            namespace=digest, prefix_hash=digest, num_tokens=tokens, model=model, profile_digest=digest
        ),
        arrays=arrays,
        spec={name: spec.to_dict() for name, spec in specs.items()},
        stats={"kv_bytes": 1 << 50, "recall": dict.fromkeys(specs, _LONGEST), "recall_budget": config.budget(tokens)},
        info=BuildInfo(created=1e10 + _LONGEST, build_seconds=1e4 + _LONGEST),
    )
    return IndexSizes(
        IndexWriter(payload).nbytes,
        max(_of_rank(specs[config.method], size, layers, model, rank, tp_size) for rank in range(tp_size)),
    )


def head_arrays(
    spec: IndexSpec, size: IndexSize, layer: LayerProfile, head: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of the arrays of one KV head of a layer, by name."""
    found = {}
    for name, form in spec.forms(size).items():
        shape = tuple(spec.rows(size, layer, head) if length is None else length for length in form.shape)
        found[name] = form.dtype, shape
    return found


def _of_rank(
    spec: IndexSpec,
    size: IndexSize,
    layers: list[LayerProfile],
    model: ModelFingerprint,
    rank: int,
    tp_size: int,
) -> int:
    """Bytes of what residency loads: arrays joined over the rank's KV heads, with where each head's rows begin."""
    heads, total = heads_of_rank(model.num_kv_heads, rank, tp_size), 0
    for layer in layers:
        begins = set()
        for head in heads:
            for name, (dtype, shape) in head_arrays(spec, size, layer, head).items():
                total += math.prod(shape) * np.dtype(dtype).itemsize
                begins |= {indptr_name(name)} if is_ragged(name) else set()
        total += len(begins) * (len(heads) + 1) * np.dtype(np.int32).itemsize
    return total


def _never() -> NDArray[np.generic]:
    raise AssertionError("only the sizes of these arrays are asked for")
