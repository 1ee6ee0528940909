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

Runs, all through HTTP, streamed, with 32 requests at a time (sizes: `--set`, defaults in `RUNS`):

- `groups`: `--dataset-name generated-shared-prefix`, groups of one system prompt each, requests spread by zipf.
- `agent`: the same with `--gsp-num-turns`: conversations behind system prompts.

What is the same for every engine: flags, seed, and so prompts; the prefix cache is on and nothing is evicted. Before
each run come a short rehearsal behind another prefix, and a pass that is not timed: from an empty cache, one request at
a time, it prefills every shared prompt, and in `sparse` and `auto` builds its index. So the stock engines' requests
find their prompt in the prefix cache, too, and a time to the first token is that of a question behind a cached prompt.

Weights are random: they serve to time, never to judge an answer. `bench_serving` sends text that it decodes from
random ids, and counts a token when text comes back. So the tokenizer of dummy models has a word for every id: every
text has as many tokens after encoding as it was made of.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import string
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import chain, islice, product
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import engines
from engines import BUILDING, INDEXED, SHAPES, STOCK, Row

Sizes = dict[str, Any]

RUNS: dict[str, Sizes] = {
    "groups": {
        "groups": 4,
        "prefix": 65536,
        "question": 128,
        "output": 512,
        "requests": 128,
        "zipf": 1.0,
        "concurrency": 32,
    },
    "agent": {
        "groups": 4,
        "prefix": 16384,
        "question": 128,
        "output": 256,
        "conversations": 32,
        "turns": 8,
        "concurrency": 32,
    },
}
"""Sizes of each run; lengths are tokens, `question` and `output` are those of a turn.

`groups`: system prompts of `prefix` tokens, requests spread over them by zipf. `agent`: conversations behind system
prompts.
"""

#: Contents alone, in their order. Roles would be tokens that no row could tell from a prompt's.
_CHAT = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
_SPARE = 64
"""Tokens beyond those of the sizes, for each request."""
_REHEARSAL = 8192
"""Tokens of the rehearsal's prefix, at most."""

# The module as it is, once per list of arguments: its import takes most of a short run. It draws from the tokenizer's
# vocabulary, which comes in another order from each tokenizer that is loaded; only in one order makes a seed the same
# prompts, in both passes and for every engine.
_BENCH = """
import json, runpy, sys
from transformers import PreTrainedTokenizerFast

unordered = PreTrainedTokenizerFast.get_vocab
PreTrainedTokenizerFast.get_vocab = lambda self: dict(sorted(unordered(self).items(), key=lambda item: item[1]))
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["bench_serving", *arguments]
    runpy.run_module("sglang.bench_serving", run_name="__main__")
"""

# bench_serving imports the data sets of images, whose module imports `datasets`, whatever is measured. Where that
# package is missing its process gets this instead.
_NO_DATASETS = """
def load_dataset(*args, **kwargs):
    raise ImportError("expected no data set to be loaded: this is a stand-in for the package `datasets`")
"""


def sizes_of(run: str, changes: Sequence[str]) -> Sizes:
    """Sizes of a run after changes such as `groups.prefix=4096`; those of other runs are left out.

    Raises:
        ValueError: no such run or size, or sizes that do not fit each other.
    """
    sizes = dict(RUNS[run])
    for change in changes:
        name, _, value = change.partition("=")
        of, _, key = name.partition(".")
        if key not in RUNS.get(of, {}) or not value:
            raise ValueError(f"expected RUN.SIZE=NUMBER, RUN one of {', '.join(RUNS)}, got {change!r}")
        if of == run:
            sizes[key] = type(RUNS[of][key])(value)
    if _every(sizes) % sizes["groups"]:
        what = "requests" if "requests" in sizes else "conversations"
        found = f"{_every(sizes)} and {sizes['groups']}"
        raise ValueError(f"{run}: expected {what} to be a multiple of groups, got {found}")
    return sizes


def _every(sizes: Sizes) -> int:
    """Requests, or conversations, of all groups."""
    return int(sizes.get("requests") or sizes["conversations"])


def own_tokens(sizes: Sizes) -> int:
    """Tokens of a request, or conversation, behind what it shares, answers included."""
    return sizes.get("turns", 1) * (sizes["question"] + sizes["output"]) + _SPARE


def pool_tokens(sizes: Sizes) -> int:
    """Slots of KV that hold all of a run, so that nothing is evicted during it."""
    shared = sizes["groups"] * (sizes["prefix"] + _SPARE)
    return shared + (_every(sizes) + sizes["concurrency"]) * (own_tokens(sizes) + _SPARE)


def commands(sizes: Sizes, seed: int, model: Path, results: Path, port: int) -> list[list[str]]:
    """Arguments of `bench_serving` for three passes, which each append a line to `results`.

    1. A rehearsal behind another prefix, short, so that no kernel is compiled later.
    2. The warm-up: an empty prefix cache, then every shared prompt, one at a time.
    3. What is measured. With one seed the system prompts of both passes of `generated-shared-prefix` are the same: it
       makes them first.
    """
    always = ["--host", "127.0.0.1", "--port", str(port), "--model", str(model), "--tokenizer", str(model)]
    always += ["--output-file", str(results), "--output-details", "--cache-report", "--disable-tqdm"]
    always += ["--warmup-requests", "0"]
    seeded = [*always, "--backend", "sglang-oai-chat" if "turns" in sizes else "sglang", "--seed", str(seed)]
    groups, prefix, question, concurrency = (sizes[name] for name in ("groups", "prefix", "question", "concurrency"))
    rehearsal = [*always, "--backend", "sglang", "--seed", str(seed + 1000)]
    rehearsal += _prefixes(1, concurrency, min(prefix, _REHEARSAL), question, 32)
    warm_up = [*seeded, "--max-concurrency", "1", "--flush-cache", *_prefixes(groups, 1, prefix, 1, 2), "--gsp-ordered"]
    timed = [*seeded, "--max-concurrency", str(concurrency)]
    timed += _prefixes(groups, _every(sizes) // groups, prefix, question, sizes["output"])
    if "turns" in sizes:
        timed += ["--gsp-num-turns", str(sizes["turns"])]
    else:
        timed += ["--gsp-group-distribution", "zipf", "--gsp-zipf-alpha", str(sizes["zipf"])]
    return [rehearsal, warm_up, timed]


def _prefixes(groups: int, prompts: int, prefix: int, question: int, output: int) -> list[str]:
    numbers = {"num-groups": groups, "prompts-per-group": prompts, "system-prompt-len": prefix}
    numbers |= {"question-len": question, "output-len": output}
    words = [word for name, number in numbers.items() for word in (f"--gsp-{name}", str(number))]
    return ["--dataset-name", "generated-shared-prefix", *words]


def bench(passes: Sequence[Sequence[str]], results: Path, log: Path, home: Path) -> list[Row]:
    """Run `bench_serving` once per list of arguments, in one process of its own; what it found, one for each.

    Args:
        results: that it writes.
        log: of what it prints.
        home: of that process. It keeps prompts there, by lengths and the tokenizer's class: another model's would be
            taken for this one's in the user's own.

    Raises:
        RuntimeError: it failed.
    """
    stand_ins = home / "stand_ins"
    stand_ins.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "HOME": str(home)}
    if importlib.util.find_spec("datasets") is None:
        (stand_ins / "datasets.py").write_text(_NO_DATASETS)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(stand_ins), os.environ.get("PYTHONPATH")]))
    with log.open("w") as out:
        command = [sys.executable, "-c", _BENCH, json.dumps(passes)]
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment, check=False)
    found = engines.read([results]) if results.exists() else []
    if done.returncode or len(found) < len(passes):
        raise RuntimeError(f"bench_serving failed ({done.returncode}); the end of its log:\n{engines.tail(log)}")
    return found[-len(passes) :]


def figures(results: Sequence[Row], sizes: Sizes, page: int) -> Row:
    """What a row holds of the results of all passes.

    Times are in ms. `prompt_tokens` and `cached_tokens` are (least, most) of all requests: as the tokenizer of
    `bench_serving` counts them (SGLang 0.5.16: of the first turn), and as the server found them in its prefix cache. Of
    the last pass: steps that the plugin attended, exactly and sparsely, and requests that found an index.
    `suffix_keep_ratio` is the server's, since its start; None where nothing was selected from requests' suffix tokens.

    Raises:
        RuntimeError: a request failed, or did not find what it shares in the prefix cache.
    """
    *_, before, found = results
    errors = [error for error in found["errors"] if error]
    if errors or found["completed"] != len(found["output_lens"]):
        raise RuntimeError(f"expected every request to be answered, got {found['completed']} and {errors[:1]}")
    cached = found["cached_tokens"]
    if min(cached) < sizes["prefix"] // page * page:
        raise RuntimeError(f"expected {sizes['prefix']} tokens of each request in the prefix cache, got {min(cached)}")
    row = {
        "requests": found["completed"],
        "seconds": found["duration"],
        "output_tokens": found["total_output_tokens"],
        "output_throughput": found["output_throughput"],
        "prompt_tokens": [min(found["input_lens"]), max(found["input_lens"])],
        "cached_tokens": [min(cached), max(cached)],
    }
    for name in ("ttft", "tpot", "itl"):
        row |= {f"{name}_ms": found[f"median_{name}_ms"], f"{name}_ms_p99": found[f"p99_{name}_ms"]}
    then, now = (engines.plugin_state(one["server_info"]) for one in (before, found))
    row["suffix_keep_ratio"] = now.get("suffix_keep_ratio")
    return row | {name: int(now.get(name, 0)) - int(then.get(name, 0)) for name in (*_STEPS, "hits")}


@cache
def words(count: int) -> tuple[str, ...]:
    """`count` different words of letters and digits, the shortest first; a word's place is its token id."""
    letters = string.digits + string.ascii_letters
    longer = (map("".join, product(letters, repeat=length)) for length in range(1, 5))
    return tuple(islice(chain.from_iterable(longer), count))


def write_tokenizer(folder: Path, vocab: int) -> Path:
    """`tokenizer.json` and `tokenizer_config.json` with ids 0 to `vocab` - 1, no special tokens; words are parted by
    white space. The chat template joins the contents of all messages.
    """
    model = {"type": "WordLevel", "vocab": {word: token for token, word in enumerate(words(vocab))}, "unk_token": "0"}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    tokenizer |= {"pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None, "model": model}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"model_max_length": 1 << 20, "chat_template": _CHAT}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


ENGINES = (*STOCK, "shared", *INDEXED, BUILDING)
KEY = ("engine", "run", "start", "sizes", "shape", "page", "plan", "config", "flags", "weights")
"""What tells one cell from another: a row that has all of it is not measured again."""
_FIGURES = ("output_throughput", "ttft_ms", "ttft_ms_p99", "tpot_ms", "tpot_ms_p99", "itl_ms_p99")
_STEPS = ("cascade_steps", "sparse_steps")
_RUNS = ("groups", "agent", "branches", "long")
"""The last two are those of older rows."""
GRAPHS = (1, 2, 4, 8, 12, 16, 24, 32)
"""Batch sizes of decode graphs: SGLang's own, up to the most requests at a time."""


def server_flags(args: argparse.Namespace, engine: str, model: Path, store: Path) -> list[str]:
    """Command line of one engine, ports aside. The KV pool holds the run that needs most."""
    sizes = list(args.sizes.values())
    most = max(one["concurrency"] for one in sizes)
    longest = max(one["prefix"] + own_tokens(one) for one in sizes)
    flags = [*engines.base_flags(args, engine, model), "--context-length", str(longest), "--enable-cache-report"]
    flags += ["--max-total-tokens", str(max(map(pool_tokens, sizes))), "--max-running-requests", str(most)]
    if not args.cpu:
        graphs = [*(batch for batch in GRAPHS if batch < most), most]
        flags += ["--cuda-graph-bs-decode", *map(str, graphs)]
    return [*flags, *engines.plugin_flags(args, engine, store), *args.sglang_flags]


def missing(args: argparse.Namespace, engine: str, start: int) -> list[Row]:
    """Beginnings of the rows that the result file does not hold yet, in the order in which they are measured."""
    origin = {"engine": engine, "start": start, **engines.provenance(args)}
    rows = [{**origin, "run": run, "sizes": sizes} for run, sizes in args.sizes.items()]
    return engines.unmeasured(args.out, rows, KEY)


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
        model, store = write_tokenizer(engines.write_model(folder / "model", args.shape), vocab), folder / "store"
        store.mkdir()
        logs = args.logs / f"{engine}-{start}" if args.logs else folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log, flags = logs / "server.log", server_flags(args, engine, model, store)
        with engines.launched(flags, log, args.start_seconds, args.port) as url:
            for row in wanted:
                sizes, results = row["sizes"], folder / f"{row['run']}.jsonl"
                passes = commands(sizes, args.seed + start, model, results, urlsplit(url).port)
                try:
                    found = bench(passes, results, logs / f"bench-{row['run']}.log", home)
                    row |= {"pool_tokens": pool_tokens(sizes), **figures(found, sizes, args.page)}
                except RuntimeError as error:
                    raise RuntimeError(f"{error}\nThe end of the server's log:\n{engines.tail(log)}") from error
                engines.append(args.out, row)
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


def medians(rows: Sequence[Row]) -> dict[tuple[str, ...], dict[str, dict[str, float]]]:
    """Medians over the starts: by (device, shape, page, run and flags, sizes), and by engine, the stock ones first."""
    found: dict[tuple[str, ...], dict[str, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: (_RUNS.index(row["run"]), ENGINES.index(row["engine"]), name_of(row))):
        run, sizes = " ".join([row["run"], *row["flags"]]), json.dumps(row["sizes"], sort_keys=True)
        cell = (row["device"], row["shape"], str(row["page"]), run, sizes)
        found.setdefault(cell, {}).setdefault(name_of(row), []).append(row)
    return {
        cell: {name: {key: median(row[key] for row in of) for key in _FIGURES + _STEPS} for name, of in named.items()}
        for cell, named in found.items()
    }


def best_stock(medians: dict[str, dict[str, float]]) -> dict[str, float]:
    """The best of each figure that a stock engine reached; empty where none was measured."""
    stock = [of for name, of in medians.items() if name in STOCK]
    better = {key: max if key == "output_throughput" else min for key in _FIGURES}
    return {key: better[key](of[key] for of in stock) for key in _FIGURES} if stock else {}


def table(rows: Sequence[Row]) -> str:
    """Medians over the starts; ours with their share of the best stock engine's, where one was measured."""
    head = ["device, shape, page", "run", "engine", "output, tokens/s", "TTFT p50, p99, ms", "TPOT p50, ms"]
    head += ["TPOT p99, ms", "ITL p99, ms", "steps shared, sparse"]
    lines = []
    for (device, shape, page, run, _), by_engine in medians(rows).items():
        best = best_stock(by_engine)
        for name, of in by_engine.items():

            def text(key: str, digits: int, name: str = name, of: dict[str, float] = of, best: Any = best) -> str:
                share = f", {of[key] / best[key]:.3f}" if best and name not in STOCK else ""
                return f"{of[key]:.{digits}f}{share}"

            cells = [f"{device}, {shape}, {page}", run, name, text("output_throughput", 0)]
            cells += [f"{of['ttft_ms']:.0f}, {of['ttft_ms_p99']:.0f}", text("tpot_ms", 2), text("tpot_ms_p99", 2)]
            steps = "" if name in STOCK else f"{of['cascade_steps']:.0f}, {of['sparse_steps']:.0f}"
            lines.append([*cells, text("itl_ms_p99", 2), steps])
    return engines.markdown(head, lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; `sizes` holds those of each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["flashinfer", "shared", "auto"], choices=ENGINES)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="RUN.SIZE=NUMBER", help="another size: groups.output=256"
    )
    engines.add_arguments(parser)
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
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or print what was measured; returns the exit status."""
    args = parse(argv)
    if args.table is not None:
        print(table(engines.read(args.table)))
        return 0
    status = 0
    with tempfile.TemporaryDirectory() as home:
        for start, engine in product(range(args.starts), args.engines):
            try:
                measure(args, engine, start, Path(home))
            except RuntimeError as error:  # the other engines are measured all the same
                print(f"{engine}: {error}", file=sys.stderr, flush=True)
                status = 1
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends with us
    sys.exit(main())
