#!/usr/bin/env python3
"""Time of a decode step in a real SGLang engine, behind prefixes that requests of the batch share.

    python benchmarks/decode.py --out decode.jsonl               # measure; rows are appended, none is measured twice
    python benchmarks/decode.py --table decode.jsonl             # print result files as Markdown
    python benchmarks/decode.py --table decode.jsonl --plot decode.png
    python benchmarks/decode.py --out decode.jsonl --starts 3    # three starts of each engine, in turns
    python benchmarks/decode.py --prefixes 8 16 --contexts 16384 --batches 16 --config '{"top_k": 2048}'
    python benchmarks/decode.py --out tiny.jsonl --shape tiny ...  # a machine without a GPU: tries the script, no more

Engines: `flashinfer` and `triton` are stock SGLang; the others are SGLang with `--sparse-attn` on flashinfer. In
`plugin` no prompt has an index, and every cell is measured on two paths, in turns: `shared`, where the plugin may group
requests, and `stock`, where the requests opt out, so that SGLang's own graph is replayed. In `sparse` every prefix has
an index, built from its prefill, and every step selects; in `auto` the plugin chooses by the costs that it measured; in
`lossless` (`"exactness": "verify"`) such steps draft, and exact steps say which drafts are kept: of random weights, as
`--acceptance` says. They take the layer plan `--plan`: `kascade` (layers 0 and 1 attend all, 2, 8, 13 and 14 select,
the others reuse, with heads mapped; for 32 layers) or `anchors` (layer 0 attends all, the others select). With
`--prefixes N` a batch's requests are behind N prefixes in turns. Cells that the KV pool has no room for are left out.

A step is the time between two tokens of one request of the batch, which starts last and ends first; the first 20 are
left out. Tokens that come at once share the time since those before. In `lossless` all requests count, while all run;
the table has the mean. Weights are random: they serve to time, never to judge an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from io import BytesIO
from itertools import cycle, islice, pairwise, product
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

import engines
from engines import INDEXED, LOSSLESS, STOCK, Row, sampling, streamed

from sglang_ext.config import config_from_dict

ENGINES = (*STOCK, "plugin", *INDEXED, LOSSLESS)
SUFFIX = 64
"""Tokens of each request behind the shared prefix."""
SKIPPED = 20
"""First steps of a request that are not counted."""
SPARE = 24
"""Tokens that the other requests of a batch generate beyond the measured one's."""
KEY = ("engine", "path", "plan", "context", "prefixes", "batch", "start", "shape", "page", "tokens", "config", "flags")
KEY += ("acceptance", "weights")
"""What tells one cell from another: a row that has all of it is not measured again."""


def engine_flags(args: argparse.Namespace, engine: str, model: Path, store: Path) -> list[str]:
    """Command line of one engine."""
    own = own_tokens(args.tokens)
    longest, rows = max(args.contexts) + own, rows_of_steps(args, engine)
    pool = sum(args.contexts) * max(args.prefixes) + len(args.contexts) * max(rows) * 2 * own
    flags = [*engines.base_flags(args, engine, model), "--skip-tokenizer-init", "--context-length", str(longest)]
    flags += ["--max-total-tokens", str(pool), "--max-running-requests", str(max(rows))]
    if not args.cpu:
        flags += ["--cuda-graph-bs-decode", *map(str, rows)]
    return [*flags, *engines.plugin_flags(args, engine, store), *args.sglang_flags]


def own_tokens(generated: int) -> int:
    """Of one request, behind the prefix, at most."""
    return SUFFIX + generated + SPARE + 64


def rows_of_steps(args: argparse.Namespace, engine: str) -> list[int]:
    """Rows that decode steps may have, ascending: those of requests; in `lossless` those of their drafts, too."""
    drafts = config_from_dict(json.loads(args.config)).draft_tokens if engine == LOSSLESS else 0
    return sorted({batch * (1 + count) for batch in args.batches for count in range(drafts + 1)})


class Cell(engines.Asked):
    """Measures one engine, cell by cell."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self._prefixes: dict[int, list[list[int]]] = {}

    def prefixes(self, length: int, count: int) -> list[list[int]]:
        """So many prompts, in the engine's prefix cache."""
        known = self._prefixes.setdefault(length, [])
        while len(known) < count:
            known.append(self.tokens(length))
            prompt = [*known[-1], *self.tokens(1)]
            self.wait(self.engine.async_generate(input_ids=prompt, sampling_params=sampling(1)))
        return known[:count]

    def steps(self, row: Row, *, stock: bool) -> list[float]:
        """Seconds of the counted steps of one batch."""
        prefixes = islice(cycle(self.prefixes(row["context"], row["prefixes"])), row["batch"])
        prompts = [[*prefix, *self.tokens(SUFFIX)] for prefix in prefixes]
        if row["engine"] == LOSSLESS:
            return self.wait(batch_tokens(self.engine, prompts, row["tokens"]))
        return self.wait(batch_steps(self.engine, prompts, row["tokens"], dense=stock))

    def room(self, row: Row) -> tuple[int, int]:
        """Tokens that the KV pool has to have room for at once, and that it has: with less, requests wait."""
        wanted = row["prefixes"] * row["context"] + row["batch"] * own_tokens(row["tokens"])
        return wanted, int(self.engine.get_server_info()["max_total_num_tokens"])

    def counted(self) -> Row:
        """Steps that the plugin attended so far, exactly and sparsely, and drafts; 0 in a stock engine."""
        state = self.state()
        return {name: int(state.get(name, 0)) for name in ("cascade_steps", "sparse_steps", "drafted", "accepted")}


async def batch_tokens(engine: Any, prompts: Sequence[list[int]], tokens: int) -> list[float]:
    """Seconds of each token of some requests while all of them run: those of one took as long on average."""
    found = await asyncio.gather(*(streamed(engine, prompt, sampling(tokens)) for prompt in prompts))
    return tokens_together([one.arrivals for one in found])


def tokens_together(arrivals: Sequence[Sequence[tuple[int, float]]]) -> list[float]:
    """See `batch_tokens`; of each request (its tokens so far, seconds) of all chunks."""
    begin = max(next(when for count, when in one if count > SKIPPED) for one in arrivals)
    end = min(one[-1][1] for one in arrivals)
    if begin >= end:
        raise RuntimeError("expected requests that run together; some ended before others had begun: raise --tokens")
    of_each = [[count for count, when in one if begin <= when <= end] for one in arrivals]
    made = [counts[-1] - counts[0] for counts in of_each]
    return [(end - begin) / count for count in made for _ in range(count)]


async def batch_steps(engine: Any, prompts: Sequence[list[int]], tokens: int, *, dense: bool = False) -> list[float]:
    """Seconds of the counted steps of the first of some requests, which starts last and ends first.

    Args:
        tokens: that the first one generates.
        dense: all opt out of the plugin.
    """
    longer = sampling(tokens + SPARE + len(prompts), dense=dense)
    others = [asyncio.create_task(engine.async_generate(input_ids=one, sampling_params=longer)) for one in prompts[1:]]
    await asyncio.sleep(0)
    measured = await streamed(engine, prompts[0], sampling(tokens, dense=dense))
    await asyncio.gather(*others)
    return counted_steps(measured.arrivals)


def counted_steps(arrivals: Sequence[tuple[int, float]]) -> list[float]:
    """Seconds of the steps of one request that are counted, from (its tokens so far, seconds) of all chunks."""
    return [
        (after - before) / (tokens - so_far)
        for (so_far, before), (tokens, after) in pairwise(arrivals)
        for step in range(so_far, tokens)
        if step > SKIPPED
    ]


def missing(args: argparse.Namespace, origin: Row) -> list[Row]:
    """Beginnings of the rows that the result file does not hold yet, in the order in which they are measured."""
    engine = origin["engine"]
    paths = {"plugin": ("shared", "stock")}.get(engine, ("stock",) if engine in STOCK else (engine,))
    cells = [
        {**origin, "path": path, "context": context, "prefixes": prefixes, "batch": batch}
        for context in args.contexts
        for prefixes in args.prefixes
        for batch in args.batches
        for path in paths
    ]
    return engines.unmeasured(args.out, cells, KEY)


class Acceptance(NamedTuple):
    """Which drafts are kept.

    Attributes:
        name: of it in rows, with the share that is kept.
        kept: as `lossless_replay.Replay` takes it.
    """

    name: str
    kept: str


def acceptance_of(text: str) -> Acceptance:
    """`SHARE`, `BITS` or `FILE:NAME` of the command line."""
    if re.fullmatch(r"0?\.\d+|1\.0+", text):
        return Acceptance(text, text)
    sequences, name = {text: text}, text
    if not re.fullmatch("[01]+", text):
        path, _, name = text.partition(":")
        try:
            sequences = recorded(engines.read([path]))
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(
                f"expected a share such as 0.92, bits such as 1101, or FILE:NAME, got {text!r}: {error}; "
                "`answers.py --kept` writes such a file"
            ) from error
    if not sequences.get(name):
        names = ", ".join(sequences) or "which this file has none of"
        raise argparse.ArgumentTypeError(
            f"expected FILE:NAME with a configuration that `answers.py --kept` measured ({names}), got {text!r}"
        )
    kept = sequences[name]
    return Acceptance(f"{name}, {kept.count('1') / len(kept):.3f}", kept)


def recorded(rows: Sequence[Row]) -> dict[str, str]:
    """Drafts of all requests, one after the other, by configuration; of rows that `answers.py --kept` wrote."""
    found: dict[str, str] = {}
    for row in rows:
        if "kept" in row:
            found[row["config"]] = found.get(row["config"], "") + "".join(row["kept"])
    return found


def replayed(args: argparse.Namespace, engine: str, folder: Path) -> dict[str, str]:
    """Environment of an engine whose drafts are kept as the command line says."""
    if engine != LOSSLESS or args.acceptance is None:
        return {}
    return engines.plugin_environment(folder, "lossless_replay", {"LOSSLESS_REPLAY": args.acceptance.kept})


def measure(args: argparse.Namespace, engine: str, start: int) -> None:
    """One start of one engine: all of its cells that the result file does not hold yet."""
    origin = {"engine": engine, "start": start, "tokens": args.tokens, **engines.provenance(args)}
    if engine == LOSSLESS:
        origin["acceptance"] = args.acceptance and args.acceptance.name
    wanted = missing(args, origin)
    if not wanted:
        return
    with tempfile.TemporaryDirectory() as name:
        model, store = engines.write_model(Path(name) / "model", args.shape), Path(name) / "store"
        store.mkdir()
        cell = Cell(engine_flags(args, engine, model, store), args.shape, args.seed + start)
        try:
            for row in wanted:
                size = f"{row['prefixes']:3d} x {row['context']:6d} tokens, batch {row['batch']:3d}"
                of_row = f"{engine:10s} {row['path']:6s} {size}"
                tokens, pool = cell.room(row)
                if tokens > pool:
                    print(f"{of_row}: left out, {tokens} tokens in a KV pool of {pool}", flush=True)
                    continue
                cell.prefixes(row["context"], row["prefixes"])
                before = cell.counted()
                steps = cell.steps(row, stock=row["path"] == "stock")
                ours = {name: count - before[name] for name, count in cell.counted().items()}
                row |= {"steps": len(steps), **ours, **_times(steps)}
                if "cache_device" in row["config"]:
                    row["cache_rank"] = cell.state()["decode"]["cache_rank"]
                engines.append(args.out, row)
                print(
                    f"{of_row}: {row['ms']:8.3f} ms ({row['ms_p10']:.3f} to {row['ms_p90']:.3f}), {ours}",
                    flush=True,
                )
        finally:
            cell.engine.shutdown()


def _times(steps: Sequence[float]) -> Row:
    tenths = quantiles(steps, n=10, method="inclusive")
    times = {"ms": median(steps), "ms_mean": fmean(steps), "ms_p10": tenths[0], "ms_p90": tenths[-1]}
    return {name: 1e3 * seconds for name, seconds in times.items()}


def table(rows: Sequence[Row]) -> str:
    """Medians over the starts, in ms; ours with their share of the best stock engine's of the same device and shape.

    Raises:
        ValueError: rows of other weights than others.
    """
    weights = {row.get("weights", "dummy") for row in rows}
    if len(weights) > 1:
        raise ValueError(f"expected rows of one kind of weights, got {sorted(weights)}; print their files apart")
    cells: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in rows:
        group = (row["device"], row["shape"], row["page"], row.get("prefixes", 1), row["context"], row["batch"])
        cells.setdefault(group, {}).setdefault(name_of(row), []).append(ms_of(row))
    names = sorted({name for found in cells.values() for name in found}, key=place_of)
    lines = []
    for (device, shape, page, prefixes, context, batch), found in sorted(cells.items()):
        dense = [median(times) for name, times in found.items() if name in STOCK]
        texts = []
        for name in names:
            share = f", {median(found[name]) / min(dense):.3f}" if dense and name in found and name not in STOCK else ""
            texts.append(_spread(found.get(name)) + share)
        tokens = f"{prefixes} x {context}" if prefixes > 1 else str(context)
        lines.append([f"{device}, {shape}, {page}", tokens, str(batch), *texts])
    return engines.markdown(["device, shape, page", "tokens", "batch", *names], lines)


def _spread(times: list[float] | None) -> str:
    if not times:
        return ""
    text = f"{median(times):.2f}"
    return text if len(times) == 1 else f"{text} ({min(times):.2f}-{max(times):.2f})"


#: Line and marker by engine and path; whatever else is measured comes after these.
LOOKS = {
    "plugin, shared": ("-", "o"),
    "flashinfer": ("--", "s"),
    "triton": ("-.", "^"),
    "plugin, stock": (":", "x"),
    "sparse, kascade": ("-", "D"),
    "sparse, anchors": ("-", "v"),
    "auto, kascade": ("-", "*"),
    "auto, anchors": ("-", "P"),
}
_OWN_BUDGET = {"keep_ratio": None, "group_growth": "none"}
"""The plugin's own, as rows say it of the time when `decode.py` had another one."""
_COLORS = 64
"""Of the PNG: less than a third of the bytes that all would take."""


def name_of(row: Row) -> str:
    """Engine and path, or layer plan, of a row, as the table and the plot call it, and the settings that were given."""
    engine, config = row["engine"], dict(row.get("config") or {})
    if _OWN_BUDGET.items() <= config.items():
        config = {key: value for key, value in config.items() if key not in _OWN_BUDGET}
    if engine in STOCK:
        return str(engine)
    name = f"{engine}, {row['path' if engine == 'plugin' else 'plan']}"
    if row.get("acceptance"):
        name += f", {row['acceptance']}"
    return f"{name}, {json.dumps(config)}" if config else name


def ms_of(row: Row) -> float:
    """Of a step; of a token where steps give several: that is a mean."""
    return float(row["ms_mean" if row["engine"] == LOSSLESS else "ms"])


def place_of(name: str) -> tuple[bool, int, str]:
    """Stock engines first, then as in `LOOKS`."""
    order = list(LOOKS)
    return "," in name, order.index(name) if name in order else len(order), name


def plotted(rows: Sequence[Row]) -> dict[tuple[int, str], list[tuple[int, float]]]:
    """Per batch and name the ascending (context, median over the starts in ms), where all share one prefix."""
    times: dict[tuple[int, str], dict[int, list[float]]] = {}
    for row in [row for row in rows if row.get("prefixes", 1) == 1]:
        times.setdefault((row["batch"], name_of(row)), {}).setdefault(row["context"], []).append(ms_of(row))
    keys = sorted(times, key=lambda key: (key[0], place_of(key[1])))
    return {key: [(context, median(ms)) for context, ms in sorted(times[key].items())] for key in keys}


def plot(rows: Sequence[Row], path: str | Path) -> Path:
    """Time of a step against the context, one line per batch and engine or path, both axes logarithmic.

    Raises:
        ValueError: nothing to draw, or rows of several devices or shapes.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator
    from PIL import Image

    titles = sorted({f"{row['device']}, {row['shape']}, pages of {row['page']}" for row in rows})
    if len(titles) != 1:
        raise ValueError(f"expected rows of one device, shape and page size, got {titles or 'no rows'}")
    drawn = plotted(rows)
    batches = sorted({batch for batch, _ in drawn})
    names = list(dict.fromkeys(name for _, name in drawn))
    ours = [name for name in names if name not in STOCK]
    figure = Figure(figsize=(7.6, 4.4))
    panel = figure.subplots()
    for (batch, name), points in drawn.items():
        line, marker = LOOKS.get(name, ("-", f"${names.index(name)}$"))
        looks = {"color": f"C{batches.index(batch)}", "marker": marker, "markersize": 5, "lw": 1.3}
        said = "plugin" if ours == [name] else name
        panel.plot(*zip(*points, strict=True), line, label=f"{said}, {batch} at a time", **looks)
    panel.set_xscale("log", base=2)
    panel.set(yscale="log", xlabel="tokens of shared prefix", ylabel="ms a decode step", title=titles[0])
    panel.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}K" if tokens >= 1024 else f"{tokens:g}")
    low, high = panel.get_ylim()
    panel.set_yticks([ms for ms in (1, 2, 5, 10, 20, 50, 100, 200, 500) if low <= ms <= high])
    panel.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
    panel.yaxis.set_minor_locator(NullLocator())
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.tight_layout()
    drawing = BytesIO()
    figure.savefig(drawing, dpi=100)
    Image.open(drawing).convert("RGB").quantize(_COLORS).save(path, optimize=True)
    return Path(path)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["flashinfer", "plugin"], choices=ENGINES)
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192, 32768, 131072], metavar="TOKENS")
    parser.add_argument("--prefixes", nargs="+", type=int, default=[1], metavar="COUNT", help="of each length")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32], metavar="REQUESTS")
    parser.add_argument("--tokens", type=int, default=240, help="generated by the measured request")
    parser.add_argument(
        "--acceptance",
        type=acceptance_of,
        metavar="SHARE|BITS|FILE:NAME",
        help="of `lossless`: share of drafts that are kept; of each draft 1 or 0; a configuration of a file of "
        "`answers.py --kept`; without: what the weights say",
    )
    engines.add_arguments(parser)
    parser.add_argument("--plot", metavar="FILE.png", help="with --table: draw the same rows, too")
    parser.add_argument("--logs", type=Path, help="folder that keeps the engines' logs")
    parser.add_argument("--out", default="decode.jsonl", help="result file; rows are appended")
    parser.add_argument("--one", nargs=2, metavar=("ENGINE", "START"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.plot and args.table is None:
        parser.error("expected --table FILE with --plot: the rows to draw")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, each start in a process of its own; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv)
    if args.table is not None:
        rows = engines.read(args.table)
        try:
            print(table(rows))
        except ValueError as error:
            sys.exit(f"decode.py: {error}")
        if args.plot:
            plot(rows, args.plot)
        return 0
    if args.one:
        measure(args, args.one[0], int(args.one[1]))
        return 0
    status = 0
    for start, engine in product(range(args.starts), args.engines):
        command = [sys.executable, __file__, "--one", engine, str(start), *argv]
        with ExitStack() as stack:
            folder, log = stack.enter_context(tempfile.TemporaryDirectory()), None
            if args.logs is not None:
                args.logs.mkdir(parents=True, exist_ok=True)
                log = stack.enter_context((args.logs / f"{engine}-{start}.log").open("w"))
            environment = os.environ | replayed(args, engine, Path(folder))
            status |= subprocess.run(command, check=False, env=environment, stderr=log).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
