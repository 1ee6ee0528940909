"""Copies of the repository, and pytest in them: what failed, how long it took, and nothing left running behind it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutant_plugin import FAILED, ONLY

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-0.5.16" / "bin" / "python"
WORKERS = 2
_RUN = "MUTANTS_RUN"


@dataclass(frozen=True)
class Command:
    """One pytest command of the day suite: its environment and what it collects."""

    name: str
    environment: dict[str, str]
    paths: tuple[str, ...]

    def takes(self, test: str) -> bool:
        """Whether a test, or a path, is one of this command's."""
        return test.startswith("tests/prefix_kernels/triton") == (self.name == "triton")


#: What `make test` runs on the first of the SGLang versions.
DAY = (
    Command("triton", {"TRITON_INTERPRET": "1"}, ("tests/prefix_kernels/triton",)),
    Command("rest", {}, ()),
)
NOT_OF_THE_DAY = "full"


class Copy:
    """A clone of the committed tree in a temporary folder. Its packages come before those that are installed."""

    def __init__(self, folder: Path, commit: str) -> None:
        self.root = folder
        subprocess.run(["git", "clone", "-q", "--shared", "--no-checkout", ROOT, folder], check=True)
        subprocess.run(["git", "checkout", "-q", "--detach", commit], cwd=folder, check=True)

    def clean(self) -> None:
        """As committed, and nothing else."""
        subprocess.run(["git", "checkout", "-q", "--force", "."], cwd=self.root, check=True)
        subprocess.run(["git", "clean", "-fdxq"], cwd=self.root, check=True)

    @property
    def environment(self) -> dict[str, str]:
        roots = [self.root, self.root / "kernels", self.root / "index_store", Path(__file__).parent]
        # A mutant may be as long and as new as what was compiled before it.
        return {"PYTHONPATH": os.pathsep.join(map(str, roots)), "PYTHONDONTWRITEBYTECODE": "1"}

    def check(self) -> None:
        """Raises where this copy's packages are not those that its tests would import."""
        code = "import sglang_ext, prefix_kernels, prefix_index as p; print(sglang_ext.__path__[0], p.__path__[0])"
        run = subprocess.run(
            [PYTHON, "-c", code],
            cwd=tempfile.gettempdir(),
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=True,
        )
        outside = [path for path in run.stdout.split() if self.root.resolve() not in Path(path).resolve().parents]
        if outside:
            raise RuntimeError(f"expected packages below {self.root}, got {outside}")


@contextlib.contextmanager
def copies(count: int, commit: str) -> Iterator[list[Copy]]:
    """Clean copies, removed in the end."""
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        made = [Copy(folder / f"copy-{number}", commit) for number in range(count)]
        made[0].check()
        yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Outcome:
    """How a run of pytest ended.

    Attributes:
        status: pytest's; None: time was up.
        failed: tests that failed, and modules that could not be collected.
    """

    status: int | None
    failed: list[str]
    seconds: float

    @property
    def red(self) -> bool:
        return bool(self.failed) or self.status not in (0, 5, None)


def run_pytest(
    copy: Copy,
    command: Command,
    *,
    tests: Sequence[str] = (),
    paths: Sequence[str] = (),
    limits: dict[str, float] | None = None,
    workers: int = 0,
    flags: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    seconds: float,
    log: Path | None = None,
) -> Outcome:
    """One command of the day suite in a copy.

    Args:
        tests: their ids, modules in the order to run them; none: all of the paths.
        paths: to collect, where no tests are named.
        limits: seconds of single tests.
        workers: of xdist; 0: without it.
        flags: of pytest.
        seconds: for all of it.
        log: where everything that is said goes.
    """
    # Short: sockets of tests have their names below it.
    scratch = Path(tempfile.mkdtemp(prefix="mu-"))
    words = [PYTHON, "-m", "pytest", "-p", "mutant_plugin", "-p", "no:cacheprovider", "-m", f"not {NOT_OF_THE_DAY}"]
    words += ["-n", str(workers), "--dist", "loadgroup", "--no-loadscope-reorder"] if workers else []
    words += [f"--basetemp={scratch / 't'}", *flags]
    env = {**os.environ, **copy.environment, **command.environment, **(environment or {})}
    env |= {FAILED: str(scratch / "failed"), _RUN: uuid.uuid4().hex}
    if tests:
        (scratch / "only").write_text(json.dumps({"ids": list(tests), "limits": limits or {}}))
        env[ONLY] = str(scratch / "only")
        paths = list(dict.fromkeys(test.split("::")[0] for test in tests))
    log = log or scratch / "log"
    begun, status = time.monotonic(), None
    with log.open("w") as out:
        process = subprocess.Popen(
            [*words, *paths], cwd=copy.root, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(seconds)
        if status is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        _end_all(env[_RUN])
        process.wait()
    failed = [json.loads(line) for line in (scratch / "failed").open()] if (scratch / "failed").exists() else []
    known = set(tests)
    failed = [name if name in known else name.rsplit("@", 1)[0] if "@" in name else name for name in failed]
    shutil.rmtree(scratch, ignore_errors=True)
    return Outcome(status, list(dict.fromkeys(failed)), round(time.monotonic() - begun, 1))


def _end_all(run: str) -> None:
    """Servers have sessions of their own: whatever was started by a run and is still there has its mark."""
    mark = f"{_RUN}={run}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
