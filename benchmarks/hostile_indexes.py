#!/usr/bin/env python3
"""Indexes with right checksums and wrong content, through the loader of a server and its decode steps.

    python benchmarks/hostile_indexes.py                  # on a CPU, kernels in Triton's interpreter
    python benchmarks/hostile_indexes.py --device cuda    # on a GPU

For reads out of bounds, on a GPU. The first command must end with 86, else the tool's silence says nothing.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    check="compute-sanitizer --tool memcheck --error-exitcode 86 --kernel-name kns=_kernel"
    $check python benchmarks/sanitize.py --plant memcheck
    $check python benchmarks/hostile_indexes.py --device cuda --methods token_index "token_index, 2 bits"

Every array of a method is damaged in form and value, in one KV head of one layer or in all of them, and the index as a
whole: arrays that are missing, too many, or exchanged. What a builder might have made of another prompt is no damage
that anybody could see; it is planted all the same (`fits`), since decode steps must bear it.

Each damage is planted in an index of each method, stored, and loaded. What the loader refuses must be `index_corrupt`
and reported to the store. What it accepts is decoded beside an index that is whole, by every path that its method has:
the reference of decode and, where there are, the kernels of the decode graphs. No step may raise, no selection may
leave its own prefix, and what the other index selects must be what it selects alone. One line per method and path; exit
status 1 where any of that was not so.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

if "cuda" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from kernel_rows import commit
from tqdm import tqdm

from prefix_index import ArrayKey, BuildInfo, FileStore, IndexFile, IndexPayload, IndexStoreError
from prefix_kernels.types import Selection
from sglang_ext.decode.select_op import graph_refusal
from sglang_ext.methods import parse_spec
from sglang_ext.methods.arrays import split_heads
from sglang_ext.prefix import residency
from sglang_ext.prefix.residency import Residency, ResidentIndex, State
from tests.decode_oracle import OracleGroup
from tests.prefix_index.samples import sample_identity, sample_model
from tests.sparse_server import GQA, KV_HEADS, LAYERS, Server

Array = NDArray[Any]
Arrays = dict[ArrayKey, Array]
VICTIM = (1, 1)
"""Layer and KV head of what is damaged in one place."""


class Damage(NamedTuple):
    """What is done to which array; `apply` changes them in place, each is the caller's own copy. What `fits` might have
    been built: a loader cannot refuse it.
    """

    name: str
    apply: Callable[[Arrays], None]
    fits: bool = False


FORMS: dict[str, Callable[[Array], Array]] = {
    "half": lambda a: a[: len(a) // 2],
    "one less": lambda a: a[:-1],
    "one more": lambda a: np.concatenate([a, a[-1:]]),
    "narrower": lambda a: a[..., :-1],
    "twice as wide": lambda a: np.concatenate([a, a], axis=-1),
    "flat": lambda a: a.reshape(-1) if a.ndim > 1 else a.reshape(1, 1, -1),
    "one dim more": lambda a: a[None],
    "three dims more": lambda a: a[None, None, None],
    "none": lambda a: a[:0],
}
"""Other shapes; of a single number, those of two in a row."""
DTYPES: dict[str, Callable[[Array], Array]] = {
    "other dtype": lambda a: a.astype(np.float64 if a.dtype.kind == "f" else np.int64),
    "same bytes": lambda a: a.view({1: np.int8, 2: np.uint16, 4: np.uint32}[a.dtype.itemsize]),
}
"""Other dtypes, of the same size too."""
VALUES: dict[str, dict[str, float]] = {
    "i": {"32767": 32767, "minus 1": -1, "minus 32768": -32768},
    "u": {},
    "f": {"NaN": np.nan, "infinity": np.inf, "minus infinity": -np.inf},
}
"""By kind of dtype, what all of an array, or its last value, is set to."""


PLACES: dict[str, Callable[[ArrayKey], bool]] = {
    "in a KV head": lambda k: k[1:] == VICTIM,
    "everywhere": lambda k: True,
}
"""Which arrays of a name are damaged."""


def _set(value: float, where: Any = ...) -> Callable[[Array], Array]:
    return lambda a: _replaced(a, where if a.ndim else ..., value)


def _on(name: str, change: Callable[[Array], Array], where: str = "everywhere") -> Callable[[Arrays], None]:
    def apply(arrays: Arrays) -> None:
        arrays |= {key: change(a) for key, a in arrays.items() if key.name == name and PLACES[where](key)}

    return apply


def damages(arrays: Arrays, method: str) -> Iterator[Damage]:
    """All of them, for arrays of an index of one method that can be loaded; they are not written."""
    names = sorted({key.name for key in arrays})
    shapes = {label: lambda a, form=form: form(a if a.ndim else np.stack([a, a])) for label, form in FORMS.items()}
    for name in names:
        for where, there in PLACES.items():
            if len(names) > 1 or where != "everywhere":  # else it is an index of another method
                yield Damage(f"{name}: missing {where}", _drop(lambda k, n=name, of=there: k.name == n and of(k)))
            for label, form in {**shapes, **DTYPES}.items():
                yield Damage(f"{name}: {label} {where}", _on(name, form, where))
        sample = arrays[ArrayKey(name, *VICTIM)]
        for label, value in VALUES[sample.dtype.kind].items():
            yield Damage(f"{name}: {label}", _on(name, _set(value)))
            yield Damage(f"{name}: {label} once", _on(name, _set(value, (-1,) * sample.ndim), "in a KV head"))
    yield from _of_meaning(names)
    yield from _of_whole(method)


def _of_meaning(names: list[str]) -> Iterator[Damage]:
    """By what an array means."""

    def damage(name: str, label: str, change: Callable[[Array], Array], *, fits: bool = False) -> Damage:
        return Damage(f"{name}: {label}", _on(name, change), fits)

    for name in names:
        last = name.rpartition(".")[2]
        if last == "channels":
            yield damage(name, "descending", lambda a: a[::-1].copy())
            yield damage(name, "one twice", lambda a: np.concatenate([a[:1], a[:-1]]))
            yield damage(name, "one behind the last", lambda a: np.concatenate([a[:-1], a[-1:] + 100]))
        if last == "counts":
            yield damage(name, "one entry too many", lambda a: _added(a, 1))
            yield damage(name, "one entry too few", lambda a: _added(a, -1))
            yield damage(name, "all in the last block", lambda a: _moved(a, -1))
            yield damage(name, "all in the first block", lambda a: _moved(a, 0))
            yield damage(name, "one of a block in another", lambda a: _added(_added(a, 1), -1, 1))
        if last == "places":
            yield damage(name, "all 255", lambda a: np.full_like(a, 255))
            yield damage(name, "all 0", lambda a: np.zeros_like(a))
            yield damage(name, "descending", lambda a: a[..., ::-1].copy())
            yield damage(name, "the first one other", lambda a: _replaced(a, (..., 0), a[..., 0] ^ 0xFF))
        if last == "block_sizes":
            for size in (0, -16, 1, 17, 128, 1 << 30):
                yield damage(name, f"{size} tokens", _set(size))
            yield damage(name, "of another head", lambda a: np.where(a == 16, 64, 16).astype(a.dtype))
        if last.endswith(("scale", "radius")):
            yield damage(name, "negative", lambda a: -np.abs(a) - 1)
            yield damage(name, "all 0", lambda a: np.zeros_like(a), fits=True)
            most = 131072.0 if last.startswith(("keys", "mean", "min", "max", "center")) else 65504.0
            yield damage(name, "as large as may be", _set(most), fits=True)
        if last.endswith(("_scale", "_zero")):
            yield damage(name, "1e30", _set(1e30))
        if last == "centroids":
            yield damage(name, "1,000 times as long", lambda a: (a * 1000).astype(a.dtype))
            yield damage(name, "all 0", lambda a: np.zeros_like(a), fits=True)
        if last.endswith("packed") or last == "codes":
            yield damage(name, "all 255", lambda a: np.full_like(a, 255), fits=True)
            yield damage(name, "random", _random, fits=True)


def _random(a: Array) -> Array:
    return np.random.default_rng(1).integers(0, 256, a.shape, np.uint8)


def _replaced(a: Array, where: Any, value: Any) -> Array:
    a[where] = value
    return a


def _added(a: Array, more: int, block: int = 0) -> Array:
    a[..., block] += more
    return a


def _moved(a: Array, block: int) -> Array:
    out = np.zeros_like(a)
    out[..., block] = a.sum(axis=-1)
    return out


def _of_whole(method: str) -> Iterator[Damage]:
    """To the index as a whole."""
    yield Damage("no array of a layer", _drop(lambda k: k.layer == VICTIM[0]))
    yield Damage("no array of a KV head", _drop(lambda k: (k.layer, k.kv_head) == VICTIM))
    for where in PLACES:
        yield Damage(f"an array too many {where}", _more(f"{method}.more", where))
    yield Damage("an array without a name", _more(f"{method}.", "everywhere"))
    yield Damage("an array of a method that nobody knows", _more("other.more", "everywhere"), fits=True)
    for what, of in (("layer", "layer"), ("KV head", "kv_head")):

        def add(arrays: Arrays, of: str = of) -> None:
            arrays |= {key._replace(**{of: 1000 + getattr(key, of)}): a for key, a in arrays.items()}

        def exchange(arrays: Arrays, of: str = of) -> None:
            others = {1: 0, 0: 1}
            numbers = {key: others.get(getattr(key, of), getattr(key, of)) for key in arrays}
            arrays |= {key: arrays[key._replace(**{of: number})] for key, number in numbers.items()}

        yield Damage(f"a {what} too many", add, fits=True)
        # Heads may differ in size, and say so.
        yield Damage(f"{what}s exchanged", exchange, fits=True)


def _drop(which: Callable[[ArrayKey], bool]) -> Callable[[Arrays], None]:
    def apply(arrays: Arrays) -> None:
        for key in [key for key in arrays if which(key)]:
            del arrays[key]

    return apply


def _more(name: str, where: str) -> Callable[[Arrays], None]:
    """Adds an array of this name where the first of the others is."""

    def apply(arrays: Arrays) -> None:
        first = min(key.name for key in arrays)
        arrays |= {key._replace(name=name): a for key, a in arrays.items() if key.name == first and PLACES[where](key)}

    return apply


DAMAGED, WHOLE, OWN = 272, 208, 3
"""Tokens of the two prefixes, and of a request behind them."""
SERIALS = (1, 2, 3)
"""Two requests on the damaged index's prefix, one on the other's."""
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
    """Of one index in a step.

    Attributes:
        index: which.
        selections: by anchor layer.
        wrong: by layer, whether a row on it attended anything but what was selected and its own tokens.
    """

    index: ResidentIndex
    selections: Selections
    wrong: list[bool]


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
    """A method, a store with one whole index and one that is damaged, and a server's decode steps by each path."""

    def __init__(self, raw: dict[str, Any], device: torch.device, folder: Path) -> None:
        self.spec, self.device = parse_spec(raw), device
        dim, dtype = (128, torch.bfloat16) if device.type == "cuda" else (64, torch.float32)
        paths = {"reference": False} | ({} if graph_refusal(self.spec.method) else {"decode graphs": True})
        self.servers = {
            path: Server(device, len(SERIALS), dtype, dim=dim, kernels=kernels, spec=self.spec)
            for path, kernels in paths.items()
        }
        self.model = sample_model(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=dim, v_head_dim=dim)
        self.store = CountingStore(folder, create=True)
        self.store.open()
        self.builds = 0
        for server in self.servers.values():  # all have the same slots, keys and queries
            (damaged, first), (whole, second) = server.prefix(DAMAGED), server.prefix(WHOLE)
            for serial in SERIALS:
                server.join(serial, whole if serial == SERIALS[-1] else damaged, None, OWN)
            q = 2 * torch.randn(LAYERS, len(SERIALS), KV_HEADS * GQA, dim, generator=server.gen)
        self.q = q.to(device, dtype)
        self.arrays = self._arrays_of(first)
        self.whole = self._loaded(self._arrays_of(second), WHOLE)

    def _arrays_of(self, index: ResidentIndex) -> Arrays:
        return {
            ArrayKey(f"{self.spec.method}.{name}", layer, head): array.cpu().numpy()
            for layer, built in enumerate(index.layers)
            for head, pieces in enumerate(split_heads(built))
            for name, array in pieces.items()
        }

    def _loaded(self, arrays: Arrays, prefix_len: int) -> ResidentIndex:
        """As the loader leaves an index that is stored as a builder would, of a made-up prompt of that length."""
        self.builds += 1
        identity = sample_identity(list(range(prefix_len)), model=self.model)
        info = BuildInfo(created=float(self.builds))
        entry = self.store.put(IndexPayload(identity, arrays, spec={}, stats={}, info=info))
        loader = Residency(self.store, self.spec, LAYERS, KV_HEADS, self.device, 1 << 32)
        index = loader.acquire(entry)
        assert index.loaded is not None
        index.loaded.result()
        loader.close()
        return index

    def planted(self, damage: Damage) -> ResidentIndex:
        """The index of the longer prefix with a damage, as the loader leaves it."""
        arrays = {key: array.copy() for key, array in self.arrays.items()}
        damage.apply(arrays)
        return self._loaded({key: array.copy(order="C") for key, array in arrays.items()}, DAMAGED)

    def step(self, path: str, damaged: ResidentIndex | None) -> list[Found]:
        """A decode step by one of `servers` beside the whole index, which is the last one. None: requests on its prefix
        have no index.
        """
        server = self.servers[path]
        server.index = dict(zip(SERIALS, (damaged, damaged, self.whole), strict=True))
        batch = server.batch(list(SERIALS), [server.lens[serial] for serial in SERIALS])
        for _ in range(3):  # until the slots in common are known
            server.tracker.learn(batch)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        plan = server.sparse.plan(batch)
        if plan is None or server.sparse.begin(plan, batch) is None:
            raise RuntimeError("the step is not attended by the indexes")
        groups, starts = [], [0] * len(SERIALS)
        for prefix, index in zip(plan.selects.prefixes, plan.indexes, strict=True):
            slots = server.slots_of(SERIALS[prefix.rows[0]], 0, prefix.length)
            groups.append(OracleGroup(index, slots, list(prefix.rows)))
            for row in prefix.rows:
                starts[row] = prefix.length
        own = [server.slots_of(*of) for of in zip(SERIALS, starts, batch.seq_lens, strict=True)]
        found = [Found(group.index, {}, []) for group in groups]
        sm_scale = self.q.shape[-1] ** -0.5
        for layer, kv in enumerate(server.caches):
            out = server.sparse.run(self.q[layer], kv, layer, sm_scale)
            for number, group in enumerate(groups if layer in server.anchors else ()):
                group.kept[layer] = found[number].selections[layer] = server.listed(number, group.slots, layer)
            wanted = server.oracle.run(self.q[layer], kv, groups, own, layer, sm_scale)
            off = (out.float() - wanted).norm(dim=2) / wanted.norm(dim=2)
            right = off < (0.05 if self.device.type == "cuda" else 1e-4)  # NaN is not
            for group, of in zip(groups, found, strict=True):
                of.wrong.append(not bool(right[group.rows].all()))
        return found


def judge(bench: Bench, tally: Tally, what: str, found: Sequence[Found], alone: Selections) -> None:
    """Look at a step of an accepted index and the whole one, which selects what is given `alone` without the other."""
    for index, selections, wrong in found:
        for layer, selection in selections.items():
            try:
                selection.check_integrity(index.prefix_len)
            except ValueError as error:
                tally.fail(OUTSIDE, f"{what}, layer {layer}: {error}")
        for layer in [layer for layer, off in enumerate(wrong) if off]:
            tally.fail(OTHER, f"{what}, layer {layer}: attention of other slots")
    for layer, selection in found[-1].selections.items():
        for mine, theirs in zip(selection.positions.tolist(), alone[layer].positions.tolist(), strict=True):
            # On a GPU sums are cut by the batch: scores that nearly tie may change places.
            if len(set(mine) ^ set(theirs)) > (len(mine) // 10 if bench.device.type == "cuda" else 0):
                tally.fail(OTHER, f"{what}, layer {layer}: the whole index selects otherwise")


EXCEPTION, OUTSIDE, OTHER = "exceptions", "positions outside", "selections of another index"
LOADER = "refused without a report or a reason", "accepted although it does not fit", "refused although it fits"


def run(name: str, device: torch.device, sample: int | None, unchecked: bool) -> list[Tally]:
    """All damages of one method. Returns a tally per decode path; the loader's is part of the first."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(METHODS[name], device, Path(folder))
        alone = {path: bench.step(path, None)[-1].selections for path in bench.servers}
        tallies = {path: Tally(path) for path in alone}
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
            for path, tally in tallies.items():
                if refused or (unchecked and path != "reference"):
                    continue
                try:
                    judge(bench, tally, damage.name, bench.step(path, index), alone[path])
                except Exception as error:
                    tally.fail(EXCEPTION, f"{damage.name}: {type(error).__name__}: {error}")
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
