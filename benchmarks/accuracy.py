"""Paired accuracy: the same questions, dense and sparse, to one real SGLang server.

For each task and length it makes documents, prebuilds their indexes with `sglang-ext prebuild`, starts a server
with `--sparse-attn`, asks every question once dense (per-request opt-out: SGLang's own backend) and once sparse,
and writes one JSON line per task and length with both accuracies, the difference with its 95% interval, and the
keep ratio that the server counted. `--table` prints the rows of result files as a Markdown table, `--summary` what they
say in a line per keep ratio and length.

    python benchmarks/accuracy.py --out results.jsonl --lengths 8192 --questions 512 \\
        --config '{"keep_ratio": 0.1}' -- --device cpu --dtype float32 --attention-backend torch_native ...

Rows that the result file holds already are skipped, so an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines import append, launched, read
from kernel_rows import origin

from sglang_ext.config import parse_profiled
from sglang_ext.quality.evaluate import ask_many, keep_ratio_between, paired, server_state
from sglang_ext.quality.tasks import TASKS, Document, make_document

START_SECONDS = 300.0
"""That a server may take to start."""

#: Questions per document where fewer are right: few needles must stay few, and many quotes from one small
#: vocabulary would repeat pairs of words, which makes the task another one than the model learned.
QUESTIONS_PER_DOCUMENT = {"single_needle": 16, "copy_span": 16}


def documents(task: str, num_tokens: int, questions: int, seed: int, per_document: int) -> list[Document]:
    """Enough documents of one task for `questions` questions."""
    each = QUESTIONS_PER_DOCUMENT.get(task, per_document)
    count = -(-questions // each)
    return [make_document(task, seed=seed + i, num_tokens=num_tokens, num_questions=each) for i in range(count)]


def prebuild(args: argparse.Namespace, docs: dict[tuple[str, int], list[Document]], folder: Path) -> None:
    """Index all documents by the project's own command; raises CalledProcessError when it fails."""
    prompts = folder / "prompts.jsonl"
    with prompts.open("w") as file:
        for (task, length), group in docs.items():
            for doc in group:
                file.write(json.dumps({"id": f"{task}-{length}-{doc.seed}", "text": doc.text}) + "\n")
    command = [sys.executable, "-m", "sglang_ext.cli", "prebuild", "--model-path", args.model_path]
    command += ["--prompts", str(prompts), "--store", str(args.store), "--sparse-attn-config", args.config]
    command += ["--report", str(folder / "prebuild.jsonl"), "--", *args.sglang_flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measure(url: str, docs: Sequence[Document], concurrency: int) -> dict[str, Any]:
    """Ask all questions of these documents dense, then sparse."""
    asked = [(doc, question) for doc in docs for question in doc.questions]
    prompts = [f"{doc.text} {question.text}" for doc, question in asked]
    outcome: dict[str, list[bool]] = {}
    seconds: dict[str, float] = {}
    tokens: dict[str, int] = {}
    wrong: dict[str, list[dict[str, str]]] = {}
    for name, sparse in (("dense", False), ("sparse", True)):
        before, begun = server_state(url), time.perf_counter()
        replies = ask_many(url, prompts, sparse=sparse, concurrency=concurrency)
        after, seconds[name] = server_state(url), time.perf_counter() - begun
        outcome[name] = [bool(q.score(reply.text)) for (_, q), reply in zip(asked, replies, strict=True)]
        wrong[name] = [
            {"question": q.text, "expected": " ".join(q.answer), "got": reply.text}
            for (_, q), reply, right in zip(asked, replies, outcome[name], strict=True)
            if not right
        ][:3]
        tokens[name] = sum(reply.completion_tokens for reply in replies)
        rows = after["sparse_rows"] - before["sparse_rows"]
        if sparse == (rows == 0):
            raise RuntimeError(f"expected {'some' if sparse else 'no'} sparsely decoded tokens, got {rows}")
    dense_rows = after["dense_rows"] - before["dense_rows"]
    return {
        **dataclasses.asdict(paired(outcome["dense"], outcome["sparse"])),
        "keep_ratio": keep_ratio_between(before, after),
        "sparse_rows": rows,
        "dense_rows_in_sparse_pass": dense_rows,
        "largest_group": after["largest_group"],
        "seconds": seconds,
        "completion_tokens": tokens,
        "documents": len(docs),
        "wrong_examples": wrong,
    }


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    """What a row needs to be repeated."""
    return {
        **origin(args),
        **{name: getattr(args, name) for name in ("questions", "seed", "concurrency")},
        "model": args.model_path,
        "config": json.loads(args.config),
        "sum_every": parse_profiled(args.config, args.model_path)[0].summed_every,
        "flags": args.sglang_flags,
    }


def table(paths: Sequence[str]) -> str:
    """Result files as one Markdown table."""
    lines = [
        "| task | tokens | backend | questions | dense | sparse | difference [95%] | keep ratio | sparse steps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in read(paths):
        share = row["sparse_rows"] / (row["sparse_rows"] + row["dense_rows_in_sparse_pass"])
        lines.append(
            f"| {row['task']} | {row['num_tokens']} | {_backend(row['flags'])} | {row['count']} "
            f"| {row['dense']:.1%} | {row['sparse']:.1%} "
            f"| {row['difference']:+.1%} [{row['low']:+.1%}, {row['high']:+.1%}] "
            f"| {row['keep_ratio']:.1%} | {share:.1%} |"
        )
    return "\n".join(lines)


def summary(paths: Sequence[str]) -> str:
    """Of each file, keep ratio, length and concurrency: the task that loses most, and the mean, as a Markdown table."""
    lines = [
        "| method | backend | keep ratio | tokens | at a time | tasks | worst task | difference [95%] "
        "| mean over tasks | sparse steps, least |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for path in paths:
        cells: dict[tuple[str, str, float, int, int], list[dict[str, Any]]] = {}
        for row in read([path]):
            config = row["config"]
            method, backend = config.get("method", "its default"), _backend(row["flags"])
            # Rows without one are of before it was the default.
            every = row.get("sum_every") or config.get("sum_every") or 1
            if every > 1:
                method += f", sum_every {every}"
            key = (method, backend, config["keep_ratio"], row["num_tokens"], row.get("concurrency", 0))
            cells.setdefault(key, []).append(row)
        for (method, backend, keep, tokens, together), own in sorted(cells.items()):
            worst = min(own, key=lambda row: (row["difference"], row["low"]))
            mean = sum(row["difference"] for row in own) / len(own)
            steps = min(row["sparse_rows"] / (row["sparse_rows"] + row["dense_rows_in_sparse_pass"]) for row in own)
            lines.append(
                f"| {method} | {backend} | {keep:.0%} | {tokens} | {together or ''} | {len(own)} | {worst['task']} "
                f"| {worst['difference']:+.1%} [{worst['low']:+.1%}, {worst['high']:+.1%}] "
                f"| {mean:+.2%} | {steps:.1%} |"
            )
    return "\n".join(lines)


def _backend(flags: Sequence[str]) -> str:
    return flags[flags.index("--attention-backend") + 1] if "--attention-backend" in flags else "default"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="models/needle")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS), metavar="TASK")
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192], metavar="TOKENS")
    parser.add_argument("--questions", type=int, default=512, help="per task and length")
    parser.add_argument("--per-document", type=int, default=64, help="questions per document")
    parser.add_argument("--seed", type=int, default=10_000, help="of the first document")
    parser.add_argument("--concurrency", type=int, default=32, help="questions asked at a time")
    parser.add_argument("--config", default="{}", help="--sparse-attn-config as JSON")
    parser.add_argument("--store", type=Path, help="index store to use and keep; default: a temporary one")
    parser.add_argument("--commit", default="", help="of the code measured, where there is no git checkout")
    parser.add_argument("--out", default="accuracy.jsonl", help="result file; rows are appended")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="print result files as Markdown, measure nothing")
    parser.add_argument("--summary", nargs="+", metavar="FILE", help="the same, one line per keep ratio and length")
    parser.add_argument("sglang_flags", nargs="*", metavar="-- SGLANG FLAGS")
    return parser.parse_args(argv)


def main() -> None:
    """Measure what the result file does not hold yet."""
    args = parse()
    if args.table:
        print(table(args.table))
        return
    if args.summary:
        print(summary(args.summary))
        return
    out = Path(args.out)
    known = provenance(args)
    same = ("config", "sum_every", "flags", "sglang", "model", "questions", "seed", "concurrency")
    rows = read([args.out]) if out.exists() else []
    done = {(row["task"], row["num_tokens"]) for row in rows if all(row.get(key) == known[key] for key in same)}
    wanted = [(task, length) for length in args.lengths for task in args.tasks if (task, length) not in done]
    if not wanted:
        print(f"{out} holds all rows asked for; nothing to measure")
        return
    docs = {key: documents(key[0], key[1], args.questions, args.seed, args.per_document) for key in wanted}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        args.store = args.store or folder / "store"
        prebuild(args, docs, folder)
        flags = ["--model-path", args.model_path, "--sparse-attn", "--sparse-attn-store", str(args.store)]
        flags += ["--sparse-attn-config", args.config, *args.sglang_flags]
        with launched(flags, folder / "server.log", START_SECONDS) as url:
            for (task, length), group in docs.items():
                row = {"task": task, "num_tokens": length, **measure(url, group, args.concurrency), **known}
                append(args.out, row)
                print(
                    f"{task:18s} {length:6d} dense {row['dense']:.3f} sparse {row['sparse']:.3f} "
                    f"diff {row['difference']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}] "
                    f"keep {row['keep_ratio']:.3f} {row['seconds']['dense']:.0f}+{row['seconds']['sparse']:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
