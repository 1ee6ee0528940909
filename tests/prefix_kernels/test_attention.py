"""Prefix and suffix attention and their merge against the fp64 oracle."""

import itertools

import pytest
import torch

from prefix_kernels import AttnState, PagedKV, Selection
from prefix_kernels.ops import merge_state, prefix_attention, suffix_attention
from prefix_kernels.suffix_attention import reference as suffix_reference
from prefix_kernels.testing import ERROR_BUDGET, dense_attention, paged_kv

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def inputs(prefix_len, dtype=torch.float32, device="cpu", rows=3, kv_heads=2, gqa=4, dim=16, v_dim=16, seed=0):
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, kv_heads * gqa, dim, generator=gen).to(device, dtype)
    keys = torch.randn(prefix_len, kv_heads, dim, generator=gen).to(device, dtype)
    values = torch.randn(prefix_len, kv_heads, v_dim, generator=gen).to(device, dtype)
    return q, keys, values


def assert_state(state, oracle, dtype=torch.float32):
    assert state.out.dtype == state.lse.dtype == torch.float32
    torch.testing.assert_close(
        state.out.to(dtype).double(), oracle.out, atol=ERROR_BUDGET[dtype], rtol=ERROR_BUDGET[dtype]
    )
    torch.testing.assert_close(state.lse, oracle.lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prefix_len", [1, 17, 4097])
def test_all_positions_equal_dense(prefix_len, dtype, device):
    q, keys, values = inputs(prefix_len, dtype, device, v_dim=24)
    kv, slots = paged_kv(keys, values)
    state = prefix_attention(q, kv, slots, Selection.all(prefix_len, 2, device), 0.25)
    assert_state(state, dense_attention(q, keys, values, 0.25), dtype)


def test_heads_read_their_own_positions_and_counts():
    q, keys, values = inputs(50)
    kv, slots = paged_kv(keys, values)
    own = [[3, 7, 49], [0]]
    positions = torch.tensor([own[0], [0, -1, -1]], dtype=torch.int32)
    selection = Selection(positions, torch.tensor([3, 1], dtype=torch.int32))
    # Position 0 stands behind the padding: unread for head 0, it may hold NaN there.
    kv.k_cache[slots[0], 0], kv.v_cache[slots[0], 0] = torch.nan, torch.nan
    state = prefix_attention(q, kv, slots, selection, 0.3)
    for head, chosen in enumerate(own):
        part = slice(head * 4, head * 4 + 4)
        oracle = dense_attention(q[:, part], keys[chosen, head : head + 1], values[chosen, head : head + 1], 0.3)
        assert_state(AttnState(state.out[:, part], state.lse[:, part]), oracle)


def test_chunked_selection_equals_one_chunk(monkeypatch):
    q, keys, values = inputs(333)
    kv, slots = paged_kv(keys, values)
    counts = torch.tensor([333, 100], dtype=torch.int32)
    positions = Selection.all(333, 2).positions.clone()
    positions[1, 100:] = -1
    selection = Selection(positions, counts)
    whole = prefix_attention(q, kv, slots, selection, 0.25)
    monkeypatch.setattr("prefix_kernels.prefix_attention.reference.ELEMENTS_PER_CHUNK", 50 * 2 * 16)
    assert_state(prefix_attention(q, kv, slots, selection, 0.25), AttnState(whole.out.double(), whole.lse))


def test_empty_selection_is_the_neutral_state():
    q, keys, values = inputs(5)
    kv, slots = paged_kv(keys, values)
    none = Selection(torch.full((2, 3), -1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    for selection in (none, Selection.all(0, 2)):
        state = prefix_attention(q, kv, slots, selection, 0.25)
        assert torch.equal(state.out, torch.zeros_like(state.out))
        assert bool((state.lse == -torch.inf).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "lengths",
    [[0], [0, 0], [1, 0, 17], [257, 3, 256, 0, 255], [4097, 1, 2]],
    ids=lambda x: "-".join(map(str, x)),
)
def test_suffix_equals_dense(lengths, dtype, device):
    q, keys, values = inputs(max(sum(lengths), 1), dtype, device, rows=len(lengths), v_dim=24)
    kv, slots = paged_kv(keys, values)
    indptr = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    state = suffix_attention(q, kv, indptr, slots.int(), 0.25)
    assert not bool(state.out.isnan().any())
    for row, (start, end) in enumerate(itertools.pairwise(indptr.tolist())):
        oracle = dense_attention(q[row : row + 1], keys[start:end], values[start:end], 0.25)
        assert_state(AttnState(state.out[row : row + 1], state.lse[row : row + 1]), oracle, dtype)


def test_suffix_in_small_batches_of_pieces(monkeypatch):
    q, keys, values = inputs(900, rows=2)
    kv, slots = paged_kv(keys, values)
    indptr = torch.tensor([0, 30, 900])
    whole = suffix_attention(q, kv, indptr, slots, 0.25)
    monkeypatch.setattr(suffix_reference, "ELEMENTS_PER_CHUNK", 1)
    monkeypatch.setattr(suffix_reference, "MAX_CHUNK", 64)
    pieces = suffix_attention(q, kv, indptr, slots, 0.25)
    assert_state(pieces, AttnState(whole.out.double(), whole.lse))


def test_strided_pool_buffers():
    q, keys, values = inputs(40)
    kv, slots = paged_kv(keys, values)
    both = torch.stack([kv.k_cache, kv.v_cache], dim=1)
    strided = PagedKV(both[:, 0], both[:, 1])
    assert not strided.k_cache.is_contiguous()
    state = prefix_attention(q, strided, slots, Selection.all(40, 2), 0.25)
    assert_state(state, dense_attention(q, keys, values, 0.25))


@pytest.mark.parametrize("split", [0, 1, 20, 40])
def test_prefix_and_suffix_merge_to_dense(split):
    q, keys, values = inputs(40)
    kv, slots = paged_kv(keys, values)
    prefix = prefix_attention(q, kv, slots[:split], Selection.all(split, 2), 0.25)
    rest = slots[split:]
    indptr = torch.arange(4) * len(rest)
    suffix = suffix_attention(q, kv, indptr, rest.repeat(3), 0.25)
    assert_state(merge_state(prefix, suffix), dense_attention(q, keys, values, 0.25))


def test_merge_is_associative_and_ignores_empty_parts():
    gen = torch.Generator().manual_seed(1)
    states = [AttnState(torch.randn(4, 2, 8, generator=gen), 30 * torch.randn(4, 2, generator=gen)) for _ in range(3)]
    states[1].lse[0] = -torch.inf
    states[1].out[0] = torch.nan
    for state in states:
        state.lse[1, 0] = -torch.inf
    a, b, c = states
    left = merge_state(merge_state(a, b), c)
    right = merge_state(a, merge_state(b, c))
    flat = merge_state(a, b, c)
    for other in (right, flat, merge_state(c, b, a)):
        torch.testing.assert_close(left.out, other.out)
        torch.testing.assert_close(left.lse, other.lse)
    assert not bool(flat.out.isnan().any() | flat.lse.isnan().any())
    assert torch.equal(flat.out[1, 0], torch.zeros(8))
    assert flat.lse[1, 0] == -torch.inf
    torch.testing.assert_close(merge_state(a).out[0], a.out[0])


def test_errors():
    q, keys, values = inputs(10)
    kv, slots = paged_kv(keys, values)
    every = Selection.all(10, 2)
    with pytest.raises(ValueError, match="multiple of num_kv_heads=2"):
        prefix_attention(q[:, :3], kv, slots, every, 1.0)
    with pytest.raises(ValueError, match="slots"):
        prefix_attention(q, kv, slots[None], every, 1.0)
    with pytest.raises(ValueError, match="another prefix"):
        prefix_attention(q, kv, slots[:5], every, 1.0)
    with pytest.raises(ValueError, match=r"batch \+ 1 = 4"):
        suffix_attention(q, kv, torch.tensor([0, 1]), slots, 1.0)
    for indptr in ([1, 2, 3, 4], [0, 3, 2, 4], [0, 1, 2, 11]):
        with pytest.raises(ValueError, match="ascending from 0"):
            suffix_attention(q, kv, torch.tensor(indptr), slots, 1.0)
    with pytest.raises(ValueError, match="kv_indices"):
        suffix_attention(q, kv, torch.tensor([0, 1, 2, 3]), slots.float(), 1.0)
    with pytest.raises(ValueError, match="at least one state"):
        merge_state()
    one = AttnState(torch.zeros(1, 2, 3), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="one shape"):
        merge_state(one, AttnState(torch.zeros(1, 2, 4), torch.zeros(1, 2)))


def test_an_implementation_is_never_substituted():
    q, keys, values = inputs(10)
    kv, slots = paged_kv(keys, values)
    message = "no implementation .fastest.; expected one of: reference, triton"
    with pytest.raises(ValueError, match=message):
        prefix_attention(q, kv, slots, Selection.all(10, 2), 1.0, implementation="fastest")
    with pytest.raises(ValueError, match=message):
        suffix_attention(q, kv, torch.arange(4), slots, 1.0, implementation="fastest")
    with pytest.raises(ValueError, match=message):
        merge_state(implementation="fastest")
