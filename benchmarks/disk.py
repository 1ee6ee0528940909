"""What a disk and a stopwatch say: fio (or a plain reader and writer of our own), repeats in turn, summaries."""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prefix_index.reader import fresh_buffer

Row = dict[str, Any]


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


def summary(values: Sequence[float], digits: int = 3) -> Row:
    return {
        "median": round(statistics.median(values), digits),
        "spread": [round(f(values), digits) for f in (min, max)],
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


def plain(path: Path, nbytes: int, mode: str) -> float:
    """As `fio`, where there is none: 1 MiB at a time, reads by 8 threads."""
    flags = os.O_RDONLY | os.O_DIRECT if mode == "read" else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    buffer, fd = memoryview(fresh_buffer(8 << 20).data), os.open(path, flags)

    def part(thread: int) -> None:
        for offset in range(thread << 20, nbytes, 8 << 20):
            end = min(1 << 20, nbytes - offset)
            os.preadv(fd, [buffer[thread << 20 : (thread << 20) + end]], offset)

    begun = time.perf_counter()
    if mode == "read":
        threads = [threading.Thread(target=part, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        for offset in range(0, nbytes, 1 << 20):
            os.write(fd, buffer[: min(1 << 20, nbytes - offset)])
        os.fsync(fd)
    took = time.perf_counter() - begun
    os.close(fd)
    return took


def disk_reference() -> tuple[str, Callable[[Path, int, str], float]]:
    if shutil.which("fio"):
        found = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
        return f"{found}: bs 1M; read libaio iodepth 8 direct; write psync fallocate end_fsync", fio
    return "own plain reader (O_DIRECT, 1 MiB, 8 threads) and writer (1 MiB, fsync): fio is not installed", plain
