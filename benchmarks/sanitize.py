#!/usr/bin/env python3
"""NVIDIA's compute-sanitizer over small cases of every Triton kernel, on a GPU.

    python benchmarks/sanitize.py --out sanitize.jsonl                      # memcheck and racecheck; minutes
    python benchmarks/sanitize.py --tools synccheck --only score_items_sm90_kernel --out more.jsonl

Each kernel is looked at in some of the GPU's tests of one file, in a process of their own; other launches of these are
left alone. Memory comes from CUDA itself (`PYTORCH_NO_CUDA_MEMORY_CACHING`), so that a read behind a tensor is
one behind an allocation. First memcheck and racecheck have to find the error that was planted for each in a kernel of
this file: else its silence would say nothing, and the run ends. (The other tools have none.) Exit status 1 where a case
has an error, fails its tests, runs none, or launches the kernel never.

A kernel with `gl.warp_specialize` hands what its warp groups capture, and the number of the group's code, through
shared memory: the first warps write, all threads meet at `barrier.sync 1`, the others read, all meet again. In kernels
that have barriers in memory, too, racecheck reports these reads and writes as races of each other. Those are counted as
`of the dispatch`, and as no error: `tests/benchmarks/test_sanitize.py` shows of the compiled code that barriers lie
between them. Nothing at a line of a kernel's body is among them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from kernel_rows import driver, installed, origin
from tqdm import tqdm
from triton.runtime.jit import JITFunction

from prefix_kernels.kernels import COUNTS

ROOT = Path(__file__).resolve().parents[1]
FOUND = 86
"""Exit status of the sanitizer where it found an error."""
_ERRORS = re.compile(r"(?:ERROR SUMMARY: |RACECHECK SUMMARY: )(\d+)")
_TOLD = 400
"""Lines of what was told that a row keeps, where it is not clean."""
_PASSED = re.compile(r"(\d+) passed")
_ENTRY = re.compile(r"(?:Error|Warning): Race reported between ")
_END = re.compile(r"\n=========[ ]*(?:\n|$)")
_REPORTED = re.compile(r"(Read|Write) access at (\w+)\+0x[0-9a-f]+ in (\S+?):(\d+)")
_launched: Counter[str] = Counter()


class Case(NamedTuple):
    """Tests that launch some kernels.

    Attributes:
        kernels: that are looked at, one after the other.
        file: of tests, below `tests/prefix_kernels`.
        tests: pytest's -k.
    """

    kernels: tuple[str, ...]
    file: str
    tests: str


CASES = (
    Case(
        ("score_items_sm90_kernel", "list_kernel"),
        "test_specialized_selection.py",
        "scores_and_lists and (8x128 and (129 or lengths or row and tokens or listed and 65 and 16) or 128x64 and 129) "
        "or number_of_channels and (32 or 96) and not bfloat16",
    ),
    Case(
        ("attend_items_sm90_kernel",),
        "triton/test_grouped_attention.py",
        "(every_group_size and 65) or bits_that_the_merge_would or lists_of_each_head or alone_on_their_lists",
    ),
    Case(
        ("attend_items_kernel", "merge_items_kernel"),
        "triton/test_grouped_attention.py",
        "groups_and_suffixes or (every_group_size and 65) or fp8 or lists_of_each_head or first_channels",
    ),
    Case(
        ("score_kernel", "list_kernel"),
        "triton/test_anchor_selection.py",
        "scores_and_lists or some_channels or groups_share",
    ),
    Case(("score_kernel",), "triton/test_sparse_decode.py", "every_method and ball and channels"),
    Case(
        ("pick_kernel", "score_kernel", "list_kernel"),
        "triton/test_csa_selection.py",
        "test_tokens or tables_and_codes or groups_share",
    ),
    Case(("depth_kernel", "merge_kernel"), "triton/test_sparse_decode.py", "every_method and union"),
    Case(("copy_slot_lists_kernel", "common_slots_kernel"), "triton/test_slot_lists.py", "follow or compared"),
    Case(
        ("post_kernel", "wait_kernel", "answer_kernel", "copy_words_kernel", "copy_lists_kernel"),
        "triton/test_peer_lists.py",
        "answer or copied",
    ),
    Case(("attend_tiles_kernel",), "triton/test_prefill_attention.py", "as_the_reference and (extend or decode)"),
    Case(
        ("look_up_kernel", "count_kernel", "fetch_kernel", "gather_kernel"),
        "triton/test_residents.py",
        "steps_as_the or reuse or without_groups or gathered",
    ),
)


@triton.jit
def planted_read_kernel(values_ptr, out_ptr, BLOCK: tl.constexpr):  # noqa: N803
    """Reads one block behind its tensor."""
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(values_ptr + BLOCK + at))


@triton.jit
def planted_race_kernel(out_ptr, BLOCK: tl.constexpr):  # noqa: N803
    """Threads write to shared memory, and each reads what another one wrote, without a barrier."""
    at = tl.inline_asm_elementwise(COUNTS, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    place = tl.arange(0, BLOCK)
    tl.inline_asm_elementwise(
        "st.shared.b32 [$1], 7; mov.b32 $0, 0;", "=r,r", [place * 4 + at], dtype=tl.int32, is_pure=False, pack=1
    )
    other = (BLOCK - 1 - place) * 4 + at
    read = tl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=r,r", [other], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out_ptr + place, read)


def plant(tool: str) -> None:
    """Launch the kernel whose error a tool has to find."""
    out, values = (torch.zeros(256, dtype=torch.int32, device="cuda") for _ in range(2))  # not two rows of one tensor
    if tool == "racecheck":
        planted_race_kernel[(1,)](out, BLOCK=256, num_warps=8)
    else:
        planted_read_kernel[(1,)](values, out, BLOCK=256)
    torch.cuda.synchronize()


PLANTED = {
    "memcheck": ("planted_read_kernel", re.compile(r"Invalid __global__ read")),
    "racecheck": ("planted_race_kernel", re.compile(r"(?i)hazard|race reported")),
}
"""By tool, the kernel in which it has to find an error, and how it calls that."""


def sanitize(tool: str, kernel: str, command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run a command of Python's under a tool of the sanitizer's.

    Returns:
        errors (None where the tool said nothing), races of the dispatch, tests that passed, whether any failed,
        launches of the kernel, the exit status, seconds, and what was told where anything but silence came of it.
    """
    flags = ["--tool", tool, "--error-exitcode", str(FOUND), "--kernel-name", f"kns={kernel}"]
    folders = (ROOT, ROOT / "kernels", ROOT / "index_store", ROOT / "benchmarks")
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    begun = time.monotonic()
    job = subprocess.Popen(
        ["compute-sanitizer", *flags, sys.executable, *command],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    status: int | None = None
    try:
        told, _ = job.communicate(timeout=seconds)
        status = job.returncode
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)  # the tests, too, which hold the GPU's memory
        told, _ = job.communicate()
    errors = [int(count) for count in _ERRORS.findall(told)]
    aside = dispatched(told, kernel)
    summaries = [line for line in told.splitlines() if _PASSED.search(line)]
    row = {
        "errors": sum(errors) - aside if errors else None,
        "of the dispatch": aside,
        "passed": int(_PASSED.findall(summaries[-1])[0]) if summaries else 0,
        "failed": any(word in line for line in summaries for word in ("failed", "error")),
        "launches": sum(int(times) for times in re.findall(rf"launched {kernel} (\d+) times", told)),
        "status": status,
        "seconds": round(time.monotonic() - begun, 1),
    }
    silent = row["errors"] == 0 and status == 0
    return row if silent else row | {"told": told.splitlines()[-_TOLD:]}


def parts(source: str, kernel: str) -> set[int]:
    """Lines of a source file at which a kernel starts its warp groups; none for a kernel without."""
    for one in ast.walk(ast.parse(source)):
        if isinstance(one, ast.FunctionDef) and one.name == kernel:
            # The call, and an `if` that chooses between two: the compiler names either, or the beginning.
            calls = {
                part.lineno
                for part in ast.walk(one)
                if isinstance(part, ast.Expr | ast.If)
                and re.match(r"\w+\.warp_specialize\(", ast.unparse(part.body[0] if isinstance(part, ast.If) else part))
            }
            return calls and calls | {one.lineno}
    return set()


def dispatched(told: str, kernel: str) -> int:
    """Races of racecheck's report on a kernel whose accesses all stand where it starts its warp groups."""
    sources = {path.name: path.read_text() for path in sorted((ROOT / "kernels").rglob("*.py"))}
    found = {name: parts(text, kernel) for name, text in sources.items() if f"\ndef {kernel}(" in text}
    count = 0
    for entry in _ENTRY.split(told)[1:]:
        text = _END.split(entry)[0]
        named = _REPORTED.findall(text)
        at_start = [name == kernel and int(line) in found.get(Path(file).name, ()) for _, name, file, line in named]
        count += 1 < len(re.findall(r"\baccess at\b", text)) == len(named) and all(at_start)
    return count


def run_case(args: argparse.Namespace, what: tuple[str, str, Case]) -> dict[str, Any]:
    """One kernel of a case under one tool."""
    tool, kernel, case = what
    file = ROOT / "tests" / "prefix_kernels" / case.file
    plugins = ["-p", "no:cacheprovider", "-p", Path(__file__).stem]
    pytest = ["-m", "pytest", "-o", "addopts=", "-q", *plugins, "-k", case.tests, str(file)]
    row = sanitize(tool, kernel, pytest, args.case_seconds)
    ended = row["status"] == 0 or (row["status"] == FOUND and row["of the dispatch"] > 0)
    good = row["errors"] == 0 and ended and not row["failed"] and row["passed"] > 0 and row["launches"] > 0
    return {"good": good, "tool": tool, "kernel": kernel, "file": case.file, "tests": case.tests, **row}


# -- as a plugin of pytest ---------------------------------------------------------------------------------------


def pytest_configure() -> None:
    """Count launches of Triton kernels from now on, before there is any."""
    run = JITFunction.run

    def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        _launched[kernel.fn.__name__] += 1
        return run(kernel, *args, **kwargs)

    JITFunction.run = counted


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each kernel."""
    for name, times in sorted(_launched.items()):
        terminalreporter.write_line(f"launched {name} {times} times")


# -- command line ----------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    kernels = sorted({name for case in CASES for name in case.kernels})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="sanitize.jsonl", help="rows are appended")
    parser.add_argument(
        "--tools",
        nargs="+",
        default=["memcheck", "racecheck"],
        choices=["memcheck", "racecheck", "initcheck", "synccheck"],
    )
    parser.add_argument("--only", nargs="+", metavar="KERNEL", choices=kernels, help=f"of {', '.join(kernels)}")
    parser.add_argument("--jobs", type=int, default=4, help="cases at a time, each with the sanitizer's memory")
    parser.add_argument("--case-seconds", type=float, default=300.0, help="a case that takes longer has failed")
    parser.add_argument("--commit", default="", help="of the code, where there is no git checkout")
    parser.add_argument("--runtime", default="", help="what the machine runs in, such as a virtual machine's name")
    parser.add_argument("--plant", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> int:
    """Run; 1 where a case is not clean, 2 where a tool does not find what was planted."""
    args = parse()
    if args.plant:
        plant(args.plant)
        return 0
    if shutil.which("compute-sanitizer") is None or not torch.cuda.is_available():
        raise SystemExit(
            "expected compute-sanitizer (of the CUDA toolkit) on the path and a CUDA device, got "
            f"{shutil.which('compute-sanitizer')} and {torch.cuda.device_count()} devices; run it on a GPU's machine "
            "with the toolkit's bin folder on the path"
        )
    told = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True).stdout
    version = (re.findall(r"(?i)version (\S+)", told) or [told.strip()])[0]
    where = {"sanitizer": version, "runtime": args.runtime, "driver": driver(), "triton": installed("triton")}
    where |= origin(args)
    for tool in [one for one in args.tools if one in PLANTED]:
        kernel, error = PLANTED[tool]
        found = sanitize(tool, kernel, [__file__, "--plant", tool], args.case_seconds)
        told = "\n".join(found.get("told", []))
        if not found["errors"] or found["status"] != FOUND or kernel not in told or not error.search(told):
            print(told)
            print(f"expected {tool} to find the error planted in {kernel}, got {found['errors']} errors: see above")
            return 2
        print(f"{tool}: finds the error planted in {kernel}")
    chosen = [(kernel, case) for case in CASES for kernel in case.kernels if not args.only or kernel in args.only]
    work = [(tool, *one) for tool in args.tools for one in chosen]
    failed = 0
    with ThreadPoolExecutor(args.jobs) as pool, Path(args.out).open("a") as file:
        for row in tqdm(pool.map(partial(run_case, args), work), total=len(work), unit="case"):
            file.write(json.dumps({**row, **where}) + "\n")
            file.flush()
            failed += not row["good"]
            what = f"{row['tool']:10s} {row['kernel']} ({row['file']}): {row['errors']} errors"
            what += f", {row['of the dispatch']} of the dispatch" if row["of the dispatch"] else ""
            tqdm.write(f"{what} in {row['launches']} launches, {row['passed']} tests, {row['seconds']:.0f} s")
            if not row["good"]:
                tqdm.write("\n".join(row.get("told", [])))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
