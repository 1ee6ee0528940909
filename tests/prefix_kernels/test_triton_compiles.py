"""Every Triton kernel compiles for sm_80, sm_90 and sm_100, without a GPU, in the shapes that it is launched in.

The launches are those of the operations themselves, kept by `recording()`; nothing spills to local memory.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs

from prefix_kernels import PagedKV, launching
from prefix_kernels.anchor_selection import AnchorConfig, AnchorSelection, Form, ScoredTokens, default_config
from prefix_kernels.anchor_selection.kernels import list_kernel
from prefix_kernels.csa_selection import CsaSelection, CsaShape
from prefix_kernels.csa_selection import default_config as default_csa
from prefix_kernels.csa_selection.kernels import score_kernel as score_lists
from prefix_kernels.grouped_attention import AttentionConfig, AttentionShape, Segment
from prefix_kernels.grouped_attention import default_config as default_attention
from prefix_kernels.grouped_attention.runner import GroupedAttention
from prefix_kernels.launching import Launch, launch, recording
from prefix_kernels.peer_lists import AskingSide, answer, copy_words
from prefix_kernels.pooled_scores import ScoreInputs, ScoreShape
from prefix_kernels.pooling import Pooling
from prefix_kernels.prefill_attention import Span
from prefix_kernels.prefill_attention.runner import PrefillAttention
from prefix_kernels.residents import ResidentGroup, Residents, ResidentShape, gather_listed
from prefix_kernels.slot_lists import common_slots, copy_slot_lists
from prefix_kernels.types import CandidateForm, SelectionGroup, new_lists, pack_lists
from prefix_kernels.union_selection import UnionSelection
from sglang_ext.decode.buffers import StepBuffers
from sglang_ext.decode.types import PrefixGroup
from tests.prefix_kernels.compiling import compiled
from tests.prefix_kernels.selecting import lists_of

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
HEADS, KV_HEADS, DIM = 32, 8, 128
CPU = torch.device("cpu")
_GLOBAL = r"(ld|st|red|atom|cp\.async\.c[ag]\.shared)\.global"


def q(rows: int, dtype: torch.dtype = torch.bfloat16, dim: int = DIM) -> torch.Tensor:
    return torch.zeros(rows, HEADS, dim, dtype=dtype)


def pool(dtype: torch.dtype = torch.bfloat16, dim: int = DIM) -> PagedKV:
    cache = torch.zeros(64, KV_HEADS, dim).to(dtype)
    return PagedKV(cache, cache)


def prefix(rows: int, dtype: torch.dtype = torch.bfloat16, kv: torch.dtype | None = None, dim: int = DIM) -> None:
    """A group, in the portable kernel."""
    queries, cache = q(rows, dtype, dim), pool(kv or dtype, dim)
    attend(queries, cache, default_attention(AttentionShape.of(queries, cache), rows), 1)


def grouped(
    config: AttentionConfig, dtype: torch.dtype = torch.bfloat16, dim: int = DIM, passes: int = 2, **how: bool
) -> None:
    """A group of a tile's rows and a suffix of each, in one launch where the kernel can."""
    attend(q(config.block_m // (HEADS // KV_HEADS), dtype, dim), pool(dtype, dim), config, passes, **how)


def latent(heads: int, rows: int) -> None:
    """Queries of so many heads over one latent key of 576 channels, 512 of which are the value."""
    keys = torch.zeros(64, 1, 576, dtype=torch.bfloat16)
    queries = torch.zeros(rows, heads, 576, dtype=torch.bfloat16)
    kv = PagedKV(keys, keys[..., :512])
    attend(queries, kv, default_attention(AttentionShape.of(queries, kv), rows, specialized=True), 2)


def attend(queries: torch.Tensor, kv: PagedKV, config: AttentionConfig, passes: int, **how: bool) -> None:
    rows, heads, _ = queries.shape
    attention = GroupedAttention(AttentionShape.of(queries, kv), rows, [config] * passes, CPU)
    own = [Segment((r,), 5, list_begin=40) for r in range(rows)]
    attention.plan([Segment(tuple(range(rows)), 40)], *([own] if passes > 1 else []))
    out, lse = queries.new_empty(rows, heads, kv.v_cache.shape[2]), torch.zeros(rows, heads)
    attention.run(queries, kv, torch.arange(64).int(), 0.1, out, lse, **how)


def select_tokens(
    shape: ScoreShape, config: AnchorConfig, queries: torch.Tensor, num_programs: int = 264, form: Form = Form.FUSED
) -> None:
    select = AnchorSelection(shape, len(queries), 1, 131072, 600, config, CPU, form=form, num_programs=num_programs)
    inputs = ScoreInputs(queries, 0.1, candidates=torch.zeros(64, dtype=torch.int32))
    select.run(inputs, torch.zeros(64), lists_of(select), slot_table=torch.arange(64).int())


def anchor(rows: int, config: AnchorConfig, *, form: Form = Form.FUSED, sum_every: int = 1, **sizes: int) -> None:
    """A selection on 96 channels in codes of 4 bits, unless `sizes` say otherwise."""
    shape = ScoreShape(HEADS, KV_HEADS, **{"channels": 96, **sizes}, listed_channels=True, sum_every=sum_every)
    select_tokens(shape, config, q(rows), form=form)


def as_served(rows: int) -> None:
    """The default index of heads of 128."""
    anchor(rows, hopper_selection(rows), sum_every=16, channels=64)


def tables(rows: int, *, form: Form = Form.FUSED, **sizes: Any) -> None:
    """A selection on CSAttention's lists, as many and as long as by default."""
    shape = CsaShape(HEADS, KV_HEADS, DIM, **{"num_subspaces": 16, "num_centroids": 16, **sizes})
    select = CsaSelection(shape, rows, 1, 131072, 600, default_csa(shape), CPU, form=form, num_programs=264)
    select.run(q(rows), 0.1, torch.zeros(64), lists_of(select), slot_table=torch.arange(64).int())


def blocks(rows: int, form: CandidateForm, bits: int = 4, *, dim: int = DIM, hopper: bool = False) -> None:
    """A selection by blocks, or of listed candidates."""
    listed = form is CandidateForm.LISTED
    kept, every = (64, 16) if listed else (dim, 1)
    shape = ScoreShape(HEADS, KV_HEADS, kept, bits, listed, sum_every=every, form=form, entry_tokens=16)
    select_tokens(shape, default_config(shape, rows, specialized=hopper), q(rows, dim=dim))


def latent_blocks(rows: int, form: CandidateForm = CandidateForm.TOKEN, *, hopper: bool = False) -> None:
    """A selection by blocks on 128 channels of the latent keys of 16 query heads; of tokens that share a block's row,
    as a first level has them.
    """
    shape = ScoreShape(16, 1, 128, 4, True, form=form, shared_rows=form is CandidateForm.TOKEN)
    queries = torch.zeros(rows, 16, 576, dtype=torch.bfloat16)
    select_tokens(shape, default_config(shape, rows, specialized=hopper), queries, 132)


def union() -> None:
    select = UnionSelection(KV_HEADS, 16, 4096, CPU)
    heads, counts = torch.zeros(16, KV_HEADS, 4, dtype=torch.int64), torch.zeros(64, KV_HEADS, 2112, dtype=torch.int32)
    first, second = (
        ScoredTokens(torch.zeros(64), heads, counts, form) for form in (CandidateForm.TOKEN, CandidateForm.MEAN)
    )
    lists = new_lists(600, (16, KV_HEADS), CPU, with_slots=True)
    select.run(first, second, lists, slot_table=torch.arange(64).int())


def hopper_selection(rows: int) -> AnchorConfig:
    return default_config(ScoreShape(HEADS, KV_HEADS, 96), rows, specialized=True)


def slot_lists() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The table of slots, its rows and the lengths, as SGLang hands them in."""
    return torch.zeros(9, 256, dtype=torch.int32), torch.zeros(8, dtype=torch.int64), torch.ones(8, dtype=torch.int64)


def copied_lists(kv_heads: int = KV_HEADS) -> None:
    lists, counts = torch.zeros(8, 5, dtype=torch.int32), torch.zeros(8, kv_heads, dtype=torch.int32)
    copy_slot_lists(*slot_lists(), lists, torch.zeros(64, dtype=torch.int32), counts, implementation="triton")


def compared_lists() -> None:
    common_slots(*slot_lists(), 3, torch.zeros(8, dtype=torch.int32), implementation="triton")


def exchanged() -> None:
    """A question and its answer."""
    words, lists = torch.zeros(4, dtype=torch.int64), torch.zeros(64, dtype=torch.int32)
    side = AskingSide(words.data_ptr(), words, 4, 500)
    side.ask()
    copy_words(lists.data_ptr(), lists.data_ptr(), 64)
    answer(words.data_ptr(), 1 << 32)
    side.take(lists, lists, 2)


def swapped_in(dtype: torch.dtype = torch.bfloat16, dim: int = DIM, groups: int = 64, kv_heads: int = KV_HEADS) -> None:
    """A step of the layer that selects, then the copy of one that reuses its selection."""
    residents = Residents(ResidentShape(2, kv_heads, 4096, 8, 64), groups, 64, CPU, implementation="triton")
    residents.plan([ResidentGroup(0, SelectionGroup(48, 8, head_stride=8))])
    cache, host = torch.zeros(64 + 4096, kv_heads, dim, dtype=dtype), torch.zeros(8, kv_heads, 16, 2 * dim, dtype=dtype)
    lists, kv = new_lists(64, (8, kv_heads), CPU, with_slots=True), PagedKV(cache, cache)
    residents.run(0, torch.zeros(64, dtype=torch.int32), lists, host, kv)
    residents.fetch(0, host, kv, torch.zeros(kv_heads, dtype=torch.int32))


def gathered(dtype: torch.dtype = torch.bfloat16, dim: int = DIM) -> None:
    """What a prefill attends of host memory, by its own lists and by another layer's."""
    host, out = (torch.zeros(pages, KV_HEADS, 16, 2 * dim, dtype=dtype) for pages in (8, 2))
    [group] = pack_lists([SelectionGroup(48, 32)], KV_HEADS)
    pages, lists = torch.zeros(3, dtype=torch.int32), torch.zeros(group.lists_end(KV_HEADS), dtype=torch.int32)
    for head_map in (None, torch.zeros(KV_HEADS, dtype=torch.int32)):
        gather_listed(host, pages, lists, group, 0, out, head_map=head_map, implementation="triton")


def prefilled(rows: int, dtype: torch.dtype = torch.bfloat16, dim: int = DIM) -> None:
    """A request's new tokens: over its own slots, then over pages of the host."""
    queries, cache = q(rows, dtype, dim), pool(dtype, dim)
    spans = [Span(slice(0, rows), torch.arange(64).repeat(-(-rows // 64)))]
    attention = PrefillAttention(spans, [torch.arange(rows)], AttentionShape.of(queries, cache), CPU)
    pages = torch.zeros(4, cache.num_kv_heads, 16, 2 * dim, dtype=cache.k_cache.dtype)
    attention.fold(attention.own(queries, cache, 0.1), 0, queries, cache, pages, 0.1)


CASES: dict[str, Callable[[], None]] = {
    "prefix_attention of 1 request": lambda: prefix(1),
    "prefix_attention of 8 requests": lambda: prefix(8),
    "prefix_attention of 32 requests": lambda: prefix(32),
    "prefix_attention on fp8": lambda: prefix(8, kv=torch.float8_e4m3fn),
    "prefix_attention in fp32": lambda: prefix(1, torch.float32),
    "prefix_attention with heads of 256": lambda: prefix(1, dim=256),
    "prefix_attention of 32 requests with heads of 256": lambda: prefix(32, dim=256),
    "prefix_attention of 32 requests in fp32": lambda: prefix(32, torch.float32),
    "prefix_attention with heads of 96": lambda: prefix(1, dim=96),
    "attention with bounded registers": lambda: grouped(AttentionConfig(128, 64, 8, 3, 2, 128)),
    "attention on latent keys": lambda: latent(16, 1),
    "attention on latent keys for 4 requests": lambda: latent(16, 4),
    "attention on latent keys with 64 heads": lambda: latent(64, 1),
    "specialized attention of 64 rows": lambda: grouped(SPECIALIZED),
    "specialized attention of 64 rows, one program": lambda: grouped(AttentionConfig(64, 32, 4, 10, 1, None, True)),
    "specialized attention of 64 rows while lists are made": lambda: grouped(SPECIALIZED, after_lists=True),
    "specialized attention of 128 rows": lambda: grouped(AttentionConfig(128, 64, 4, 5, 1, None, True)),
    "specialized attention in three passes": lambda: grouped(SPECIALIZED, passes=3),
    "specialized attention with heads of 64": lambda: grouped(SPECIALIZED, torch.float16, 64),
    "selection of tokens in one launch": lambda: anchor(1, NARROW),
    "selection of tokens by a sample's sums": lambda: anchor(8, WIDE, sum_every=16),
    "selection of tokens by codes of 2 bits": lambda: anchor(8, WIDE, bits=2),
    "selection of tokens by codes of 8 bits": lambda: anchor(8, WIDE, bits=8),
    "selection of tokens in three launches": lambda: anchor(8, WIDE, form=Form.UNFUSED),
    "selection of tokens by codes of 8 bits in three launches": lambda: anchor(8, WIDE, form=Form.UNFUSED, bits=8),
    "selection of tokens for 32 requests in one launch": lambda: anchor(32, WIDE),
    "selection of tokens for 32 requests in one tile": lambda: anchor(32, WIDEST),
    "specialized selection of tokens": lambda: anchor(1, hopper_selection(1)),
    "specialized selection of tokens for 8 requests": lambda: anchor(8, hopper_selection(8)),
    "specialized selection of tokens for 16 requests": lambda: anchor(16, hopper_selection(16)),
    "specialized selection of tokens for 32 requests": lambda: anchor(32, hopper_selection(32)),
    "specialized selection by a sample's sums": lambda: anchor(1, hopper_selection(1), sum_every=16),
    "specialized selection by a sample's sums for 8 requests": lambda: anchor(8, hopper_selection(8), sum_every=16),
    "specialized selection by a sample's sums for 32 requests": lambda: anchor(32, hopper_selection(32), sum_every=16),
    "specialized selection as served for 8 requests": lambda: as_served(8),
    "specialized selection as served for 32 requests": lambda: as_served(32),
    "selection by lists of centroids": lambda: tables(1),
    "selection by lists of centroids in four launches": lambda: tables(8, form=Form.UNFUSED, pooling=Pooling.MEAN),
    "selection by lists of many centroids": lambda: tables(8, num_subspaces=64, num_centroids=256, bits=8),
    "selection of blocks": lambda: blocks(1, CandidateForm.MEAN),
    "selection of blocks for 32 requests": lambda: blocks(32, CandidateForm.MEAN),
    "selection of blocks by minima and maxima": lambda: blocks(8, CandidateForm.MINMAX),
    "selection of blocks by minima and maxima for 32 requests": lambda: blocks(32, CandidateForm.MINMAX),
    "selection of blocks by balls": lambda: blocks(8, CandidateForm.BALL, 8),
    "selection of blocks by halves": lambda: blocks(8, CandidateForm.MEAN, 16),
    "selection of listed tokens": lambda: blocks(8, CandidateForm.LISTED),
    "selection of listed tokens for 32 requests": lambda: blocks(32, CandidateForm.LISTED),
    **{
        f"specialized selection of listed tokens for {rows} requests": lambda rows=rows: blocks(
            rows, CandidateForm.LISTED, hopper=True
        )
        for rows in (1, 8, 32)
    },
    "selection of latent keys' blocks": lambda: latent_blocks(1, CandidateForm.MEAN),
    "selection of latent keys' blocks by balls": lambda: latent_blocks(1, CandidateForm.BALL),
    "selection of latent keys' blocks as a first level": lambda: latent_blocks(1),
    **{
        f"specialized selection of latent keys' blocks for {rows} requests": lambda rows=rows: latent_blocks(
            rows, hopper=True
        )
        for rows in (1, 4, 8)
    },
    "selection by two methods": union,
    "copy_slot_lists": copied_lists,
    "copy_slot_lists of one KV head": lambda: copied_lists(1),
    "common_slots": compared_lists,
    "questions and answers": exchanged,
    "prefill_attention of 16 tokens": lambda: prefilled(16),
    "prefill_attention of 64 tokens": lambda: prefilled(64),
    "prefill_attention in fp32": lambda: prefilled(64, torch.float32),
    "prefill_attention with heads of 64": lambda: prefilled(64, torch.float16, dim=64),
    "prefill_attention with heads of 256": lambda: prefilled(64, dim=256),
    "listed tokens of host memory": gathered,
    "residents": swapped_in,
    "residents of one group and KV head": lambda: swapped_in(torch.float16, 64, 1, 1),
    "residents with heads of 96 in fp32": lambda: swapped_in(torch.float32, 96),
}
NARROW, WIDE, WIDEST = AnchorConfig(8, 64), AnchorConfig(32, 64), AnchorConfig(128, 64, 8, 3, 1, True)
SPECIALIZED = AttentionConfig(64, 64, 4, 3, 2, 128, specialized=True)

#: fp8 is refused below sm_89, where the conversion is not in hardware.
NOT_FOR = {("prefix_attention on fp8", 80), ("attention with bounded registers", 80)}
NOT_FOR |= {(case, other) for case in CASES if case.startswith("specialized") for other in (80, 100)}
# Hopper's tiles of 64 rows; others have 32.
NOT_FOR |= {(f"attention on latent keys {of}", sm) for of in ("for 4 requests", "with 64 heads") for sm in (80, 100)}
NOT_FOR |= {("selection of tokens for 32 requests in one tile", 80)}  # lower tiles do there
NOT_FOR |= {(case, 80) for case in CASES if case.startswith(("selection of blocks", "selection of l")) and "32" in case}
#: Bytes that a thread may spill, with either Triton: a bound on registers has its price, and so has the kernel whose
#: warps share them out.
SPILLED = {
    "attention with bounded registers": 32,
    "attention on latent keys": 64,
    "attention on latent keys for 4 requests": 224,
    "attention on latent keys with 64 heads": 240,
    "specialized attention of 128 rows": 16,
    # Numbers of the tables, outside of the loops.
    "specialized selection of tokens for 32 requests": 160,
    "specialized selection by a sample's sums for 32 requests": 80,
    "specialized selection of latent keys' blocks for 8 requests": 384,
    "selection of tokens by codes of 8 bits": 40,
    "selection of blocks by halves": 24,
    "selection of blocks by minima and maxima": 8,
    "selection of blocks by minima and maxima for 32 requests": 24,
    "selection by lists of many centroids": 208,
    "residents with heads of 96 in fp32": 8,
    "prefill_attention of 16 tokens": 64,  # on sm_80
}
#: Where sm_100 spills more: tiles and bounds on registers were chosen for the others.
SPILLED_ON_SM_100 = {
    "attention with bounded registers": 136,
    "selection of tokens by codes of 8 bits in three launches": 8,  # Triton 3.6
    "selection of blocks for 32 requests": 16,
    "selection of blocks by minima and maxima for 32 requests": 88,
}


def launches(case: str) -> list[Launch]:
    with recording() as kept:
        CASES[case]()
    assert kept.launches
    return kept.launches


def dumped(what: str, cubin: bytes, folder: Path) -> str:
    """What `cuobjdump` tells of a compiled kernel."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, f"--dump-{what}", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """STACK: bytes of local memory that a thread needs, for spilled registers; SHARED: what is laid out beforehand."""
    told = dumped("resource-usage", cubin, folder)
    found = {name: int(number) for name, number in re.findall(r"(STACK|SHARED):(\d+)", told)}
    assert len(found) == 2, told
    return found


#: On sm_90; a compilation takes seconds.
BY_DAY = (
    "selection of tokens in one launch",
    "selection by lists of centroids",
    "specialized attention of 64 rows",
    "specialized attention of 64 rows while lists are made",
    "specialized selection of tokens for 32 requests",
)


def _marks(case: str, capability: int) -> Any:
    return [] if case in BY_DAY and capability == 90 else pytest.mark.full


@pytest.mark.parametrize(
    ("case", "capability"),
    [pytest.param(c, sm, marks=_marks(c, sm)) for c in CASES for sm in SHARED_BYTES if (c, sm) not in NOT_FOR],
)
def test_kernels_compile_without_spilling(
    case: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_can_overlap", lambda: capability >= 90)
    for one in launches(case):
        kernel = compiled(one, capability)
        assert f".target sm_{capability}" in kernel.asm["ptx"]
        used = resources(kernel.asm["cubin"], tmp_path)
        spilled = 8 if one.kernel is list_kernel and capability == 80 else SPILLED.get(case, 0)
        spilled = max(spilled, SPILLED_ON_SM_100.get(case, 0) if capability == 100 else 0)
        assert used["STACK"] <= spilled, (one.kernel.__name__, one.options)
        # Triton's own shared memory comes behind it, aligned so; a launch asks for more than 48 KiB by that alone.
        assert used["SHARED"] % 1024 == 0
        assert kernel.metadata.shared + used["SHARED"] <= SHARED_BYTES[capability] + 1024
        assert not (48 << 10) + 1024 - used["SHARED"] < kernel.metadata.shared <= 48 << 10


@pytest.mark.full
@pytest.mark.parametrize("rows", [1, 8, 16, 32])
@pytest.mark.parametrize(
    ("form", "bits", "dim", "channels", "dtype"),
    [
        (CandidateForm.TOKEN, 4, 64, 48, torch.float32),
        (CandidateForm.TOKEN, 4, 128, 96, torch.float32),
        (CandidateForm.TOKEN, 8, 128, 64, torch.float16),
        (CandidateForm.TOKEN, 8, 128, 96, torch.float16),
        (CandidateForm.TOKEN, 8, 128, 128, torch.float16),
        (CandidateForm.TOKEN, 4, 256, 128, torch.float16),
        (CandidateForm.TOKEN, 4, 256, 256, torch.float16),
        (CandidateForm.TOKEN, 16, 128, 128, torch.float32),
        (CandidateForm.TOKEN, 16, 256, 256, torch.float16),
        (CandidateForm.MINMAX, 16, 128, 128, torch.float16),
        (CandidateForm.MINMAX, 16, 128, 128, torch.float32),
        (CandidateForm.MINMAX, 16, 256, 256, torch.float16),
        (CandidateForm.BALL, 16, 256, 256, torch.float16),
        (CandidateForm.MEAN, 16, 256, 256, torch.float16),
        (CandidateForm.MINMAX, 8, 256, 256, torch.float16),
    ],
)
def test_programs_of_wide_rows_share_a_multiprocessor(
    form: CandidateForm, bits: int, dim: int, channels: int, dtype: torch.dtype, rows: int, tmp_path: Path
) -> None:
    """As many as the schedule says, as they wait for each other; of shared memory that CUDA does not refuse. Halves are
    those of blocks, whose tokens share a row."""
    shared = form is CandidateForm.TOKEN and bits == 16
    tokens = form is CandidateForm.TOKEN and not shared
    heads, kv_heads = (4, 2) if tokens else (HEADS, KV_HEADS)
    shape = ScoreShape(
        heads, kv_heads, channels, bits, tokens, sum_every=16 if tokens else 1, form=form, shared_rows=shared
    )
    config = default_config(shape, rows)
    with recording() as kept:
        select_tokens(shape, config, torch.zeros(rows, heads, dim, dtype=dtype), 64)
    for one in kept.launches:
        kernel = compiled(one, 90)
        used = resources(kernel.asm["cubin"], tmp_path)["SHARED"]
        assert not (48 << 10) + 1024 - used < kernel.metadata.shared <= 48 << 10, (config, used)
        assert kernel.metadata.shared <= 227 << 10
        most = (228 << 10) // config.programs_per_sm
        assert one.kernel is list_kernel or kernel.metadata.shared + used + 1024 <= most, config


def test_entries_of_lists_are_loaded_byte_by_byte() -> None:
    """Hints of the layout are not taken for addresses: a list may begin anywhere. 8 entries of a thread, two phases."""
    (score,) = (one for one in launches("selection by lists of centroids") if one.kernel is score_lists)
    loads = re.findall(r"ld\.global\.(\S*b8) ", compiled(score, 90).asm["ptx"])
    assert loads == 32 * ["b8"]  # of a place and of a code


def test_hopper_multiplies_large_tiles_with_its_own_instructions() -> None:
    (attend, _) = launches("prefix_attention of 32 requests")
    assert "wgmma.mma_async" in compiled(attend, 90).asm["ptx"]
    assert "wgmma.mma_async" not in compiled(attend, 80).asm["ptx"]
    attend, _ = launches("specialized attention of 64 rows")
    ptx = compiled(attend, 90).asm["ptx"]
    assert all(word in ptx for word in ("wgmma.mma_async", "setmaxnreg", "cp.async.mbarrier.arrive.noinc"))


def test_launches_that_follow_wait_before_they_write_and_programs_that_meet_are_launched_together() -> None:
    """The listing of a selection comes while its scores are made, attention while these are listed, the merge last."""
    for case, follows in (
        ("specialized attention of 64 rows", (True, True)),
        ("selection of tokens in one launch", (False, False)),
        ("specialized selection of tokens", (False, True)),
    ):
        found = [(one, compiled(one, 90).asm["ptx"]) for one in launches(case)]
        for (one, ptx), later in zip(found, follows, strict=True):
            before, wait, _ = ptx.partition("griddepcontrol.wait")
            assert bool(wait) == one.options.get("launch_pdl", False) == later
            assert not (wait and re.search(r"(st|red|atom)\.global", before))
            assert ptx.count("atom.global.gpu.acq_rel") == one.options.get("launch_cooperative_grid", 0)
        assert ("griddepcontrol.launch_dependents" in found[0][1]) == case.startswith("specialized")


def test_pages_are_copied_by_16_bytes_behind_the_launch_that_gives_them_cells() -> None:
    *others, assigned, reused = launches("residents")
    assert len(others) == 2
    for one in others:
        before, wait, _ = compiled(one, 90).asm["ptx"].partition("griddepcontrol.wait")
        assert one.options["launch_pdl"]
        assert wait
        assert not re.search(_GLOBAL, before)
    for one in (assigned, reused):
        before, wait, behind = compiled(one, 90).asm["ptx"].partition("griddepcontrol.wait")
        assert one.options["launch_pdl"]
        assert wait
        assert not re.search(_GLOBAL, before)
        # Keys and values of 16 rows of 256 bytes by 128 threads; who places cells reads how many are of each age.
        assert behind.count("st.global.v4.b32") == 4
        assert behind.count("ld.global.cg.v4.b32") == (4 if one is reused else 4 + 8)


def test_threads_wait_for_the_codes_that_they_copied_and_for_no_other_thread() -> None:
    """Two more steps are on their way then. Loops have no barrier, and those of the sums nothing between threads."""
    for case, product in (
        ("specialized selection of tokens", "mma.sync.aligned.m16n8k32"),
        ("specialized selection of tokens for 32 requests", "wgmma.mma_async"),
    ):
        scores, _ = launches(case)
        ptx = compiled(scores, 90).asm["ptx"]
        assert set(re.findall(r"cp\.async\.wait\w+ ?\d*", ptx)) == {"cp.async.wait_group 2"}
        at = {m[1]: m.start() for m in re.finditer(r"^(\$L__BB\w+):", ptx, re.MULTILINE)}
        ways = [(at[m[1]], m.end()) for m in re.finditer(r"bra(?:\.uni)?\s+(\$L__BB\w+);", ptx) if m[1] in at]
        bodies = sorted((ptx[begin:end] for begin, end in ways if begin < end), key=len)
        sums = next(body for body in bodies if product in body and "ex2.approx" in body)
        pooling = next(body for body in bodies if product in body and "red.shared" in body)
        assert "shfl" not in sums, case
        for body in (sums, pooling):
            assert "cp.async.wait_group" in body, case
            assert not re.search(r"bar\.sync|st(matrix)?\S*\.shared|ldmatrix", body), case


def test_codes_are_unpacked_without_a_conversion() -> None:
    """In the loop of the token index a code costs less than one instruction; a conversion alone would be one."""
    sums, *_ = launches("selection of tokens in three launches")
    ptx = compiled(sums, 90).asm["ptx"]
    assert not re.search(r"cvt\.rn\.f16\.[us](8|16|32)", ptx)
    assert "cp.async.cg.shared.global" in ptx


def test_a_product_is_rounded_before_threads_add_it_to_another() -> None:
    """Else two threads that add the same two in turns round different products, and their sums differ."""
    of_bytes, *_ = launches("selection of tokens by codes of 8 bits in three launches")
    found = [(one, 90) for one in launches("selection of tokens in three launches")[:2]]
    for sums, capability in [*found, (of_bytes, 80)]:
        ptx = compiled(sums, capability).asm["ptx"]
        powers = set(re.findall(r"ex2\.approx\S*\s+(%\w+)", ptx))
        fused = re.findall(r"fma\.rn\.f32\s+(%\w+), (%\w+), (%\w+), %\w+;", ptx)
        of_powers = [(out, *factors) for out, *factors in fused if powers.intersection(factors)]
        # A running total is scaled by each thread alone, and takes its own place; no other product may be fused.
        assert of_powers
        assert all(out in factors for out, *factors in of_powers)


def test_nothing_runs_while_launches_are_recorded() -> None:
    kernel: Any = SimpleNamespace(arg_names=["out_ptr"])
    with recording() as kept:
        launch(kernel, (4, 0), {"out_ptr": None})
        assert not kept.launches  # an empty grid is no launch
        launch(kernel, (1,), {"out_ptr": 1, "of another kernel": 2})
    (launched,) = kept.launches
    assert launched.arguments == {"out_ptr": 1}


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("specialized selection")])
def test_nothing_is_spilled_where_codes_are_multiplied(case: str, tmp_path: Path) -> None:
    """Where few numbers of the tables are (`SPILLED`), they are written and read outside of these loops."""
    scores, _ = launches(case)
    sass = dumped("sass", compiled(scores, 90).asm["cubin"], tmp_path)
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(\S.*?);", sass, re.MULTILINE)
    at = {int(address, 16): number for number, (address, _) in enumerate(lines)}
    loops = []
    for number, (_, text) in enumerate(lines):
        target = re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text)
        begin = at[int(target[1], 16)] if target else number
        if begin < number and any("MMA." in text for _, text in lines[begin : number + 1]):
            loops.append((begin, number))
    # Others go over these: over tiles of query rows, and over groups.
    inner = [one for one in loops if not any(one != of and one[0] <= of[0] and of[1] <= one[1] for of in loops)]
    assert len(inner) >= 2, "one sums, and one pools"
    for begin, end in inner:
        assert not [text for _, text in lines[begin : end + 1] if re.search(r"\b(STL|LDL)\b", text)]


@pytest.mark.parametrize(
    "case", ["specialized selection of tokens", "specialized selection by a sample's sums for 32 requests"]
)
def test_before_the_scores_are_made_only_tables_are_read(case: str) -> None:
    _, listing = launches(case)
    assert listing.options["launch_pdl"] is True
    first, *others = compiled(listing, 90).asm["ptx"].split("griddepcontrol.wait")
    assert not re.search(r"(st|red|atom|cp\.async\S*)\.global", first)
    loads = re.findall(r"ld\.global\S*", first)
    # Eleven numbers of an item and one of a KV head, one by one; scores come four at a time.
    assert len(loads) == 12
    assert not any(".v" in load or ".cg" in load for load in loads)
    assert "griddepcontrol.launch_dependents" not in first, "attention would begin before the queries are there"
    assert len(others) == 2, "once where there is work, and once for all at the end"
    assert not re.search(r"(ld|st|red|atom)\.global", others[-1]), "nothing is left to do"


def test_before_the_lists_are_made_attention_reads_tables_only() -> None:
    """How many items, whose list a KV head reads, and the eleven numbers of the first item."""
    attend, _ = launches("specialized attention of 64 rows")
    before, _, _ = compiled(attend, 90).asm["ptx"].partition("griddepcontrol.wait")
    assert len(re.findall(r"ld\.global\S*", before)) == 13
    assert not re.search(r"(ld\.global\S*\.v|cp\.async\S*\.global)", before)


def test_while_lists_are_made_programs_wait_for_what_is_listed_only() -> None:
    """Those that multiply and those that fetch wait at a list of the layer; the first ones, too, before they end."""
    found = []
    for one in launches("specialized attention of 64 rows while lists are made"):
        assert one.options["launch_pdl"] is True
        ptx = compiled(one, 90).asm["ptx"]
        assert "atom" not in ptx
        found.append(ptx.split("griddepcontrol.wait"))
    (before, multiplied, fetched, ended), (tables, merged) = found
    assert sum(".cg" in load for load in re.findall(r"ld\.global\S*", before)) == 1, "a joined suffix' own count"
    loads = re.findall(r"ld\.global\S*", multiplied)
    # Of one item the count, and what the next one is; no slot, before those that fetch have waited.
    assert [load for load in loads if ".cg" in load] == loads[:1]
    assert len(loads) == 9
    assert ["cp.async" in part for part in (multiplied, fetched, ended)] == [False, True, False]
    # Four numbers of each span. Parts, past the first level of caches.
    assert re.findall(r"ld\.global\S*", tables) == ["ld.global.b32"] * 8
    assert sum(".cg" in load for load in re.findall(r"ld\.global\S*", merged)) >= 2
    for part in (multiplied, fetched, tables):
        assert "griddepcontrol.launch_dependents" not in part
    for part in (ended, merged):
        assert "griddepcontrol.launch_dependents" in part


def test_own_tokens_of_requests_are_attended_before_lists_are_there() -> None:
    """As the plugin plans them: how many there are is on the device, too, but known before."""
    buffers = StepBuffers(2, KV_HEADS, 4096, CPU)
    layout = buffers.lay_out([1050, 1090], [PrefixGroup("a prompt", (0, 1), 1000)])
    assert layout is not None
    attention = GroupedAttention(AttentionShape.of(q(2), pool()), 2, [SPECIALIZED] * 2, CPU, num_programs=64)
    attention.plan([Segment((0, 1), 600, head_stride=600, list_id=2)], layout.suffix)
    (launched,) = attention._launches
    strides = launched.items[: int(launched.num_items[0]), 3].tolist()
    assert strides == sorted(strides)
    assert strides[:2] == [0, 0]
    assert strides[-1] == 600
