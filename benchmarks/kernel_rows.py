"""Rows of `kernel_bench.py`: one JSON line each, with what it takes to repeat them."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Row = dict[str, Any]

MEMORY_RATE = 4.3e12
"""Bytes a second of an H200, as a device copy reaches them."""

#: Provenance that a row must share to count as measured already.
_SAME = ("device", "torch", "triton", "flashinfer", "commit")


class Run:
    """Rows of one result file.

    Args:
        out: appended to.
        origin: provenance of what is measured now.
    """

    def __init__(self, out: Path, origin: Row) -> None:
        self._out, self.origin, self.failed = out, origin, 0
        known = [json.loads(line) for line in out.open()] if out.exists() else []
        self.rows = [row for row in known if all(row.get(key) == origin[key] for key in _SAME)]

    def has(self, key: Row) -> bool:
        """Whether a green row with this key is there."""
        return any(row["green"] and all(row.get(k) == v for k, v in key.items()) for row in self.rows)

    def add(self, row: Row) -> None:
        """Write a row and print it."""
        row = {**row, **self.origin}
        with self._out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        self.failed += not row["green"]
        print(brief(row), flush=True)


def named(row: Row) -> str:
    """The case, with its budget where it has one."""
    return f"{row['case']}, {row['budget']:,}" if row.get("budget") else str(row["case"])


def brief(row: Row) -> str:
    """One row for the terminal."""
    at = f"{named(row):23s} {row['context']:7d} tokens, batch {row['batch']:3d} in {row['groups']:2d} groups"
    if not row["green"]:
        return f"FAILED {at}: {row.get('error') or row['gate']}; no time"
    text = f"{at}: {row['us']:10.2f} us [{row['us_p10']:.2f}, {row['us_p90']:.2f}]"
    if "floor_us" in row:
        text += f", floor {row['floor_us']:.2f}"
    elif row.get("share") is not None:
        text += f", {row['share']:6.1%} of 4.3 TB/s"
    for rival, ratio in row.get("ratio", {}).items():
        text += f", {ratio:.3f} x {rival}"
    return text if row["meaningful"] else text + " (times mean nothing here)"


def origin(args: argparse.Namespace, *, cpu: bool = False) -> Row:
    """Where a row comes from; `args` may hold the commit, where the tree is no git checkout. `cpu`: whatever GPU there
    is, nothing ran on it.
    """
    import torch

    on_gpu = torch.cuda.is_available() and not cpu
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "CPU",
        "sglang": installed("sglang"),
        "torch": torch.__version__,
        "commit": getattr(args, "commit", None) or commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def provenance(args: argparse.Namespace) -> Row:
    """What a row of `kernel_bench.py` needs to be repeated, beside its key."""
    import torch

    return {
        **origin(args, cpu=args.smoke),
        "driver": None if args.smoke else driver(),
        "cuda": torch.version.cuda,
        "triton": installed("triton"),
        "flashinfer": installed("flashinfer-python"),
        "seed": args.seed,
    }


def driver() -> str:
    """The NVIDIA driver's version; empty where nvidia-smi does not say."""
    return _told("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]


def commit() -> str:
    """The checkout's commit, `+` when files were changed; empty outside a git checkout."""
    return _told("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*")


def _told(*command: str) -> str:
    """What a program prints; nothing where it is not installed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
