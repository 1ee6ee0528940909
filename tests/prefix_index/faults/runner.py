"""Finds the campaigns of this folder, runs each in a process of its own under a time limit, and says what came out."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import pkgutil
import platform
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .outcome import Campaign, Outcome

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("numpy", "msgspec", "xxhash", "pyzmq")
WIDTH = 80


def campaigns() -> dict[str, Campaign]:
    """Every campaign by name, of all modules in this folder that have some."""
    found: dict[str, Campaign] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not module.name.startswith("_"):
            found |= getattr(importlib.import_module(f"{__package__}.{module.name}"), "CAMPAIGNS", {})
    return found


def run_one(name: str, count: int, seed: int, limit_s: float) -> Outcome:
    """Runs a campaign in a session of its own, which is killed as a whole after ``limit_s`` seconds: then it is
    stuck. One that ends without an outcome has tried nothing, which is not ok either.
    """
    command = [sys.executable, "-m", f"{__package__}.runner", name, str(count), str(seed)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, start_new_session=True)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return Outcome(name, 0, stuck=1, detail=f"not done after {limit_s:.0f} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        lines, complaints = out.read().splitlines(), err.read().splitlines()
    with contextlib.suppress(IndexError, ValueError, TypeError):
        return Outcome(**json.loads(lines[-1]))
    return Outcome(name, 0, detail=f"exit {process.returncode}: {' | '.join(complaints[-3:])}")


def provenance(seed: int) -> dict[str, Any]:
    """What a row needs to be repeated."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "kernel": platform.release().partition("-")[0],
        "filesystem": filesystem_of(tempfile.gettempdir()),
        "cpus": os.cpu_count(),
        "root": os.geteuid() == 0,
        "seed": seed,
        "versions": versions,
    }


def filesystem_of(path: str) -> str:
    """The type of the file system that ``path`` lies on, from the mount table; empty where there is none."""
    best, kind = "", ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, mount, name, *_ = line.split(" ")
            inside = path == mount or path.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, name
    return kind


def row_of(outcome: Outcome, seconds: float, source: dict[str, Any]) -> dict[str, Any]:
    return {**dataclasses.asdict(outcome), "ok": outcome.ok, "seconds": round(seconds, 1), **source}


def source_of(row: dict[str, Any]) -> str:
    """A row's provenance as a line of text."""
    versions = ", ".join(f"{name} {number}" for name, number in row["versions"].items())
    who = "root" if row["root"] else "an ordinary user"
    return (
        f"{row['date']}, commit `{row['commit']}`, Linux {row['kernel']}, {row['filesystem']}, {row['cpus']} CPUs, "
        f"as {who}, seed {row['seed']}; {versions}."
    )


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table below their provenance; a campaign is told by its docstring."""
    found = campaigns()
    lines = [*dict.fromkeys(source_of(row) for row in rows), ""]
    lines += ["| campaign | what is done, and what must hold | tried | lost | wrong | stuck |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    for row in rows:
        what = " ".join((found[row["name"]].run.__doc__ or "").split()).rstrip(".") if row["name"] in found else ""
        counts = " | ".join(f"{row[count]:,}" for count in ("tried", "lost", "wrong", "stuck"))
        lines.append(f"| `{row['name']}` | {what} | {counts} |")
    return "\n".join(lines)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows at 80 columns, their details below them; a bad one is marked."""
    lines = [f"{'campaign':<38}{'tried':>9}{'lost':>6}{'wrong':>7}{'stuck':>7}{'seconds':>9}"]
    for row in rows:
        lines.append(
            f"{row['name'][:37]:<38}{row['tried']:>9,}{row['lost']:>6}{row['wrong']:>7}{row['stuck']:>7}"
            f"{row['seconds']:>9.1f}"
        )
        sign = "  " if row["ok"] else "! "
        lines += textwrap.wrap(row["detail"], WIDTH, initial_indent=f"  {sign}", subsequent_indent="    ")
    bad = sum(not row["ok"] for row in rows)
    lines.append(f"{len(rows)} campaigns, {sum(row['tried'] for row in rows):,} faults, {bad} not ok")
    return "\n".join(lines)


if __name__ == "__main__":  # one campaign, NAME COUNT SEED: the last line of the output is its outcome as JSON
    print(json.dumps(dataclasses.asdict(campaigns()[sys.argv[1]].run(int(sys.argv[2]), int(sys.argv[3])))), flush=True)
