"""Selection quality: every method and its rivals on the same queries and keys, against the oracle.

Two sources in one result file. *Captured*: queries, keys and values of a model's decode steps, from files that
`--make-captures` writes by running the model through SGLang. *Planted*: synthetic prefixes whose critical tokens are
known to be hard for random choice and for sliding windows; the run stops if they are not.

    python benchmarks/selection.py --make-captures --captures captures --model-path models/needle -- --device cpu ...
    python benchmarks/selection.py --captures captures --planted 8192 32768 131072 --out selection.jsonl
    python benchmarks/selection.py --table selection.jsonl

A line of the result file is one method on one prompt, with a point for each keep ratio: attention-mass recall, its
ratio to the oracle's, Top-k overlap outside the windows, relative output error over the prefix, bytes read in a step
per KV head (index, and bf16 keys and values of the selection), averaged over layers and tokens; layer 0 also apart.
Lines that the file holds already are not measured again, so an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import selection_tables
import torch
from kernel_rows import origin
from selection_data import (
    Item,
    calibrated_channels,
    captured_items,
    captures_missing,
    make_captures,
    own_channels,
    planted_items,
)
from selection_methods import Budget, LayerInput, Method, Step, as_heads, make_methods
from torch import Tensor
from tqdm import tqdm

from prefix_kernels.pooling import Pooling, sum_step
from prefix_kernels.testing import PLANTED
from sglang_ext.calibration.selection_quality import FullAttention, Oracle, full_attention, oracle_at, selection_quality
from sglang_ext.config import SparseAttnConfig
from sglang_ext.methods.arrays import kv_bytes
from sglang_ext.methods.base import LayerProfile
from sglang_ext.quality.tasks import TASKS

KEEP_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2)
MEANS = ("recall", "oracle_recall", "oracle_ratio", "overlap", "error", "index_bytes", "kv_bytes")

Row = dict[str, Any]
Channels = Sequence[LayerProfile] | None
Figures = dict[str, float]


def budgets_for(prefix_len: int, keep_ratios: Iterable[float], num_sink: int, num_recent: int) -> tuple[Budget, ...]:
    """As served: the windows are part of the budget and shrink to it."""
    budgets = []
    for keep in keep_ratios:
        tokens = min(prefix_len, max(1, round(keep * prefix_len)))
        sink = min(num_sink, tokens)
        budgets.append(Budget(keep, tokens, sink, min(num_recent, tokens - sink)))
    return tuple(budgets)


@dataclasses.dataclass
class Measured:
    """What one method did on one item: per layer the figures of each budget, bytes stored and build seconds."""

    points: list[list[Figures]] = dataclasses.field(default_factory=list)
    stored: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)


class Evaluation:
    """All methods on one item, layer by layer.

    Args:
        item: one prompt.
        methods: that are measured.
        channels: by layer, of an offline calibration; None: from the prefix itself.
        options: of the run.
    """

    def __init__(self, item: Item, methods: Sequence[Method], channels: Channels, options: Options):
        self.item, self.methods, self.channels, self.options = item, methods, channels, options
        self.measured = {method.name: Measured() for method in methods}

    def run(self) -> list[Row]:
        """Measure; one row per method."""
        options = self.options
        layers, sm_scale = self.item.load(options.device)
        prefix_len, _, head_dim = layers[0].keys.shape
        budgets = budgets_for(prefix_len, options.keep_ratios, options.num_sink, options.num_recent)
        step = Step(prefix_len, sm_scale, options.pooling, budgets)
        for i, layer in enumerate(layers):
            attention = full_attention(layer.q, layer.keys, layer.values, sm_scale, options.pooling)
            oracles = [oracle_at(attention, budget.tokens, budget.num_sink, budget.num_recent) for budget in budgets]
            channels = own_channels(layer) if self.channels is None else self.channels[i]
            given = LayerInput(layer.keys, layer.samples, channels)
            for method in self.methods:
                self._measure(method, given, layer.q, step, attention, oracles)
        return [self._row(method, step, head_dim) for method in self.methods]

    def _measure(
        self,
        method: Method,
        given: LayerInput,
        q: Tensor,
        step: Step,
        attention: FullAttention,
        oracles: Sequence[Oracle],
    ) -> None:
        found = self.measured[method.name]
        arrays, seconds = method.build(given)
        found.seconds.append(seconds)
        found.stored.append(method.stored(arrays))
        tiled, tokens = as_heads(arrays, q)
        chosen = method.select(tiled, tokens, q.shape[0] * attention.num_kv_heads, step)
        points = []
        for budget, selection, oracle in zip(step.budgets, chosen, oracles, strict=True):
            figures = selection_quality(attention, selection, oracle).means()
            index = method.index_read(tiled, tokens, step, budget)
            points.append({**figures, "index_bytes": index, "kv_bytes": kv_bytes(budget.tokens, q.shape[2])})
        found.points.append(points)

    def _row(self, method: Method, step: Step, head_dim: int) -> Row:
        found, dense = self.measured[method.name], kv_bytes(step.prefix_len, head_dim)
        points = {}
        for i, budget in enumerate(step.budgets):
            layers = [layer[i] for layer in found.points]
            means = {key: sum(layer[key] for layer in layers) / len(layers) for key in MEANS}
            read = (means["index_bytes"] + means["kv_bytes"]) / dense
            first = {key: layers[0][key] for key in ("recall", "oracle_recall", "error")}
            points[f"{budget.keep_ratio:g}"] = {"budget": budget.tokens, **means, "read_share": read, "layer0": first}
        stored = sum(found.stored) / len(found.stored)
        return {
            **identity(self.item, self.options, method),
            "kind": method.kind,
            "prefix_len": step.prefix_len,
            "sum_step": sum_step(step.prefix_len, method.sum_every),
            "layers": len(found.points),
            "stored_bytes_per_token": stored / step.prefix_len,
            "stored_share": stored / dense,
            "build_seconds": sum(found.seconds),
            "points": points,
            **self.options.origin,
        }


@dataclasses.dataclass(frozen=True)
class Options:
    """What all rows of a run share."""

    device: torch.device
    pooling: Pooling
    num_sink: int
    num_recent: int
    steps: int
    keep_ratios: tuple[float, ...]
    origin: Row


def identity(item: Item, options: Options, method: Method) -> Row:
    """What makes a row another row: the fields that a resumed run compares."""
    return {
        "source": item.source,
        "data": item.data,
        "num_tokens": item.num_tokens,
        "item": item.item,
        "generator": item.generator,
        "method": method.name,
        "spec": method.describe(),
        "layer_plan": None,  # every layer selects for itself
        "pooling": options.pooling.value,
        "num_sink": options.num_sink,
        "num_recent": options.num_recent,
        "steps": options.steps,
        **({"sum_every": method.sum_every} if method.sum_every > 1 else {}),
        "keep_ratios": list(options.keep_ratios),
    }


def _key(row: Row) -> str:
    """`identity`'s fields as text; they come first in a row."""
    fields = list(row)
    return json.dumps({key: row[key] for key in fields[: fields.index("keep_ratios") + 1]}, sort_keys=True)


def check_difficulty(rows: Iterable[Row]) -> None:
    """Raise when planted data say nothing: chance or windows find the critical tokens, or nobody can.

    Raises:
        RuntimeError: random or StreamingLLM recall 0.5 or more, or the oracle less than 0.8 from 5% kept on.
    """
    for row in rows:
        if row["source"] != "planted":
            continue
        for keep, point in row["points"].items():
            easy = row["method"] in ("random", "streaming_llm") and point["recall"] >= 0.5
            hopeless = row["method"] == "oracle" and float(keep) >= 0.05 and point["recall"] < 0.8
            if easy or hopeless:
                raise RuntimeError(
                    f"planted {row['data']} at {row['num_tokens']} tokens is too {'easy' if easy else 'flat'}: "
                    f"{row['method']} recalls {point['recall']:.2f} at {keep} kept; change its parameters"
                )


def read_rows(path: Path) -> list[Row]:
    """Rows of a result file (also one packed by xz); a last line that was cut off is removed from the file."""
    if not path.exists():
        return []
    if path.suffix == ".xz":
        return [json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines()]
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def measure(
    items: Sequence[Item],
    methods: Sequence[Method],
    channels: Channels,
    options: Options,
    out: Path,
) -> int:
    """Write the rows that `out` lacks; returns how many.

    Raises:
        RuntimeError: see `check_difficulty`.
    """
    done = {_key(row) for row in read_rows(out)}
    written = 0
    with tqdm(items, unit="prompt", disable=None) as bar:
        for item in bar:
            bar.set_postfix_str(f"{item.source} {item.data} {item.num_tokens}")
            missing = [one for one in methods if json.dumps(identity(item, options, one), sort_keys=True) not in done]
            if not missing:
                continue
            rows = Evaluation(item, missing, channels if item.source == "captured" else None, options).run()
            check_difficulty(rows)
            with out.open("a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
            written += len(rows)
    return written


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    served = SparseAttnConfig()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captures", type=Path, metavar="DIR", help="folder of capture files")
    parser.add_argument("--planted", nargs="*", type=int, metavar="TOKENS", default=[], help="lengths of planted data")
    parser.add_argument("--kinds", nargs="+", choices=list(PLANTED), default=list(PLANTED), metavar="KIND")
    parser.add_argument("--out", type=Path, default=Path("selection.jsonl"), help="result file; rows are appended")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="rows to measure; default: all")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS", help="of captures; default: all there")
    parser.add_argument("--questions", type=int, default=2, help="captures per task and length")
    parser.add_argument("--steps", type=int, default=8, help="last decode steps that are measured")
    parser.add_argument("--keep", nargs="+", type=float, default=list(KEEP_RATIOS), metavar="RATIO")
    parser.add_argument("--pooling", choices=[p.value for p in Pooling], default=served.pooling.value)
    parser.add_argument("--num-sink", type=int, default=served.num_sink_tokens)
    parser.add_argument("--num-recent", type=int, default=16 * served.num_recent_pages)
    parser.add_argument("--seed", type=int, default=0, help="of planted data and random choice")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="print result files as Markdown")
    parser.add_argument("--at", nargs="+", type=float, default=[0.05], metavar="RATIO", help="keep ratios of --table")
    parser.add_argument(
        "--make-captures", action="store_true", help="run the model and write captures, measure nothing"
    )
    parser.add_argument("--model-path", default="models/needle")
    parser.add_argument("--capture-seed", type=int, default=20_000, help="of the first captured document")
    parser.add_argument("sglang_flags", nargs="*", metavar="-- SGLANG FLAGS")
    args = parser.parse_args(argv)
    if not (args.table or args.captures or args.planted):
        parser.error("name --captures, --planted lengths, or a result file with --table")
    if args.make_captures and not args.captures:
        parser.error("--make-captures needs --captures DIR to write to")
    return args


def options_of(args: argparse.Namespace) -> Options:
    """The run's options, with where the rows come from."""
    keep, windows = tuple(sorted(args.keep)), (args.num_sink, args.num_recent)
    return Options(torch.device(args.device), Pooling(args.pooling), *windows, args.steps, keep, origin(args))


def run(args: argparse.Namespace) -> None:
    """Measure what the result file lacks."""
    options = options_of(args)
    items: list[Item] = []
    channels = None
    if args.captures:
        found = captured_items(args.captures, args.steps)
        items += [
            item
            for item in found
            if item.data in args.tasks
            and item.item < args.questions
            and (args.lengths is None or item.num_tokens in args.lengths)
        ]
        channels = calibrated_channels(args.captures, args.steps, options.device)
    items += planted_items(args.planted, args.kinds, args.seed)
    methods = make_methods(args.methods, args.seed)
    print(f"{measure(items, methods, channels, options, args.out)} new rows in {args.out}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; Ctrl-C leaves a file that the next run goes on with."""
    args = parse(argv)
    try:
        if args.make_captures:
            lengths = args.lengths or [4096, 8192, 16384, 32768]
            wanted = captures_missing(args.captures, lengths, args.tasks, args.questions)
            make_captures(wanted, args.model_path, args.sglang_flags, args.capture_seed)
        elif args.table:
            rows = [row for path in args.table for row in read_rows(path)]
            print(selection_tables.tables(rows, args.at))
        else:
            run(args)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
