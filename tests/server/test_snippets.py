"""The commands of the documents, run as a reader would: as they stand there, from top to bottom.

What a reader puts in is put in here: the model, the flags of this machine, free ports, a socket in the test's folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from scripts.needle.tasks import make_document
from scripts.servers import free_ports
from tests.server.harness import CPU_FLAGS, JOB_SECONDS, MODEL, READY, ROOT, START_SECONDS
from tests.server.jobs import running

pytestmark = pytest.mark.full

DOCUMENTS = ("README.md", "docs/using.md", "docs/operating.md", "docs/calibration.md")
#: Lines that make or change an environment, or have a test of their own.
NOT_HERE = ("make ", "pip ")
#: What a command says once it serves; it then runs until it is told to end.
SERVES = {"-m sglang.launch_server": READY, "sglang-ext store serve": "serves "}
#: Small jobs: the shipped model behind short prompts.
SMALL = ["--max-total-tokens", "16384", "--page-size", "16", "--disable-overlap-schedule", "--sleep-on-idle"]


def commands(document: str) -> list[str]:
    """The lines of the bash blocks, continued ones joined, comments left out."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / document).read_text(), re.S)
    text = "\n".join(blocks).replace("\\\n", " ")
    lines = (re.sub(r"\s+#.*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(NOT_HERE)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a reader stands: a checkout with prompts of theirs."""
    for name in ("models", "benchmarks", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    documents = [make_document("many_keys", seed=seed, num_tokens=1024, num_questions=2) for seed in (5, 6)]
    lines = [{"id": f"doc-{n}", "text": one.text, "question": one.questions[0].text} for n, one in enumerate(documents)]
    (tmp_path / "development.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = [{name: line[name] for name in ("id", "text")} for line in lines]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    np.save(tmp_path / "needle_layers_0_2.npy", np.array([[0, 1]] * 6, dtype=np.int32))
    (tmp_path / "sparse.json").write_text(json.dumps({"keep_ratio": 0.2, "store_min_free_bytes": 16 << 20}))
    return tmp_path


def put_in(line: str, folder: Path) -> str:
    """What a reader replaces: names in capitals, the GPU's flags, a socket's place, ports, lengths of a large run."""
    port, nccl_port = free_ports(2)
    cpu = " ".join([*CPU_FLAGS, *SMALL, "--nccl-port", str(nccl_port)])
    line = re.sub(r"--attention-backend (flashinfer|triton)( --sampling-backend.*)?", cpu, line)
    line = line.replace("SGLANG FLAGS", cpu).replace("--lengths 4096 8192 16384", "--lengths 1024 1536")
    line = re.sub(r"\bMODEL\b", str(MODEL), line).replace("HEAD_MAP.npy", "needle_layers_0_2.npy")
    line = re.sub(r"\bDIR\b", "./store", line).replace(
        "ipc:///run/user/1000/sglang-ext/store", f"ipc://{folder}/socket"
    )
    if "launch_server" in line:
        (folder / "store").mkdir(exist_ok=True)
        line += f" --port {port}"
        line += f" {cpu}" if "--device" not in line else f" --nccl-port {nccl_port}"
    return line


ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def wait_for(process: subprocess.Popen[bytes], line: str, log: Path) -> None:
    """Until a job ends well, or until a service serves."""
    ready = next((words for name, words in SERVES.items() if name in line), None)
    deadline = time.monotonic() + (JOB_SECONDS if ready is None else START_SECONDS)
    said = ""
    while process.poll() is None and (ready is None or ready not in said):
        assert time.monotonic() < deadline, f"{line}: {said[-3000:]}"
        time.sleep(0.3)
        said = log.read_text(errors="replace")
    assert process.poll() == (0 if ready is None else None), f"{line}: {log.read_text(errors='replace')[-3000:]}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_commands_of_a_document_run_from_top_to_bottom(document: str, folder: Path) -> None:
    """A store service stays up for the commands that come behind it."""
    with contextlib.ExitStack() as services:
        for number, line in enumerate(commands(document)):
            ours, log = put_in(line, folder), folder / f"{number}.log"
            command = running(["bash", "-c", ours], log, ENVIRONMENT, folder)
            if "store serve" in ours:
                wait_for(services.enter_context(command), ours, log)
            else:
                with command as process:
                    wait_for(process, ours, log)


@pytest.mark.parametrize("document", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_the_tables_of_committed_results_print(document: str, tmp_path: Path) -> None:
    lines = [
        line for line in commands(f"docs/{document}") if re.search(r"--(table|summary)\b.* benchmarks/results/", line)
    ]
    for line in lines:
        if "--plot" in line:
            line = re.sub(r"--plot \S+", f"--plot {tmp_path / 'plot.png'}", line)
        env = {**os.environ, **ENVIRONMENT}
        done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stderr[-2000:]}"
        assert done.stdout.strip()
