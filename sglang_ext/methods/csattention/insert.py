"""Streaming insert: the lists of CSAttention take in the keys of new tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sglang_ext.methods.base import check_keys
from sglang_ext.methods.csattention import CSAttentionSpec, channel_order
from sglang_ext.methods.csattention.codec import decode_tables, encode_tables
from sglang_ext.methods.csattention.lists import grown_lists


def insert_keys(
    spec: CSAttentionSpec, arrays: Mapping[str, Tensor], new_keys: Tensor, first_position: int
) -> dict[str, Tensor]:
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
    list_len = spec.list_len(first_position)
    lists = decode_tables(arrays, list_len, first_position, spec.codec, spec.score_bits, spec.method)
    check_keys(new_keys)
    centroids = arrays["centroids"]
    num_kv_heads, m, _, subspace_dim = centroids.shape
    if tuple(new_keys.shape[1:]) != (num_kv_heads, m * subspace_dim):
        raise ValueError(
            f"expected new keys [num_new, num_kv_heads={num_kv_heads}, head_dim={m * subspace_dim}], got "
            f"{tuple(new_keys.shape)}"
        )
    channels = channel_order(m * subspace_dim, m, spec.layout, new_keys.device)
    grown = grown_lists(lists, centroids, new_keys, channels, first_position)
    built = encode_tables(grown, first_position + new_keys.shape[0], spec.codec, spec.score_bits)
    if spec.codec == "compact":
        same = grown.positions[..., -1] < first_position
        for name in ("codes", "scale", "zero"):
            kept = same.view(*same.shape, *[1] * (built[name].dim() - same.dim()))
            built[name] = torch.where(kept, arrays[name], built[name])
    left = {name: array for name, array in arrays.items() if name != "counts"}
    return {**left, **built}
