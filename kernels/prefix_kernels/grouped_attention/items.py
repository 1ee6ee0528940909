"""Work of one grouped attention launch, cut into items on the host: no device is asked, and no Python runs in `run()`.

A *segment* is a list of slots and the rows that attend it: a group and its selection, or one request and its suffix.
An *item* is one tile of a segment's rows over one stretch of its list; every KV head runs every item. A *span* says
where a batch row finds the parts that the items of its segments wrote. A tile whose rows have no other part is
*direct*: its item writes the result itself, and the merge leaves those rows alone. So is a *joined* item, which attends
one request's suffix and then its list, where the request has nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

ITEM_FIELDS = 11
SPAN_FIELDS = 4
_WORTH = 0.95
"""Of the longest turn with fewer items, what it may be with more: each has a start and a part to merge."""
_WORTH_OF_TWO = 0.85
"""The same of lists of two chunks: those that are cut are not joined with their suffixes."""
_ITEM_ENTRIES = 256
"""What an item costs beside its entries, in entries: some 3 us (H200, heads of 128)."""
DIRECT = -1
"""In place of an item's first partial row, and of a span's number of parts."""


@dataclass(frozen=True)
class Segment:
    """A list of slots and the requests that attend it.

    Attributes:
        rows: batch rows, one query row each. Empty: nothing to do.
        length: entries of the list that may be attended, 0 allowed; the arena must have as many, for each head.
        list_begin: where the list begins in its arena of slots.
        head_stride: entries from one KV head's list to the next, in the arena of such lists; 0 where all heads read the
            same one, in the arena of these.
        list_id: row of the device's table of counts that bounds the list per KV head; -1 for exactly `length`.

    Raises:
        ValueError: a negative number.
    """

    rows: tuple[int, ...]
    length: int
    list_begin: int = 0
    head_stride: int = 0
    list_id: int = -1

    def __post_init__(self) -> None:
        numbers = (*self.rows, self.length, self.list_begin, self.head_stride, self.list_id + 1)
        if min(numbers) < 0:
            raise ValueError(f"expected rows, length, list_begin and head_stride of at least 0, got {self}")


_NO_SUFFIX = Segment((), 0)


@dataclass(frozen=True)
class Joined(Segment):
    """A list of one request, in one part, and the suffix that its item attends before it; made by `join`."""

    suffix: Segment = _NO_SUFFIX


def check_rows(rows: Sequence[int], max_batch: int) -> None:
    """Raise ValueError unless rows of a pass are of the batch, each once."""
    if len(set(rows)) < len(rows) or max(rows, default=-1) >= max_batch:
        raise ValueError(f"expected each batch row below {max_batch} once in a pass, got {sorted(rows)}")


class Items(NamedTuple):
    """What a launch reads.

    Attributes:
        rows: batch rows in the order of the segments.
        items: per item (first of `rows`, its requests, list_begin, head_stride, list_id, first entry, end, first
            partial row or DIRECT, and list_begin, length and list_id of the suffix that is joined to the list; length
            0: none is). KV head h writes its tile to the partial rows from `first + h * block_m` on.
        spans: per segment and request (batch row, partial row of KV head 0 and query head 0 of its group, partial rows
            from one part to the next, partial rows from one KV head to the next, number of parts or DIRECT).
    """

    rows: list[int]
    items: list[tuple[int, ...]]
    spans: list[tuple[int, int, int, int, int]]


def join(
    passes: Sequence[Sequence[Segment]],
    attended: Mapping[int, int],
    *,
    gqa: int,
    block_m: int,
    block_n: int,
    target: int,
    longest: int,
) -> list[list[Segment]]:
    """The segments of a launch's passes, with one `Joined` for a request's list and suffix where one item does both.

    These two are all that the request attends, the list is nobody else's and in one part, and all heads have the same
    suffix. It comes first: its slots are there before lists are that a selection writes.

    Args:
        passes: a row stands in at most one segment of each.
        attended: batch row -> segments with entries, of all launches.
        gqa, block_m, block_n, target: as in `cut`.
        longest: entries of a suffix that is joined, at most: what is fetched while a list is waited for. A longer one
            stays apart: programs that have no list attend it meanwhile.
    """
    left = [[s for s in of_pass if s.rows and s.length] for of_pass in passes]
    if len(left) < 2:
        return left
    chunks = [_chunks([s.length for s in of], _tiles(of, block_m // gqa), block_n, target) for of in left]
    own: dict[int, list[tuple[int, int]]] = {}
    for number, of_pass in enumerate(left):
        for place, segment in enumerate(of_pass):
            if len(segment.rows) == 1:
                own.setdefault(segment.rows[0], []).append((number, place))
    gone: set[tuple[int, int]] = set()
    for row, both in own.items():
        if len(both) == attended[row] == 2:
            at, to = sorted(both, key=lambda one: (left[one[0]][one[1]].head_stride, left[one[0]][one[1]].length))
            suffix, listed = left[at[0]][at[1]], left[to[0]][to[1]]
            if suffix.length <= longest and suffix.head_stride == 0 and listed.length <= chunks[to[0]][to[1]]:
                gone.add(at)
                left[to[0]][to[1]] = Joined(**vars(listed), suffix=suffix)
    return [
        [one for place, one in enumerate(of_pass) if (number, place) not in gone] for number, of_pass in enumerate(left)
    ]


def cut(
    segments: Sequence[Segment],
    *,
    gqa: int,
    num_kv_heads: int,
    block_m: int,
    block_n: int,
    target: int,
    first_partial: int = 0,
    first_row: int = 0,
    alone: Collection[int] = (),
) -> Items:
    """Items of about `target` in number, all of nearly the same length.

    The shortest chunk (a multiple of block_n) is taken that needs no more than `target` items: the last wave of thread
    blocks is full. Where more than half as many tiles are there to begin with, as many more are allowed if that
    shortens the longest turn: one long list among many short ones must not be one item. So are lists of two chunks:
    those that are more than full waves are cut so that they fill one wave. Their items come last.

    Args:
        segments: in any order. Those without rows or entries give no item, a `Joined` one gives one.
        gqa: query heads per KV head.
        num_kv_heads: KV heads.
        block_m: rows of a tile, a power of 2 of at least `gqa`.
        block_n: entries of one step inside a stretch.
        target: items that fill the GPU once, at least 1.
        first_partial: where the partial rows begin.
        first_row: where its `rows` will stand in the launch's.
        alone: batch rows that no other pass attends.

    Raises:
        ValueError: not even one request's query heads fit a tile.
    """
    if block_m < gqa:
        raise ValueError(f"expected block_m of at least gqa={gqa} rows, got {block_m}; raise block_m")
    per_tile = block_m // gqa
    busy = [s for s in segments if s.rows and s.length]
    tiles = _tiles(busy, per_tile)
    # By lists alone: a joined suffix is never cut, however short the stretches.
    chunks = _chunks([s.length for s in busy], tiles, block_n, target)
    rows: list[int] = []
    items: list[tuple[int, ...]] = []
    spans: list[tuple[int, int, int, int, int]] = []
    partial = first_partial
    for segment, num_tiles, chunk in sorted(zip(busy, tiles, chunks, strict=True), key=lambda one: -one[2]):
        suffix = segment.suffix if isinstance(segment, Joined) else _NO_SUFFIX
        parts = 1 if suffix.length else -(-segment.length // chunk)
        before = (suffix.list_begin, suffix.length, suffix.list_id)
        for tile in range(num_tiles):
            members = segment.rows[tile * per_tile : (tile + 1) * per_tile]
            which = (segment.list_begin, segment.head_stride, segment.list_id)
            if suffix.length or (parts == 1 and all(row in alone for row in members)):
                items.append((first_row + len(rows), len(members), *which, 0, segment.length, DIRECT, *before))
                spans += [(row, 0, 0, 0, DIRECT) for row in members]
                rows += members
                continue
            stride = num_kv_heads * block_m
            for part in range(parts):
                begin = part * chunk
                stretch = (begin, min(begin + chunk, segment.length), partial + part * stride)
                items.append((first_row + len(rows), len(members), *which, *stretch, *before))
            spans += [(row, partial + i * gqa, stride, block_m, parts) for i, row in enumerate(members)]
            rows += members
            partial += parts * stride
    return Items(rows, items, spans)


def _tiles(segments: Sequence[Segment], per_tile: int) -> list[int]:
    return [-(-len(s.rows) // per_tile) for s in segments]


def _chunks(lengths: Sequence[int], tiles: Sequence[int], block_n: int, target: int) -> list[int]:
    """Entries of a stretch of each list; see `cut`."""
    plain, count = _least_chunk(lengths, tiles, block_n, target), sum(tiles)
    if 2 * count <= target:
        return [plain] * len(lengths)
    finer = _least_chunk(lengths, tiles, block_n, target + count)
    times = [_longest_turn(lengths, tiles, chunk, target) for chunk in (plain, finer)]
    best, time = (finer, times[1]) if times[1] < _WORTH * times[0] else (plain, times[0])
    return _two_chunks(lengths, tiles, block_n, target, time + _ITEM_ENTRIES) or [best] * len(lengths)


def _two_chunks(
    lengths: Sequence[int], tiles: Sequence[int], block_n: int, target: int, time: float
) -> list[int] | None:
    """The same where the longest lists fill waves, and the others one more; None unless that is worth it.

    Args:
        time: entries of the busiest program with one chunk for all.
    """
    count = sum(tiles)
    waves = max(1, count // target)
    most = waves * target if count > target else target // 2
    order = sorted(range(len(lengths)), key=lambda one: -lengths[one])
    fitting = sum(1 for filled in accumulate(tiles[one] for one in order) if filled <= most)

    def cut_into(some: Sequence[int], items: int) -> tuple[int, int]:
        """Least chunk of these lists, and how many items they are then."""
        of_lengths, of_tiles = [lengths[one] for one in some], [tiles[one] for one in some]
        chunk = _least_chunk(of_lengths, of_tiles, block_n, items)
        return chunk, sum(n * -(-length // chunk) for length, n in zip(of_lengths, of_tiles, strict=True))

    if not 0 < fitting < len(order):
        return None
    long, used = cut_into(order[:fitting], waves * target)
    spare = min(target, target + count - used)
    short, needed = cut_into(order[fitting:], spare)
    turn = waves * long + short + (waves + 1) * _ITEM_ENTRIES
    if needed > spare or short >= long or turn >= _WORTH_OF_TWO * time:
        return None
    chunks = dict.fromkeys(order[:fitting], long) | dict.fromkeys(order[fitting:], short)
    return [chunks[one] for one in range(len(lengths))]


def _longest_turn(lengths: Sequence[int], tiles: Sequence[int], chunk: int, programs: int) -> float:
    """Entries that the busiest of so many programs attends, at least."""
    whole = sum(n * (length // chunk) for length, n in zip(lengths, tiles, strict=True))
    rest = max((length % chunk for length in lengths), default=0)
    even = sum(n * length for length, n in zip(lengths, tiles, strict=True)) / programs
    return max(chunk * -(-whole // programs), rest, even)


def _least_chunk(lengths: Sequence[int], tiles: Sequence[int], block_n: int, target: int) -> int:
    """The least multiple of block_n for which all segments together need at most `target` items, if there is one."""
    low, high = 1, max((-(-length // block_n) for length in lengths), default=1)
    while low < high:
        middle = (low + high) // 2
        needed = sum(n * -(-length // (middle * block_n)) for length, n in zip(lengths, tiles, strict=True))
        low, high = (low, middle) if needed <= target else (middle + 1, high)
    return low * block_n
