"""CSA scores in Triton against the reference: both forms of lists, every group size, several groups and layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from prefix_kernels.csa_scores import CompactLists, csa_scores_compact, encode_lists
from prefix_kernels.csa_scores.runner import CsaConfig, CsaGroup, CsaScores, CsaShape, CsaTables, default_config

SMALL = CsaConfig(tile=256, step=16, num_warps=1)
TWO_BLOCKS = CsaConfig(tile=512, step=32, num_warps=4)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tables_of(
    shape: CsaShape, prefix_len: int, list_len: int, device: torch.device, seed: int = 0, clustered: bool = False
) -> CsaTables:
    """Random lists; clustered ones are runs of neighbours, so that blocks are full or empty."""
    order = randn(*shape.lead, prefix_len, seed=seed)
    if clustered:
        order = torch.arange(prefix_len) - torch.arange(shape.lead[1] * shape.lead[2]).view(*shape.lead[1:], 1) * 37
        order = -(order % prefix_len).float().expand(*shape.lead, prefix_len)
    positions = order.topk(list_len).indices.sort(dim=-1).values
    lists = encode_lists(positions, randn(*shape.lead, list_len, seed=seed + 1), prefix_len, shape.bits)
    centroids = randn(*shape.lead, shape.head_dim // shape.num_subspaces, seed=seed + 2)
    centroids = torch.nn.functional.normalize(centroids, dim=-1).to(shape.centroid_dtype)
    weights = randn(*shape.lead[:2], seed=seed + 3).abs().to(device) if shape.weighted else None
    lists = CompactLists(*(None if part is None else part.to(device) for part in lists))  # type: ignore[arg-type]
    return CsaTables(centroids.to(device), lists, list_len, prefix_len, weights)


def channels(shape: CsaShape, device: torch.device, shuffled: bool = True) -> torch.Tensor:
    order = torch.randperm(shape.head_dim, generator=torch.Generator().manual_seed(9))
    order = order if shuffled else torch.arange(shape.head_dim)
    return order.view(shape.num_subspaces, -1).to(device)


def expected(q: torch.Tensor, tables: CsaTables, shape: CsaShape, dims: torch.Tensor) -> torch.Tensor:
    scores = csa_scores_compact(
        q, tables.centroids, tables.lists, tables.list_len, shape.bits, dims, tables.prefix_len, tables.subspace_weights
    )
    return scores.flatten(1, 2)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Products of fp16 scales are rounded once more than in the reference, relative to a term: a few ulp of the sum."""
    assert torch.equal(got == -torch.inf, wanted == -torch.inf)
    torch.testing.assert_close(got, wanted, atol=3e-5, rtol=1e-5)


def run(scores: CsaScores, q: torch.Tensor, layer: int = 0, spare: int = 3) -> list[torch.Tensor]:
    """In an output that holds NaN before; what is past its end must stay."""
    out = torch.full((scores.out_elements(layer) + spare,), torch.nan, device=q.device)
    scores.run(q, out, layer)
    assert bool(out[scores.out_elements(layer) :].isnan().all())
    return scores.views(out, layer)


def scores_of_one(
    shape: CsaShape, tables: CsaTables, dims: torch.Tensor, num_rows: int, config: CsaConfig, bitmap: bool | None = None
) -> CsaScores:
    scores = CsaScores(shape, dims, num_rows, tables.prefix_len, config, bitmap=bitmap)
    scores.plan([CsaGroup(tables, tuple(range(num_rows)))])
    return scores


def check_one(
    shape: CsaShape,
    prefix_len: int,
    list_len: int,
    device: torch.device,
    rows: int = 1,
    config: CsaConfig = SMALL,
    bitmap: bool | None = None,
    clustered: bool = False,
) -> None:
    tables = tables_of(shape, prefix_len, list_len, device, seed=prefix_len, clustered=clustered)
    assert bitmap is None or (tables.lists.counts is None) == bitmap
    dims, q = channels(shape, device), randn(rows, shape.num_qo_heads, shape.head_dim, seed=7).to(device)
    scores = scores_of_one(shape, tables, dims, rows, config, bitmap)
    close(run(scores, q)[0], expected(q, tables, shape, dims))


@pytest.mark.parametrize(("bits", "weighted"), [(4, False), (4, True), (8, False)])
@pytest.mark.parametrize("ratio", [0.02, 0.078, 0.3], ids="alpha{}".format)
@pytest.mark.parametrize("prefix_len", [1, 17, 255, 257, 1000])
def test_every_length_and_form(prefix_len: int, ratio: float, bits: int, weighted: bool, device: torch.device) -> None:
    shape, list_len = CsaShape(2, 2, 64, 4, 4, bits, weighted), max(1, int(ratio * prefix_len))
    check_one(shape, prefix_len, list_len, device, config=default_config(list_len / prefix_len))


@pytest.mark.parametrize("list_len", [9, 90], ids=["offsets", "bitmap"])
@pytest.mark.parametrize(
    ("rows", "gqa", "kv_heads", "dim", "m", "c"),
    [(1, 1, 3, 64, 4, 4), (9, 1, 1, 64, 4, 16), (2, 5, 1, 128, 8, 4), (1, 4, 1, 128, 16, 16), (1, 4, 2, 96, 6, 5)],
)
def test_every_shape(
    rows: int, gqa: int, kv_heads: int, dim: int, m: int, c: int, list_len: int, device: torch.device
) -> None:
    check_one(CsaShape(kv_heads * gqa, kv_heads, dim, m, c, 4), 400, list_len, device, rows)


@pytest.mark.parametrize("config", [SMALL, TWO_BLOCKS, default_config(0.02)], ids=str)
@pytest.mark.parametrize("list_len", [100, 300], ids=["offsets", "bitmap"])
def test_clustered_lists_of_every_tile(list_len: int, config: CsaConfig, device: torch.device) -> None:
    """Full blocks take several steps, empty ones none, and a block's bounds may coincide."""
    shape = CsaShape(2, 2, 64, 4, 4, 4)
    check_one(shape, 1100, list_len, device, config=config, bitmap=list_len == 300, clustered=True)


@pytest.mark.parametrize("list_len", [50, 200], ids=["offsets", "bitmap"])
def test_runs_have_the_same_bits(list_len: int, device: torch.device) -> None:
    """Whatever the tile and the step, too: lists are added in the order of subspaces."""
    shape = CsaShape(2, 1, 64, 8, 4, 4)
    tables, dims = tables_of(shape, 530, list_len, device), channels(shape, device)
    q, other = randn(1, 2, 64, seed=3).to(device), randn(1, 2, 64, seed=4).to(device)
    scores = scores_of_one(shape, tables, dims, 1, SMALL)
    first = run(scores, q)[0]
    assert torch.equal(run(scores_of_one(shape, tables, dims, 1, TWO_BLOCKS), q)[0], first)
    close(run(scores, other)[0], expected(other, tables, shape, dims))
    assert torch.equal(run(scores, q)[0], first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_queries_with_strides(dtype: torch.dtype, device: torch.device) -> None:
    shape = CsaShape(4, 2, 64, 4, 4, 4, centroid_dtype=torch.float32)
    tables, dims = tables_of(shape, 300, 12, device), channels(shape, device, shuffled=False)
    q = randn(3, 8, 70, seed=3).to(device, dtype)[:, ::2, :64]
    scores = scores_of_one(shape, tables, dims, 3, SMALL)
    close(run(scores, q)[0], expected(q, tables, shape, dims))


def test_groups_of_both_forms_and_layers(device: torch.device) -> None:
    """Two prefixes, one with bitmaps; requests that are in no group; another plan; a second layer."""
    shape = CsaShape(2, 1, 64, 4, 4, 4, weighted=True)
    short, long, third = (
        tables_of(shape, *sizes, device, seed=n) for n, sizes in enumerate([(200, 100), (520, 20), (256, 3)])
    )
    dims, q = channels(shape, device), randn(6, 2, 64, seed=3).to(device)
    scores = CsaScores(shape, dims, 4, 600, TWO_BLOCKS, max_groups=3, num_layers=2)
    plans = [
        [CsaGroup(short, (4, 1)), CsaGroup(long, (0, 5))],
        [CsaGroup(third, (2,)), CsaGroup(long, (3, 0)), CsaGroup(short, (5,))],
        [],
    ]
    for groups in plans:
        scores.plan(groups)
        got = run(scores, q)
        assert len(got) == len(groups)
        for part, group in zip(got, groups, strict=True):
            close(part, expected(q[list(group.rows)], group.tables, shape, dims))
    scores.plan(plans[1], layer=0)
    scores.plan(plans[0], layer=1)
    for layer, groups in ((0, plans[1]), (1, plans[0])):
        for part, group in zip(run(scores, q, layer), groups, strict=True):
            close(part, expected(q[list(group.rows)], group.tables, shape, dims))


def test_scores_of_weight_zero_are_listed(device: torch.device) -> None:
    """A listed position whose terms are all 0 has the score 0, not -inf."""
    shape = CsaShape(2, 1, 64, 4, 4, 4)
    for list_len in (10, 100):
        tables, dims = tables_of(shape, 300, list_len, device), channels(shape, device)
        got = run(scores_of_one(shape, tables, dims, 1, SMALL), torch.zeros(1, 2, 64, device=device))[0]
        assert bool(((got == 0) | (got == -torch.inf)).all())
        assert bool((got == 0).any())


def test_default_configurations() -> None:
    found = [default_config(ratio) for ratio in (1e-6, 0.02, 0.078, 0.117, 1.0)]
    assert [(one.tile, one.step, one.num_warps) for one in found] == [
        (2048, 32, 1),
        (2048, 64, 1),
        (2048, 128, 1),
        (1024, 128, 4),
        (1024, 128, 4),
    ]


def test_errors(device: torch.device) -> None:
    with pytest.raises(ValueError, match="expected num_qo_heads as a multiple of num_kv_heads, got 3 and 2"):
        CsaShape(3, 2, 64, 4, 4, 4)
    with pytest.raises(ValueError, match="expected head_dim as a multiple of num_subspaces, got 64 and 5"):
        CsaShape(4, 2, 64, 5, 4, 4)
    with pytest.raises(ValueError, match="expected 4 or 8 bits"):
        CsaShape(4, 2, 64, 4, 4, 3)
    for sizes in ({"tile": 128}, {"step": 24}, {"num_warps": 3}):
        with pytest.raises(ValueError, match=f"expected {next(iter(sizes))} as a power of 2"):
            dataclasses.replace(SMALL, **sizes)
    shape = CsaShape(4, 2, 64, 4, 4, 4)
    dims = channels(shape, device)
    with pytest.raises(ValueError, match="of at least 1, got 0, 600, 1 and 1"):
        CsaScores(shape, dims, 0, 600, SMALL)
    with pytest.raises(ValueError, match="expected integer subspace_dims"):
        CsaScores(shape, dims[:2], 2, 600, SMALL)
    scores = CsaScores(shape, dims, 2, 600, SMALL, bitmap=False)
    good = tables_of(shape, 600, 20, device)
    for groups in ([CsaGroup(good, (0,)), CsaGroup(good, (1,))], [CsaGroup(good, (0, 0))], [CsaGroup(good, (0, 1, 2))]):
        with pytest.raises(ValueError, match="expected at most 1 groups and 2 rows, each once"):
            scores.plan(groups)
    with pytest.raises(ValueError, match="expected a prefix of at most 600 tokens, got 601"):
        scores.plan([CsaGroup(tables_of(shape, 601, 20, device), (0,))])
    with pytest.raises(ValueError, match="expected lists with bitmap=False, got bitmap=True"):
        scores.plan([CsaGroup(tables_of(shape, 600, 200, device), (0,))])
    scores.plan([CsaGroup(good, (1,))])
    q, out = torch.zeros(2, 4, 64, device=device), torch.zeros(4 * 600, device=device)
    for bad in (q[:1], q[:, :2], q[..., :32], q.double()):
        with pytest.raises(ValueError, match="expected q"):
            scores.run(bad, out)
    with pytest.raises(ValueError, match="adjacent channels"):
        scores.run(torch.zeros(2, 64, 4, device=device).transpose(1, 2), out)
    for short in (out[:-1], out.half(), torch.zeros(8000, device=device)[::2]):
        with pytest.raises(ValueError, match="expected out contiguous in float32 with at least 2400"):
            scores.run(q, short)


def test_errors_of_tables(device: torch.device) -> None:
    shape = CsaShape(4, 2, 64, 4, 4, 4)
    good = tables_of(shape, 600, 20, device)
    lists = good.lists
    strided = torch.stack([lists.codes, lists.codes], dim=-1)[..., 0]
    weights = torch.ones(2, 4, device=device)
    for bad, message in [
        (CsaTables(good.centroids.float(), lists, 20, 600), "expected centroids .* another spec"),
        (CsaTables(good.centroids[:1], lists, 20, 600), "expected centroids"),
        (CsaTables(good.centroids, lists, 21, 600), "expected places of compact lists"),
        (CsaTables(good.centroids, lists, 20, 600, weights), "expected subspace_weights None"),
        (
            CsaTables(good.centroids, lists._replace(scale=lists.scale.float()), 20, 600),
            "expected scale of compact lists in .*float16, got .*float32",
        ),
        (CsaTables(good.centroids, lists._replace(codes=strided), 20, 600), "expected contiguous tables"),
    ]:
        with pytest.raises(ValueError, match=message):
            bad.check(shape)
    weighted = CsaShape(4, 2, 64, 4, 4, 4, weighted=True)
    for wrong in (None, weights.half(), weights[:1]):
        with pytest.raises(ValueError, match="expected subspace_weights"):
            CsaTables(good.centroids, lists, 20, 600, wrong).check(weighted)
