"""How CSAttention's tables are kept: the paper's layout, the compact codec, and the bytes of both.

Paper (B.1): int32 position and fp16 score, 6 bytes an entry. Compact: see `prefix_kernels.csa_scores.compact`;
of N positions a list of L = alpha * N entries takes L * (1 + bits / 8) + N / 128 bytes with offsets and L * bits / 8
+ N / 8 with a bitmap, whichever is less (the bitmap from alpha = 0.117 on). With either, 4 bytes a list keep the
baseline that streaming insert needs; searches do not read it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from prefix_kernels.csa_scores import (
    BLOCK_POSITIONS,
    CompactLists,
    bitmap_is_smaller,
    check_entries,
    check_lists,
    decode_lists,
    encode_lists,
    list_bytes,
)
from sglang_ext.methods.base import require_arrays
from sglang_ext.methods.contents import LARGEST, ContentError, Form
from sglang_ext.methods.csattention.lists import CentroidLists

CODECS = ("compact", "paper")
SCORE_BITS = (4, 8)
PAPER_ENTRY_BYTES = 6
BASELINE_BYTES = 4


def encode_tables(lists: CentroidLists, prefix_len: int, codec: str, score_bits: int) -> dict[str, Tensor]:
    """The arrays that hold the lists of a layer.

    Args:
        lists: of list_len entries.
        prefix_len: tokens of the prefix.
        codec: "paper" or "compact".
        score_bits: of the compact codec, 4 or 8.

    Returns:
        paper: `positions`, `scores` (fp16) and `baseline`. compact: the fields of `CompactLists` by name, `counts` only
        with offsets, and `baseline`.
    """
    if codec == "paper":
        return {"positions": lists.positions, "scores": lists.scores.half(), "baseline": lists.baseline}
    compact = encode_lists(lists.positions, lists.scores, prefix_len, score_bits)
    parts = {name: part for name, part in compact._asdict().items() if part is not None}
    return {**parts, "baseline": lists.baseline}


def table_forms(lead: tuple[int, int], list_len: int, prefix_len: int, codec: str, score_bits: int) -> dict[str, Form]:
    """What the arrays of `encode_tables` must be, of one KV head; `lead` is (num_subspaces, num_centroids)."""
    baseline = {"baseline": Form("float32", lead, -LARGEST, LARGEST)}
    if codec == "paper":
        listed = (*lead, list_len)
        positions, scores = Form("int32", listed, 0, prefix_len - 1), Form("float16", listed, -LARGEST, LARGEST)
        return {"positions": positions, "scores": scores, **baseline}
    forms = {
        "places": Form("uint8", (*lead, list_len)),
        "counts": Form("int16", (*lead, -(-prefix_len // BLOCK_POSITIONS)), 0, BLOCK_POSITIONS),
        "codes": Form("uint8", (*lead, -(-list_len * score_bits // 8))),
        "scale": Form("float16", lead, 0.0, LARGEST),
        "zero": Form("float16", lead, -LARGEST, LARGEST),
        **baseline,
    }
    if bitmap_is_smaller(list_len, prefix_len):
        del forms["counts"]
        forms["places"] = Form("uint8", (*lead, -(-prefix_len // 8)))
    return forms


def check_tables(arrays: Mapping[str, Tensor], list_len: int, prefix_len: int, codec: str) -> None:
    """Raise ContentError unless each list names `list_len` positions of the prefix, ascending; forms are right."""
    if codec == "compact":
        try:
            check_entries(compact_lists(arrays, "csattention"), list_len, prefix_len)
        except ValueError as error:
            raise ContentError("lists", f"{list_len} ascending positions in each", error) from None
    elif not bool((arrays["positions"].diff(dim=-1) > 0).all()):
        raise ContentError("positions", "ascending positions", "others")


def decode_tables(
    arrays: Mapping[str, Tensor], list_len: int, prefix_len: int, codec: str, score_bits: int, method: str
) -> CentroidLists:
    """The lists that arrays of `encode_tables` hold, with the scores as they are stored.

    Args:
        arrays: of one layer, `centroids` among them.
        list_len: entries of a list.
        prefix_len, codec, score_bits: as in `encode_tables`.
        method: to name in errors.

    Raises:
        ValueError: an array is missing or of another shape.
    """
    centroids, baseline = require_arrays(arrays, ("centroids", "baseline"), method)
    lead = tuple(centroids.shape[:3])
    if codec == "paper":
        positions, scores = require_arrays(arrays, ("positions", "scores"), method)
        if tuple(positions.shape) != (*lead, list_len):
            raise ValueError(
                f"expected positions {(*lead, list_len)} for prefix_len={prefix_len}, got {tuple(positions.shape)}; is "
                "the index of another prefix or spec? After a streaming insert use CSAttentionSpec.fixed"
            )
        return CentroidLists(positions, scores.float(), baseline)
    lists = compact_lists(arrays, method)
    check_lists(lists, lead, list_len, prefix_len, score_bits)
    positions, scores = decode_lists(lists, list_len, score_bits)
    return CentroidLists(positions.int(), scores, baseline)


def compact_lists(arrays: Mapping[str, Tensor], method: str) -> CompactLists:
    """The lists of a compact index; shapes are checked where they are read, by `csa_scores_compact`.

    Raises:
        ValueError: an array is missing.
    """
    places, codes, scale, zero = require_arrays(arrays, ("places", "codes", "scale", "zero"), method)
    return CompactLists(places, arrays.get("counts"), codes, scale, zero)


def table_bytes(
    num_subspaces: int,
    num_centroids: int,
    list_len: int,
    prefix_len: int,
    head_dim: int,
    codec: str,
    score_bits: int,
) -> int:
    """Bytes of one KV head's lists, baselines and centroids.

    Args:
        num_subspaces, num_centroids: m and C.
        list_len: L, entries of a list.
        prefix_len: tokens of the prefix.
        head_dim: channels of a key.
        codec, score_bits: as in `encode_tables`.
    """
    one = list_len * PAPER_ENTRY_BYTES if codec == "paper" else list_bytes(list_len, prefix_len, score_bits)
    return num_subspaces * num_centroids * (one + BASELINE_BYTES) + num_centroids * head_dim * 2


def entries_bytes_per_token(list_ratio: float, codec: str, score_bits: int) -> float:
    """Bytes per token of one list, the part that is linear in the prefix's length."""
    if codec == "paper":
        return PAPER_ENTRY_BYTES * list_ratio
    return min(list_ratio + 2 / BLOCK_POSITIONS, 1 / 8) + list_ratio * score_bits / 8


def paper_table_ratio(
    num_subspaces: int, num_centroids: int, list_ratio: float, head_dim: int, element_bytes: int = 2
) -> float:
    """Bytes of the paper's lists over those of the KV: 6 m C alpha / (2 d B). Source: CSAttention, Eq. B.1.

    Args:
        num_subspaces, num_centroids, list_ratio: m, C and alpha.
        head_dim: d.
        element_bytes: B, bytes of one element of K or V: 2 (fp16, bf16) or 4 (fp32).
    """
    return PAPER_ENTRY_BYTES * num_subspaces * num_centroids * list_ratio / (2 * head_dim * element_bytes)
