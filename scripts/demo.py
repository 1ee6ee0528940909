"""The demo: a stock SGLang server with --sparse-attn, shared documents, dense against sparse in one table.

    make demo                                  # makes the virtual environment first
    python scripts/demo.py --tokens 16384      # in an environment that is there

Everything it writes lies in .demo/, which it makes anew at each run. It starts one server on a free port and
one prebuild job, and stops both whatever happens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.needle.tasks import Document, Question, make_document
from scripts.servers import Reply, ask_many, free_port, keep_ratio_between, process_group, server_state

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".demo"
TASKS = ("single_needle", "many_keys", "multi_query", "variable_tracking")
START_SECONDS = 900
"""FlashInfer compiles its kernels at a machine's first start: 4 minutes on 16 cores."""
WAITED_SECONDS = 30
"""Between two lines that say what a start waits for."""
PREBUILD_SECONDS = 1200

CPU_FLAGS = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-overlap-schedule"),
    *("--disable-cuda-graph", "--chunked-prefill-size", "4096"),
    "--sleep-on-idle",  # an idle scheduler would keep one core busy while the indexes are built
]
# The server and the prebuild job live side by side on one GPU, so neither takes most of it.
GPU_FLAGS = ["--attention-backend", "flashinfer", "--mem-fraction-static", "0.4"]


class DemoError(Exception):
    """A step failed; the message says what happened and what to do, `log` where more is written."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True)
class Pass:
    """All questions asked once: what came back and what the server counted meanwhile."""

    replies: list[Reply]
    seconds: float
    before: dict[str, Any]
    after: dict[str, Any]

    def counted(self, name: str) -> int:
        """By how much a counter grew."""
        return int(self.after[name]) - int(self.before[name])

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over wall-clock time, prefill of the questions included."""
        return sum(reply.completion_tokens for reply in self.replies) / self.seconds

    @property
    def cached_tokens(self) -> float:
        """Mean per request."""
        return sum(reply.cached_tokens for reply in self.replies) / len(self.replies)

    def attended(self) -> float:
        """Prefix tokens that one request attends per step, mean over all layers."""
        pairs = zip(self.before["attended_tokens_per_layer"], self.after["attended_tokens_per_layer"], strict=True)
        grown = [after - before for before, after in pairs]
        return sum(grown) / len(grown) / self.counted("sparse_rows")


class Progress:
    """Lines with the time since the start."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begun:5.0f} s] {text}", flush=True)


def has_gpu() -> bool:
    """Whether this torch can use a GPU; asked in a process of its own, so that the demo holds none."""
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def process(command: Sequence[str], log: Path) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """A process of the demo, see `process_group`."""
    # Without it, SGLang's torch backend recomputes the whole document's attention for each question (CPU only).
    environment = {**os.environ, "SGLANG_EXT_CPU_SHORT_EXTEND": "1", "PYTHONUNBUFFERED": "1"}
    return process_group(command, log, cwd=ROOT, env=environment)


def wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path, say: Progress) -> None:
    """Return once the server answers; raise when it ends or takes too long. Meanwhile say what its log says last."""
    deadline = time.monotonic() + START_SECONDS
    due = time.monotonic() + WAITED_SECONDS
    while time.monotonic() < deadline:
        if time.monotonic() > due:
            due += WAITED_SECONDS
            last = (log.read_text(errors="replace").splitlines() or [""])[-1]
            say(f"  still starting (the first start on a GPU compiles kernels): {last[-120:].strip()}")
        if server.poll() is not None:
            raise DemoError(f"The server ended with status {server.returncode} while starting.", log)
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise DemoError(f"The server did not answer within {START_SECONDS} s. A busy machine? Try again.", log)


def prebuild(args: argparse.Namespace, flags: Sequence[str], say: Progress) -> list[dict[str, Any]]:
    """Index the documents in a process of their own; returns its report, one line per document."""
    report, log = FOLDER / "report.jsonl", FOLDER / "prebuild.log"
    command = [sys.executable, "-m", "sglang_ext.cli", "prebuild", "--model-path", str(args.model)]
    command += ["--prompts", str(FOLDER / "prompts.jsonl"), "--store", str(FOLDER / "store")]
    command += ["--sparse-attn-config", args.config, "--report", str(report), "--", *flags]
    lines: list[dict[str, Any]] = []
    deadline = time.monotonic() + PREBUILD_SECONDS
    with process(command, log) as job:
        ended = False
        while not ended:
            ended = job.poll() is not None
            text = report.read_text() if report.exists() else ""
            for line in text[: text.rfind("\n") + 1].splitlines()[len(lines) :]:
                lines.append(json.loads(line))
                last = lines[-1]
                say(f"  {last['id']}: {last['status']} {last.get('detail', '')}".rstrip())
            if time.monotonic() > deadline:
                raise DemoError(f"The prebuild did not end within {PREBUILD_SECONDS} s.", log)
            time.sleep(0.2)
    bad = [line["id"] for line in lines if line["status"] != "built"]
    if job.returncode or bad or len(lines) != len(TASKS):
        built = f"expected {len(TASKS)} indexes, got {len(lines) - len(bad)}"
        raise DemoError(f"The prebuild ended with status {job.returncode}; {built}.", log)
    return lines


def ask_all(
    url: str, prompts: Sequence[str], longest: int, args: argparse.Namespace, say: Progress, *, sparse: bool
) -> Pass:
    """Ask every question once, several in flight."""
    answered = 0

    def count() -> None:
        nonlocal answered
        answered += 1
        if answered % 8 == 0 or answered == len(prompts):
            say(f"  {'sparse' if sparse else 'dense'}: {answered} of {len(prompts)} questions answered")

    before = server_state(url)
    begun = time.perf_counter()
    replies = ask_many(
        url, prompts, sparse=sparse, concurrency=args.concurrency, max_new_tokens=longest, on_reply=count
    )
    return Pass(replies, time.perf_counter() - begun, before, server_state(url))


def write_inputs(documents: Sequence[Document]) -> None:
    """prompts.jsonl for the prebuild, and one ready-made question for the reader's next command."""
    shutil.rmtree(FOLDER / "store", ignore_errors=True)
    (FOLDER / "store").mkdir(parents=True)
    (FOLDER / "report.jsonl").unlink(missing_ok=True)
    with open(FOLDER / "prompts.jsonl", "w") as file:
        for document in documents:
            file.write(json.dumps({"id": document.task, "text": document.text}) + "\n")
    first = documents[0]
    question = {
        "text": f"{first.text} {first.questions[0].text}",
        "sampling_params": {"temperature": 0, "max_new_tokens": first.questions[0].max_new_tokens},
    }
    (FOLDER / "question.json").write_text(json.dumps(question))


def table(
    dense: Pass, sparse: Pass, questions: Sequence[tuple[str, Question]], report: Sequence[dict[str, Any]]
) -> str:
    """The result: at most 80 columns."""

    def right(which: Pass, task: str | None) -> str:
        scores = [
            question.score(reply.text)
            for (name, question), reply in zip(questions, which.replies, strict=True)
            if task in (None, name)
        ]
        return f"{sum(scores)} of {len(scores)}  {100 * sum(scores) / len(scores):5.1f} %"

    tokens = sum(line["num_tokens"] for line in report) / len(report)
    keep = keep_ratio_between(sparse.before, sparse.after) or 1.0
    rows = [
        ("answers right", right(dense, None), right(sparse, None)),
        *((f"  {task}", right(dense, task), right(sparse, task)) for task in TASKS),
        ("keep ratio, mean over all layers", "100.0 %", f"{100 * keep:.1f} %"),
        ("prefix tokens attended per step", f"{tokens:.0f}", f"{sparse.attended():.0f}"),
        ("cached tokens per request", f"{dense.cached_tokens:.0f}", f"{sparse.cached_tokens:.0f}"),
        ("tokens decoded sparsely", str(dense.counted("sparse_rows")), str(sparse.counted("sparse_rows"))),
        ("tokens per second (see below)", f"{dense.tokens_per_second:.1f}", f"{sparse.tokens_per_second:.1f}"),
    ]
    index, kv, built = (sum(line[name] for line in report) for name in ("index_bytes", "kv_bytes", "build_seconds"))
    rule = "-" * 78
    lines = [rule, f"  {'':34}{'dense':>20}{'sparse':>20}", rule]
    lines += [f"  {name:34}{left:>20}{other:>20}" for name, left, other in rows]
    lines += [
        rule,
        f"  documents                         {len(report)} of {tokens:.0f} tokens, built once, kept on disk",
        f"  index size against KV size        {index / 1e6:.1f} MB / {kv / 1e6:.1f} MB = {100 * index / kv:.1f} %",
        f"  build time                        {built:.1f} s in all, {built / len(report):.1f} s a document",
        rule,
    ]
    return "\n".join(lines)


def fallbacks(sparse: Pass) -> str:
    """What decoded dense in the sparse pass, and why, by the server's own words."""
    grown = Counter(sparse.after["fallbacks"]) - Counter(sparse.before["fallbacks"])
    reasons = ", ".join(f"{name}: {count} requests" for name, count in sorted(grown.items()))
    return f"{sparse.counted('dense_rows')} tokens decoded dense in the sparse pass ({reasons or 'no reason'})"


def run(args: argparse.Namespace) -> int:
    """The whole demo; returns the exit status."""
    say = Progress()
    if not (args.model / "config.json").is_file():
        raise DemoError(f"Expected a model in {args.model}, found none. Is this a complete checkout?")
    say(f"writing {len(TASKS)} shared documents of {args.tokens} tokens to .demo/prompts.jsonl")
    per_task = -(-args.questions // len(TASKS))
    try:
        documents = [make_document(task, args.seed, args.tokens, per_task) for task in TASKS]
    except ValueError as error:
        raise DemoError(f"Expected --tokens and --questions that make documents: {error}.") from error
    write_inputs(documents)
    questions = [(doc.task, question) for doc in documents for question in doc.questions]
    prompts = [f"{doc.text} {question.text}" for doc in documents for question in doc.questions]
    longest = max(question.max_new_tokens for _, question in questions)

    gpu = has_gpu()
    total = (args.tokens + 1024) * (len(TASKS) + 2)
    flags = [*(GPU_FLAGS if gpu else CPU_FLAGS), "--page-size", "16", "--max-running-requests", "16"]
    flags += ["--context-length", str(args.tokens + 1024), "--max-total-tokens", str(total)]
    url, log = f"http://127.0.0.1:{args.port}", FOLDER / "server.log"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(args.model), *flags]
    command += ["--port", str(args.port), "--sparse-attn", "--sparse-attn-store", str(FOLDER / "store")]
    command += ["--sparse-attn-config", args.config]
    say(f"starting SGLang with --sparse-attn on {'the GPU' if gpu else 'the CPU'}, port {args.port}")
    with process(command, log) as server:
        wait_until_ready(server, url, log, say)
        say("building the indexes in a process of its own: sglang-ext prebuild")
        report = prebuild(args, flags, say)
        try:
            say("prefilling each document once, so that both passes find it in the prefix cache")
            ask_many(url, prompts[::per_task], sparse=False, concurrency=1, max_new_tokens=1)
            say(f"asking {len(prompts)} questions, {args.concurrency} in flight")
            dense, sparse = (ask_all(url, prompts, longest, args, say, sparse=sparse) for sparse in (False, True))
        except (OSError, RuntimeError) as error:
            raise DemoError(f"A request failed: {error}", log) from error
    if sparse.counted("sparse_rows") == 0:
        raise DemoError(f"The sparse path did not run: {fallbacks(sparse)}.", log)
    print()
    print(table(dense, sparse, questions, report))
    if sparse.counted("dense_rows"):
        print(f"  {fallbacks(sparse)}")
    if not gpu:
        print("  Speed on a CPU is that of the reference implementation in plain torch: it shows")
        print("  that the path works, not how fast it is.")
    print("\nNext, the same server with these indexes, left running:\n\n    make serve\n")
    print("and then, in another terminal, a question behind the first document:\n")
    print("    curl -s localhost:30000/generate -H 'Content-Type: application/json' \\")
    print("      -d @.demo/question.json\n")
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "needle", help="checkpoint folder")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of each shared document")
    parser.add_argument("--questions", type=int, default=32, help="questions in all, asked twice")
    parser.add_argument("--concurrency", type=int, default=8, help="questions in flight")
    parser.add_argument(
        "--config", default="@scripts/demo_config.json", help="--sparse-attn-config of server and prebuild"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the documents")
    parser.add_argument("--port", type=int, default=None, help="of the server (default: a free one)")
    args = parser.parse_args(argv)
    args.port = args.port or free_port()
    return args


def main() -> int:
    """Run, and turn failures into a message with the end of the log."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run(parse())
    except KeyboardInterrupt:
        print("\ninterrupted; the server was stopped", file=sys.stderr)
        return 130
    except DemoError as error:
        print(f"\nThe demo failed. {error}", file=sys.stderr)
        if error.log is not None and error.log.exists():
            print(f"\nThe end of {error.log.relative_to(ROOT)}:\n", file=sys.stderr)
            for line in error.log.read_text(errors="replace").splitlines()[-25:]:
                print(f"    {line[:200]}", file=sys.stderr)
            print(f"\nThe whole log is {error.log}. Fix what it names and run it again.", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
