"""Arrays of a layer cut per KV head, as the store keeps them, and joined again, as selectors read them.

Most arrays have num_kv_heads as their leading dimension. Where heads differ in size (AB-Sparse's block sizes per
head) an array is *ragged*: the rows of all heads stand one after the other, without padding, and `row_indptr`
[num_kv_heads + 1] int32 holds where each head's rows begin (AB-Sparse, 3.4). A ragged array is known by its name:
the part after the last dot begins with `ragged_`. All ragged arrays with the same part before the last dot share
the `row_indptr` with that part. The pieces of a head carry no `row_indptr`: their lengths say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

RAGGED = "ragged_"
ROW_INDPTR = "row_indptr"


def is_ragged(name: str) -> bool:
    """Whether an array of this name holds rows of all heads one after the other."""
    return name.rpartition(".")[2].startswith(RAGGED)


def indptr_name(name: str) -> str:
    """Name of the `row_indptr` of a ragged array."""
    path, dot, _ = name.rpartition(".")
    return f"{path}{dot}{ROW_INDPTR}"


def split_heads(arrays: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """One mapping of views per KV head; `row_indptr` arrays are left out.

    Args:
        arrays: what `IndexBuilder.build_layer` returned. Reads the values of `row_indptr`.

    Raises:
        ValueError: the arrays do not agree on the number of KV heads, or a ragged array lacks its `row_indptr`.
    """
    bounds = {name: a.tolist() for name, a in arrays.items() if name.rpartition(".")[2] == ROW_INDPTR}
    counts = {len(b) - 1 for b in bounds.values()}
    counts |= {a.shape[0] for name, a in arrays.items() if not is_ragged(name) and name not in bounds}
    missing = [name for name in arrays if is_ragged(name) and indptr_name(name) not in bounds]
    if len(counts) != 1 or missing:
        raise ValueError(
            f"expected arrays of one number of KV heads, and row_indptr with the ragged ones, got {sorted(counts)} "
            f"heads and {missing} without row_indptr; pass all arrays of one layer"
        )
    heads: list[dict[str, Tensor]] = [{} for _ in range(counts.pop())]
    for name, array in arrays.items():
        if name in bounds:
            continue
        rows = bounds[indptr_name(name)] if is_ragged(name) else None
        for head, pieces in enumerate(heads):
            pieces[name] = array[head] if rows is None else array[rows[head] : rows[head + 1]]
    return heads


def join_heads(heads: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The inverse of `split_heads`, for any of its heads in any order; new memory.

    Raises:
        ValueError: no head, heads with different arrays, or ragged arrays of a head with different lengths.
    """
    if not heads or any(pieces.keys() != heads[0].keys() for pieces in heads):
        raise ValueError(
            f"expected at least one KV head, all with the same arrays, got {[sorted(pieces) for pieces in heads]}"
        )
    joined: dict[str, Tensor] = {}
    for name, first in heads[0].items():
        pieces = [head[name] for head in heads]
        if not is_ragged(name):
            joined[name] = torch.stack(pieces)
            continue
        joined[name] = torch.cat(pieces)
        bounds = [0]
        for piece in pieces:
            bounds.append(bounds[-1] + piece.shape[0])
        indptr = torch.tensor(bounds, dtype=torch.int32, device=first.device)
        known = joined.setdefault(indptr_name(name), indptr)
        if not torch.equal(known, indptr):
            raise ValueError(
                f"expected {name} with {known.tolist()} rows up to each KV head, as the other ragged arrays, got "
                f"{bounds}"
            )
    return joined
