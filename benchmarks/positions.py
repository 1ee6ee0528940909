#!/usr/bin/env python3
"""Does a real server select the positions that the reference of decode selects?

For each task and length it makes one document, prebuilds its index with `sglang-ext prebuild`, starts a server with
`--sparse-attn`, asks questions of the shipped model, so many at a time, and has the server trace what each sparse step
selected and by which queries. Then the reference, in this process, selects again: from the index in the store, by the
same queries. What is compared is each (step, anchor layer, KV head): equal position by position, equal but for
positions of equal scores, or other. It covers what lies between queries and lists in a server: who is in which group,
how its queries are pooled, how far its budget grows, which index was loaded. Whether the queries are right is for
`replay.py`, which computes them again.

    python benchmarks/positions.py --out positions.jsonl --lengths 16384 32768 --together 1 16 \\
        -- --device cpu --dtype float32 --attention-backend torch_native ...

Traces of decode graphs hold no queries: `--disable-decode-cuda-graph`, or a CPU. Rows that the result file holds
already are skipped, so an interrupted run goes on; `--table` prints files as a Markdown table and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from accuracy import documents, prebuild, provenance, running_server
from replay_selection import Reselection, Tally, servers_queries

from scripts.needle_network import load
from sglang_ext.attention.trace import TRACED, Selected, SparseStep, Start, read_trace
from sglang_ext.indexing.layer_plan import LayerPlan
from sglang_ext.quality.evaluate import Reply, ask
from sglang_ext.quality.tasks import TASKS, Document

WANTED = 0.999
"""Share of selections that must be equal position by position, in float32."""


def cells(args: argparse.Namespace) -> list[tuple[str, int, int]]:
    """(task, tokens, questions at a time) that the result file does not hold yet."""
    origin, out = provenance(args), Path(args.out)
    same = ("config", "sum_every", "flags", "sglang", "model", "questions", "seed")
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {
        (row["task"], row["num_tokens"], row["together"])
        for row in rows
        if all(row.get(key) == origin[key] for key in same)
    }
    every = [(task, length, size) for length in args.lengths for task in args.tasks for size in args.together]
    return [cell for cell in every if cell not in done]


def asked(url: str, document: Document, together: int, name: str) -> list[Reply]:
    """Answers to all questions of one document, so many at a time; the ids of the requests begin with `name`."""
    ask(url, document.text, sparse=False, max_new_tokens=1)  # its KV is in the cache: all begin at the same time

    def one(number: int) -> Reply:
        question = document.questions[number]
        prompt = f"{document.text} {question.text}"
        return ask(url, prompt, sparse=True, max_new_tokens=question.max_new_tokens, rid=f"{name}{number}")

    with ThreadPoolExecutor(together) as pool:
        return list(pool.map(one, range(len(document.questions))))


def traced(folder: Path, name: str) -> Iterator[Selected]:
    """What the steps of requests selected whose ids begin with `name`."""
    for record in read_trace(_only(folder)):
        if isinstance(record, SparseStep):
            yield from (group for group in record.groups if any(rid.startswith(name) for rid in group.rids))


def compared(reselection: Reselection, groups: Iterator[Selected], head_dim: int) -> dict[str, Any]:
    """Verdicts on what steps selected.

    Raises:
        RuntimeError: there is nothing to compare, and why.
    """
    tally, largest = Tally(), 0
    for group in groups:
        queries = servers_queries(group, head_dim)
        if not queries:
            raise RuntimeError("expected queries in the trace, got none; was it written by decode graphs?")
        found = reselection.compare(group, queries)
        if found is None:
            raise RuntimeError(f"expected index {group.digest} in the server's store; it has left")
        tally.add(found)
        largest = max(largest, len(group.rids))
    if not tally.steps:
        raise RuntimeError("expected sparse steps in the trace, got none; the server's log says why it decoded dense")
    return {**tally.row(), "largest_group": largest}


def measure(args: argparse.Namespace, wanted: Sequence[tuple[str, int, int]], folder: Path) -> Iterator[dict[str, Any]]:
    """One row per cell, as they come."""
    docs = {
        (task, length): documents(task, length, args.questions, args.seed, args.questions) for task, length, _ in wanted
    }
    args.store = args.store or folder / "store"
    prebuild(args, docs, folder)
    config, trace = json.loads(args.config), folder / "trace"
    own = {**vars(args), "config": json.dumps({**config, "trace_folder": str(trace)})}
    network = load(Path(args.model_path), torch.float32, "cpu")
    with running_server(argparse.Namespace(**own), folder / "server.log") as url:
        start = next(read_trace(_only(trace)))
        assert isinstance(start, Start)
        plan = LayerPlan.from_dict(start.layer_plan, num_layers=network.shape.layers, num_kv_heads=start.num_kv_heads)
        reselection = Reselection(str(args.store), config, Path(args.model_path), plan, torch.device("cpu"))
        for task, length, together in wanted:
            begun, right, questions = time.perf_counter(), 0, 0
            name = f"{TRACED}{task}-{length}-{together}-"
            for document in docs[task, length]:
                replies = asked(url, document, together, f"{name}{document.seed}-")
                scores = [q.score(r.text) for q, r in zip(document.questions, replies, strict=True)]
                right, questions = right + sum(scores), questions + len(scores)
            yield {
                "task": task,
                "num_tokens": length,
                "together": together,
                "asked": questions,
                "right": right,
                **compared(reselection, traced(trace, name), network.shape.head_dim),
                "seconds": round(time.perf_counter() - begun, 1),
            }
        reselection.close()


def table(paths: Sequence[str]) -> str:
    """Result files as one Markdown table: a line per length and number of questions at a time, and their sum."""
    rows = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
    lines = [
        "| tokens | at a time | tasks | right answers | largest group | steps | selections | equal by position "
        "| equal scores | other |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = sorted({(row["num_tokens"], row["together"]) for row in rows})
    for key in [*keys, None]:
        of = [row for row in rows if key is None or (row["num_tokens"], row["together"]) == key]
        total = {name: sum(row[name] for row in of) for name in ("asked", "right", "steps", *_VERDICTS)}
        number = sum(total[name] for name in _VERDICTS)
        first = "| all | |" if key is None else f"| {key[0]:,} | {key[1]} |"
        lines.append(
            f"{first} {len({row['task'] for row in of})} | {total['right']} of {total['asked']} "
            f"| {max(row['largest_group'] for row in of)} | {total['steps']:,} | {number:,} "
            f"| {total['equal']:,} ({total['equal'] / number:.2%}) | {total['equal scores']} | {total['other']} |"
        )
    return "\n".join(lines)


_VERDICTS = ("equal", "equal scores", "other")


def _only(folder: Path) -> Path:
    found = sorted(folder.glob("steps-*.trace"))
    if len(found) != 1:
        raise RuntimeError(f"expected one trace in {folder}, found {len(found)}: one server, one folder")
    return found[0]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="models/needle")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS), metavar="TASK")
    parser.add_argument("--lengths", nargs="+", type=int, default=[16384, 32768], metavar="TOKENS")
    parser.add_argument("--together", nargs="+", type=int, default=[1, 16], metavar="N", help="questions at a time")
    parser.add_argument("--questions", type=int, default=16, help="per task and length")
    parser.add_argument("--seed", type=int, default=20_000, help="of the first document")
    parser.add_argument("--config", default="{}", help="--sparse-attn-config as JSON")
    parser.add_argument("--store", type=Path, help="index store to use and keep; default: a temporary one")
    parser.add_argument("--commit", default="", help="of the code measured, where there is no git checkout")
    parser.add_argument("--out", default="positions.jsonl", help="result file; rows are appended")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="print result files as Markdown, measure nothing")
    parser.add_argument("sglang_flags", nargs="*", metavar="-- SGLANG FLAGS")
    args = parser.parse_args(argv)
    args.concurrency = max(args.together)
    return args


def main() -> int:
    """Measure what the result file does not hold yet; 1 where fewer than `WANTED` are equal."""
    args = parse()
    if args.table:
        print(table(args.table))
        return 0
    wanted = cells(args)
    if not wanted:
        print(f"{args.out} holds all rows asked for; nothing to measure")
        return 0
    origin, enough = provenance(args), True
    with tempfile.TemporaryDirectory() as name:
        for row in measure(args, wanted, Path(name)):
            with Path(args.out).open("a") as file:
                file.write(json.dumps({**row, **origin}) + "\n")
            enough &= row["share_by_position"] >= WANTED
            print(
                f"{row['task']:18s} {row['num_tokens']:6d} {row['together']:3d} at a time: {row['right']} of "
                f"{row['asked']} right, {row['steps']} steps in groups of up to {row['largest_group']}, "
                f"{row['share_by_position']:.2%} equal by position, {row['share_equal']:.2%} by score, "
                f"{row['seconds']:.0f} s",
                flush=True,
            )
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
