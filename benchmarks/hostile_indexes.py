#!/usr/bin/env python3
"""Indexes with right checksums and wrong content, through the loader of a server and its decode steps.

    python benchmarks/hostile_indexes.py                  # on a CPU, kernels in Triton's interpreter
    python benchmarks/hostile_indexes.py --device cuda    # on a GPU

For reads out of bounds, on a GPU. The first command must end with 86, else the tool's silence says nothing.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    check="compute-sanitizer --tool memcheck --error-exitcode 86 --kernel-name kns=_kernel"
    $check python benchmarks/sanitize.py --plant memcheck
    $check python benchmarks/hostile_indexes.py --device cuda --methods token_index "token_index, 2 bits"

Each damage of `hostile_damages.py` is planted in an index of each method, stored, and loaded. What the loader refuses
must be `index_corrupt` and reported to the store. What it accepts is decoded beside an index that is whole, by every
path that its method has: the reference of decode and, where there are, the kernels of the decode graphs. No step
may raise, no selection may leave its own prefix, and what the other index selects must be what it selects alone. One
line per method and path; exit status 1 where any of that was not so.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

if "cuda" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from hostile_damages import Arrays, Damage, damages
from kernel_rows import commit
from tqdm import tqdm

from prefix_index import (
    ArrayKey,
    BuildInfo,
    FileStore,
    IndexEntry,
    IndexFile,
    IndexIdentity,
    IndexPayload,
    IndexStoreError,
)
from prefix_kernels.grouped_attention import AttentionShape
from prefix_kernels.pooling import Pooling
from prefix_kernels.types import PagedKV, Selection
from sglang_ext.config import config_from_dict
from sglang_ext.decode.grouping import SlotTracker
from sglang_ext.decode.select_op import ReferenceOp, graph_refusal, op_maker
from sglang_ext.decode.sparse import SparseDecode
from sglang_ext.decode.types import DecodeBatch
from sglang_ext.methods import make_builder, make_selector, parse_spec
from sglang_ext.methods.arrays import split_heads
from sglang_ext.methods.base import LayerProfile
from sglang_ext.methods.layer_plan import LayerPlan
from sglang_ext.prefix import residency
from sglang_ext.prefix.residency import Residency, ResidentIndex, State
from tests.prefix_index.samples import sample_identity, sample_model

LAYERS, KV_HEADS, GQA = 3, 2, 2
ROLES = ["dense", "anchor", "anchor"]
DAMAGED, WHOLE, OWN = 272, 208, 3
"""Tokens of the two prefixes, and of a request behind them."""
LENGTHS = (DAMAGED, DAMAGED, WHOLE)
"""Of the requests' prefixes."""
SLOTS, WIDTH = 2048, 400
METHODS: dict[str, dict[str, Any]] = {
    "token_index": {"method": "token_index"},
    "token_index, 2 bits": {"method": "token_index", "bits": 2},
    "ab_sparse": {"method": "ab_sparse"},
    "ab_sparse, some channels": {"method": "ab_sparse", "num_channels": 32},
    "ab_sparse, bounds in fp16": {"method": "ab_sparse", "representation": "minmax", "quantization": "none"},
    "ab_sparse, sizes per head": {"method": "ab_sparse", "sizes": "profile", "representation": "ball"},
    "csattention": {"method": "csattention"},
    "csattention, long lists": {"method": "csattention", "list_ratio": 0.4, "score_bits": 8},
    "two_level": {"method": "two_level"},
    "union": {"method": "union"},
    "exact": {"method": "exact"},
}

Selections = dict[int, Selection]
"""By anchor layer."""


class Found(NamedTuple):
    """Of a step: selections of each group, and the output of each layer."""

    selections: list[Selections]
    outs: list[torch.Tensor]


class CountingStore(FileStore):
    """Counts what is reported."""

    reports = 0

    def report(self, index: IndexFile, error: IndexStoreError) -> bool:
        self.reports += 1
        return super().report(index, error)


@dataclass
class Tally:
    """What became of the damages of one method on one decode path."""

    path: str
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def fail(self, what: str, detail: str) -> None:
        self.counts[what] += 1
        self.wrong.append(f"{what}: {detail}")


class Bench:
    """A method, a store with one whole index and one that is damaged, and the pool that decode steps read.

    Args:
        raw: of the method.
        device: where indexes and the pool lie.
        folder: of the store.
    """

    def __init__(self, raw: dict[str, Any], device: torch.device, folder: Path) -> None:
        self.spec, self.device = parse_spec(raw), device
        self.dim = 128 if device.type == "cuda" else 64
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        named = {"method": self.spec.method, "methods": {self.spec.method: {k: raw[k] for k in raw if k != "method"}}}
        budgets = {"keep_ratio": 0.2, "min_top_k": 32, "num_recent_pages": 1}
        # With a trace, what kernels select is kept.
        self.config = config_from_dict({**named, **budgets, "layer_plan": ROLES, "trace_folder": str(folder)})
        self.plan = LayerPlan.from_dict({"layers": ROLES}, num_layers=LAYERS, num_kv_heads=KV_HEADS)
        self.model = sample_model(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=self.dim, v_head_dim=self.dim)
        self.store = CountingStore(folder, create=True)
        self.store.open()
        self.builds = 0
        gen = self.gen = torch.Generator().manual_seed(0)
        pool = torch.randn(LAYERS, 2, SLOTS, KV_HEADS, self.dim, generator=gen).to(device, self.dtype)
        self.caches = [PagedKV(*of_layer) for of_layer in pool]
        self.q = 2 * torch.randn(LAYERS, 3, KV_HEADS * GQA, self.dim, generator=gen).to(device, self.dtype)
        # Two requests on the damaged index's prefix, one on the other's.
        slots = torch.randperm(SLOTS, generator=gen).int().to(device)
        self.table = torch.zeros(4, WIDTH, dtype=torch.int32, device=device)
        taken = 0
        for row, prefix in enumerate(LENGTHS):
            self.table[row, : prefix + OWN] = slots[taken : taken + prefix + OWN]
            taken += prefix + OWN
        self.table[1, :DAMAGED] = self.table[0, :DAMAGED]
        self.arrays = self._built(DAMAGED)
        self.whole = self._loaded(self.put(self._built(WHOLE), WHOLE))

    def _built(self, prefix_len: int) -> Arrays:
        profile = LayerProfile(block_sizes=(16, 64))
        arrays: Arrays = {}
        for layer in range(LAYERS):
            keys = torch.randn(prefix_len, KV_HEADS, self.dim, generator=self.gen)
            queries = torch.randn(KV_HEADS, 64, self.dim, generator=self.gen)
            built = make_builder(self.spec, profile).build_layer(keys, queries)
            for head, pieces in enumerate(split_heads(built)):
                arrays |= {ArrayKey(f"{self.spec.method}.{n}", layer, head): a.numpy() for n, a in pieces.items()}
        return arrays

    def identity(self, prefix_len: int) -> IndexIdentity:
        """Of a made-up prompt of that length."""
        return sample_identity(list(range(prefix_len)), model=self.model)

    def put(self, arrays: Arrays, prefix_len: int) -> IndexEntry:
        """Store an index as a builder would."""
        self.builds += 1
        info = BuildInfo(created=float(self.builds))
        return self.store.put(IndexPayload(self.identity(prefix_len), arrays, spec={}, stats={}, info=info))

    def _loaded(self, entry: IndexEntry) -> ResidentIndex:
        loader = Residency(self.store, self.spec, LAYERS, KV_HEADS, self.device, 1 << 32)
        index = loader.acquire(entry)
        loader.close()  # the load ends first
        return index

    def planted(self, damage: Damage) -> ResidentIndex:
        """The index of the longer prefix with a damage, as the loader leaves it."""
        arrays = {key: array.copy() for key, array in self.arrays.items()}
        damage.apply(arrays)
        return self._loaded(self.put({key: array.copy(order="C") for key, array in arrays.items()}, DAMAGED))

    # -- decode paths --------------------------------------------------------------------------------------

    def attended(self, indexes: Sequence[ResidentIndex], selections: Sequence[Selections]) -> list[torch.Tensor]:
        """Per layer, attention over what each group selected and its rows' suffix tokens: by definition, in torch."""
        outs = []
        for layer, kv in enumerate(self.caches):
            out = torch.zeros(self.q[layer].shape, device=self.device)
            for row, prefix in enumerate(LENGTHS):
                number = next((n for n, index in enumerate(indexes) if index.prefix_len == prefix), None)
                selection = None if number is None else selections[number].get(layer)
                for head in range(KV_HEADS):
                    slots = self.table[row, : prefix + OWN].long()
                    if selection is not None:
                        chosen = selection.positions[head, : int(selection.counts[head])].long()
                        slots = torch.cat((slots[chosen], slots[prefix:]))
                    part = slice(head * GQA, (head + 1) * GQA)
                    scores = self.dim**-0.5 * self.q[layer, row, part].float() @ kv.k_cache[slots, head].float().T
                    out[row, part] = scores.softmax(dim=1) @ kv.v_cache[slots, head].float()
            outs.append(out)
        return outs

    def step(self, indexes: Sequence[ResidentIndex], *, kernels: bool) -> Found:
        """A decode step by the reference operation, or by what decode graphs hold."""
        on_gpu = self.device.type == "cuda"
        tracker = SlotTracker(3, 16, self.device)
        shape = AttentionShape(KV_HEADS * GQA, KV_HEADS, self.dim, self.dim, self.dtype, self.dtype)
        make_op = op_maker(shape, self.config, self.spec, LAYERS, self.device, captured=True)
        if not kernels:
            selector = make_selector(self.spec, self.config.summed_every)
            make_op = lambda sizes: ReferenceOp(selector, Pooling(self.config.pooling))  # noqa: E731
        sparse = SparseDecode(
            shape, self.config, make_op, self.plan, tracker, arena_size=8192, max_prefix_len=512, device=self.device
        )
        lens = [n + OWN for n in LENGTHS]
        rows = torch.arange(3, device=self.device)
        by_row = [next((i for i in indexes if i.prefix_len == n), None) for n in LENGTHS]
        device_lens = torch.tensor(lens, device=self.device)
        batch = DecodeBatch([0, 1, 2], lens, self.table, rows, device_lens, by_row)
        for _ in range(3):  # until the slots in common are known
            tracker.learn(batch)
            if on_gpu:
                torch.cuda.synchronize()
        plan = sparse.plan(batch)
        if plan is None or sparse.begin(plan, batch) is None:
            raise RuntimeError("the step is not attended by the indexes")
        outs = [sparse.run(self.q[n], kv, n, self.dim**-0.5) for n, kv in enumerate(self.caches)]
        assert sparse.copies is not None
        assert len(sparse.copies.groups) == len(indexes)
        found = []
        for taken in sparse.copies.take(range(len(indexes))):
            of_group = {}
            for layer, (positions, counts) in taken.items():
                there = torch.arange(positions.shape[1]) < counts[:, None]
                ascending = torch.where(there, positions, 1 << 30).sort(dim=1).values
                positions = torch.where(there, ascending, -1)
                of_group[layer] = Selection(positions.to(self.device), counts.to(self.device))
            found.append(of_group)
        return Found(found, outs)

    def paths(self) -> dict[str, Callable[[Sequence[ResidentIndex]], Found]]:
        """The decode paths of the method."""
        graphs = {} if graph_refusal(self.spec.method) else {"decode graphs": partial(self.step, kernels=True)}
        return {"reference": partial(self.step, kernels=False), **graphs}


def judge(
    bench: Bench, tally: Tally, what: str, indexes: Sequence[ResidentIndex], found: Found, alone: Selections
) -> None:
    """Look at a step of an accepted index and the whole one.

    Args:
        alone: what the whole one selects without the other.
    """
    for index, of_group in zip(indexes, found.selections, strict=True):
        for layer, selection in of_group.items():
            try:
                selection.check_integrity(index.prefix_len)
            except ValueError as error:
                tally.fail(OUTSIDE, f"{what}, layer {layer}: {error}")
    for layer, selection in found.selections[-1].items():
        for mine, theirs in zip(selection.positions.tolist(), alone[layer].positions.tolist(), strict=True):
            # On a GPU sums are cut by the batch: scores that nearly tie may change places.
            if len(set(mine) ^ set(theirs)) > (len(mine) // 10 if bench.device.type == "cuda" else 0):
                tally.fail(OTHER, f"{what}, layer {layer}: the whole index selects otherwise")
    # What was attended is what was selected: slots of the own prefix.
    wanted = bench.attended(indexes, found.selections)
    for layer, (mine, theirs) in enumerate(zip(found.outs, wanted, strict=True)):
        off = (mine.float() - theirs.float()).norm(dim=2) / theirs.float().norm(dim=2)
        if not bool((off < (0.05 if bench.device.type == "cuda" else 1e-4)).all()):  # NaN, too
            tally.fail(OTHER, f"{what}, layer {layer}: attention of other slots")


EXCEPTION, OUTSIDE, OTHER = "exceptions", "positions outside", "selections of another index"
LOADER = "refused without a report or a reason", "accepted although it does not fit", "refused although it fits"


def run(name: str, device: torch.device, sample: int | None, unchecked: bool) -> list[Tally]:
    """All damages of one method. Returns a tally per decode path; the loader's is part of the first."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(METHODS[name], device, Path(folder))
        paths = {path: (step, step([bench.whole]).selections[0]) for path, step in bench.paths().items()}
        tallies = {path: Tally(path) for path in paths}
        cases = [Damage("none", lambda arrays: None, fits=True), *damages(bench.arrays, bench.spec.method)]
        if sample and sample < len(cases):
            cases = [cases[i * len(cases) // sample] for i in range(sample)]
        for damage in tqdm(cases, desc=name, disable=None):
            reports = bench.store.reports
            index = bench.planted(damage)
            refused = index.state is State.FAILED
            for tally in tallies.values():
                tally.counts["refused" if refused else "accepted"] += 1
            first = tallies["reference"]
            if refused and (index.reason != "index_corrupt" or bench.store.reports != reports + 1):
                first.fail(LOADER[0], f"{damage.name}: {index.reason}: {index.detail}")
            if refused == damage.fits:
                first.fail(LOADER[2 if refused else 1], f"{damage.name}: {index.detail}")
            for path, (step, alone) in paths.items():
                if refused or (unchecked and path != "reference"):
                    continue
                indexes = [index, bench.whole]
                try:
                    found = step(indexes)
                    judge(bench, tallies[path], damage.name, indexes, found, alone)
                except Exception as error:
                    tallies[path].fail(EXCEPTION, f"{damage.name}: {type(error).__name__}: {error}")
        bench.store.close()
    return list(tallies.values())


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--sample", type=int, help="so many damages of each method, evenly; all by default")
    parser.add_argument(
        "--unchecked", action="store_true", help="let the loader accept everything: what damages would do"
    )
    parser.add_argument("--out", type=Path, help="rows as JSON lines")
    args = parser.parse_args(argv)
    if args.unchecked:
        residency.check_forms = residency.check_layer = lambda *_: None  # type: ignore[assignment]
    logging.disable(logging.ERROR)  # each refusal is one
    failed = 0
    for name in args.methods:
        for tally in run(name, torch.device(args.device), args.sample, args.unchecked):
            counts = {"damages": tally.counts["refused"] + tally.counts["accepted"]}
            counts |= {what: tally.counts[what] for what in ("refused", "accepted", EXCEPTION, OUTSIDE, OTHER)}
            counts |= {what: tally.counts[what] for what in LOADER if tally.counts[what]}
            row = {"method": name, "path": tally.path, **counts}
            print(", ".join([name, tally.path, *(f"{count} {what}" for what, count in counts.items())]))
            for line in tally.wrong[:20]:
                print(f"    {line}"[:300])
            if args.out is not None:
                origin = {"device": args.device, "torch": torch.__version__, "commit": commit()}
                with args.out.open("a") as file:
                    file.write(json.dumps({**row, **origin}) + "\n")
            failed += bool(tally.wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
