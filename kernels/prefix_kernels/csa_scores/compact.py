"""The compact form of CSAttention's lists: exact positions in about a byte, scores in 4 or 8 bits.

Positions of a list ascend, and are cut into blocks of 256. A list stores how many entries each block has (two bytes a
block) and every entry's place in its block (one byte): L + 2 ceil(N / 256) bytes for L of N positions. Scores are codes
of `bits` bits between the list's own minimum and maximum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prefix_kernels.low_bit import pack_codes, unpack_codes

BLOCK_POSITIONS = 256
"""Positions whose offset fits one byte."""


class CompactLists(NamedTuple):
    """Lists of equally many entries; leading dims are any, for instance [num_kv_heads, num_subspaces, num_centroids].

    Attributes:
        places: [..., list_len] uint8, position mod 256 in ascending order of positions.
        counts: [..., ceil(prefix_len / 256)] int16, entries of each block of 256 positions.
        codes: [..., ceil(list_len * bits / 8)] uint8, scores in ascending order of positions, the first of a byte in
            its low bits; padding is 0.
        scale: [...] fp16, at least 0; score = code * scale + zero.
        zero: [...] fp16, score of code 0.
    """

    places: Tensor
    counts: Tensor
    codes: Tensor
    scale: Tensor
    zero: Tensor


def encode_lists(positions: Tensor, scores: Tensor, prefix_len: int, bits: int) -> CompactLists:
    """The compact form; positions are kept exactly, scores to within half a step of `scale`.

    Args:
        positions: [..., list_len] integer, ascending and unique within a list, in [0, prefix_len).
        scores: same shape, floating, within fp16's range.
        prefix_len: tokens of the prefix.
        bits: 4 or 8.

    Returns:
        New tensors.

    Raises:
        ValueError: shapes do not fit, or bits is another number.
    """
    if positions.shape != scores.shape or positions.dim() == 0 or not 1 <= positions.shape[-1] <= prefix_len:
        raise ValueError(
            f"expected positions and scores [..., list_len in 1..{prefix_len}] of one shape, got "
            f"{tuple(positions.shape)} and {tuple(scores.shape)}"
        )
    if bits not in (4, 8):
        raise ValueError(f"expected scores of 4 or 8 bits, got {bits}; choose one of them")
    return CompactLists(*encode_positions(positions, prefix_len), *_encode_scores(scores.float(), bits))


def encode_positions(positions: Tensor, prefix_len: int) -> tuple[Tensor, Tensor]:
    """`places` and `counts` of `CompactLists`, of positions as `encode_lists` takes them; new tensors."""
    positions, num_blocks = positions.int(), -(-prefix_len // BLOCK_POSITIONS)
    # Entries of each block: differences of the places at which the blocks begin, as positions ascend.
    ends = BLOCK_POSITIONS * torch.arange(1, num_blocks + 1, dtype=torch.int32, device=positions.device)
    upto = torch.searchsorted(positions, ends.expand(*positions.shape[:-1], -1).contiguous(), out_int32=True)
    counts = upto.diff(dim=-1, prepend=torch.zeros_like(upto[..., :1])).short()
    return (positions % BLOCK_POSITIONS).to(torch.uint8), counts


def decode_lists(lists: CompactLists, list_len: int, bits: int) -> tuple[Tensor, Tensor]:
    """Positions [..., list_len] int64, ascending, and scores of that shape in fp32, of what `encode_lists` made."""
    rank = torch.arange(1, list_len + 1, device=lists.places.device).expand(*lists.places.shape[:-1], -1).contiguous()
    block = torch.searchsorted(lists.counts.cumsum(dim=-1), rank)
    positions = block * BLOCK_POSITIONS + lists.places.long()
    codes = unpack_codes(lists.codes, bits)[..., :list_len].float()
    return positions, codes * lists.scale.float()[..., None] + lists.zero.float()[..., None]


def check_lists(lists: CompactLists, lead: tuple[int, ...], list_len: int, prefix_len: int, bits: int) -> None:
    """Raise ValueError unless the shapes are those of lists with leading dims `lead`, and scores of so many bits."""
    blocks, code_bytes = -(-prefix_len // BLOCK_POSITIONS), -(-list_len * bits // 8)
    expected = ((*lead, list_len), (*lead, blocks), (*lead, code_bytes), lead, lead)
    for name, part, wanted in zip(CompactLists._fields, lists, expected, strict=True):
        if part.shape != wanted:
            raise ValueError(
                f"expected {name} of compact lists as {wanted} for list_len={list_len}, prefix_len={prefix_len} and "
                f"{bits} bits, got {tuple(part.shape)}; is the table of another prefix or spec?"
            )


def check_entries(places: Tensor, counts: Tensor, list_len: int, prefix_len: int) -> None:
    """Raise ValueError unless each list holds `list_len` ascending positions of the prefix: decoding relies on it.

    `places` and `counts` of `CompactLists` are of the shapes that `check_lists` wants, counts in 0..256. Waits for the
    device.
    """
    ends = counts.cumsum(dim=-1)
    ascend = bool((ends[..., -1] == list_len).all())
    if ascend:
        # Entry i behind entry i - 1; behind those of another block it may have a lower place.
        rises = places.new_ones((*places.shape[:-1], list_len + 1), dtype=torch.bool)
        torch.gt(places[..., 1:], places[..., :-1], out=rises[..., 1:list_len])
        rises.scatter_(-1, ends[..., :-1], True)
        behind = (counts[..., -1] > 0) & (places[..., -1] > (prefix_len - 1) % BLOCK_POSITIONS)
        ascend = bool(rises.all()) and not bool(behind.any())
    if not ascend:
        raise ValueError(f"expected {list_len} ascending positions below {prefix_len} in each list, got others")


def _encode_scores(scores: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes against the fp16 scale and zero that are stored, which are rounded outwards to span all scores."""
    levels = (1 << bits) - 1
    low, high = scores.aminmax(dim=-1)
    zero = _round_half(low, -torch.inf)
    scale = _round_half((high - zero.float()) / levels, torch.inf)
    step = scale.float().masked_fill(scale == 0, 1.0)[..., None]
    codes = ((scores - zero.float()[..., None]) / step).round_().clamp_(0, levels).to(torch.uint8)
    spare = -codes.shape[-1] % (8 // bits)
    return pack_codes(torch.nn.functional.pad(codes, (0, spare)), bits), scale, zero


def _round_half(x: Tensor, towards: float) -> Tensor:
    """x in fp16, rounded up or down (`towards` is +inf or -inf)."""
    half = x.half()
    short = half.float() < x if towards > 0 else half.float() > x
    return torch.where(short, torch.nextafter(half, torch.full_like(half, towards)), half)
