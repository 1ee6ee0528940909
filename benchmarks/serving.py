#!/usr/bin/env python3
"""A real SGLang server under the load of SGLang's own `bench_serving`, with the plugin and without.

    python benchmarks/serving.py --out serving.jsonl                  # measure; rows are appended, none twice
    python benchmarks/serving.py --table serving.jsonl                # print result files as Markdown
    python benchmarks/serving.py --runs groups --engines flashinfer shared --out serving.jsonl
    CUDA_VISIBLE_DEVICES=1 python benchmarks/serving.py --engines shared --port 12001 --out shared.jsonl   # beside it

Engines: `flashinfer` and `triton` are stock SGLang; the others are SGLang with `--sparse-attn` on flashinfer. In
`shared` no prompt has an index: what requests share is attended exactly and read once. In `sparse` every shared prompt
has an index, built from its prefill, and every step selects; in `auto` the plugin chooses by costs that it measured.
Both take the layer plan `--plan`, as in `decode.py`. `building` is `auto` without an index at the beginning: the server
builds them beside the timed requests (`"build": "shared"`), and their latency shows what that costs.

Runs, all through HTTP, streamed, with 32 requests at a time (sizes: `--set`, defaults in `serving_runs.py`):

- `groups`: `--dataset-name generated-shared-prefix`, groups of one system prompt each, requests spread by zipf.
- `agent`: the same with `--gsp-num-turns`: conversations behind system prompts.

What is the same for every engine: flags, seed, and so prompts; the prefix cache is on and nothing is evicted. Before
each run come a short rehearsal behind another prefix, and a pass that is not timed: from an empty cache, one request at
a time, it prefills every shared prompt, and in `sparse` and `auto` builds its index. So the stock engines' requests
find their prompt in the prefix cache, too, and a time to the first token is that of a question behind a cached prompt.

Weights are dummies: they serve to time, never to judge an answer. The tokenizer has a word for every token.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from engines import (
    BUILDING,
    INDEXED,
    SHAPES,
    STOCK,
    Row,
    add_arguments,
    append,
    base_flags,
    launched,
    markdown,
    plugin_flags,
    provenance,
    read,
    tail,
    unmeasured,
    write_model,
)
from serving_runs import RUNS, bench, commands, context_tokens, figures, pool_tokens, sizes_of, write_tokenizer

ENGINES = (*STOCK, "shared", *INDEXED, BUILDING)
KEY = ("engine", "run", "start", "sizes", "shape", "page", "plan", "config", "flags")
"""What tells one cell from another: a row that has all of it is not measured again."""
_FIGURES = ("output_throughput", "ttft_ms", "ttft_ms_p99", "tpot_ms", "tpot_ms_p99", "itl_ms_p99")
_STEPS = ("cascade_steps", "sparse_steps")
_RUNS = ("groups", "agent", "branches", "long")
"""The last two are those of older rows."""
_ORDER = ("flashinfer", "triton", "shared", "sparse", "auto", BUILDING)
GRAPHS = (1, 2, 4, 8, 12, 16, 24, 32)
"""Batch sizes of decode graphs: SGLang's own, up to the most requests at a time."""


def server_flags(args: argparse.Namespace, engine: str, model: Path, store: Path) -> list[str]:
    """Command line of one engine, ports aside. The KV pool holds the run that needs most."""
    sizes = list(args.sizes.values())
    most = max(one["concurrency"] for one in sizes)
    flags = [*base_flags(args, engine, model), "--context-length", str(max(map(context_tokens, sizes)))]
    flags += ["--max-total-tokens", str(max(map(pool_tokens, sizes))), "--max-running-requests", str(most)]
    flags += ["--enable-cache-report"]
    if not args.cpu:
        graphs = [*(batch for batch in GRAPHS if batch < most), most]
        flags += ["--cuda-graph-bs-decode", *map(str, graphs)]
    return [*flags, *plugin_flags(args, engine, store), *args.sglang_flags]


def missing(args: argparse.Namespace, engine: str, start: int) -> list[Row]:
    """Beginnings of the rows that the result file does not hold yet, in the order in which they are measured."""
    origin = {"engine": engine, "start": start, **provenance(args)}
    return unmeasured(args.out, [{**origin, "run": run, "sizes": sizes} for run, sizes in args.sizes.items()], KEY)


def measure(args: argparse.Namespace, engine: str, start: int, home: Path) -> None:
    """One start of one engine: all of its runs that the result file does not hold yet.

    Raises:
        RuntimeError: the server or `bench_serving` failed, or a row would not be what it says.
    """
    wanted = missing(args, engine, start)
    if not wanted:
        return
    vocab = int(SHAPES[args.shape]["vocab_size"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, store = write_tokenizer(write_model(folder / "model", args.shape), vocab), folder / "store"
        store.mkdir()
        logs = args.logs / f"{engine}-{start}" if args.logs else folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / "server.log"
        with launched(server_flags(args, engine, model, store), log, args.start_seconds, args.port) as url:
            port = urlsplit(url).port
            assert port is not None
            for row in wanted:
                passes = commands(row["run"], row["sizes"], args.seed + start, model, folder, port)
                try:
                    results = bench(passes, row["run"], folder, logs, home)
                    row |= {"pool_tokens": pool_tokens(row["sizes"]), **figures(results, row["sizes"], args.page)}
                except RuntimeError as error:
                    raise RuntimeError(f"{error}\nThe end of the server's log:\n{tail(log)}") from error
                append(args.out, row)
                print(f"{engine:10s} {brief(row)}", flush=True)


def brief(row: Row) -> str:
    """One row for the terminal."""
    text = f"{row['run']:8s} {row['output_throughput']:8.1f} tokens/s"
    for name in ("tpot", "ttft"):
        text += f", {name.upper()} {row[f'{name}_ms']:.2f}, p99 {row[f'{name}_ms_p99']:.2f} ms"
    return f"{text}; {row['cascade_steps']} shared and {row['sparse_steps']} sparse steps, {row['hits']} hits"


def name_of(row: Row) -> str:
    """Engine of a row, with the layer plan where it has one, and the plugin's settings that were given."""
    parts = [row["engine"], *([row["plan"]] if row["engine"] in (*INDEXED, BUILDING) else [])]
    return ", ".join(parts + ([json.dumps(row["config"])] if row["config"] and row["engine"] not in STOCK else []))


def run_of(row: Row) -> str:
    """Run of a row, with the flags that every engine was given beside its own."""
    return " ".join([row["run"], *row["flags"]])


def place_of(name: str) -> tuple[int, str]:
    """Stock engines first."""
    return _ORDER.index(name.split(",")[0]), name


def medians(rows: Sequence[Row]) -> dict[tuple[str, ...], dict[str, dict[str, float]]]:
    """Medians over the starts: by (device, shape, page, run and flags, sizes) and engine, in the order of `_RUNS`."""
    found: dict[tuple[str, ...], dict[str, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: (_RUNS.index(row["run"]), place_of(name_of(row)))):
        cell = (row["device"], row["shape"], str(row["page"]), run_of(row), json.dumps(row["sizes"], sort_keys=True))
        found.setdefault(cell, {}).setdefault(name_of(row), []).append(row)
    return {
        cell: {name: {key: median(row[key] for row in of) for key in _FIGURES + _STEPS} for name, of in engines.items()}
        for cell, engines in found.items()
    }


def best_stock(engines: dict[str, dict[str, float]]) -> dict[str, float]:
    """The best of each figure that a stock engine reached; empty where none was measured."""
    stock = [of for name, of in engines.items() if name in STOCK]
    better = {key: max if key == "output_throughput" else min for key in _FIGURES}
    return {key: better[key](of[key] for of in stock) for key in _FIGURES} if stock else {}


def table(rows: Sequence[Row]) -> str:
    """Medians over the starts; ours with their share of the best stock engine's, where one was measured."""
    head = ["device, shape, page", "run", "engine", "output, tokens/s", "TTFT p50, p99, ms", "TPOT p50, ms"]
    head += ["TPOT p99, ms", "ITL p99, ms", "steps shared, sparse"]
    lines = []
    for (device, shape, page, run, _), engines in medians(rows).items():
        best = best_stock(engines)
        for name, of in engines.items():

            def text(key: str, digits: int, name: str = name, of: dict[str, float] = of, best: Any = best) -> str:
                share = f", {of[key] / best[key]:.3f}" if best and name not in STOCK else ""
                return f"{of[key]:.{digits}f}{share}"

            cells = [f"{device}, {shape}, {page}", run, name, text("output_throughput", 0)]
            cells += [f"{of['ttft_ms']:.0f}, {of['ttft_ms_p99']:.0f}", text("tpot_ms", 2), text("tpot_ms_p99", 2)]
            steps = "" if name in STOCK else f"{of['cascade_steps']:.0f}, {of['sparse_steps']:.0f}"
            lines.append([*cells, text("itl_ms_p99", 2), steps])
    return markdown(head, lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; `sizes` holds those of each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["flashinfer", "shared", "auto"], choices=ENGINES)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="RUN.SIZE=NUMBER", help="another size: groups.output=256"
    )
    add_arguments(parser)
    parser.add_argument("--port", type=int, help="of the server, on loopback; default: a free one")
    parser.add_argument("--start-seconds", type=float, default=300.0, help="how long a server may take to start")
    parser.add_argument("--logs", type=Path, help="folder that keeps the servers' and bench_serving's logs")
    parser.add_argument("--out", default="serving.jsonl", help="result file; rows are appended")
    args = parser.parse_args(argv)
    if args.table is None:
        try:
            args.sizes = {run: sizes_of(run, args.set) for run in args.runs}
        except ValueError as error:
            parser.error(str(error))
        import torch

        args.cpu = not torch.cuda.is_available()
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or print what was measured; returns the exit status."""
    args = parse(argv)
    if args.table is not None:
        print(table(read(args.table)))
        return 0
    status = 0
    with tempfile.TemporaryDirectory() as home:
        for start in range(args.starts):
            for engine in args.engines:
                try:
                    measure(args, engine, start, Path(home))
                except RuntimeError as error:  # the other engines are measured all the same
                    print(f"{engine}: {error}", file=sys.stderr, flush=True)
                    status = 1
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends with us
    sys.exit(main())
