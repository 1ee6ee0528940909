"""The house: source roots, sizes, and nothing in the sources that belongs to one machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house_report import circle, imports

ROOT = Path(__file__).resolve().parents[1]

# Put together here, so that this file does not hold what it looks for.
MACHINE_PATHS = [f"/{name}/" for name in ("work", "opt", "root", "mnt")]
REGISTRIES = [
    "pypi" + ".org",
    "python" + "hosted",
    "--index" + "-url",
    "--extra-index" + "-url",
    "download." + "pytorch",
]

MAX_LINES = 600
MAX_FILE_BYTES = 16 << 20


def project_files() -> list[Path]:
    """What is in the repository or would be: tracked files and new ones that are not ignored."""
    try:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize("folder", ["kernels", "index_store"])
def test_source_roots_are_no_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists(), (
        f"{folder}/ is a source root; an __init__.py would shadow the distribution of that import name"
    )


def test_nothing_in_the_sources_belongs_to_one_machine() -> None:
    pattern = re.compile(
        "|".join([*(rf"(?<![\w.]){re.escape(path)}" for path in MACHINE_PATHS), *map(re.escape, REGISTRIES)])
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in project_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="ignore").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "machine paths or registry hosts:\n" + "\n".join(found)


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports within functions and for type checkers count, too."""
    assert circle(imports()) == []


def test_modules_are_short_and_files_small() -> None:
    sources = [path for path in project_files() if path.suffix == ".py"]
    too_long = [str(path.relative_to(ROOT)) for path in sources if len(path.read_text().splitlines()) > MAX_LINES]
    assert not too_long, f"expected modules of at most {MAX_LINES} lines, got {too_long}"
    too_big = [str(path.relative_to(ROOT)) for path in project_files() if path.stat().st_size > MAX_FILE_BYTES]
    assert not too_big, f"expected files of at most {MAX_FILE_BYTES} bytes, got {too_big}"


@pytest.mark.parametrize("script", [".ci/run", "scripts/make_venv.sh"])
def test_scripts_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("python", "arguments", "message"),
    [
        (sys.executable, [], "expected VERSION and DIR"),
        ("no-such-python", ["0.5.16", "new"], "expected PYTHON to be Python 3.10 to 3.12"),
        (sys.executable, ["0.5.16", "taken"], "to be a virtual environment or absent"),
    ],
    ids=["arguments", "PYTHON", "folder taken"],
)
def test_make_venv_says_what_is_wrong(python: str, arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    command = [str(ROOT / "scripts" / "make_venv.sh"), *arguments]
    env = {**os.environ, "PYTHON": python, "SGLANG_EXT_FULL": "0"}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert message in run.stderr
