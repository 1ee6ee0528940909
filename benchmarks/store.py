"""The index store against the disk and the memory below it: reading, writing, listing, latency.

Each row is one JSON line: medians and [min, max] over the repeats, the figure it is compared with from the same
run, and what is needed to repeat it. A row is written only after what was measured gave the right bytes.

    python benchmarks/store.py                      # all rows, about 5 minutes, 3 GB of disk
    python benchmarks/store.py --only read warm --dir FOLDER_ON_THE_DISK --repeats 9

`read`, `write`  cold reads and durable writes against `fio` on the same disk, in turn; not measured without `fio`
`warm`           from the page cache, against memcpy and xxh3
`scan`           start-up with many entries
`latency`        get and read of a 1 MB index
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from engines import append, forget
from kernel_rows import Row, commit

from prefix_index import (
    ArrayKey,
    BuildInfo,
    FileStore,
    IndexCorrupt,
    IndexFile,
    IndexPayload,
    IndexWriter,
)
from prefix_index.folder import open_direct
from prefix_index.reader import PIECE_NBYTES, THREADS, fresh_buffer
from tests.prefix_index.samples import sample_identity


def seconds_of(act: Callable[[], object]) -> float:
    """Wall seconds of one call; its result is freed outside them."""
    gc.collect()
    begun = time.perf_counter()
    kept = act()
    took = time.perf_counter() - begun
    del kept
    return took


def in_turn(repeats: int, **acts: Callable[[], float]) -> dict[str, list[float]]:
    """Each of the measurements `repeats` times, in turn and in changing order; the first round does not count."""
    values: dict[str, list[float]] = {name: [] for name in acts}
    for repeat in range(repeats + 1):
        for name in list(acts) if repeat % 2 else reversed(acts):
            value = acts[name]()
            if repeat:
                values[name].append(value)
    return values


def summary(values: Sequence[float]) -> Row:
    return {
        "median": round(statistics.median(values), 3),
        "spread": [round(f(values), 3) for f in (min, max)],
    }


def rates(values: dict[str, list[float]], nbytes: int) -> Row:
    """Seconds of `ours` and `reference` as GB/s (1e9 bytes), and the ratio of the medians."""
    gbs = {name: [nbytes / s / 1e9 for s in seconds] for name, seconds in values.items()}
    ratio = statistics.median(gbs["ours"]) / statistics.median(gbs["reference"])
    return {**{f"{name}_GB_s": summary(v) for name, v in gbs.items()}, "ratio": round(ratio, 3)}


def fio(path: Path, nbytes: int, mode: str) -> float:
    """Seconds for `nbytes` of `path` at the rate of fio: read with O_DIRECT, or write and fsync."""
    size = nbytes - nbytes % (1 << 20)
    command = ["fio", "--name=bench", f"--filename={path}", f"--size={size}", "--bs=1M", "--output-format=json"]
    if mode == "read":
        command += ["--rw=read", "--ioengine=libaio", "--iodepth=8", "--direct=1", "--readonly"]
    else:
        command += ["--rw=write", "--ioengine=psync", "--end_fsync=1", "--fallocate=posix", "--overwrite=0"]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][mode]
    if job["io_bytes"] != size:
        raise RuntimeError(f"fio: expected {size} bytes, found {job['io_bytes']}")
    return nbytes / float(job["bw_bytes"])


def fio_version() -> str:
    """What a row calls its reference; empty where there is none."""
    if shutil.which("fio") is None:
        print("reads and writes of the disk: not measured, expected fio on the path, got none", file=sys.stderr)
        return ""
    found = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return f"{found}: bs 1M; read libaio iodepth 8 direct; write psync fallocate end_fsync"


def payload_of(nbytes: int, *, names: int = 6, layers: int = 32, heads: int = 8) -> IndexPayload:
    """An index of about `nbytes` bytes in the shape of an 8B model's: 32 layers, 8 KV heads, 6 arrays of each."""
    each = max(nbytes // (names * layers * heads) // 8, 1)
    rng = np.random.default_rng(0)
    arrays = {
        ArrayKey(f"bench.a{n}", layer, head): rng.integers(0, 1 << 63, each, np.int64)
        for layer in range(layers)
        for n in range(names)
        for head in range(heads)
    }
    return IndexPayload(sample_identity(np.arange(32)), arrays, info=BuildInfo(created=1.7e9, build_seconds=60.0))


def write_plainly(path: Path, payload: IndexPayload, *, sync: bool = True) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("wb", buffering=0) as out:
        IndexWriter(payload).write(out)
        if sync:
            os.fsync(out.fileno())


def check_arrays(what: str, found: Mapping[ArrayKey, Any], payload: IndexPayload) -> None:
    if found.keys() != payload.arrays.keys() or not all(np.array_equal(found[k], payload.arrays[k]) for k in found):
        raise RuntimeError(f"{what}: expected the arrays that were written, found others")


def check_read(path: Path, payload: IndexPayload) -> None:
    """What is measured reads the right bytes, and notices wrong ones. Raises RuntimeError."""
    check_arrays(str(path), read_all(path), payload)
    at = path.stat().st_size // 2
    with path.open("r+b", buffering=0) as file:
        right = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([right[0] ^ 1]), at)
        try:
            read_all(path)
            raise RuntimeError(f"{path}: expected IndexCorrupt for a flipped bit, found none")
        except IndexCorrupt:
            os.pwrite(file.fileno(), right, at)
            os.fsync(file.fileno())


def read_rows(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    if not has_direct(folder):
        print("cold reads: not measured, this file system has no O_DIRECT (choose another by --dir)", file=sys.stderr)
        return
    reference = fio_version()
    for size in args.sizes if reference else ():
        path = stored(folder / "cold", size)
        nbytes = path.stat().st_size

        def cold(path: Path = path) -> float:
            forget(path)
            return seconds_of(lambda: read_all(path))

        values = in_turn(args.repeats, ours=cold, reference=partial(fio, path, nbytes, "read"))
        yield {"bench": "cold_read_verified", "nbytes": nbytes, "reference": reference, **rates(values, nbytes)}


def stored(path: Path, nbytes: int) -> Path:
    """An index in a file, and checked: reads right, damage found."""
    payload = payload_of(nbytes)
    write_plainly(path, payload)
    check_read(path, payload)
    return path


def read_all(path: Path) -> Any:
    with IndexFile.open(path) as index:
        return index.read_many()


def warm_rows(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    for size in args.sizes:
        yield warm_row(stored(folder / "warm", size), args.repeats)


def warm_row(path: Path, repeats: int) -> Row:
    source = np.frombuffer(path.read_bytes(), np.uint8)

    def copy() -> Any:
        out = fresh_buffer(len(source))
        np.copyto(out, source)
        xxhash.xxh3_64_intdigest(out)
        return out

    values = in_turn(repeats, ours=lambda: seconds_of(lambda: read_all(path)), reference=lambda: seconds_of(copy))
    reference = "one thread: memcpy, then xxh3-64 of the copy"
    row = {"bench": "warm_read_verified", "nbytes": len(source), "reference": reference}
    return {**row, **rates(values, len(source))}


def write_rows(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    reference = fio_version()
    if not reference:
        return
    payload = payload_of(args.write_size)
    nbytes = sum(array.nbytes for array in payload.arrays.values())
    with FileStore(folder / "write", create=True) as store:

        def put() -> float:
            store.delete(payload.identity)
            return seconds_of(lambda: store.put(payload))

        def plainly() -> float:
            path = folder / "plain"
            took = fio(path, nbytes, "write")
            path.unlink()
            return took

        put()
        check_read(store.path_of(payload.identity), payload)
        values = in_turn(args.repeats, ours=put, reference=plainly)
        check_read(store.path_of(payload.identity), payload)
    yield {"bench": "write_durable", "nbytes": nbytes, "reference": reference, **rates(values, nbytes)}


def scan_rows(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    store, payload = FileStore(folder / "scan", create=True), payload_of(64, names=1, layers=1, heads=1)
    store.open()
    first = payload.identity
    identities = [msgspec.structs.replace(first, prefix_hash=f"{i:064x}") for i in range(args.entries)]
    paths = [store.path_of(identity) for identity in identities]
    for path, identity in zip(paths, identities, strict=True):  # as put() would, without 10,000 times fsync
        write_plainly(path, IndexPayload(identity, payload.arrays, info=payload.info), sync=False)
    store.close()
    for state in ("cached", "cold"):
        seconds = []
        for _ in range(args.repeats):
            if state == "cold":
                os.sync()
                for path in paths:
                    forget(path)
            seconds.append(seconds_of(store.open))
            if {entry.digest for entry in store.list()} != {identity.digest for identity in identities}:
                raise RuntimeError("scan: expected all entries, found others")
            store.close()
        yield {"bench": "startup_scan", "entries": args.entries, "headers": state, "seconds": summary(seconds)}


def latency_rows(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Milliseconds of gets from an open store, and of the reading of all arrays after each."""
    payload = payload_of(1 << 20, names=1, layers=4, heads=8)
    seconds: dict[str, list[float]] = {"get": [], "get_and_read": []}
    with FileStore(folder / "latency", create=True) as store:
        store.put(payload)
        for _ in range(args.gets + 20):
            begun = time.perf_counter()
            with store.get(payload.identity) as index:
                opened = time.perf_counter()
                found = index.read_many()
            done = time.perf_counter()
            check_arrays("get", found, payload)
            seconds["get"].append(opened - begun)
            seconds["get_and_read"].append(done - begun)
    row: Row = {"nbytes": sum(a.nbytes for a in found.values()), "arrays": len(found), "gets": args.gets}
    for name, each in seconds.items():
        row[f"{name}_ms"] = {f"p{q}": round(float(np.percentile(each[20:], q)) * 1e3, 3) for q in (50, 99)}
    yield {"bench": "get_latency", "store": "embedded file", **row}


BENCHES: dict[str, Callable[[argparse.Namespace, Path], Iterator[Row]]] = {
    "read": read_rows,
    "warm": warm_rows,
    "write": write_rows,
    "scan": scan_rows,
    "latency": latency_rows,
}


def provenance(args: argparse.Namespace, folder: Path) -> Row:
    """What a row needs to be repeated."""
    cpu = [line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(Path(where), kind, what) for what, where, kind in mounts if folder.resolve().is_relative_to(where)]
    _, filesystem, disk = max(above, key=lambda mount: len(mount[0].parts))
    return {
        "config": {"threads": THREADS, "piece_nbytes": PIECE_NBYTES, "repeats": args.repeats, "quick": args.quick},
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "cpu": f"{len(os.sched_getaffinity(0))} x {cpu[0] if cpu else platform.machine()}",
        "kernel": platform.release(),
        "filesystem": filesystem,
        "disk": disk,
        "direct": has_direct(folder),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: version(name) for name in ("msgspec", "numpy", "xxhash")},
    }


def has_direct(folder: Path) -> bool:
    """Whether this file system reads with O_DIRECT; without it, `cold` rows compare reads through the page cache."""
    path = folder / "direct"
    path.touch()
    with path.open("rb") as file:
        fd = open_direct(file.fileno())
    if fd is not None:
        os.close(fd)
    return fd is not None


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(BENCHES), choices=list(BENCHES), metavar="BENCH")
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure; default: where temporary files go")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "store.jsonl")
    parser.add_argument("--repeats", type=int, default=7, help="of each measurement, after one that does not count")
    parser.add_argument("--quick", action="store_true", help="small and few: does it run at all?")
    args = parser.parse_args(argv)
    args.sizes = [4 << 20, 20 << 20] if args.quick else [64 << 20, 256 << 20, 1 << 30]
    args.write_size = 8 << 20 if args.quick else 512 << 20
    args.entries, args.gets = (200, 50) if args.quick else (10_000, 1000)
    args.repeats = 2 if args.quick else args.repeats
    return args


def main() -> None:
    """Measure, and append the rows."""
    args = parse()
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        folder = Path(name)
        for bench in args.only:
            origin = provenance(args, folder)
            for row in BENCHES[bench](args, folder):
                append(args.out, {**row, **origin})
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
