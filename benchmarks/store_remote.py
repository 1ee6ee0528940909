"""The remote tier over a real Mooncake (TCP, loopback) and over obstore's file system: putting and getting one index.

Each row is one JSON line: medians and [min, max] of GB/s over the repeats, beside it what the client library moves
in the same run with bare buffers, no headers and no checksums, and what is needed to repeat it. A row is written only
after what came back was verified.

    python -m benchmarks.store_remote                                   # from the root; a minute or two
    python -m benchmarks.store_remote --only mooncake --chunk-mib 16 32 64 --repeats 7

Mooncake runs in a network namespace of its own (`tests/prefix_index/mooncake_cluster.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from prefix_index import ArrayKey, IndexPayload
from prefix_index.remote import Blobs, ObjectBlobs, RemoteStore
from tests.prefix_index import mooncake_cluster
from tests.prefix_index.samples import sample_identity

LAYERS, HEADS = 32, 8
MIB = 1 << 20


def payload_of(nbytes: int) -> IndexPayload:
    """32 layers x 8 KV heads of random bytes."""
    rng = np.random.default_rng(0)
    each = nbytes // (LAYERS * HEADS)
    arrays: Any = {
        ArrayKey("bench.k", layer, head): rng.integers(0, 256, each, np.uint8)
        for layer in range(LAYERS)
        for head in range(HEADS)
    }
    return IndexPayload(sample_identity(), arrays)


def rate(nbytes: int, call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return nbytes / (time.perf_counter() - begun) / 1e9


def summary(rates: list[float]) -> dict[str, Any]:
    return {"gb_s": round(statistics.median(rates), 3), "range": [round(min(rates), 3), round(max(rates), 3)]}


def bare(blobs: Blobs, nbytes: int, chunk_nbytes: int) -> Iterator[tuple[float, float]]:
    """(put, get) GB/s of the client library alone: one value after the other, no header, no checksum."""
    source = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    target = np.zeros_like(source)
    count = nbytes // chunk_nbytes

    def put() -> None:
        for i in range(count):
            blobs.write(f"bare/{i}", memoryview(source[i * chunk_nbytes : (i + 1) * chunk_nbytes]))

    def get() -> None:
        for i in range(count):
            blobs.read(f"bare/{i}", 0, [memoryview(target[i * chunk_nbytes : (i + 1) * chunk_nbytes])])

    while True:
        figures = rate(nbytes, put), rate(nbytes, get)
        if not np.array_equal(source, target):
            raise RuntimeError("the client library gave other bytes back")
        for i in range(count):
            blobs.delete(f"bare/{i}")
        yield figures


def measure(blobs: Blobs, payload: IndexPayload, chunk_nbytes: int, repeats: int) -> dict[str, Any]:
    """Puts, gets, and part gets in turn with the bare client."""
    figures: dict[str, list[float]] = {name: [] for name in ("put", "get", "bare_put", "bare_get")}
    with RemoteStore(blobs, chunk_nbytes=chunk_nbytes, timeout_s=60) as store:
        nbytes = store.put(payload).nbytes
        alone = bare(blobs, nbytes // chunk_nbytes * chunk_nbytes, chunk_nbytes)

        for turn in range(repeats + 1):
            store.delete(payload.identity)
            row = {"put": rate(nbytes, lambda: store.put(payload))}
            row["get"] = rate(nbytes, lambda: store.get(payload.identity).close())
            row["bare_put"], row["bare_get"] = next(alone)
            for name, value in row.items() if turn else ():  # the first turn warms up
                figures[name].append(value)
        with store.get(payload.identity) as index:
            index.verify()
            if not all(np.array_equal(index.array(*key), array) for key, array in payload.arrays.items()):
                raise RuntimeError("the store gave other bytes back")
    return {"nbytes": nbytes, **{name: summary(values) for name, values in figures.items()}}


@contextmanager
def backend(name: str, folder: str) -> Iterator[Blobs]:
    if name == "mooncake":
        with mooncake_cluster.Cluster(segment_nbytes=2 << 30) as cluster:
            yield cluster.blobs()
    else:
        yield ObjectBlobs(Path(folder, "objects").as_uri())


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return {
        "device": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "mooncake": version("mooncake-transfer-engine-non-cuda"),
        "obstore": version("obstore"),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "repeats": args.repeats,
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["mooncake", "file"], default=["mooncake", "file"])
    parser.add_argument("--mib", type=int, default=256, help="size of the index")
    parser.add_argument("--chunk-mib", type=int, nargs="+", default=[32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", help="where the file backend works; by default a folder for temporary files")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "store_remote.jsonl")
    args = parser.parse_args()
    if not mooncake_cluster.is_inside():
        command = [sys.executable, "-m", "benchmarks.store_remote", *sys.argv[1:]]
        done = mooncake_cluster.run_inside(command, timeout_s=900)
        print(done.stdout, end="")
        return done.returncode
    payload = payload_of(args.mib * MIB)
    for name in args.only:
        for chunk_mib in args.chunk_mib:
            with tempfile.TemporaryDirectory(dir=args.dir) as folder, backend(name, folder) as blobs:
                row = measure(blobs, payload, chunk_mib * MIB, args.repeats)
            row = {"backend": name, "chunk_mib": chunk_mib, **row, **provenance(args)}
            with args.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(json.dumps({k: v for k, v in row.items() if isinstance(v, dict) or k in ("backend", "chunk_mib")}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
