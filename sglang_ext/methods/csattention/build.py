"""Builds CSAttention's tables, and lets them take in the keys of new tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.methods.base import (
    Arrays,
    IndexBuilder,
    check_finite,
    check_keys,
    check_samples,
    check_shape,
    require_arrays,
)
from sglang_ext.methods.csattention.kmeans import cosine_kmeans
from sglang_ext.methods.csattention.lists import centroid_lists, grown_lists
from sglang_ext.methods.csattention.spec import CSAttentionSpec, subspace_channels


class CSAttentionBuilder(IndexBuilder[CSAttentionSpec]):
    """Builds the tables of a layer.

    Arrays: `centroids` [num_kv_heads, m, C, head_dim / m] fp16 of unit length. With codec "paper" `positions`
    [num_kv_heads, m, C, L] int32, ascending and unique within a list; `scores` same shape fp16, centroid . key less
    the list's baseline; `baseline` [num_kv_heads, m, C] fp32. With codec "compact" the fields of `CompactLists` with
    leading dims [num_kv_heads, m, C], `counts` only where offsets are smaller than a bitmap, and `baseline`. With
    weighting "contribution" also `weights` [num_kv_heads, m] fp32.
    """

    @property
    def needs_queries(self) -> bool:
        """For the centroids."""
        return True

    def prepare(self, queries: Tensor | None) -> dict[str, Tensor]:
        """See the base: `centroids` [num_layers, num_kv_heads, m, C, head_dim / m] fp16; nothing without queries."""
        if queries is None:
            return {}
        check_shape(queries, "queries [num_layers, num_kv_heads, num_samples >= 1, head_dim]", 4)
        check_finite(queries=queries)
        return {"centroids": self._clustered(queries)}

    def build_layer(self, keys: Tensor, queries: Tensor | None, prepared: Arrays | None = None) -> dict[str, Tensor]:
        """See the base; waits for the device once."""
        spec = self.spec
        samples, largest = check_samples(queries, keys, spec.method)
        prefix_len, num_kv_heads, head_dim = keys.shape
        shape = (num_kv_heads, spec.num_subspaces, spec.num_centroids, head_dim // spec.num_subspaces)
        channels = _channel_order(head_dim, spec.num_subspaces, spec.layout, keys.device)
        if prepared:
            centroids = require_arrays(prepared, ("centroids",), spec.method)[0].to(keys.device)
        else:
            centroids = self._clustered(samples)
        if tuple(centroids.shape) != shape:
            raise ValueError(
                f"expected prepared centroids {shape}, got {tuple(centroids.shape)}; are they of this spec?"
            )
        lists = centroid_lists(
            centroids, keys, channels, spec.list_len(prefix_len), spec.baseline == "tail_mean", largest
        )
        arrays = {"centroids": centroids, **spec.tables(prefix_len).encode(lists)}
        if spec.weighting == "contribution":
            length = self._parts(samples).float().norm(dim=3)
            share = length / length.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            arrays["weights"] = share.mean(dim=2)
        return arrays

    def _clustered(self, queries: Tensor) -> Tensor:
        """[..., num_kv_heads, num_samples, head_dim] -> [..., num_kv_heads, m, C, head_dim / m] fp16."""
        spec = self.spec
        points = self._parts(queries)
        return cosine_kmeans(
            points, spec.num_centroids, iterations=spec.iterations, batch_size=spec.batch_size, seed=spec.seed
        ).half()

    def _parts(self, queries: Tensor) -> Tensor:
        """At most `max_samples` queries by subspace: [..., num_kv_heads, m, num_samples, head_dim / m]."""
        spec = self.spec
        num_samples, head_dim = queries.shape[-2:]
        if num_samples > spec.max_samples:
            generator = torch.Generator().manual_seed(spec.seed)
            kept = torch.randperm(num_samples, generator=generator)[: spec.max_samples]
            queries = queries[..., kept.sort().values.to(queries.device), :]
        channels = _channel_order(head_dim, spec.num_subspaces, spec.layout, queries.device)
        if channels is not None:
            queries = queries[..., channels]
        return queries.view(*queries.shape[:-1], spec.num_subspaces, -1).transpose(-3, -2)


def insert_keys(spec: CSAttentionSpec, arrays: Arrays, new_keys: Tensor, first_position: int) -> dict[str, Tensor]:
    """Lists of the same length after new keys were tried in each: every one that exceeds the minimum replaces it.

    Source: CSAttention, 3.3 (5). Centroids and baselines stay those of the build, so with `baseline="tail_mean"` a
    list's baseline is the mean of the positions that it lacked then. Inserting keys at once into the paper's layout is
    inserting them one by one; of equal scores the earlier position stays.

    Compact lists are decoded, merged and encoded for the longer prefix; positions stay exact, scores do not. A new key
    is compared with decoded scores: it enters by its own score against the list's minimum, which is kept to fp16's
    rounding, but of entries in the lowest step the latest leaves first, whichever was really least. Where a list
    changes, its scores are quantized again between its new bounds, which moves each by at most half a step more per
    call: few calls with many keys lose less than many calls with few. A list that no new key enters keeps its codes.

    Args:
        spec: of the index. Lists keep their length only under a spec that fixes it: after the first insert, search and
            insert with `spec.fixed(built_len)`, where built_len is the prefix_len of the build.
        arrays: of one layer, as built or as an earlier call returned them. Not written.
        new_keys: [num_new, num_kv_heads, head_dim] post-RoPE keys at positions first_position and on.
        first_position: tokens that the arrays cover, one more than the last position that the lists could hold.

    Returns:
        Arrays as in `arrays`, of a prefix of first_position + num_new tokens; those that change are new.

    Raises:
        ValueError: an array is missing or of another shape, or the keys do not fit.
    """
    lists = spec.tables(first_position).decode(arrays)
    check_keys(new_keys)
    centroids = arrays["centroids"]
    num_kv_heads, m, _, subspace_dim = centroids.shape
    if tuple(new_keys.shape[1:]) != (num_kv_heads, m * subspace_dim):
        raise ValueError(
            f"expected new keys [num_new, num_kv_heads={num_kv_heads}, head_dim={m * subspace_dim}], got "
            f"{tuple(new_keys.shape)}"
        )
    channels = _channel_order(m * subspace_dim, m, spec.layout, new_keys.device)
    grown = grown_lists(lists, centroids, new_keys, channels, first_position)
    built = spec.tables(first_position + len(new_keys)).encode(grown)
    if spec.codec == "compact":
        same = grown.positions[..., -1] < first_position
        for name in ("codes", "scale", "zero"):
            kept = same.view(*same.shape, *[1] * (built[name].dim() - same.dim()))
            built[name] = torch.where(kept, arrays[name], built[name])
    left = {name: array for name, array in arrays.items() if name != "counts"}
    return {**left, **built}


def _channel_order(head_dim: int, num_subspaces: int, layout: str, device: torch.device) -> Tensor | None:
    """Channels in the order of `subspace_channels` [head_dim] int64; None where that is their own order."""
    channels = subspace_channels(head_dim, num_subspaces, layout)
    return None if layout == "contiguous" else channels.flatten().to(device)
