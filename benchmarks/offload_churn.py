#!/usr/bin/env python3
"""Prefixes in host memory: what a decode step selects that is not resident, of real models' dense decode.

    make models                                                       # once
    python benchmarks/offload_churn.py --out rows.jsonl               # Qwen on a CPU
    python benchmarks/offload_churn.py --trace selected.npz           # its selections, for residents to be fed with
    python benchmarks/offload_churn.py --table rows.jsonl

Post-RoPE queries, keys and values are captured by transformers. A document is prefilled once. Each question behind it
is answered for a given number of steps, past tokens that end an answer, as `answers.py` forces them. A layer selects by
the exact scores of its true query: maximum over the query heads of a KV head and a group's requests, sink and window
inside the budget, as serving does. Layer 0 does not select. Residents are units of 1, 4 or 16 tokens; what was wanted
least recently leaves.

    wanted  units with a selected token, as a share of the prefix: |M_t|
    churn   |M_t - M_{t-1}| / |M_t|
    moved   |T_t| / |M_t|: wanted units that residents of so many tokens lack; none where they have too few cells

The first step, which fetches all, does not count. `lagged_rows` attend what was resident before the step:

    exact      the selection itself
    lagged     selected tokens that are resident; the others are fetched, and resident at the next step
    error      |output - dense output| / |dense output| of a query head
    lost       selected tokens that are not attended, as a share of the budget
    moved      tokens that are fetched, as a share of the budget
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from answers_data import Chat, Document, Question, documents
from engines import Row, append, grouped, markdown, read
from kernel_rows import origin
from torch import Tensor

from prefix_kernels.block_scores import block_scores_mean
from prefix_kernels.budget import budget_for_group
from prefix_kernels.pooling import pool_scores
from prefix_kernels.top_k_selection import rank_by_keys
from sglang_ext.files import partial_file
from sglang_ext.methods.base import SelectArgs
from sglang_ext.options import SparseAttnConfig

TEMPERATURE = 0.8
"""Of long answers: greedy ones of small models soon repeat themselves, and so do their queries."""


@dataclass
class Answered:
    """One answer. All tensors are float32.

    Attributes:
        task: kind of the question.
        queries: [steps, layers, num_qo_heads, head_dim], post-RoPE: row t is of the decode step that reads token t.
        keys, values: [layers, num_kv_heads, question and steps, head_dim]: behind the document, in order.
        text: the answer's.
    """

    task: str
    queries: Tensor
    keys: Tensor
    values: Tensor
    text: str


@dataclass
class Captured:
    """A document and its answers.

    Attributes:
        name: of the document.
        keys, values: [layers, num_kv_heads, prefix_len, head_dim] float32, post-RoPE.
        answers: in the order of the questions.
    """

    name: str
    keys: Tensor
    values: Tensor
    answers: list[Answered]

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        with partial_file(path) as partial:
            torch.save({**vars(self), "answers": [vars(one) for one in self.answers]}, partial)

    @classmethod
    def load(cls, path: Path) -> Captured:
        """Read what `save` wrote."""
        data = torch.load(path, weights_only=True)
        return cls(**{**data, "answers": [Answered(**one) for one in data["answers"]]})


def output_error(keys: Tensor, values: Tensor, query: Tensor, sm_scale: float, selected: Tensor) -> Tensor:
    """Relative error of one layer's output at one decode step [..., num_kv_heads], mean over the KV head's query heads.

    Args:
        keys, values: [num_kv_heads, tokens, head_dim]: the prefix, and all behind it, which is attended.
        query: [num_qo_heads, head_dim].
        sm_scale: multiplies q.k.
        selected: bool [..., num_kv_heads, prefix_len]: the prefix tokens that are attended.
    """
    query = query.view(len(keys), -1, query.shape[-1])
    logits = query @ keys.mT * sm_scale
    dense = logits.softmax(-1) @ values
    every = torch.nn.functional.pad(selected, (0, keys.shape[1] - selected.shape[-1]), value=True)
    out = logits.masked_fill(~every[..., None, :], -torch.inf).softmax(-1) @ values
    return ((out - dense).norm(dim=-1) / dense.norm(dim=-1)).mean(-1)


class Capturing:
    """A model of a Hugging Face folder that writes down its queries, in float32 on the CPU."""

    def __init__(self, model: str, chat: Chat) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask

        def attend(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            if query.shape[2] == 1:
                self._seen[module.layer_idx] = query[0, :, 0]
            return sdpa_attention_forward(module, query, *args, **kwargs)

        AttentionInterface.register("queries_seen", attend)
        AttentionMaskInterface.register("queries_seen", sdpa_mask)
        self._seen: dict[int, Tensor] = {}
        how = {"dtype": torch.float32, "attn_implementation": "queries_seen"}
        self._model, self._chat = AutoModelForCausalLM.from_pretrained(model, **how), chat

    @torch.no_grad()
    def capture(self, document: Document, steps: int, temperature: float = 0.0) -> Captured:
        """Prefill a document, whose prefix selections are made of, and answer the first turn of each conversation in so
        many decode steps; greedily at 0.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        prefix = self._chat.prefix(document.text)
        self._read(prefix, cache)
        keys, values = _layers(cache, 0)
        answers = []
        for turns in document.conversations:
            answers.append(self._answer(turns[0], cache, len(prefix), steps, temperature))
            cache.crop(len(prefix))
        return Captured(document.name, keys, values, answers)

    def _answer(self, question: Question, cache: Any, prefix_len: int, steps: int, temperature: float) -> Answered:
        logits = self._read(self._chat.question(question, first=True), cache)
        drawn = torch.Generator().manual_seed(0)
        tokens, queries = list[int](), list[Tensor]()
        for _ in range(steps):
            if temperature:
                token = (logits / temperature).softmax(-1).multinomial(1, generator=drawn)
            else:
                token = logits.argmax(-1, keepdim=True)
            tokens.append(int(token))
            logits = self._read(tokens[-1:], cache)
            queries.append(torch.stack([self._seen[layer] for layer in sorted(self._seen)]))
        keys, values = _layers(cache, prefix_len)
        return Answered(question.task, torch.stack(queries), keys, values, self._chat.text(tokens))

    def _read(self, ids: list[int], cache: Any) -> Tensor:
        """Logits [vocab_size] behind these tokens; the cache grows by them."""
        out = self._model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[0, -1]


def _layers(cache: Any, begin: int) -> tuple[Tensor, Tensor]:
    """Keys and values [layers, num_kv_heads, tokens, head_dim] from a position on, copied."""
    keys, values = zip(*((layer.keys[0, :, begin:], layer.values[0, :, begin:]) for layer in cache.layers), strict=True)
    return torch.stack(keys), torch.stack(values)


UNITS = (1, 4, 16)
RESIDENTS = (1, 1.5, 2, 3, 4, 6, 0.1)
"""Budgets of tokens; below 1: a share of the prefix."""
LAGS = (1, 2, 4, 0.1)
WRITTEN = "tests", "type stubs", "a manual", "a review", "a port to C", "a tutorial", "docs", "a short version"
ASKED = {
    "prose": (
        "Retell the text above in your own words, one paragraph after the other, as fully as you can.",
        "List every person named above, and what is said of each.",
        "Write an exam about the text above: many questions, each with its answer.",
        "Explain the text above to a child, subject by subject.",
        "List all years and numbers of the text above, and what each is of.",
        "Translate the text above to French.",
        "Write a dialogue of two historians about the text above.",
        "Which statements of the text above are doubtful? Quote each, and say why.",
    ),
    "code": tuple(f"Write {what} of the module above, as fully as you can." for what in WRITTEN),
}
"""What a document's readers ask, all at once: a group of requests. Answers are long."""


def asked(packages: Path, chat: Chat, length: int, seed: int) -> dict[str, Document]:
    """By kind: prose, and the source of `argparse`, cut a little behind so many tokens; eight questions on each."""
    prose = next(iter(documents(packages, chat, length + 1024, 1, seed)))
    found = {}
    for kind, text in (("prose", prose.text), ("code", inspect.getsource(argparse))):
        cut = chat.text(chat.ids(text)[: length + 16 - len(chat.prefix(""))])
        turns = tuple((Question(f"{kind} {n}", one, "", (), "all", 0),) for n, one in enumerate(ASKED[kind]))
        found[kind] = Document(f"{kind}-{length}", cut, turns)
    return found


def sizes(prefix_len: int, head_dim: int, budget: int) -> SelectArgs:
    """Of a selection, as served by default."""
    config = SparseAttnConfig()
    windows = {"num_sink": config.num_sink_tokens, "num_recent": 16 * config.num_recent_pages}
    return SelectArgs(prefix_len=prefix_len, budget=budget, sm_scale=head_dim**-0.5, **windows)


def scored(keys: Tensor, queries: Tensor) -> Tensor:
    """Log shares [steps, num_kv_heads, prefix_len] by queries [steps, requests, num_qo_heads, head_dim]."""
    return torch.stack([pool_scores(block_scores_mean(one, keys), keys.shape[-1] ** -0.5) for one in queries])


def selected(scores: Tensor, args: SelectArgs) -> Tensor:
    """Positions [..., budget] int32, ascending, of scores [..., prefix_len]."""
    return args.top_k(rank_by_keys(scores.flatten(0, -2))).positions.view(*scores.shape[:-1], -1)


def traced(captured: Captured, answer: Answered, prefix_len: int, steps: int, budget: int) -> Tensor:
    """What an answer selects: positions [layers - 1, num_kv_heads, steps, budget] int32, from layer 1 on."""
    args, found = sizes(prefix_len, captured.keys.shape[-1], budget), []
    for keys, queries in zip(captured.keys[1:, :, :prefix_len], answer.queries[:steps, 1:].unbind(1), strict=True):
        found.append(selected(scored(keys, queries[:, None]), args).transpose(0, 1))
    return torch.stack(found)


def masked(positions: Tensor, prefix_len: int, unit: int = 1) -> Tensor:
    """bool [..., prefix_len / unit]: units with such a position."""
    mask = torch.zeros(*positions.shape[:-1], prefix_len // unit, dtype=torch.bool)
    return mask.scatter_(-1, positions.long() // unit, True)


def tokens_of(size: float, budget: int, prefix_len: int) -> int:
    """Tokens that a size means: so many budgets, or below 1 a share of the prefix."""
    return int(size * (budget if size >= 1 else prefix_len))


class Recency:
    """Units of each KV head, the one wanted last first. Residents of any number of cells are the first of them.

    Units wanted in one step keep their order; `residents.reference` takes the lowest cell of such.
    """

    def __init__(self, heads: int, units: int) -> None:
        self._order = torch.arange(units).repeat(heads, 1)
        self._known = torch.zeros(heads, units, dtype=torch.bool)

    def resident(self, cells: int) -> Tensor:
        """bool [heads, units]: what so many cells hold."""
        return torch.zeros_like(self._known).scatter_(1, self._order[:, :cells], True) & self._known

    def want(self, wanted: Tensor) -> Tensor:
        """Want units, bool [heads, units]; int64 [heads, units + 1]: how many of them each number of cells held."""
        there = wanted.gather(1, self._order)
        first = there.cumsum(1)
        held = torch.nn.functional.pad((there & self._known.gather(1, self._order)).cumsum(1), (1, 0))
        place = torch.where(there, first - 1, first[:, -1:] + (~there).cumsum(1) - 1)
        self._order = torch.empty_like(self._order).scatter_(1, place, self._order)
        self._known |= wanted
        return held


def churned(wanted: Tensor, cells: Sequence[int]) -> Row:
    """`wanted`, `churn` and `moved` (of each number of cells) of bool [steps, num_kv_heads, units]."""
    recency, kept = Recency(*wanted.shape[1:]), torch.tensor(cells).clamp(max=wanted.shape[2])
    held = torch.stack([recency.want(one)[:, kept] for one in wanted])[1:].sum((0, 1))
    counts = wanted.sum(-1)
    total, most = int(counts[1:].sum()), int(counts.max())
    moved = [round(1 - int(n) / total, 4) if most <= of else None for n, of in zip(held, cells, strict=True)]
    new = int((wanted[1:] & ~wanted[:-1]).sum())
    return {"wanted": round(float(wanted[1:].float().mean()), 4), "churn": round(new / total, 4), "moved": moved}


def churn_rows(captured: Captured, prefix_len: int, keep: Sequence[float]) -> Iterator[Row]:
    """Of each answer and the group of all, each budget and unit: figures by layer, from layer 1 on.

    Args:
        prefix_len: tokens of the document that are the prefix.
        keep: budgets of one request: tokens, or below 1 shares of the prefix.
    """
    answers, dim = captured.answers, captured.keys.shape[-1]
    groups = [[one] for one in answers] + ([answers] if len(answers) > 1 else [])
    for group in groups:
        found = list[tuple[Row, Row]]()
        for layer in range(1, len(captured.keys)):
            queries = torch.stack([one.queries[:, layer] for one in group], 1)
            scores = scored(captured.keys[layer, :, :prefix_len], queries)
            for size in keep:
                budget = budget_for_group(tokens_of(size, 1, prefix_len), len(group))
                tokens = [tokens_of(one, budget, prefix_len) for one in RESIDENTS]
                positions = selected(scores, sizes(prefix_len, dim, budget))
                for unit in UNITS:
                    figures = churned(masked(positions, prefix_len, unit), [one // unit for one in tokens])
                    residents = dict(zip(map(str, RESIDENTS), tokens, strict=True))
                    found.append(({"kept": size, "budget": budget, "unit": unit, "residents": residents}, figures))
        shared = {"bench": "churn", "document": captured.name, "prefix_len": prefix_len, "requests": len(group)}
        shared |= {"task": group[0].task if len(group) == 1 else "group", "steps": len(group[0].queries)}
        yield from ({**shared, **row} for row in by_layer(found))


def by_layer(found: Sequence[tuple[Row, Row]]) -> list[Row]:
    """Rows of (fields, figures of a layer): each figure becomes a list over the layers of the same fields."""
    rows: dict[str, Row] = {}
    for fields, figures in found:
        row = rows.setdefault(repr(fields), {**fields, **{name: [] for name in figures}})
        for name, value in figures.items():
            row[name].append(value)
    return list(rows.values())


def lagging(scores: Tensor, args: SelectArgs, every: int) -> Iterator[tuple[int, dict[str, tuple[Tensor, Tensor]]]]:
    """Of one in so many steps, from the second on: by way, what is attended and what is fetched; bool [heads, tokens].
    All steps change what is resident. `scores` are [steps, num_kv_heads, prefix_len].
    """
    heads, prefix_len = scores.shape[1:]
    cells = {size: tokens_of(size, args.budget, prefix_len) for size in LAGS}
    cells = {size: count for size, count in cells.items() if args.budget <= count <= prefix_len}
    recency = Recency(heads, prefix_len)
    for step, now in enumerate(masked(selected(scores, args), prefix_len)):
        if step % every == 1 % every and step > 0:
            found = {"exact": (now, now & ~recency.resident(args.budget))}
            for size, count in cells.items():
                there = recency.resident(count)
                found[f"lagged {size}"] = now & there, now & ~there
            yield step, found
        recency.want(now)


def lagged_rows(
    captured: Captured, answer: Answered, prefix_len: int, keep: Sequence[float], every: int
) -> Iterator[Row]:
    """Of each budget and way: figures by layer, from layer 1 on, of one in so many steps. Attention is also on all
    behind the prefix; see `churn_rows`.
    """
    found, behind = list[tuple[Row, Row]](), answer.keys.shape[2] - len(answer.queries)
    for layer in range(1, len(captured.keys)):
        keys, values = (
            torch.cat([of[layer], own[layer]], 1)
            for of, own in ((captured.keys, answer.keys), (captured.values, answer.values))
        )
        scores = scored(keys[:, :prefix_len], answer.queries[:, layer, None])
        for size in keep:
            args = sizes(prefix_len, keys.shape[-1], tokens_of(size, 1, prefix_len))
            steps = []
            for step, ways in lagging(scores, args, every):
                end = captured.keys.shape[2] + behind + step + 1
                query = answer.queries[step, layer]
                attended, fetched = (torch.stack(one) for one in zip(*ways.values(), strict=True))
                lost, moved = ((one.sum(-1) / args.budget) for one in (attended[:1] & ~attended, fetched))
                error = output_error(keys[:, :end], values[:, :end], query, args.sm_scale, attended)
                steps.append(torch.stack([error, lost, moved], -1).mean(1))
            for way, means in zip(ways, torch.stack(steps).mean(0).tolist(), strict=True):
                figures = {name: round(one, 5) for name, one in zip(("error", "lost", "moved"), means, strict=True)}
                found.append(({"kept": size, "budget": args.budget, "way": way}, figures))
    shared = {"bench": "lagged", "document": captured.name, "task": answer.task, "prefix_len": prefix_len}
    yield from ({**shared, "every": every, **row} for row in by_layer(found))


def captures(args: argparse.Namespace) -> Iterator[tuple[int, Any]]:
    """(tokens of the prefix, capture) of each document, captured if it is not there."""
    from transformers import AutoTokenizer

    folder = args.work / Path(args.model_path).name / f"seed-{args.seed}-{args.new_tokens}"
    folder.mkdir(parents=True, exist_ok=True)
    chat = Chat(AutoTokenizer.from_pretrained(args.model_path))
    for length in args.contexts:
        for document in asked(args.packages, chat, length, args.seed).values():
            path = folder / f"{document.name}.pt"
            if not path.exists():
                Capturing(args.model_path, chat).capture(document, args.new_tokens, TEMPERATURE).save(path)
            yield length, Captured.load(path)


def churn(args: argparse.Namespace) -> None:
    """Count and judge what the result file does not hold."""
    known = {"model": Path(args.model_path).name, "seed": args.seed, **origin(args, cpu=True)}
    held = read([args.out]) if Path(args.out).exists() else []
    done = {(row["bench"], row["document"]) for row in held if row.get("model") == known["model"]}
    for length, captured in captures(args):
        if ("churn", captured.name) not in done:
            for row in churn_rows(captured, length, args.keep):
                append(args.out, {**row, **known})
        for answer in captured.answers[: args.lagged] if ("lagged", captured.name) not in done else ():
            for row in lagged_rows(captured, answer, length, args.keep, args.every):
                append(args.out, {**row, **known})


def trace(args: argparse.Namespace) -> None:
    """Write what the first answer selects, for a server's residents to be fed with."""
    length, captured = next(captures(args))
    positions = traced(captured, captured.answers[0], length, 64, args.budget).numpy().astype(np.uint16)
    np.savez_compressed(args.trace, positions=positions, prefix_len=length)


def table(rows: Sequence[Row]) -> str:
    """Markdown of all parts."""
    made = {"churn": churn_table, "lagged": lagged_table}
    return "\n\n".join(made[name](of) for (name,), of in sorted(grouped(rows, ["bench"]), key=lambda one: one[0]))


def churn_table(rows: Sequence[Row]) -> str:
    """By document, requests, budget and unit: means over layers and answers, of 8 KV heads of 128 channels in bf16."""
    columns = list(rows[0]["residents"])
    heads = [f"{float(one):g} budgets" if float(one) >= 1 else f"{float(one):.0%} of it" for one in columns]
    lines = []
    names = ("model", "document", "requests", "kept", "budget", "unit")
    for (model, document, requests, _, budget, unit), of in grouped(rows, names):
        cells = [f"{mean_of(of, figure):.1%}" for figure in ("wanted", "churn")]
        layers = [
            (wanted * row["prefix_len"], moved)
            for row in of
            for wanted, moved in zip(row["wanted"], row["moved"], strict=True)
        ]
        for n in range(len(columns)):
            known = all(moved[n] is not None for _, moved in layers)
            nbytes = fmean(tokens * moved[n] for tokens, moved in layers) * 8 * 512 if known else 0.0
            cells.append(f"{nbytes / 1e3:,.0f} ({nbytes / 51e3:.1f})" if known else "-")
        asking = "1 request" if requests == 1 else f"{requests} requests"
        lines.append([f"{model}, {document}, {asking}, {budget:,} tokens, units of {unit}", *cells])
    return markdown(["KB a step and layer (us at 51 GB/s), residents of", "wanted", "churn", *heads], lines)


def lagged_table(rows: Sequence[Row]) -> str:
    """By way: error (against exact's), lost and fetched shares of the budget; means over layers and answers."""
    columns = grouped(rows, ("model", "document", "kept", "budget"))
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        cells = []
        for _, of in columns:
            exact, found = ([row for row in of if row["way"] == one] for one in ("exact", way))
            more = mean_of(found, "error") / mean_of(exact, "error") - 1 if found else 0.0
            figures = [mean_of(found, figure) for figure in ("error", "lost", "moved")] if found else []
            cells.append("{:.4f} ({:+.1%}), {:.1%}, {:.1%}".format(figures[0], more, *figures[1:]) if found else "-")
        lines.append([way, *cells])
    return markdown(["error, lost, moved", *(f"{key[0]}, {key[1]}, {key[3]:,} tokens" for key, _ in columns)], lines)


def mean_of(rows: Sequence[Row], figure: str) -> float:
    """Over rows and layers."""
    return fmean(value for row in rows for value in row[figure])


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", default="churn.jsonl", help="result file; rows are appended (default: %(default)s)")
    add("--trace", metavar="FILE.npz", help="write what the first answer selects, and count nothing")
    add("--contexts", nargs="+", type=int, default=[8192], metavar="TOKENS", help="of documents (8192)")
    add("--budget", type=int, default=512, metavar="TOKENS", help="of --trace (%(default)s)")
    add("--model-path", default=".models/qwen2.5-coder-0.5b-instruct", help="of transformers")
    add("--packages", type=Path, default=Path(".models/packages"), help="folder of `make models`")
    add("--work", type=Path, default=Path(".models/queries"), help="folder of captures")
    add("--new-tokens", type=int, default=128, help="decode steps of an answer (%(default)s)")
    add("--keep", nargs="+", type=float, default=[1 / 64, 1 / 20, 512, 2048], help="budgets; below 1: shares")
    add("--lagged", type=int, default=2, metavar="N", help="answers whose error is measured (%(default)s)")
    add("--every", type=int, default=4, metavar="N", help="one of so many steps has an error (%(default)s)")
    add("--seed", type=int, default=0, help="of documents (%(default)s)")
    add("--commit", help="for the rows, where the tree is no git checkout")
    add("--table", nargs="+", metavar="FILE", help="print result files as Markdown, measure nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or print the tables; returns the exit status."""
    args = parse(argv)
    if args.table:
        print(table(read(args.table)))
        return 0
    with torch.no_grad():
        (trace if args.trace else churn)(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
