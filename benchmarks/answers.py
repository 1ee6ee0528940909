#!/usr/bin/env python3
"""Answers of a real language model, dense and sparse, on the same questions: what a speed may cost.

    make models                                                       # once
    python benchmarks/answers.py --out answers.jsonl                  # dense, exact and the default, on a GPU
    python benchmarks/answers.py --out answers.jsonl --suites forced documents ruler \\
        --config dense --config 'default 5%={"keep_ratio": 0.05}'     # configurations by name
    python benchmarks/answers.py --out answers.jsonl --suites documents --config default \\
        --config 'hosted={"build": "off", "offload": {"host_bytes": 9000000000}}'        # behind its indexes
    python benchmarks/answers.py --out answers.jsonl --suites own --model-path models/needle --lengths 65536
    python benchmarks/answers.py --table answers.jsonl --plot answers.png
    python benchmarks/answers.py --prompts development.jsonl --seed 500 --documents 4     # for `sglang-ext calibrate`

Each configuration is a server of its own, started here. `dense` is stock SGLang; `cascade` reads shared prefixes once,
exactly; the others select in every decode step (`"decode_path": "sparse"`), behind indexes built from the prompts'
own prefill. Suites:

    forced      teacher-forced agreement inside sustained decoding: dense's tokens are forced through the decode loop
    documents   many questions of six kinds behind one document, and conversations
    ruler       RULER's 13 tasks, each sample its own prefix
    own         the seven tasks of `models/needle`, which reads up to 147,456 tokens
    times       milliseconds of a decode step, of as many requests as are in flight (alone on its GPU)

Servers listen on loopback; `forced` starts them with `--enable-custom-logit-processor`: clients can run code there.
Rows are appended as they are measured, and none is measured twice: an interrupted run goes on. Dense is measured first,
since `forced` compares with its files in `--work`. Questions and documents are functions of `--seed`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from answers_data import KINDS, OWN_QUESTIONS, RULER_TASKS, Chat, Document, Question, documents, own_documents, ruler
from answers_table import plot, table
from engines import Row, append, grouped, launched, plugin_environment, read, sampling, sparse_flags, unmeasured
from kernel_rows import origin
from tqdm import tqdm

from scripts.needle.tasks import TASKS
from scripts.servers import keep_ratio_between, post, server_state
from sglang_ext.calibration.agreement import Agreement, agreement, check_generated, load_steps
from sglang_ext.cli.arguments import tp_size

DENSE = "dense"
SUITES = ("forced", "documents", "ruler", "own", "times")
FORCED_QUESTIONS = 16
"""Of a document, asked at once."""
START_SECONDS = 600.0
SPARSE_SHARE = 0.95
"""Of a selecting configuration's rows: the least that has to be decoded so."""

#: What every sparse configuration has unless it says otherwise: indexes by prefill, used by every step.
SELECTING: Row = {
    "build": "prefill",
    "decode_path": "sparse",
    "prefetch_policy": "wait_complete",
    "profile": "none",
    "index_gpu_bytes": 2 << 30,
    "share_prefixes": True,
    "min_shared_tokens": 1024,
}
USUAL: dict[str, Row] = {DENSE: {}, "cascade": {"build": "off", "decode_path": "cascade"}, "default": {}}
"""Configurations that have a name, measured where none is named; `--config NAME=JSON` gives others."""


@dataclass(frozen=True)
class Served:
    """A running server and the questions for it.

    Attributes:
        url: of the server.
        chat: of its model.
        sparse: whether it has the plugin, with counters.
        temperature: of answers to questions.
    """

    url: str
    chat: Chat
    sparse: bool
    temperature: float = 0.0

    def generate(self, document: Document, ids: Sequence[int], fields: Row) -> Row:
        """One request, in the document's own namespace.

        RULER's documents begin alike, and of a prompt that lies in the cache in part no index is built.
        """
        return post(self.url, "/generate", {"input_ids": list(ids), "extra_key": document.name, **fields})

    def warm(self, document: Document) -> None:
        """Prefill a document's prefix and, where the configuration says so, index it, or copy it to host memory."""
        self.generate(document, self.chat.prefix(document.text), {"sampling_params": sampling(8)})

    def converse(self, document: Document, turns: Sequence[Question]) -> list[tuple[float, int, Row]]:
        """Score, generated tokens, what the plugin says, of each turn; each answer stays in the context of the next."""
        ids, found = self.chat.prefix(document.text), []
        for number, question in enumerate(turns):
            ids += self.chat.question(question, first=number == 0)
            parameters = {"temperature": self.temperature, "max_new_tokens": question.max_new_tokens}
            reply = self.generate(document, ids, {"sampling_params": parameters})
            answer = reply["output_ids"]
            told = reply["meta_info"].get("sparse_attn", [{}])[0]
            found.append((question.score(self.chat.text(answer)), len(answer), told))
            ended = reply["meta_info"]["finish_reason"]["type"] == "stop"
            ids += answer[:-1] if ended and answer else answer
        return found

    def state(self) -> Row:
        """The plugin's counters; empty without the plugin."""
        return server_state(self.url) if self.sparse else {}


def counted(before: Row, after: Row) -> Row:
    """What the plugin counted between two states."""
    if not after:
        return {}
    names = ("sparse_rows", "cascade_rows", "dense_rows")
    counts = {name: after[name] - before[name] for name in names}
    return {**counts, "largest_group": after["largest_group"], "keep_ratio": keep_ratio_between(before, after)}


def ask(served: Served, docs: Sequence[Document], in_flight: int, done: Callable[[], None]) -> Iterator[Row]:
    """Ask all questions of these documents, so many at a time; a row for each task.

    `scores` has one entry for each question, `documents` the number of its document; `drafts` are tokens that lossless
    decode drafted, and those that were kept; `kept`, with --kept, has for each question its drafts, "1" where one was
    kept, else "0".
    """
    before, begun = served.state(), time.perf_counter()
    asked = [(number, turns) for number, document in enumerate(docs) for turns in document.conversations]

    def one(item: tuple[int, Sequence[Question]]) -> list[tuple[float, int, Row]]:
        found = served.converse(docs[item[0]], item[1])
        done()
        return found

    with ThreadPoolExecutor(in_flight) as pool:
        replies = list(pool.map(one, asked))
    ours = {**counted(before, served.state()), "seconds": time.perf_counter() - begun}
    ours["tokens"] = sum(size - 1 for found in replies for _, size, _ in found)
    tasks: dict[str, Row] = {}
    for (number, turns), found in zip(asked, replies, strict=True):
        for question, (score, _, told) in zip(turns, found, strict=True):
            row = tasks.setdefault(question.task, {"scores": [], "documents": [], "drafts": [0, 0]})
            row["scores"].append(round(score, 4))
            row["documents"].append(number)
            if "kept" in told:
                row.setdefault("kept", []).append(told["kept"])
            row["drafts"] = [row["drafts"][n] + told.get(name, 0) for n, name in enumerate(("drafted", "accepted"))]
    return ({"task": task, **row, **ours} for task, row in tasks.items())


def force(served: Served, docs: Sequence[Document], in_flight: int, steps: int, work: Path, name: str) -> Row:
    """Force dense's tokens, so many requests of one document at a time, and compare with dense's log-probabilities.

    Raises:
        FileNotFoundError: dense was not measured with this folder of references.
    """
    before = served.state()
    spans = {"all": 1, "full": in_flight}
    found: dict[str, list[Agreement]] = {span: [] for span in spans}
    kl_documents = []
    for document in docs:
        references = reference_paths(work, document)
        if not all(path.exists() for path in references):
            raise FileNotFoundError(
                f"expected dense's steps in {work}, got no {references[0].name}; measure the configuration {DENSE} "
                "with this --work and these flags"
            )
        outs = [path.with_name(f"{name}-{path.name}") for path in references]
        write_steps(served, document, in_flight, steps, outs, references)
        pairs = [(load_steps(reference), load_steps(out)) for reference, out in zip(references, outs, strict=True)]
        for out in outs:
            out.unlink()
        for span, rows in spans.items():
            found[span] += [one for pair in pairs if (one := agreement(*pair, rows))]
        kl_documents.append(statistics.fmean(one.kl for one in found["all"][-len(pairs) :]))
    means = {span: mean_agreement(own) for span, own in found.items() if own}
    return {**means, "kl_documents": kl_documents, **counted(before, served.state())}


def mean_agreement(found: Sequence[Agreement]) -> Row:
    """Over all steps of these."""
    steps = sum(one.steps for one in found)
    figures = ("kl", "top1", "delta")
    return {"steps": steps, **{name: sum(getattr(one, name) * one.steps for one in found) / steps for name in figures}}


def forced_prompts(served: Served, document: Document) -> list[list[int]]:
    """The first turns of a document's conversations."""
    prefix = served.chat.prefix(document.text)
    asked = document.conversations[:: max(1, len(document.conversations) // FORCED_QUESTIONS)][:FORCED_QUESTIONS]
    return [prefix + served.chat.question(turns[0], first=True) for turns in asked]


def reference_paths(work: Path, document: Document) -> list[Path]:
    """Where dense's own steps are."""
    count = min(FORCED_QUESTIONS, len(document.conversations))
    return [work / f"dense-{document.name}-{i}.npz" for i in range(count)]


def write_steps(
    served: Served, document: Document, in_flight: int, steps: int, outs: Sequence[Path], forced: Sequence[Path | None]
) -> None:
    """Answers with their log-probabilities, one file each: what was generated, or what another file has, forced."""
    from sglang_ext.compat.forced_tokens import forcing

    for out in outs:  # of a run that was interrupted
        out.unlink(missing_ok=True)
    fields = [forcing(out, steps, reference=path) for out, path in zip(outs, forced, strict=True)]
    with ThreadPoolExecutor(in_flight) as pool:
        replies = pool.map(partial(served.generate, document), forced_prompts(served, document), fields)
        for out, reply in zip(outs, replies, strict=True):
            check_generated(out, reply["output_ids"])


def reference_files(served: Served, docs: Sequence[Document], steps: int, work: Path) -> None:
    """Dense's own greedy answers with their log-probabilities, where they are not there yet."""
    work.mkdir(parents=True, exist_ok=True)
    for document in docs:
        outs = reference_paths(work, document)
        if not all(out.exists() for out in outs):
            write_steps(served, document, len(outs), steps, outs, [None] * len(outs))


def step_ms(served: Served, document: Document, in_flight: int) -> list[float]:
    """Milliseconds of a decode step, of five batches: what 128 more tokens took."""
    prompts = forced_prompts(served, document)[:in_flight]

    def seconds(tokens: int) -> float:
        ask = partial(served.generate, document, fields={"sampling_params": sampling(tokens)})
        begun = time.perf_counter()
        with ThreadPoolExecutor(in_flight) as pool:
            list(pool.map(ask, prompts))
        return time.perf_counter() - begun

    seconds(8)
    return [1e3 * (seconds(160) - seconds(32)) / 128 for _ in range(5)]


class Plan:
    """What is asked of each configuration: cells of (suite, task or "", length, requests in flight)."""

    def __init__(self, args: argparse.Namespace, chat: Chat) -> None:
        self._args, self._chat = args, chat
        self.work = args.work / Path(args.model_path).name / f"seed-{args.seed}"

    def documents(self, suite: str, task: str, length: int) -> list[Document]:
        args = self._args
        if suite == "ruler":
            return ruler(args.packages, args.model_path, self.work, task, length, args.samples)
        if suite == "own":
            return list(own_documents(task, length, args.documents, args.seed))
        count = {"forced": args.forced_documents, "times": 1}.get(suite, args.documents)
        return list(documents(args.packages, self._chat, length, count, args.seed))

    def size(self, suite: str) -> int:
        """Steps of the progress bar that one cell takes."""
        args = self._args
        return {
            "forced": args.forced_documents,
            "documents": args.documents * sum(KINDS.values()),
            "ruler": args.samples,
            "own": args.documents * OWN_QUESTIONS,
            "times": 1,
        }[suite]

    def cells(self) -> list[tuple[str, str, int]]:
        """(suite, task, length), in the order of measuring: a length's documents are prefilled once for all suites."""
        tasks = {"ruler": self._args.tasks, "own": list(TASKS)}
        suites = sorted({*self._args.suites}, key=("forced", "documents", "times", "ruler", "own").index)
        return [(suite, task, n) for n in self._args.lengths for suite in suites for task in tasks.get(suite, [""])]


def measure(args: argparse.Namespace, name: str, config: Row, plan: Plan, chat: Chat, bar: Any) -> None:
    """One configuration: start its server, measure the cells that the result file lacks."""
    asked = {key: getattr(args, key) for key in ("documents", "forced_documents", "samples", "steps")}
    asked |= {"temperature": args.temperature} if args.temperature else {}
    asked |= {"kept": True} if args.kept else {}
    known = {"config": name, "settings": config, "seed": args.seed, "model": Path(args.model_path).name}
    known |= {"asked": asked, "profile": digest_of(config.get("profile")), "flags": args.sglang_flags, **origin(args)}
    named = ("suite", "cell", "length", "in_flight")
    same = ("config", "settings", "seed", "model", "asked", "profile", "flags", "device", "commit", "sglang")
    cells = [{**known, **dict(zip(named, (*cell, n), strict=True))} for cell in plan.cells() for n in args.in_flight]
    wanted = unmeasured(args.out, cells, (*named, *same))
    bar.update(sum(plan.size(row["suite"]) for row in cells) - sum(plan.size(row["suite"]) for row in wanted))
    if not wanted:
        return
    flags = ["--model-path", args.model_path, *args.sglang_flags]
    flags += ["--enable-custom-logit-processor"] if "forced" in args.suites else []
    # Dense's files are of one machine, one set of flags and prompts.
    same_dense = json.dumps([asked, args.sglang_flags, known["device"], known["sglang"]])
    work = plan.work
    references = work / f"forced-{hashlib.sha256(same_dense.encode()).hexdigest()[:12]}"
    (work / "logs").mkdir(parents=True, exist_ok=True)
    settings = {} if name == DENSE else {**SELECTING, **USUAL.get(name, {}), **config}
    path_name = name.replace("/", "-")
    if settings:
        of = path_name if settings.get("build") != "off" else args.stores_of.replace("/", "-")
        store = work / "stores" / of
        store.mkdir(parents=True, exist_ok=True)
        flags += sparse_flags(settings, store)
    # Whoever measures into another file at the same time has a log of his own: it says when the server is ready.
    log = work / "logs" / f"{path_name}-{Path(args.out).stem}.log"
    with launched(flags, log, START_SECONDS) as url:
        served = Served(url, chat, name != DENSE, args.temperature)
        for (suite, task, length), rows in grouped(wanted, named[:3]):
            docs = plan.documents(suite, task, length)
            bar.set_description(f"{name}, {suite} {task} {length}")
            for document in docs:
                served.warm(document)
            if suite == "forced" and name == DENSE:
                reference_files(served, docs, args.steps, references)
            for cell in rows:
                if suite in ("documents", "ruler", "own"):
                    found = list(ask(served, docs, cell["in_flight"], bar.update))
                elif suite == "forced":
                    own = force(served, docs, cell["in_flight"], args.steps, references, f"of-{path_name}")
                    bar.update(len(docs))
                    found = [{"task": "forced", **own}]
                else:
                    found = [{"task": "times", "ms": step_ms(served, docs[0], cell["in_flight"])}]
                    bar.update()
                for row in found:
                    check_selected(settings, row)
                    append(args.out, {**cell, **row})


def check_selected(settings: Row, row: Row) -> None:
    """Raise RuntimeError where a row of a selecting configuration was decoded otherwise: its answers are another's."""
    if settings.get("decode_path") != "sparse" or "sparse_rows" not in row or settings.get("exactness") == "verify":
        return
    sparse, dense = row["sparse_rows"], row["dense_rows"]
    if sparse < SPARSE_SHARE * (sparse + dense) or not sparse:
        raise RuntimeError(
            f"expected {SPARSE_SHARE:.0%} of the rows to be decoded by selection, got {sparse} of {sparse + dense}; "
            "the server's log in --work says why not (index_gpu_bytes, a build that failed)"
        )


def write_prompts(path: Path, docs: Sequence[Document], chat: Chat) -> None:
    """A development set of these documents for `sglang-ext calibrate`: two questions each, of different kinds."""
    with path.open("w") as file:
        for number, document in enumerate(docs):
            asked = {turns[0].task: turns[0] for turns in document.conversations}
            for i in range(2):
                kind = list(asked)[(2 * number + i) % len(asked)]
                question = chat.question(asked[kind], first=True)
                line = {"id": f"{kind}-{document.name}", "input_ids": chat.prefix(document.text), "question": question}
                file.write(json.dumps(line) + "\n")


def digest_of(profile: str | None) -> str | None:
    """SHA-256 of a profile's file, which a later calibration may replace."""
    return hashlib.sha256(Path(profile).read_bytes()).hexdigest() if profile not in (None, "none") else None


def config_of(text: str) -> tuple[str, Row]:
    """`NAME`, or `NAME=JSON`, of the command line."""
    name, given, settings = text.partition("=")
    try:
        found = json.loads(settings) if given else {}
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected NAME=JSON, got {text!r}: {error}") from error
    if not given and name not in USUAL:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(USUAL)}, or NAME=JSON, got {text!r}")
    return name, found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default=".models/qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--packages", type=Path, default=Path(".models/packages"), help="folder of `make models`")
    parser.add_argument("--config", type=config_of, action="append", metavar="NAME[=JSON]", help="repeat for several")
    parser.add_argument("--suites", nargs="+", default=["forced", "documents"], choices=SUITES)
    parser.add_argument("--tasks", nargs="+", default=list(RULER_TASKS), choices=RULER_TASKS, help="of RULER")
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 16384, 30720], metavar="TOKENS")
    parser.add_argument("--in-flight", nargs="+", type=int, default=[16], metavar="REQUESTS")
    parser.add_argument("--documents", type=int, default=32, help="of each length; 37 questions each")
    parser.add_argument("--forced-documents", type=int, default=8, help="of each length, 16 questions each")
    parser.add_argument("--steps", type=int, default=64, help="of a forced answer; the first is prefill's")
    parser.add_argument("--samples", type=int, default=20, help="of each RULER task and length")
    parser.add_argument("--temperature", type=float, default=0.0, help="of answers, not of forced ones nor of times")
    parser.add_argument("--kept", action="store_true", help="of lossless decode: which drafts, for decode.py")
    parser.add_argument(
        "--stores-of", default="default", metavar="NAME", help='whose indexes configurations have with "build": "off"'
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path(".models/answers"), help="folder of references and logs")
    parser.add_argument("--commit", default="", help="of the code measured, where there is no git checkout")
    parser.add_argument("--prompts", type=Path, metavar="JSONL", help="write a development set, measure nothing")
    parser.add_argument("--out", default="answers.jsonl", help="result file; rows are appended")
    parser.add_argument(
        "--table", nargs="+", metavar="FILE", help="print rows of --in-flight as Markdown, measure nothing"
    )
    parser.add_argument("--against", default=DENSE, metavar="NAME", help="with --table: whose answers others are less")
    parser.add_argument("--plot", metavar="FILE.png", help="with --table: answers lost and KL against time")
    parser.add_argument("sglang_flags", nargs="*", metavar="-- SGLANG FLAGS")
    args = parser.parse_args(argv)
    if args.plot and args.table is None:
        parser.error("expected --table FILE with --plot: the rows to draw")
    if {"forced", "times"} & set(args.suites) and max(args.in_flight) > FORCED_QUESTIONS:
        parser.error(f"expected at most {FORCED_QUESTIONS} in flight for forced and times, got {max(args.in_flight)}")
    if args.steps < 2:
        parser.error(f"expected --steps of at least 2, as prefill makes the first token, got {args.steps}")
    if "forced" in args.suites and tp_size(args.sglang_flags) > 1:
        parser.error("expected one rank for forced: each of several would write down its steps; leave --tp-size out")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the result file does not hold yet; returns the exit status."""
    args = parse(argv)
    if args.table is not None:
        rows = [row for row in read(args.table) if row["in_flight"] in args.in_flight]
        print(table(rows, args.against))
        if args.plot:
            plot(rows, args.plot)
        return 0
    from transformers import AutoTokenizer

    configs = args.config or [(name, {}) for name in USUAL]
    configs.sort(key=lambda one: one[0] != DENSE)
    chat = Chat(AutoTokenizer.from_pretrained(args.model_path))
    plan = Plan(args, chat)
    if args.prompts:
        docs = [one for length in args.lengths for one in plan.documents("documents", "", length)]
        write_prompts(args.prompts, docs, chat)
        return 0
    if args.kept:
        os.environ |= plugin_environment(plan.work / "plugins", "lossless_replay", {})
    total = len(configs) * len(args.in_flight) * sum(plan.size(suite) for suite, _, _ in plan.cells())
    with tqdm(total=total, unit=" conversations", smoothing=0.05) as bar:
        for name, config in configs:
            measure(args, name, config, plan, chat, bar)
    return 0


if __name__ == "__main__":
    sys.exit(main())
