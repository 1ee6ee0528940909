#!/usr/bin/env python3
"""Serving with prefixes in host memory, in real engines: throughput, distinct prefixes, a step, a first token.

    python benchmarks/offload_serving.py --out rows.jsonl                    # a GPU of 80 GB; none is measured twice
    python benchmarks/offload_serving.py --out rows.jsonl --engines hbm host
    python benchmarks/offload_serving.py --table rows.jsonl
    python benchmarks/offload_serving.py --out tiny.jsonl --shape tiny       # a CPU: tries the script, no more

Engines are started one after another, each in a process of its own; a start is left out when its rows are there.

- `hbm`: a long prompt is prefilled and indexed, its KV is written to `--work`: `first_token` by a prefill, then `step`
  of a batch behind it in device memory.
- `host`: `first_token` of that prompt from disk, without its pages in the page cache, then from host memory; `step` of
  the same batch behind host memory, with a tenth of the prefix resident.
- `ours`: several prefixes in host memory, a KV pool smaller than one of them. A second engine on the same GPU prefills
  and indexes them, one file at a time, and has ended when `throughput` and `distinct` are measured.
- `stock`: SGLang with HiCache (on a CPU without). Its KV pool has the bytes that `ours` has in all, but room for one
  prefix and all suffixes and answers at least. `throughput`, then `distinct`: one request behind device memory.

`throughput`: so many requests at a time, prefixes drawn by zipf, tokens that came within `--seconds` behind
`--settle`. Steps of ours select what a trace says (`offload_serving_replay.py`); behind device memory what the weights
say, which costs the same. `bytes` of ours are told by its scheduler process: KV pool, rows for staging and residents,
copies for layers that attend all, indexes, tables and lists. Weights are random: they time, and judge nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import engines
from decode import SPARE, batch_steps
from engines import SHAPES, Row, Streamed, sampling, streamed, unmeasured

from scripts.servers import process_group

STARTS = ("hbm", "host", "ours", "stock")
KEY = ("measure", "engine", "answer", "sizes", "shape", "page", "plan", "config", "flags", "churn")
LINK_RATE = 51e9
"""Bytes a second that kernels read of pinned memory."""
GRAPHS = (1, 6, 8, 12, 16)
SUFFIX = 32
SIZES: dict[str, Row] = {
    "llama-3.1-8b": {
        "prefixes": 6, "prefix": 98304, "long": 131072, "warm": 8192, "in_flight": 16, "answers": [128, 512],
        "budget": 2048, "residents": 22528, "pool": 10240, "long_budget": 6144, "batch": 8,
        "seconds": 40, "settle": 8, "tokens": 200,
    },
    "tiny": {
        "prefixes": 3, "prefix": 1536, "long": 2048, "warm": 1088, "in_flight": 4, "answers": [8, 16],
        "budget": 128, "residents": 512, "pool": 768, "long_budget": 128, "batch": 2,
        "seconds": 6, "settle": 2, "tokens": 40,
    },
}  # fmt: skip
"""Tokens: `prefix`, `long`, `warm` (a prefix to warm up with), `budget`s, `residents`, `pool`, `answers`, and `tokens`
of an answer whose steps are counted. Requests: `in_flight`, `batch`."""
TRACE = Path(__file__).with_name("results") / "selected-qwen.npz"
_BEGUN = time.monotonic()


def say(text: str) -> None:
    """A line of progress, with the seconds since this process began."""
    print(f"[{time.monotonic() - _BEGUN:6.1f} s] {text}", flush=True)


# -- what is started -----------------------------------------------------------------------------------------


def token_bytes(shape: str) -> int:
    """KV of a token, all layers."""
    model = SHAPES[shape]
    itemsize = 4 if model["torch_dtype"] == "float32" else 2
    return 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"] * itemsize


def configuration(args: argparse.Namespace, start: str) -> Row:
    """`--sparse-attn-config` of one of our engines."""
    sizes, per_token = args.sizes, token_bytes(args.shape)
    long = start in ("hbm", "host")
    tokens = sizes["long"] if long else sizes["prefixes"] * sizes["prefix"]
    offload = {"host_bytes": tokens * per_token, "min_tokens": 1024, "folder": str(folder_of(args, start) / "kv")}
    offload["resident_tokens"] = sizes["long"] // 10 if long else sizes["residents"]
    if args.cpu:
        offload["staging_tokens"] = 512
    own = json.loads(args.config)
    return {
        "share_prefixes": True,
        "profile": "none",
        "decode_path": "sparse",
        "guard_every": 0,
        "build": "prefill" if start in ("hbm", "builder") else "off",
        "layer_plan": engines.layer_plan(args.plan, args.shape),
        "prefetch_policy": "wait_complete",
        "top_k": sizes["long_budget"] if long else sizes["budget"],
        "index_gpu_bytes": int(0.0627 * per_token * (tokens if start != "builder" else 2 * sizes["prefix"])),
        "store_min_free_bytes": 1 << 20,
        "offload": offload | own.pop("offload", {}),
        **own,
    }


def folder_of(args: argparse.Namespace, start: str) -> Path:
    """Of indexes and files of KV that a start shares with another one."""
    return args.work / ("long" if start in ("hbm", "host") else "served")


def engine_flags(args: argparse.Namespace, start: str) -> list[str]:
    """Command line of an engine."""
    sizes = args.sizes
    own = SUFFIX + max(*sizes["answers"], sizes["tokens"] + SPARE + sizes["batch"]) + 2 * args.page
    longest = max(sizes["long"] + sizes["warm"], sizes["prefix"]) + 2 * own
    pool = {
        "hbm": sizes["long"] + sizes["warm"] + (sizes["batch"] + 1) * own,
        "host": (sizes["batch"] + 1) * own,
        "builder": sizes["prefix"] + own,
        "ours": sizes["pool"],
        "stock": max(stock_tokens(args), sizes["prefix"] + (sizes["in_flight"] + 1) * own),
    }[start]
    flags = engines.base_flags(args, "flashinfer", engines.write_model(args.work / "model", args.shape))
    flags += ["--skip-tokenizer-init", "--context-length", str(longest), "--max-total-tokens", str(-(-pool // 64) * 64)]
    flags += ["--max-running-requests", str(sizes["in_flight"])]
    if not args.cpu:
        shares = {"builder": "0.5", "ours": "0.8"}
        if start in shares:
            flags[flags.index("--mem-fraction-static") + 1] = shares[start]
        graphs = [1] if start == "builder" else GRAPHS
        flags += ["--cuda-graph-bs-decode", *map(str, graphs)]
    if start == "stock" and not args.cpu:
        gigabytes = -(-(sizes["prefixes"] * sizes["prefix"] * token_bytes(args.shape)) // 10**9) + 3
        flags += ["--enable-hierarchical-cache", "--hicache-size", str(gigabytes)]
        flags += ["--hicache-write-policy", "write_through", "--schedule-policy", "lpm"]
    elif start != "stock":
        store = folder_of(args, start) / "store"
        store.mkdir(parents=True, exist_ok=True)
        flags += engines.sparse_flags(configuration(args, start), store)
    return [*flags, *args.sglang_flags]


def stock_tokens(args: argparse.Namespace) -> int:
    """Tokens of a KV pool of as many bytes as `ours` has in all, by its rows; 0 without any."""
    rows = engines.read([args.out]) if Path(args.out).exists() else []
    held = [sum(held_bytes(row).values()) for row in rows if row["start"] == "ours" and row["shape"] == args.shape]
    return max(held, default=0) // token_bytes(args.shape)


def plugin(args: argparse.Namespace, start: str, folder: Path) -> dict[str, str]:
    """Environment in which SGLang finds the replay as a plugin."""
    sizes = args.sizes
    budget, prefix = ("long_budget", "long") if start == "host" else ("budget", "prefix")
    settings = {"path": args.trace, "churn": args.churn, "budget": sizes[budget], "prefix_len": sizes[prefix]}
    return engines.plugin_environment(folder, "offload_serving_replay", {"OFFLOAD_REPLAY": json.dumps(settings)})


class Asked(engines.Asked):
    """One of the starts. Each wait has an end."""

    def __init__(self, args: argparse.Namespace, start: str) -> None:
        self.args = args
        say(f"{start}: starting")
        super().__init__(engine_flags(args, start), args.shape, args.seed)
        say(f"{start}: ready")

    def prefix(self, name: str) -> list[int]:
        """Tokens of a prefix, the same in all engines: `long`, `warm`, or a number."""
        length = self.args.sizes[name] if name in ("long", "warm") else self.args.sizes["prefix"]
        return random.Random(f"{name} {self.args.seed}").choices(range(16, self._vocab), k=length)

    def behind(self, prefix: Sequence[int]) -> list[int]:
        """A prompt: a prefix, and a request's own tokens."""
        return [*prefix, *self.tokens(SUFFIX)]

    def ask(self, prompt: Sequence[int], tokens: int) -> Streamed:
        """One request alone."""
        return self.wait(streamed(self.engine, prompt, sampling(tokens)), 180.0)

    def first_token(self, name: str) -> float:
        """Seconds until the first token of a request behind a prefix, from when it was sent."""
        found = self.ask(self.behind(self.prefix(name)), 4)
        return found.arrivals[0][1] - found.begun

    def steps(self, prompts: Sequence[list[int]]) -> list[float]:
        """Seconds of the steps of all prompts together, that are counted; see `decode.py`."""
        return self.wait(batch_steps(self.engine, prompts, self.args.sizes["tokens"]), 180.0)

    def counted(self) -> Row:
        """What a row shows the difference of."""
        state = self.state()
        offload = state.get("offload") or {}
        counts = {name: state.get(name, 0) for name in ("sparse_rows", "dense_rows")}
        return counts | {"translated": offload.get("translated", 0), **(offload.get("residents") or {})}


# -- what is measured ----------------------------------------------------------------------------------------


def counting(asked: Asked, row: Row, measured: Callable[..., Row], *of: Any) -> Row:
    """A measurement, with what the counters did meanwhile."""
    before = asked.counted()
    row |= measured(asked, *of)
    row |= {name: count - before.get(name, 0) for name, count in asked.counted().items()}
    state = asked.state()
    pool = asked.engine.get_server_info()["max_total_num_tokens"] * token_bytes(asked.args.shape)
    return row | {"pool_bytes": pool, "bytes": state.get("bytes"), "allocated_bytes": state.get("allocated_bytes")}


def step(asked: Asked, prompts: Sequence[list[int]]) -> Row:
    """Milliseconds of a step of all prompts, once they are warm."""
    before = asked.counted()
    times = asked.steps(prompts)
    grown = {name: count - before.get(name, 0) for name, count in asked.counted().items()}
    row: Row = {"ms": 1e3 * median(times), "steps": len(times), "tokens_per_s": len(prompts) / median(times)}
    if grown.get("wanted"):
        all_steps = asked.args.sizes["tokens"] + SPARE + len(prompts)
        model = SHAPES[asked.args.shape]
        per_token = token_bytes(asked.args.shape) / model["num_hidden_layers"] / model["num_key_value_heads"]
        moved = grown["transferred"] * per_token / all_steps
        row["moved_share"] = grown["transferred"] / grown["wanted"]
        row |= {"moved_bytes": moved, "link_ms": 1e3 * moved / LINK_RATE}
    return row


def throughput(asked: Asked, prefixes: Sequence[list[int]], answer: int) -> Row:
    """So many requests at a time for a while; tokens that came in it."""
    sizes, rng = asked.args.sizes, random.Random(answer)
    weights = [1 / rank for rank in range(1, len(prefixes) + 1)]
    begin = time.perf_counter() + sizes["settle"]
    end = begin + sizes["seconds"]
    found: list[Streamed] = []
    failed: list[str] = []

    async def client() -> None:
        while time.perf_counter() < end:
            (prefix,) = rng.choices(prefixes, weights)
            try:
                found.append(await streamed(asked.engine, asked.behind(prefix), sampling(answer)))
            except Exception as error:
                failed.append(repr(error))
                await asyncio.sleep(1)

    async def run() -> None:
        clients = [asyncio.create_task(client()) for _ in range(sizes["in_flight"])]
        while time.perf_counter() < end:
            await asyncio.sleep(min(10, max(0.1, end - time.perf_counter())))
            say(f"  {len(found)} requests answered, {len(failed)} failed {failed[:1]}")
        # What waits still is answered, or given up.
        await asyncio.wait(clients, timeout=sizes["settle"])
        asked.engine.tokenizer_manager.abort_request(abort_all=True)
        _, late = await asyncio.wait(clients, timeout=60)
        for one in late:
            one.cancel()

    asked.wait(run(), sizes["settle"] * 2 + sizes["seconds"] + 90)
    return within(found, begin, end) | {"failed": len(failed), "error": failed[:1]}


# -- starts --------------------------------------------------------------------------------------------------


def cells(args: argparse.Namespace, start: str) -> list[Row]:
    """Beginnings of a start's rows."""
    churn = Path(args.trace).name if args.trace else args.churn
    cell = {"sizes": args.sizes, "churn": churn, "start": start, **engines.provenance(args)}
    names: dict[str, list[tuple[str, str, int | None]]] = {
        "hbm": [("first_token", "prefill", None), ("step", "hbm", None)],
        "host": [("first_token", "disk", None), ("first_token", "host", None), ("step", "host", None)],
        "ours": [*(("throughput", "ours", n) for n in args.sizes["answers"]), ("distinct", "ours", None)],
        "stock": [*(("throughput", "stock", n) for n in args.sizes["answers"]), ("distinct", "hbm", None)],
    }
    return [{"measure": measure, "engine": engine, "answer": n, **cell} for measure, engine, n in names[start]]


def measure_long(args: argparse.Namespace, start: str, wanted: Sequence[Row]) -> Iterator[Row]:
    """`hbm` and `host`: all rows of the start, in their order."""
    folder = folder_of(args, start)
    if start == "hbm":
        shutil.rmtree(folder, ignore_errors=True)
    elif not (folder / "built").exists():
        raise RuntimeError(f"expected {folder / 'built'}, which the start `hbm` writes; got none: run it first")
    asked, rows = Asked(args, start), {(row["measure"], row["engine"]): row for row in wanted}
    asked.first_token("warm")
    if start == "hbm":
        seconds = asked.first_token("long")
        yield rows["first_token", "prefill"] | {"seconds": seconds}
        (folder / "built").touch()
    else:
        asked.first_token("warm")
        waited(lambda: asked.engine.flush_cache().success, 10, "the cache to be flushed")
        for path in [*folder.rglob("*")]:
            if path.is_file():
                engines.forget(path)
        yield rows["first_token", "disk"] | {"seconds": asked.first_token("long"), **told(asked)}
        again = [asked.first_token("long") for _ in range(6)]
        say(f"  first tokens {[round(one, 3) for one in again]}")
        yield rows["first_token", "host"] | {"seconds": median(again[1:]), **told(asked)}
    prompts = [asked.behind(asked.prefix("long")) for _ in range(args.sizes["batch"])]
    asked.steps(prompts[:1])
    yield counting(asked, rows["step", start], step, prompts)
    asked.engine.shutdown()


def told(asked: Asked) -> Row:
    """Whether a first token came from where it should."""
    offload = asked.state()["offload"]
    return {"events": offload["events"], "translated": offload["translated"]}


def build(args: argparse.Namespace) -> None:
    """The second engine beside `ours`: prefixes one after another, while at most two files wait to be read."""
    folder = folder_of(args, "builder")
    asked = Asked(args, "builder")
    (folder / "ready").touch()
    for number in range(args.sizes["prefixes"]):
        waited(lambda: len(list((folder / "kv").glob("*.kv"))) < 2, 120, "a file to be read")
        known, begun = set((folder / "kv").glob("*.kv")), time.monotonic()
        asked.ask(asked.behind(asked.prefix(str(number))), 1)
        waited(lambda n=known: set((folder / "kv").glob("*.kv")) - n, 60, "a file")  # type: ignore[misc]
        (new,) = set((folder / "kv").glob("*.kv")) - known
        ready = folder / f"ready-{number}"
        ready.with_suffix(".partial").write_text(str(new))
        ready.with_suffix(".partial").rename(ready)
        say(f"builder: prefix {number} in {time.monotonic() - begun:.1f} s")
    asked.engine.shutdown()
    (folder / "done").touch()


def waited(there: Callable[[], Any], seconds: float, what: str) -> None:
    """Until it is there. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not there():
        if time.monotonic() > deadline:
            raise TimeoutError(f"expected {what} within {seconds:.0f} s")
        time.sleep(0.1)


def measure_served(args: argparse.Namespace, start: str, wanted: Sequence[Row]) -> Iterator[Row]:
    """`ours` and `stock`: rows that are not there."""
    folder = folder_of(args, start)
    if start == "ours":
        waited((folder / "ready").exists, args.start_seconds, "the builder to start")
    asked = Asked(args, start)
    prefixes = [asked.prefix(str(number)) for number in range(args.sizes["prefixes"])]
    for number, prefix in enumerate(prefixes):
        if start == "ours":
            waited((folder / f"ready-{number}").exists, 180, f"prefix {number}")
        begun = time.monotonic()
        asked.ask(asked.behind(prefix), 4)
        if start == "ours":
            if int(told(asked)["events"].get("loaded", 0)) != number + 1:
                raise RuntimeError(f"expected prefix {number} to be loaded, got {asked.state()['offload']}")
            Path((folder / f"ready-{number}").read_text()).unlink()
        say(f"{start}: prefix {number} asked in {time.monotonic() - begun:.1f} s")
    if start == "ours":
        waited((folder / "done").exists, 60, "the builder to end")
    for row in wanted:
        say(f"{start}: {row['measure']} {row['answer'] or ''}")
        if row["measure"] == "throughput":
            yield counting(asked, row, throughput, prefixes, row["answer"])
            continue
        prompts = list(map(asked.behind, prefixes if start == "ours" else prefixes[:1]))
        asked.steps(prompts)
        yield counting(asked, row, step, prompts)
    asked.engine.shutdown()


def measure(args: argparse.Namespace, start: str) -> None:
    """One start, in this process: the rows that the result file does not hold yet."""
    if start in ("hbm", "host"):
        rows = measure_long(args, start, cells(args, start))
    else:
        rows = measure_served(args, start, unmeasured(args.out, cells(args, start), KEY))
    for row in rows:
        say(f"{start}: {brief(row)}")
        if unmeasured(args.out, [row], KEY):
            engines.append(args.out, row)


def brief(row: Row) -> str:
    """One row for the terminal."""
    left_out = {"sizes", "config", "flags", *KEY[4:], "seed", "sglang", "torch", "commit", "date", "start", "device"}
    shown = {name: value for name, value in row.items() if name not in left_out and value is not None}
    figures = (f"{name} {round(value, 4) if isinstance(value, float) else value}" for name, value in shown.items())
    return ", ".join(figures)


# -- processes -----------------------------------------------------------------------------------------------


def run(args: argparse.Namespace, start: str, argv: Sequence[str]) -> bool:
    """One start, and its second engine; whether all of its rows are there. Prints the end of a failed one's log."""
    if not unmeasured(args.out, cells(args, start), KEY):
        return True
    logs = args.logs or args.work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    names = ["builder", "ours"] if start == "ours" else [start]
    if start == "ours":
        shutil.rmtree(folder_of(args, start), ignore_errors=True)
    deadline, children = time.monotonic() + args.start_seconds, []
    with ExitStack() as stack:
        for name in names:
            command = [sys.executable, __file__, "--one", name, *argv]
            environment = os.environ | (plugin(args, name, args.work / name) if name in ("ours", "host") else {})
            group = process_group(command, logs / f"{name}.log", stdout=None, env=environment)
            children.append(stack.enter_context(group))
        while time.monotonic() < deadline and children[-1].poll() is None and not any(one.poll() for one in children):
            time.sleep(0.5)
        ended = [one.poll() for one in children]
    if ended[-1] == 0:
        return True
    say(f"{start}: expected it to end with 0 within {args.start_seconds:.0f} s, got {ended}; the ends of its logs:")
    for name in names:
        print(f"--- {name}\n{engines.tail(logs / f'{name}.log', 6000)}", flush=True)
    return False


def within(found: Sequence[Streamed], begin: float, end: float) -> Row:
    """Figures of what came between two times. Of a request that was still running it counts what came of it."""
    tokens, gaps, firsts = 0, [], []
    for one in found:
        pieces = [(0, one.begun), *one.arrivals]
        for (so_far, before), (count, now) in pairwise(pieces):
            if begin <= now < end:
                tokens += count - so_far
                if so_far and count > so_far:
                    gaps.append((now - before) / (count - so_far))
        if one.arrivals and one.arrivals[0][0] and begin <= one.arrivals[0][1] < end:
            firsts.append(one.arrivals[0][1] - one.begun)
    row: Row = {"tokens_per_s": tokens / (end - begin), "begun": len(firsts), "requests": len(found)}
    for name, times in (("ttft_ms", firsts), ("itl_ms", gaps)):
        row[name] = 1e3 * median(times) if times else None
    return row


def held_bytes(row: Row) -> dict[str, int]:
    """Device bytes of a row of ours, by what they are for."""
    return {name: size for name, size in row["bytes"].items() if name != "indexes_at_most"}


def table(rows: Sequence[Row]) -> str:
    """Figures beside what they are compared with; ratios: ours over stock's, step over the other's, or the link's."""
    found = {(row["measure"], row["engine"], row["answer"]): row for row in rows}
    lines: list[list[str]] = []

    def line(name: str, ours: float | None, other: float | None, digits: int, unit: str) -> None:
        if ours is not None and other:
            lines.append([name, f"{ours:,.{digits}f} {unit}", f"{other:,.{digits}f} {unit}", f"{ours / other:.2f}"])

    def of(measure: str, engine: str, figure: str, answer: int | None = None) -> float | None:
        return found.get((measure, engine, answer), {}).get(figure)

    for answer in sorted({row["answer"] for row in rows if row["answer"]}):
        for figure, unit in (("tokens_per_s", "tokens/s"), ("ttft_ms", "ms"), ("itl_ms", "ms")):
            ours, stock = (of("throughput", engine, figure, answer) for engine in ("ours", "stock"))
            line(f"throughput, answers of {answer}: {figure}", ours, stock, 1, unit)
    line("distinct", of("distinct", "ours", "tokens_per_s"), of("distinct", "hbm", "tokens_per_s"), 1, "tokens/s")
    line("step", of("step", "host", "ms"), of("step", "hbm", "ms"), 2, "ms")
    line("step, and its link", of("step", "host", "ms"), of("step", "host", "link_ms"), 2, "ms")
    for engine in ("host", "disk"):
        seconds, prefill = (of("first_token", one, "seconds") for one in (engine, "prefill"))
        line(f"first token from {engine}, prefill", seconds, prefill, 2, "s")
    told = [engines.markdown(["", "ours", "against", "ratio"], lines)]
    for row in rows:
        if row.get("bytes"):
            held = held_bytes(row)
            parts = ", ".join(f"{name} {size:,}" for name, size in held.items())
            told.append(f"\n{row['measure']} {row['engine']}: {sum(held.values()):,} bytes: {parts}")
    return "\n".join(told)


# -- command line ---------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; `sizes` filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--engines", nargs="+", default=list(STARTS), choices=STARTS, help="which are started (all)")
    add("--set", nargs="+", default=[], metavar="SIZE=NUMBER", help="another size: seconds=60, answers=128,512")
    add("--trace", default=str(TRACE), help="of selections; 'none': drawn ones (%(default)s)")
    add("--churn", type=float, default=0.3, help="of drawn ones: share that a step changes (%(default)s)")
    add("--start-seconds", type=float, default=500.0, help="a start and its rows take at most (%(default)s)")
    add("--work", type=Path, default=Path(".models/offload"), help="folder of KV files and indexes (%(default)s)")
    add("--logs", type=Path, help="folder of the engines' logs (WORK/logs)")
    add("--out", default="offload-serving.jsonl", help="result file; rows are appended (%(default)s)")
    add("--one", choices=[*STARTS, "builder"], help=argparse.SUPPRESS)
    engines.add_arguments(parser)
    parser.set_defaults(plan="anchors")
    args = parser.parse_args(argv)
    args.sizes = dict(SIZES[args.shape])
    for change in args.set:
        name, _, value = change.partition("=")
        if name not in args.sizes:
            parser.error(f"expected SIZE=NUMBER, SIZE one of {', '.join(args.sizes)}, got {change!r}")
        args.sizes[name] = [int(one) for one in value.split(",")] if name == "answers" else int(value)
    if args.trace != "none" and not Path(args.trace).is_file():
        parser.error(f"expected --trace as a file, or none for drawn selections, got {args.trace!r}")
    args.trace = None if args.trace == "none" else str(Path(args.trace).resolve())
    args.work = args.work.resolve()
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or print what was measured; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv)
    if args.table is not None:
        print(table(engines.read(args.table)))
        return 0
    if args.one:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        build(args) if args.one == "builder" else measure(args, args.one)
        return 0
    args.work.mkdir(parents=True, exist_ok=True)
    failed = [start for start in args.engines if not run(args, start, argv)]  # the others are measured all the same
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
