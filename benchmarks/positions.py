#!/usr/bin/env python3
"""Does a real server select the positions that the reference of decode selects?

For each task and length it makes one document, prebuilds its index with `sglang-ext prebuild`, starts a server with
`--sparse-attn`, asks questions of the shipped model, so many at a time, and has the server trace what each sparse step
selected and by which queries. Then the reference, in this process, selects again: from the index in the store, by the
same queries. What is compared is each (step, anchor layer, KV head): equal position by position, equal but for
positions of equal scores, or other. A step whose group has requests on several documents, or another document's index,
is other as a whole (`misplaced`).

Without decode graphs a server selects by the operations of the reference. So this says that they are given the right
things there: index, rows, configuration and profile, step by step while requests join and leave. How positions come out
of an index is for the tests of the methods, and whether the queries are right for `replay.py`, which computes them
again.

    python benchmarks/positions.py --out positions.jsonl --lengths 16384 32768 --together 1 16 \\
        -- --device cpu --dtype float32 --attention-backend torch_native ...

Traces of decode graphs hold no queries: `--disable-decode-cuda-graph`, or a CPU. Steps that keep an earlier selection
or attend all of the prefix are counted, not compared (`not searched`). Rows that the result file holds already are
skipped, so an interrupted run goes on; `--table` prints files as a Markdown table and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from accuracy import documents, prebuild, provenance, running_server
from replay_selection import Reselection, Tally, servers_queries

from scripts.needle_network import load
from sglang_ext.decode.trace import TRACED, Selected, SparseStep, Start, read_trace
from sglang_ext.indexing.layer_plan import LayerPlan
from sglang_ext.quality.evaluate import Reply, ask, server_state
from sglang_ext.quality.tasks import TASKS, Document

WANTED = 0.999
"""Share of selections that must be equal position by position."""

Row = dict[str, Any]

_VERDICTS = ("equal", "equal scores", "other")
_SAME = ("config", "sum_every", "flags", "sglang", "model", "questions", "seed")
"""What a row must have been measured with to be the one that is asked for."""


def known(args: argparse.Namespace) -> list[Row]:
    """Rows of the result file that were measured as is asked for."""
    origin, out = provenance(args), Path(args.out)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return [row for row in rows if all(row.get(key) == origin[key] for key in _SAME)]


def cells(args: argparse.Namespace) -> list[tuple[str, int, int]]:
    """(task, tokens, questions at a time) that the result file does not hold yet."""
    done = {(row["task"], row["num_tokens"], row["together"]) for row in known(args)}
    every = [(task, length, size) for length in args.lengths for task in args.tasks for size in args.together]
    return [cell for cell in every if cell not in done]


def asked(url: str, document: Document, together: int, name: str) -> list[Reply]:
    """Answers to all questions of one document, so many at a time; the ids of the requests are `name`-NUMBER."""

    def one(number: int) -> Reply:
        question = document.questions[number]
        prompt = f"{document.text} {question.text}"
        return ask(url, prompt, sparse=True, max_new_tokens=question.max_new_tokens, rid=f"{name}-{number}")

    with ThreadPoolExecutor(together) as pool:
        return list(pool.map(one, range(len(document.questions))))


def traced(folder: Path, names: Collection[str]) -> Iterator[Selected]:
    """What steps selected that had requests with ids of these names."""
    for record in read_trace(_only(folder)):
        if isinstance(record, SparseStep):
            yield from (group for group in record.groups if any(_name(rid) in names for rid in group.rids))


def compared(
    reselection: Reselection, groups: Iterable[Selected], digests: Mapping[str, str], head_dim: int
) -> dict[str, Any]:
    """Verdicts on what steps selected.

    Args:
        reselection: selects again.
        groups: of all steps.
        digests: by name of requests, the index of the document that they are about.
        head_dim: of the model.

    Raises:
        RuntimeError: there is nothing to compare, and why.
    """
    tally, kept, misplaced, not_searched = Tally(), Counter[int](), 0, 0
    for group in groups:
        queries = servers_queries(group, head_dim)
        if not queries:
            not_searched += 1
            continue
        if {digests.get(_name(rid)) for rid in group.rids} != {group.digest}:
            misplaced += 1
            tally.add(Counter(other=sum(len(heads) for heads in group.counts.values())))
            continue
        found = reselection.compare(group, queries)
        if found is None:
            raise RuntimeError(f"expected index {group.digest} in the server's store; it has left")
        tally.add(found)
        kept[len(group.rids)] = max(heads for of in group.counts.values() for heads in of)
    if not tally.steps:
        seen = (
            f"{not_searched} that searched nothing; was the trace written by decode graphs?" if not_searched else "none"
        )
        raise RuntimeError(f"expected sparse steps with their queries in the trace, got {seen}")
    return {
        **tally.row(),
        "misplaced": misplaced,
        "not searched": not_searched,
        "largest_group": max(kept, default=0),
        "kept": {str(rows): count for rows, count in sorted(kept.items())},
    }


def measure(args: argparse.Namespace, wanted: Sequence[tuple[str, int, int]], folder: Path) -> Iterator[Row]:
    """One row per cell, as they come.

    Raises:
        RuntimeError: nothing to compare; the end of the server's log is in the message.
    """
    docs = {
        (task, length): documents(task, length, args.questions, args.seed, args.questions) for task, length, _ in wanted
    }
    args.store = args.store or folder / "store"
    prebuild(args, docs, folder)
    lines = map(json.loads, (folder / "prebuild.jsonl").read_text().splitlines())
    built = {line["id"]: line["digest"] for line in lines}
    config, trace, log = json.loads(args.config), folder / "trace", folder / "server.log"
    own = {**vars(args), "config": json.dumps({**config, "trace_folder": str(trace)})}
    network = load(Path(args.model_path), torch.float32, "cpu")
    with running_server(argparse.Namespace(**own), log) as url:
        start = next(read_trace(_only(trace)))
        assert isinstance(start, Start)
        plan = LayerPlan.from_dict(start.layer_plan, num_layers=network.shape.layers, num_kv_heads=start.num_kv_heads)
        store = (str(args.store), config, Path(args.model_path), plan, torch.device("cpu"))
        with closing(Reselection(*store)) as reselection:
            for task, length, together in wanted:
                begun, right, questions, digests = time.perf_counter(), 0, 0, {}
                for document in docs[task, length]:  # its KV is in the cache: all begin at the same time
                    ask(url, document.text, sparse=False, max_new_tokens=1)
                before = server_state(url)
                for document in docs[task, length]:
                    name = f"{TRACED}{task}-{length}-{document.seed}-{together}"
                    digests[name] = built[f"{task}-{length}-{document.seed}"]
                    replies = asked(url, document, together, name)
                    scores = [q.score(r.text) for q, r in zip(document.questions, replies, strict=True)]
                    right, questions = right + sum(scores), questions + len(scores)
                try:
                    found = compared(reselection, traced(trace, digests), digests, network.shape.head_dim)
                except RuntimeError as error:
                    raise RuntimeError(f"{error}; the end of the server's log:\n{log.read_text()[-3000:]}") from error
                after = server_state(url)
                yield {
                    "task": task,
                    "num_tokens": length,
                    "together": together,
                    "asked": questions,
                    "right": right,
                    **found,
                    **{name: after[name] - before[name] for name in ("sparse_rows", "dense_rows")},
                    "dtype": start.dtype,
                    "seconds": round(time.perf_counter() - begun, 1),
                }


def table(paths: Sequence[str]) -> str:
    """Result files as one Markdown table: a line per length and number of questions at a time, and their sum."""
    rows = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
    if not rows:
        raise SystemExit(f"expected rows of positions.py, found none in {', '.join(paths)}")
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


def _only(folder: Path) -> Path:
    found = sorted(folder.glob("steps-*.trace"))
    if len(found) != 1:
        raise RuntimeError(f"expected one trace in {folder}, found {len(found)}: one server, one folder")
    return found[0]


def _name(rid: str) -> str:
    return rid.rpartition("-")[0]


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
    return parser.parse_args(argv)


def main() -> int:
    """Measure what the result file does not hold yet; 1 where fewer than `WANTED` are equal in a row, old or new."""
    args = parse()
    if args.table:
        print(table(args.table))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the server must not outlive this
    wanted = cells(args)
    if not wanted:
        print(f"{args.out} holds all rows asked for; nothing to measure")
    origin = provenance(args)
    with tempfile.TemporaryDirectory() as name:
        for row in measure(args, wanted, Path(name)) if wanted else ():
            with Path(args.out).open("a") as file:
                file.write(json.dumps({**row, **origin}) + "\n")
            print(
                f"{row['task']:18s} {row['num_tokens']:6d} {row['together']:3d} at a time: {row['right']} of "
                f"{row['asked']} right, {row['steps']} steps in groups of up to {row['largest_group']}, "
                f"{row['share_by_position']:.2%} equal by position, {row['share_equal']:.2%} by score, "
                f"{row['seconds']:.0f} s",
                flush=True,
            )
    return 0 if all(row["share_by_position"] >= WANTED for row in known(args)) else 1


if __name__ == "__main__":
    sys.exit(main())
