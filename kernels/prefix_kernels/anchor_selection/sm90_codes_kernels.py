"""Codes of 4 bits on their way from memory to Hopper's matrix instructions.

A thread copies to shared memory the very codes that it multiplies. It waits for its own copies, in their order, and for
no other thread: warps drift apart, so that one waits while another multiplies. (Loads to registers, some steps ahead,
take these, and are waited for together: ptxas gives them one scoreboard.)

`codes` is (packed codes, the first row, candidates of a list, begin and end of the stretch, the thread's place in the
ring, log2 of the candidates that share a row).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from prefix_kernels.pooled_scores.kernels import listed_token

STEPS_AHEAD = gl.constexpr(3)
"""Steps whose codes are on their way, each in a slot of a ring."""
_listed_token = gluon.jit(listed_token.fn)


def words_layout(block_n: int, num_warps: int) -> gl.DistributedLinearLayout:
    """Of [block_n, 4] words of a piece: as the matrix instructions want their left side, a word to a thread."""
    rows = [[row, 0] for row in _powers(16 * num_warps, block_n)]
    warps = [[row, 0] for row in _powers(16, 16 * num_warps)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0], *rows], lanes, warps, [], [block_n, 4])


def _powers(first: int, limit: int) -> list[int]:
    """`first` and its doubles below the limit."""
    return [first << shift for shift in range((max(limit // first, 1)).bit_length() - 1)]


@gluon.jit
def rows_at(codes, n, sizes: gl.constexpr):
    """Of the codes: of the candidates at places n."""
    ENTRY: gl.constexpr = sizes[8]
    _, first_row, listed_ptr, _, _, _, shift = codes
    if ENTRY > 0:
        n = _listed_token(listed_ptr, n, None, ENTRY)
    return first_row + (n >> shift)


@gluon.jit
def step_of(codes, start, sizes: gl.constexpr):
    """Of a list, the entries of the step from `start` on: asked for a turn before their codes."""
    ENTRY: gl.constexpr = sizes[8]
    _, _, listed_ptr, _, end, _, _ = codes
    entries = 0
    if ENTRY > 0:
        entries = gl.load(listed_ptr + gl.minimum(_entries_of(start, sizes), (end - 1) // ENTRY))
    return entries


@gluon.jit
def _by_entries(sizes: gl.constexpr):
    """int32 [BLOCK_N / ENTRY, ENTRY]: the numbers of a step's candidates."""
    BLOCK_N: gl.constexpr = sizes[2]
    LAYOUT: gl.constexpr = sizes[6]
    ENTRY: gl.constexpr = sizes[8]
    return gl.reshape(gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT)), [BLOCK_N // ENTRY, ENTRY])


@gluon.jit
def _entries_of(start, sizes: gl.constexpr):
    """The numbers of the entries of the step from `start` on, a multiple of ENTRY."""
    BLOCK_N: gl.constexpr = sizes[2]
    ENTRY: gl.constexpr = sizes[8]
    like: gl.constexpr = _by_entries(sizes).type.layout
    return start // ENTRY + gl.arange(0, BLOCK_N // ENTRY, gl.SliceLayout(1, like))


@gluon.jit
def _rows_of(entries, codes, start, sizes: gl.constexpr):
    """[BLOCK_N]: of the codes, those of a step's entries; past the end the last candidate's again."""
    BLOCK_N: gl.constexpr = sizes[2]
    LAYOUT: gl.constexpr = sizes[6]
    ENTRY: gl.constexpr = sizes[8]
    _, first_row, _, _, end, _, _ = codes
    like: gl.constexpr = _by_entries(sizes).type.layout
    last = end - 1
    limit = gl.where(_entries_of(start, sizes) < last // ENTRY, ENTRY - 1, last % ENTRY)
    place = gl.minimum(gl.arange(0, ENTRY, gl.SliceLayout(0, like))[None, :], limit[:, None])
    tokens = gl.reshape(entries[:, None] * ENTRY + place, [BLOCK_N])
    return first_row + gl.convert_layout(tokens, gl.SliceLayout(1, LAYOUT), assert_trivial=True)


@gluon.constexpr_function
def _copying(number: int, pieces: int, warps: int, follow: bool) -> tuple[str, str]:
    """What copies so many rows of codes, a thread's of a step, to its places in a slot, and its constraints. follow:
    the rows follow each other, so that one address does for all."""
    text, row_bytes, each = [], 16 * pieces, 8 if pieces % 2 == 0 else 4
    for row in range(number):
        source, behind = (0, (row % 2 * 8 + row // 2 * 16 * warps) * row_bytes) if follow else (row, 0)
        for part in range(0, 4 * pieces, each):
            into = f"[${2 * number}+{row * 8 * warps * row_bytes + part}]"
            text.append(f"cp.async.ca.shared.global {into}, [${number + source}+{behind + part}], {each};")
        text.append(f"mov.b32 ${row}, 0;")
    return " ".join(text), ",".join(["=&r"] * number + ["l"] * number + ["r"] * number)


@gluon.constexpr_function
def _taking(number: int, pieces: int, warps: int) -> tuple[str, str]:
    """What waits until a thread's rows of a step are there and loads them, and its constraints."""
    text, vector = [f"cp.async.wait_group {STEPS_AHEAD.value - 1};"], {1: "", 2: ".v2", 4: ".v4"}.get(pieces)
    for row in range(number):
        words = [f"${piece * number + row}" for piece in range(pieces)]
        address, place = f"${pieces * number}", row * 8 * warps * 16 * pieces
        if vector is None:
            text += [f"ld.shared.b32 {words[piece]}, [{address}+{place + 4 * piece}];" for piece in range(pieces)]
        else:
            into = f"{{{', '.join(words)}}}" if vector else words[0]
            text.append(f"ld.shared{vector}.b32 {into}, [{address}+{place}];")
    return " ".join(text), ",".join(["=&r"] * (pieces * number) + ["r"] * number)


@gluon.constexpr_function
def _ring(nbytes: int, piece_bytes: int) -> str:
    """The address of a thread's first word in a program's ring of steps."""
    return (
        f"{{ .shared .align 128 .b8 code_ring[{nbytes}]; .reg .b32 ring; mov.u32 ring, code_ring; mov.u32 $0, %tid.x; "
        f"mad.lo.s32 $0, $0, {piece_bytes}, ring; }}"
    )


@gluon.jit
def ring_address(BLOCK_N: gl.constexpr, PIECES: gl.constexpr):
    """Where a thread's codes are, of steps of BLOCK_N candidates at most: STEPS_AHEAD of them."""
    TEXT: gl.constexpr = _ring(BLOCK_N * PIECES * 16 * STEPS_AHEAD, 4 * PIECES)
    return gl.inline_asm_elementwise(TEXT, "=&r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def next_slot(slot, sizes: gl.constexpr):
    """The slot of the ring, in bytes, that the step after it has."""
    nbytes: gl.constexpr = sizes[2] * sizes[3] * 16
    return gl.where(slot == (STEPS_AHEAD - 1) * nbytes, 0, slot + nbytes)


@gluon.jit
def ask_rows(first_ptr, rows, into, FOLLOW: gl.constexpr, sizes: gl.constexpr):
    """Ask for codes of rows [BLOCK_N] behind `first_ptr`, into a slot. FOLLOW: the rows follow each other."""
    PIECES: gl.constexpr = sizes[3]
    LAYOUT: gl.constexpr = sizes[6]
    BLOCK_N: gl.constexpr = sizes[2]
    NUMBER: gl.constexpr = BLOCK_N // (8 * sizes[4])
    TEXT: gl.constexpr = _copying(NUMBER, PIECES, sizes[4], FOLLOW)[0]
    TOLD: gl.constexpr = _copying(NUMBER, PIECES, sizes[4], FOLLOW)[1]
    word = gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))[None, :] * PIECES
    source = (first_ptr + rows.to(gl.int64)[:, None] * (PIECES * 4) + word).to(gl.int64)
    slot = gl.full([BLOCK_N, 4], 0, gl.int32, LAYOUT) + into
    gl.inline_asm_elementwise(TEXT, TOLD, [source, slot], dtype=gl.int32, is_pure=False, pack=NUMBER)


@gluon.jit
def asked():
    """Close a step: the copies since the last call, or none, are one group for `take` to wait for."""
    gl.inline_asm_elementwise("cp.async.commit_group; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def ask(codes, entries, start, limit, slot, sizes: gl.constexpr):
    """Ask for codes of the step from `start` on, whose `step_of` is there, if that is before the limit: `take` has them
    once it was called for those before. Past the end the last candidate's are read again.

    Whatever is asked for must be taken before its slot is another's.
    """
    BLOCK_N: gl.constexpr = sizes[2]
    PIECES: gl.constexpr = sizes[3]
    NUM_WARPS: gl.constexpr = sizes[4]
    LAYOUT: gl.constexpr = sizes[6]
    ENTRY: gl.constexpr = sizes[8]
    packed_ptr, first_row, _, _, end, at, shift = codes
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    if start < limit:
        if ENTRY > 0:
            ask_rows(packed_ptr, _rows_of(entries, codes, start, sizes), at + slot, False, sizes)
        elif (shift == 0) & (start + BLOCK_N <= end):
            first = packed_ptr + (first_row + start).to(gl.int64) * (PIECES * 4)
            ask_rows(first, n & (16 * NUM_WARPS - 9), at + slot, True, sizes)  # the thread's first
        else:
            rows = gl.minimum(first_row + (start + n >> shift), first_row + (end - 1 >> shift))
            ask_rows(packed_ptr, rows, at + slot, False, sizes)
    asked()


@gluon.jit
def ask_first(codes, limit, sizes: gl.constexpr):
    """Ask for a stretch's first steps, as many as the ring has slots. Returns `step_of` of the two steps after them."""
    BLOCK_N: gl.constexpr = sizes[2]
    _, _, _, begin, _, _, _ = codes
    slot = gl.to_tensor(0)
    later = begin + STEPS_AHEAD * BLOCK_N
    for start in range(begin, later, BLOCK_N):
        ask(codes, step_of(codes, start, sizes), start, limit, slot, sizes)
        slot = next_slot(slot, sizes)
    return step_of(codes, later, sizes), step_of(codes, later + BLOCK_N, sizes)


@gluon.jit
def take(at, slot, sizes: gl.constexpr):
    """Codes of the step in a slot, the first of those that were asked for and not taken: of every piece 4 words of 32
    bits a row."""
    BLOCK_N: gl.constexpr = sizes[2]
    PIECES: gl.constexpr = sizes[3]
    LAYOUT: gl.constexpr = sizes[6]
    NUMBER: gl.constexpr = BLOCK_N // (8 * sizes[4])
    TEXT: gl.constexpr = _taking(NUMBER, PIECES, sizes[4])[0]
    TOLD: gl.constexpr = _taking(NUMBER, PIECES, sizes[4])[1]
    place = gl.full([BLOCK_N, 4], 0, gl.int32, LAYOUT) + (at + slot)
    words = gl.inline_asm_elementwise(TEXT, TOLD, [place], dtype=(gl.int32,) * PIECES, is_pure=False, pack=NUMBER)
    w0 = words[0]
    w1, w2, w3 = w0, w0, w0
    if PIECES > 1:
        w1 = words[1]
    if PIECES > 2:
        w2 = words[2]
    if PIECES > 3:
        w3 = words[3]
    return w0, w1, w2, w3
