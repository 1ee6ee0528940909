"""Parts of the kernels' benchmark, in this process: gates, tuning's choice; rivals and timer on fakes."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from prefix_kernels.grouped_attention import AttentionConfig, AttentionShape
from prefix_kernels.grouped_attention.tuned import TileKey
from prefix_kernels.testing import dense_attention

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    """The modules that run no kernel."""
    sys.path.insert(0, str(BENCHMARKS))
    names = ("kernel_problem", "kernel_rivals", "kernel_timing", "kernel_tune")
    try:
        yield SimpleNamespace(**{name.removeprefix("kernel_"): importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_the_best_configuration_is_green_everywhere_and_least_on_average(bench, capsys):
    shape = AttentionShape(4, 2, 64, 64, torch.bfloat16, torch.bfloat16)

    def row(case: str, block_n: int, us: float, green: bool = True, block_m: int = 16, **more) -> dict:
        launch = dataclasses.asdict(AttentionConfig(block_m, block_n, 4, 2, 1))
        key = {"bench": "tune", "case": case, "context": 1, "batch": 1, "suffix": 0, "page": 16}
        return {**key, "block_m": block_m, "launch": launch, "us": us, "green": green, **more}

    rows = [row("exact", 32, 10.0), row("sparse", 32, 40.0), row("exact", 64, 12.0), row("sparse", 64, 20.0)]
    rows += [row("exact", 128, 1.0), row("sparse", 128, 1.0, green=False)]
    rows += [row("exact", 32, 1.0, block_m=32), row("sparse", 64, 1.0, block_m=32)]
    rows += [row(case, 32, 0.1, page=64) for case in ("exact", "sparse")]
    ((entry, count),) = bench.tune.best(rows, shape, {"bench": "tune", "page": 16})
    assert entry.config == AttentionConfig(16, 64, 4, 2, 1)
    assert entry.us_by_case == {"exact 1 x 1": 12.0, "sparse 1 x 1": 20.0}
    assert entry.key == TileKey(16, 64, 64, "bfloat16", "bfloat16")
    assert count == 2
    assert "no configuration of 32 rows" in capsys.readouterr().err


def test_a_gate_is_as_tight_as_one_of_many_keys(bench):
    """A lost beacon of 64 in 4,096 keys is far outside bf16's limit; rounding to bf16 is inside."""
    from prefix_kernels.grouped_attention import AttentionShape

    shape = AttentionShape(4, 2, 32, 32, torch.bfloat16, torch.bfloat16)
    sizes = bench.problem.Sizes(4096, 2, 1, 16, 16)
    problem = bench.problem.make_problem(shape, sizes, 0.05, torch.device("cpu"))
    assert problem.positions.shape[2] == math.ceil(round(0.05 * 4096) * math.sqrt(2))
    wanted = problem.oracle("all")
    assert problem.gate(wanted.out.bfloat16(), wanted.lse, "all").green
    assert not problem.gate(wanted.out.bfloat16(), wanted.lse + 2e-3, "all").green
    for lost in (problem.prefix_slots[:, 1:], problem.prefix_slots[:, :-1]):
        lists = [torch.cat([lost, own[None]], dim=1) for own in problem.suffix_slots]
        state = bench.problem.oracle(problem.q, problem.kv, lists, problem.sm_scale)
        assert problem.gate(state.out, None, "all").error > 2
    assert bool(torch.isnan(problem.kv.k_cache).any())
    with pytest.raises(ValueError, match="expected a batch that is a multiple of the groups"):
        bench.problem.Sizes(4096, 3, 2, 16, 16)


class FakeDecode:
    """FlashInfer's decode wrapper as documented, from its page tables."""

    def __init__(self, workspace, layout, *, use_tensor_cores):
        assert (workspace.dtype, layout, use_tensor_cores) == (torch.uint8, "NHD", True)

    def plan(self, indptr, indices, last_page_len, qo, kv, dim, page, *, q_data_type, kv_data_type, sm_scale):
        assert (qo, kv, dim, q_data_type, kv_data_type) == (4, 2, 16, torch.float32, torch.float32)
        self.tables, self.page, self.scale = paged(indptr, indices, last_page_len, page), page, sm_scale

    def run(self, q, cache, out):
        pool = unpaged(cache, self.page)
        for row, slots in enumerate(self.tables):
            out[row] = dense_attention(q[row : row + 1], *(part[slots] for part in pool), self.scale).out[0]
        return out


class FakeCascade:
    """FlashInfer's cascade: a row attends its page table of every level."""

    def __init__(self, levels, workspace, layout):
        assert (levels, layout) == (2, "NHD")

    def plan(
        self, qo_indptr, indptr, indices, last_page_len, qo, kv, dim, page, *, q_data_type, kv_data_type, sm_scale
    ):
        self.levels = [
            (own.tolist(), paged(*tables, page))
            for own, *tables in zip(qo_indptr, indptr, indices, last_page_len, strict=True)
        ]
        self.page, self.scale = page, sm_scale

    def run(self, q, cache):
        pool, out = unpaged(cache, self.page), torch.empty_like(q)
        for row in range(len(q)):
            slots = torch.cat([tables[sum(b <= row for b in bounds) - 1] for bounds, tables in self.levels])
            out[row] = dense_attention(q[row : row + 1], *(part[slots] for part in pool), self.scale).out[0]
        return out


def paged(indptr, indices, last_page_len, page) -> list[torch.Tensor]:
    bounds = indptr.tolist()
    return [
        (indices[begin:end, None] * page + torch.arange(page)).flatten()[: (end - begin - 1) * page + int(last)]
        for begin, end, last in zip(bounds, bounds[1:], last_page_len, strict=False)
    ]


def unpaged(cache, page) -> list[torch.Tensor]:
    assert all(part.shape[1] == page for part in cache)
    return [part.flatten(0, 1) for part in cache]


@pytest.mark.parametrize(("batch", "groups", "suffix"), [(3, 1, 21), (4, 2, 16), (2, 2, 0)])
def test_rivals_are_given_the_same_keys(bench, monkeypatch, batch, groups, suffix):
    from prefix_kernels.grouped_attention import AttentionShape

    fake = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=FakeDecode, MultiLevelCascadeAttentionWrapper=FakeCascade, __version__="0"
    )
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    shape = AttentionShape(4, 2, 16, 16, torch.float32, torch.float32)
    sizes = bench.problem.Sizes(48, batch, groups, suffix, 16)
    problem = bench.problem.make_problem(shape, sizes, 0.5, torch.device("cpu"))
    for name in bench.rivals.RIVALS if suffix else ["flashinfer"]:
        case = bench.rivals.RIVALS[name](problem)
        case.poison()
        assert not problem.gate(case.out, case.lse, case.reads).green
        case.run()
        assert problem.gate(case.out, case.lse, case.reads).green, name


class FakeEvent:
    """Its time is its place in the journal."""

    journal: list[str] = []  # noqa: RUF012

    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        self.place = len(self.journal)
        self.journal.append("event")

    def elapsed_time(self, other):
        return (other.place - self.place) * 1e-3


@pytest.fixture
def fake_cuda(monkeypatch):
    """torch.cuda as far as the timer uses it; replaying a graph runs what it captured."""
    captured: list[FakeGraph] = []

    class FakeGraph:
        def replay(self):
            FakeEvent.journal.append("replay")

    @contextlib.contextmanager
    def graph(made):
        captured.append(made)
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "Event": FakeEvent,
        "CUDAGraph": FakeGraph,
        "graph": graph,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda own: contextlib.nullcontext(),
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    FakeEvent.journal.clear()
    return captured


def test_only_the_work_stands_between_the_events(bench, fake_cuda, monkeypatch):
    monkeypatch.setattr(bench.timing, "_FLUSH_BYTES", 64)
    timer = bench.timing.GpuTimer(torch.device("cpu"), repeats=(3, 3))
    timer.flush = lambda: FakeEvent.journal.append("flush")

    def work():
        FakeEvent.journal.append("work")

    replay = timer.prepare(work)
    assert FakeEvent.journal == ["work"] * 3  # twice to warm up, once captured
    FakeEvent.journal.clear()
    times = timer.time(replay)
    assert times.repeats == 3
    assert times.us == 2  # one entry between the events
    assert FakeEvent.journal[8:] == ["flush", "event", "replay", "event"] * 3


def test_what_cannot_be_captured_is_an_error_or_timed_without_a_graph(bench, fake_cuda, monkeypatch):
    monkeypatch.setattr(bench.timing, "_FLUSH_BYTES", 64)
    timer = bench.timing.GpuTimer(torch.device("cpu"))

    def work():
        if fake_cuda:
            raise RuntimeError("operation not permitted when stream is capturing")

    assert timer.prepare(work, eager_too=True) is work
    fake_cuda.clear()
    with pytest.raises(RuntimeError, match="not permitted"):
        timer.prepare(work)
