#!/usr/bin/env python3
"""Which predictor of the next step's query is worth selecting ahead with, on real models' dense decode.

    make models                                                       # once
    python benchmarks/query_prediction.py --out rows.jsonl            # Qwen, the tasks of answers.py and long answers
    python benchmarks/query_prediction.py --out rows.jsonl --model-path .models/smollm2-135m-instruct
    python benchmarks/query_prediction.py --table rows.jsonl          # what docs/selection.md shows

A layer selects prefix tokens by the exact scores of a predicted query, maximum over the query heads of a KV head, sink
and window inside the budget, as serving does. Queries, keys and values are those of dense decode in float32. They are
captured once, into `--work`, and judged from there. Rows are appended; what the result file has is not judged again.

    overlap  of the selections by the predicted and the true query: the share of the budget behind sink and window
             that both have (AsyncSpade, Eq. 1, there without windows)
    mass     of the true query's attention on what is attended: the selection and all tokens behind the prefix
    error    |output - dense output| / |dense output| of a query head

A step counts from the second decode step on; a window that decode has not filled yet is shorter. `lagged`: blocks of 16
by their INT4 means, scored by the last query, name so many budgets of candidates, which the true query ranks; `lagged
tokens`: the tokens' own scores by the last query name them; `blocks`: the blocks do, by the true query.
`repair`: of the tokens of the blocks that the true query wants, those missing are attended, by block score, up to that
share of the budget. Layer 0 does not select.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import torch
from answers_data import RULER_TASKS, Chat, Document, documents, ruler
from engines import Row, append, read
from kernel_rows import origin
from query_capture import TEMPERATURE, Answered, Captured, Capturing, long_documents
from query_predictors import Exponential, Lag, Linear, Mean, Predictor, Ridge, Rotated
from torch import Tensor
from tqdm import tqdm

from prefix_kernels.block_scores import block_scores_mean
from prefix_kernels.pooling import pool_scores
from prefix_kernels.top_k_selection import top_k_selection
from sglang_ext.methods.ab_sparse import ABSparseBuilder, ABSparseSelector, ABSparseSpec
from sglang_ext.methods.base import SelectArgs
from sglang_ext.options import SparseAttnConfig

SUITES = ("documents", "ruler", "long")
KEPT = (1 / 8, 1 / 20)
WINDOWS = (4, 8, 16, 32)
LAGS = (2, 4, 8, 16)
"""Older queries than the last, used unchanged. AsyncSpade, 3.1: over 40% within 16 tokens, at 1/8."""
CANDIDATES = (4, 8)
"""Budgets that are named for the true query to rank."""
REPAIRS = (1 / 8, 1 / 4)
"""Of the budget: what an exact second pass attends at most."""
TRUE, UNDONE = "true query", "RoPE undone"
WATCHED = ("last", "ridge 16", f"ridge 4, {UNDONE}")
"""Predictors whose selections are repaired, too, and whose overlap is written down by layer and KV head."""


def predictors(frequencies: Tensor) -> dict[str, Predictor]:
    """All that are compared, by name; `frequencies` of RoPE, for those that undo it."""
    found: dict[str, Predictor] = {"last": Lag(1)}
    for name, kind in (("ridge", Ridge), ("mean", Mean), ("exponential", Exponential)):
        found |= {f"{name} {window}": kind(window) for window in WINDOWS}
    undone = {**found, **{f"linear {window}": Linear(window) for window in (2, *WINDOWS)}}
    found |= {f"{name}, {UNDONE}": Rotated(one, frequencies) for name, one in undone.items()}
    return found | {f"lag {lag}": Lag(lag) for lag in LAGS}


@dataclass(frozen=True)
class Step:
    """One layer at one decode step.

    Attributes:
        keys, values: [num_kv_heads, prefix_len, head_dim].
        blocks: arrays of the block index, by their INT4 means.
        own_keys, own_values: [num_kv_heads, tokens behind the prefix, head_dim], the token that is read included.
        query, last: [num_qo_heads, head_dim], true, and that of the step before.
        predicted: [num_predictors, num_qo_heads, head_dim].
        args: sizes of a selection but for the budget.
    """

    keys: Tensor
    values: Tensor
    blocks: dict[str, Tensor]
    own_keys: Tensor
    own_values: Tensor
    query: Tensor
    last: Tensor
    predicted: Tensor
    args: SelectArgs

    def scores(self) -> Tensor:
        """[1 + num_predictors, num_kv_heads, prefix_len]: log shares by the true query, then by each prediction."""
        raw = block_scores_mean(torch.cat([self.query[None], self.predicted]), self.keys)
        pooled = pool_scores(raw.flatten(0, 1)[:, None], self.args.sm_scale)
        return pooled.view(*raw.shape[:2], -1).transpose(0, 1)

    def top(self, scores: Tensor, budget: int) -> Tensor:
        """bool [..., prefix_len]: the best by scores [..., prefix_len], sink and window included."""
        chosen = top_k_selection(scores.flatten(0, -2), budget, self.args.num_sink, self.args.num_recent).positions
        mask = torch.zeros(chosen.shape[0], scores.shape[-1], dtype=torch.bool, device=scores.device)
        return mask.scatter_(1, chosen.long(), True).view(scores.shape)

    def wanted(self, query: Tensor) -> Tensor:
        """[num_kv_heads, prefix_len]: each token's log share by the mean of its block."""
        return ABSparseSelector(ABSparseSpec()).token_scores(self.blocks, query[None], self.args)

    def ranked(self, named: Tensor, budget: int) -> Tensor:
        """bool [num_kv_heads, prefix_len]: the best by the true query of those named; it ranks among these alone."""
        raw = block_scores_mean(self.query[None], self.keys).masked_fill(~named[:, None, None], -torch.inf)
        return self.top(pool_scores(raw, self.args.sm_scale), budget)

    def candidates(self, budget: int) -> dict[str, Tensor]:
        """By name, what the true query selects of candidates: [num_kv_heads, prefix_len] bool."""
        last = pool_scores(block_scores_mean(self.last[None], self.keys), self.args.sm_scale)
        named = {"lagged blocks": self.wanted(self.last), "lagged tokens": last, "blocks": self.wanted(self.query)}
        return {
            f"{name} x {times}": self.ranked(self.top(scores, min(times * budget, scores.shape[1])), budget)
            for name, scores in named.items()
            for times in CANDIDATES
        }

    def repaired(self, selected: Tensor, budget: int, share: float) -> Tensor:
        """`selected` bool [..., num_kv_heads, prefix_len], and the missing tokens of the blocks that are wanted."""
        scores = self.wanted(self.query)
        missing = self.top(scores, budget) & ~selected
        ranked = scores.masked_fill(~missing, -torch.inf)
        best = ranked.topk(int(share * budget), dim=-1).indices
        return selected | (missing & torch.zeros_like(missing).scatter_(-1, best, True))

    def attended(self, selected: Tensor) -> tuple[Tensor, Tensor]:
        """Attention mass and relative output error [..., num_kv_heads], means over the KV head's query heads.

        Args:
            selected: bool [..., num_kv_heads, prefix_len]: the prefix tokens that are attended.
        """
        heads = self.keys.shape[0]
        query = self.query.view(heads, -1, self.query.shape[-1])
        logits = query @ torch.cat([self.keys, self.own_keys], 1).mT * self.args.sm_scale
        shares = logits.softmax(-1)
        prefix, own = shares.split([self.keys.shape[1], self.own_keys.shape[1]], -1)
        behind = own @ self.own_values
        dense = prefix @ self.values + behind
        # As many tokens are read as the fullest selection has: masks are cheap to name, and slow to multiply.
        count = int(selected.sum(-1).amax())
        best = selected.float().topk(count, dim=-1)
        read = best.indices[..., None, :].expand(*best.indices.shape[:-1], query.shape[1], count)
        kept = prefix.expand(*read.shape[:-1], -1).gather(-1, read) * best.values[..., None, :]
        head = torch.arange(heads, device=read.device)[:, None]
        mass = kept.sum(-1) + own.sum(-1)
        out = (kept @ self.values[head, best.indices] + behind) / mass[..., None]
        return mass.mean(-1), ((out - dense).norm(dim=-1) / dense.norm(dim=-1)).mean(-1)


@dataclass
class Sums:
    """Figures of one way of selecting, summed over steps: [layers, num_kv_heads] each."""

    figures: dict[str, Tensor] = field(default_factory=dict)

    def add(self, layer: int, layers: int, **figures: Tensor) -> None:
        """Add one step of a layer; each figure is [num_kv_heads]."""
        for name, value in figures.items():
            self.figures.setdefault(name, value.new_zeros(layers, len(value)))[layer] += value

    def means(self, steps: int) -> Row:
        """Means over steps, layers and KV heads; layer 0 is left out."""
        return {name: round(float(value[1:].mean()) / steps, 4) for name, value in self.figures.items()}

    def by_head(self, steps: int) -> list[list[float]]:
        """Overlap by layer, from layer 1 on, and KV head."""
        return [[round(one, 3) for one in heads] for heads in (self.figures["overlap"][1:] / steps).tolist()]


def judge(captured: Captured, answer: Answered, every: int) -> Iterator[Row]:
    """Rows of one answer: a row for each share kept and each way of selecting.

    Args:
        captured: the document.
        answer: one of its answers.
        every: of so many decode steps one is judged, from the second on.
    """
    steps = list(range(1, len(answer.queries), every))
    layers, device = answer.queries.shape[1], answer.queries.device
    config, known = SparseAttnConfig(), predictors(captured.frequencies)
    sums: dict[tuple[float, str], Sums] = {}
    reach = max(one.reach for one in known.values())
    lags = torch.tensor([[max(step - lag, 0) for lag in range(1, reach + 1)] for step in steps], device=device)
    held = torch.tensor(steps, device=device)[:, None]
    builder = ABSparseBuilder(ABSparseSpec())
    for layer in range(1, layers):
        keys, values = captured.keys[layer], captured.values[layer]
        queries = answer.queries[:, layer]
        window = queries[lags].transpose(1, 2)
        predicted = torch.stack([one.predict(window, held) for one in known.values()])
        blocks = builder.build_layer(keys.transpose(0, 1), None)
        args = SelectArgs(
            prefix_len=keys.shape[1],
            num_sink=config.num_sink_tokens,
            num_recent=16 * config.num_recent_pages,
            sm_scale=keys.shape[-1] ** -0.5,
        )
        behind = answer.keys.shape[2] - len(answer.queries)
        for i, step in enumerate(steps):
            own = slice(0, behind + step + 1)
            own_keys, own_values = answer.keys[layer, :, own], answer.values[layer, :, own]
            query, last = queries[step], queries[step - 1]
            now = Step(keys, values, blocks, own_keys, own_values, query, last, predicted[:, i], args)
            for kept, names, figures in compared(now, list(known)):
                for n, name in enumerate(names):
                    one = {figure: value[n] for figure, value in figures.items()}
                    sums.setdefault((kept, name), Sums()).add(layer, layers, **one)
    shared = {"task": answer.task, "document": captured.name, "prefix_len": captured.keys.shape[2]}
    for (kept, name), of in sums.items():
        row = {**shared, "steps": len(steps), "kept": kept, "selection": name, **of.means(len(steps))}
        yield {**row, "by_head": of.by_head(len(steps))} if name in WATCHED else row


def compared(step: Step, names: Sequence[str]) -> Iterator[tuple[float, list[str], dict[str, Tensor]]]:
    """Ways of selecting, with figures of [ways, num_kv_heads], for each share kept."""
    scores = step.scores()
    fixed = step.args.num_sink + step.args.num_recent
    for kept in KEPT:
        budget = int(kept * step.keys.shape[1])
        selected = step.top(scores, budget)
        candidates = step.candidates(budget)
        ways = [(TRUE, *names, *candidates)]
        masks = [torch.cat([selected, torch.stack(list(candidates.values()))])]
        some = [names.index(name) for name in WATCHED if name in names]
        for share in REPAIRS:
            ways.append(tuple(f"{names[i]}, repair 1/{round(1 / share)}" for i in some))
            masks.append(step.repaired(selected[1:][some], budget, share))
        for way, mask in zip(ways, masks, strict=True):
            mass, error = step.attended(mask)
            both = (mask & selected[0]).sum(-1)
            yield kept, list(way), {"overlap": (both - fixed) / (budget - fixed), "mass": mass, "error": error}


def asked(args: argparse.Namespace, chat: Chat) -> Iterator[tuple[str, Document]]:
    """(suite, document with the questions that are asked), in a fixed order."""
    for length in args.lengths:
        own = list(documents(args.packages, chat, length, args.documents, args.seed))
        for document in own if "documents" in args.suites else ():
            # One conversation, of which the first turn is answered, of each kind.
            kinds = {turns[0].task: turns for turns in document.conversations}
            yield "documents", replace(document, conversations=tuple(kinds.values()))
        if "long" in args.suites:
            yield from (("long", one) for one in long_documents(chat, own[0], length))
        for task in args.tasks if "ruler" in args.suites else ():
            found = ruler(args.packages, args.model_path, args.work, task, length, args.samples)
            yield from (("ruler", one) for one in found)


def measure(args: argparse.Namespace) -> None:
    """Capture what is not there, then judge what the result file does not hold."""
    from transformers import AutoTokenizer

    device = torch.device(args.device)
    known = {"model": Path(args.model_path).name, "seed": args.seed, **origin(args)}
    known |= {"device": platform.processor() or "CPU"} if device.type == "cpu" else {}
    args.work = args.work / known["model"]
    captures = args.work / f"seed-{args.seed}-{args.steps}-{args.new_tokens}-{args.device}"
    captures.mkdir(parents=True, exist_ok=True)
    chat = Chat(AutoTokenizer.from_pretrained(args.model_path))
    plan = [(suite, document, captures / f"{document.name}.pt") for suite, document in asked(args, chat)]
    missing = [one for one in plan if not one[2].exists()]
    capturing = Capturing(args.model_path, chat, device) if missing else None
    for suite, document, path in tqdm(missing, unit=" captures"):
        assert capturing is not None
        long = suite == "long"
        steps, temperature = (args.new_tokens, TEMPERATURE) if long else (args.steps, 0.0)
        capturing.capture(document, steps, temperature).save(path)
    rows = read([args.out]) if Path(args.out).exists() else []
    same = ("model", "seed", "commit", "device")
    done = {(row["document"], row["task"]) for row in rows if all(row[key] == known[key] for key in same)}
    for suite, document, path in tqdm(plan, unit=" documents"):
        if all((document.name, turns[0].task) in done for turns in document.conversations):
            continue
        captured = Captured.load(path, device)
        every = args.long_every if suite == "long" else args.every
        for answer in captured.answers:
            if (document.name, answer.task) not in done:
                found = list(judge(captured, answer, every))
                for row in found:
                    append(args.out, {"suite": suite, "every": every, **row, **known})


def table(rows: Sequence[Row]) -> str:
    """Markdown: overlap, mass and error of each way of selecting; then the overlap of each layer, from layer 1 on."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    columns = [(model, kept) for model in models for kept in KEPT]
    heads = (f"{model}, {kept:.1%}" for model, kept in columns)
    lines = ["| selection | " + " | ".join(heads) + " |", "|---|" + "---|" * len(columns)]
    for name in dict.fromkeys(row["selection"] for row in rows):
        found = [mean_of(rows, model, kept, name) for model, kept in columns]
        cells = (f"{one['overlap']:.1%}, {one['mass']:.3f}, {one['error']:.3f}" for one in found)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for model, kept in columns:
        layers = " ".join(f"{one:.0%}" for one in by_layer(rows, model, kept, WATCHED[-1]))
        lines.append(f"\n{model}, {kept:.1%}, {WATCHED[-1]}, overlap by layer: {layers}")
    return "\n".join(lines)


def chosen(rows: Sequence[Row], model: str, kept: float, name: str) -> dict[str, list[Row]]:
    """Rows of one model, share kept and way of selecting, by task."""
    tasks: dict[str, list[Row]] = {}
    for row in rows:
        if (row["model"], row["kept"], row["selection"]) == (model, kept, name):
            tasks.setdefault(row["task"], []).append(row)
    return tasks


def mean_of(rows: Sequence[Row], model: str, kept: float, name: str) -> dict[str, float]:
    """Overlap, mass and error: means over tasks, of each over its answers."""
    tasks = chosen(rows, model, kept, name).values()
    return {figure: fmean(fmean(row[figure] for row in of) for of in tasks) for figure in ("overlap", "mass", "error")}


def by_layer(rows: Sequence[Row], model: str, kept: float, name: str) -> list[float]:
    """Overlap of a watched predictor by layer, from layer 1 on: means over tasks and KV heads."""
    tasks = chosen(rows, model, kept, name).values()
    means = [torch.tensor([row["by_head"] for row in of]).mean((0, 2)) for of in tasks]
    return [float(one) for one in torch.stack(means).mean(0)]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default=".models/qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--packages", type=Path, default=Path(".models/packages"), help="folder of `make models`")
    parser.add_argument("--suites", nargs="+", default=list(SUITES), choices=SUITES)
    parser.add_argument("--tasks", nargs="+", default=list(RULER_TASKS), choices=RULER_TASKS, help="of RULER")
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096], metavar="TOKENS", help="of prefixes")
    parser.add_argument("--documents", type=int, default=1, help="of each length; a question of each kind")
    parser.add_argument("--samples", type=int, default=1, help="of each RULER task and length")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of an answer")
    parser.add_argument("--new-tokens", type=int, default=2000, help="decode steps of a long answer")
    parser.add_argument("--every", type=int, default=1, help="judge one of so many steps")
    parser.add_argument("--long-every", type=int, default=8, help="the same of long answers")
    parser.add_argument("--seed", type=int, default=0, help="of documents and questions")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--work", type=Path, default=Path(".models/queries"), help="folder of captures")
    parser.add_argument("--commit", default="", help="of the code measured, where there is no git checkout")
    parser.add_argument("--out", default="query-prediction.jsonl", help="result file; rows are appended")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="print rows as Markdown, measure nothing")
    args = parser.parse_args(argv)
    for name in ("steps", "new_tokens"):
        if getattr(args, name) < 2:
            flag = f"--{name.replace('_', '-')}"
            parser.error(
                f"expected {flag} of at least 2, as a first step has no query before it, got {getattr(args, name)}"
            )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or print the table; returns the exit status."""
    args = parse(argv)
    if args.table:
        print(table(read(args.table)))
        return 0
    with torch.no_grad():
        measure(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
