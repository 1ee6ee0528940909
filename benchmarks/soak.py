#!/usr/bin/env python3
"""Mixed traffic on a real SGLang engine with `--sparse-attn`, every token compared with dense decode.

    python benchmarks/soak.py --seconds 240 --out soak.json -- --attention-backend flashinfer ...SGLang's flags

First each question is asked alone and dense (the request opts out). Then requests come and go: questions about
documents that share prefixes, of different lengths, some aborted, more of them than the KV pool holds. A token that
differs is wrong, unless the dense run's logarithm of its probability was within `--tie` of the best one's: two tokens
of equal logits, within the rounding of the model's dtype. Behind a difference nothing is compared. At the end nothing
may be held any more.

`--sparse-seconds SECONDS` adds a second half on longer documents, which the server builds indexes of: decode steps
are sparse, and a part of the requests is traced (`trace_folder`) and replayed in plain float32 torch with the very
selections (`replay.py`, here or later: `--trace FOLDER --replay 0`).

`--control SECONDS` runs the same traffic dense first: a batch is rounded otherwise than a request alone, without the
plugin, too. In 16 bits that changes answers, so as many wrong ones as the control's are allowed, and three standard
deviations (`verdicts.py`; `chance` in the row says how likely so many are, `detectable` how many chance would not have
explained: with too short a control no run is good); with `--dtype float32` there are none to allow.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import engines
import torch
import verdicts
from engines import Row, Streamed, sampling, streamed
from kernel_rows import origin
from replay import REQUESTS, replay, replay_good

from scripts.needle.tasks import TASKS, make_document
from sglang_ext.config import parse_profiled
from sglang_ext.decode.trace import TRACED
from sglang_ext.methods.base import summed_every

_BEST = 8
"""Tokens whose probability is asked for."""
_FOLDERS = ("build_report", "trace_folder")
"""Of the configuration, what a row leaves out: paths of this machine."""
_NO_SETTINGS = (
    "config",
    "commit",
    "model_path",
    "out",
    "replay",
    "replay_seconds",
    "sglang_flags",
    "trace",
)
"""Arguments that a row leaves out, or has elsewhere."""


@dataclass(frozen=True)
class Reference:
    """One question and its dense answer.

    Attributes:
        prompt: token ids.
        tokens: greedily generated ones.
        gaps: per generated token, how many nats the best ones are behind the best one, by token.
    """

    prompt: list[int]
    tokens: list[int]
    gaps: list[dict[int, float]]


def compare(reference: Reference, tokens: Sequence[int], tie: float) -> tuple[str, int, float]:
    """("equal", "tie" or "wrong"; tokens that are equal; nats that the first other one is behind)."""
    for i, (token, wanted) in enumerate(zip(tokens, reference.tokens, strict=False)):
        if token != wanted:
            gap = reference.gaps[i].get(token, math.inf)
            return ("tie" if gap <= tie else "wrong"), i, gap
    return "equal", len(tokens), 0.0


class Traffic:
    """Requests on one engine.

    Args:
        engine: SGLang's, started, with the plugin.
        args: the command line.
        seed: of what is drawn.
    """

    def __init__(self, engine: Any, args: argparse.Namespace, seed: int) -> None:
        self._engine, self._args, self._rng = engine, args, random.Random(seed)
        self.longest_wait = 0.0

    def prompts(self, count: int, lengths: Sequence[int], seed: int) -> list[list[list[int]]]:
        """Token ids of all questions about each document."""
        encode, found = self._engine.tokenizer_manager.tokenizer.encode, []
        for number in range(count):
            task, length = list(TASKS)[number % len(TASKS)], lengths[number % len(lengths)]
            document = make_document(task, seed + number, length, self._args.questions)
            found.append([encode(f"{document.text} {question.text}") for question in document.questions])
        return found

    async def run(self, seconds: float, turn: Callable[[], Awaitable[None]]) -> int:
        """So many turns at once for the given time; how many of them never came to an end."""
        ends = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < ends:
                await turn()

        clients = [asyncio.ensure_future(client()) for _ in range(self._args.concurrency)]
        ended, hung = await asyncio.wait(clients, timeout=seconds + 2 * self._args.stall)
        for one in hung:
            one.cancel()
        for one in ended:
            one.result()
        return len(hung)

    async def ask(self, found: Counter[str], prompt: Sequence[int], parameters: Row, **how: Any) -> Streamed:
        """One request; what became of it is counted in `found`. `how`: of `streamed`."""
        got = await streamed(self._engine, prompt, parameters, **how)
        self.longest_wait = max(self.longest_wait, got.longest_wait)
        found["aborted"] += got.aborted
        found["retractions"] += int(got.meta.get("num_retractions") or 0)
        return got


class Soak(Traffic):
    """Requests whose answers are compared with dense ones; see the module."""

    def __init__(self, engine: Any, args: argparse.Namespace) -> None:
        super().__init__(engine, args, args.seed)
        self._next = 0
        self.found: dict[str, Counter[str]] = {}
        self.farthest: dict[str, float] = {}
        self.examples: list[Row] = []

    def references(self) -> list[Reference]:
        """Dense answers, each asked alone."""
        args, found = self._args, []
        logprobs = {"return_logprob": True, "top_logprobs_num": _BEST}
        for prompt in itertools.chain(*self.prompts(args.documents, args.lengths, args.seed)):
            parameters = sampling(args.tokens, dense=True)
            out = self._engine.generate(input_ids=prompt, sampling_params=parameters, **logprobs)
            best = out["meta_info"]["output_top_logprobs"]
            gaps = [{int(one[1]): float(of[0][0] - one[0]) for one in of} for of in best]
            found.append(Reference(prompt, out["output_ids"], gaps))
        return found

    async def one(self, references: Sequence[Reference], half: str) -> None:
        """One request; what comes of it goes to `found` and `farthest`. Those of the half "control" are dense."""
        found, dense = self.found.setdefault(half, Counter()), half == "control"
        # Documents come in waves: most requests ask about a few of them, the rest about any.
        few = len(references) // self._args.documents * 2
        wave = int(time.monotonic() / 5) * few % len(references)
        near = [(wave + i) % len(references) for i in range(few)]
        reference = references[self._rng.choice(near) if self._rng.random() < 0.8 else self._next % len(references)]
        self._next += 1
        tokens = self._rng.randint(1, self._args.tokens)
        aborted = self._rng.random() < self._args.aborted
        rid = f"soak-{self._next}-{self._rng.random()}"
        parameters, end_at = sampling(tokens, dense=dense), tokens // 2 + 1 if aborted else 0
        got = await self.ask(found, reference.prompt, parameters, rid=rid, end_at=end_at)
        verdict, equal, gap = compare(reference, got.tokens, self._args.tie)
        found[verdict] += 1
        found["tokens equal"] += equal
        self.farthest[half] = max(self.farthest.get(half, 0.0), gap)
        if verdict == "wrong" and len(self.examples) < 8:
            self.examples.append({"dense": dense, "token": equal, "of": len(got.tokens), "gap": gap})


_LONG = 4
"""A tenth of the requests may generate so many times as many tokens as the others: memory runs out under them."""


def sparse_config(args: argparse.Namespace, folder: Path) -> Row:
    """--sparse-attn-config of both halves: prompts as short as those of the exact half are never indexed.

    Raises:
        ValueError: lengths that do not tell the halves apart, or that no index covers exactly.
    """
    if max(args.lengths) >= min(args.sparse_lengths):
        raise ValueError(
            f"expected documents of the sparse half to be longer than all of the exact half's, got "
            f"{args.sparse_lengths} and {args.lengths}; change --sparse-lengths or --lengths"
        )
    # An index covers the document alone, whatever question stands behind it in the prompt that it is built of.
    align = math.gcd(*args.sparse_lengths)
    if align < 256:
        raise ValueError(f"expected --sparse-lengths to be multiples of 256 or more, got {args.sparse_lengths}")
    return {
        "share_prefixes": True,
        "decode_path": "sparse",
        "method": "token_index",
        "methods": {"token_index": {}},
        "group_growth": "sqrt",
        "max_keep_ratio": 0.5,
        "build": "prefill",
        "build_align": align,
        "build_report": str(folder / "built.jsonl"),
        "min_sparse_prompt_len": min(args.sparse_lengths),
        "index_gpu_bytes": args.index_bytes,
        "trace_folder": str(folder),
        **json.loads(args.config),
    }


class SparseTraffic(Traffic):
    """Requests on documents with indexes: joins and leaves, aborted ones, equal prompts at the same time, groups whose
    first member ends first, requests that opted out, long ones that make memory run out.

    Args:
        folder: receives the requests that are traced.
        beside: what to do in a tenth of the turns: a request of the exact half.
    """

    def __init__(
        self, engine: Any, args: argparse.Namespace, folder: Path, beside: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(engine, args, args.seed + 1)
        self._beside, self._number = beside, itertools.count()
        self._written: set[str] = set()
        self._requests = folder / REQUESTS
        self._requests.write_text("")
        self.found: Counter[str] = Counter()
        self._documents = self.prompts(args.sparse_documents, args.sparse_lengths, args.seed + 1000)
        #: Of all documents together.
        self.tokens = sum(len(of[0]) for of in self._documents)

    async def turn(self) -> None:
        """One or some requests."""
        rng, documents = self._rng, self._documents
        wave = int(time.monotonic() / 5) * 2
        near = rng.random() < 0.8
        document = (wave + rng.randrange(2)) % len(documents) if near else rng.randrange(len(documents))
        questions = [(document, rng.randrange(len(documents[document]))) for _ in range(4)]
        kind = rng.random()
        if kind < 0.1:
            await self._beside()
        elif kind < 0.2:
            self.found["duplicates"] += 1
            await asyncio.gather(*(self._one(questions[0], self._length()) for _ in range(3)))
        elif kind < 0.35:
            # Its first member ends first, and a cold prompt may take its slots at once.
            self.found["groups left by the first"] += 1
            first = asyncio.ensure_future(self._one(questions[0], rng.randint(2, 6)))
            await asyncio.sleep(0.05)
            others = [asyncio.ensure_future(self._one(one, self._length())) for one in questions[1:]]
            await first
            await self._one((rng.randrange(len(documents)), 0), self._length())
            await asyncio.gather(*others)
        else:
            await self._one(questions[0], self._length())

    def _length(self) -> int:
        most = self._args.tokens * (_LONG if self._rng.random() < 0.1 else 1)
        return self._rng.randint(1, most)

    async def _one(self, which: tuple[int, int], tokens: int) -> None:
        rng, prompt = self._rng, self._documents[which[0]][which[1]]
        dense = rng.random() < self._args.dense
        traced = rng.random() < (self._args.traced_dense if dense else self._args.traced)
        end_at = rng.randint(1, tokens) if rng.random() < self._args.aborted else 0
        rid = f"{TRACED if traced else 'soak-'}{next(self._number)}"
        parameters = sampling(tokens, dense=dense)
        got = await self.ask(self.found, prompt, parameters, rid=rid, end_at=end_at, return_logprob=traced)
        self.found["dense" if dense else "sparse"] += 1
        self.found["tokens"] += len(got.tokens)
        if not traced:
            return
        self.found["traced"] += 1
        name = f"{which[0]}-{which[1]}"
        if name not in self._written:
            self._written.add(name)
            engines.append(self._requests, {"prompt": name, "ids": prompt})
        known = [float(one[0]) for one in got.meta.get("output_token_logprobs") or []]
        logprobs = known if len(known) == len(got.tokens) else []
        row = {"rid": rid, "dense": dense, "prompt": name, "tokens": got.tokens, "logprobs": logprobs}
        engines.append(self._requests, row)


def memory(engine: Any) -> Row:
    """What is in use while nothing runs, as SGLang and the plugin say. SGLang itself ends an idle server whose slots do
    not add up.
    """
    used = device = None
    with suppress(AttributeError, IndexError):  # a release that does not say
        for _ in range(20):
            engine.generate(input_ids=[1, 2, 3], sampling_params=sampling(2))  # SGLang says it behind batches only
            time.sleep(0.1)
            loads = engine.loop.run_until_complete(engine.tokenizer_manager.get_loads())
            used = int(loads[0].num_used_tokens)
            if not used:
                break
    state = engines.plugin_state(engine.get_server_info())
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        device = total - free
    names = ("requests", "index_users", "resident_bytes", "allocated_bytes")
    return {"used_kv_tokens": used, **{name: state[name] for name in names}, "device_bytes": device}


def same(before: Row, after: Row) -> bool:
    """Whether slots, requests and users of indexes are as before. Indexes may stay resident, within their limit."""
    return all(before[key] == after[key] for key in ("used_kv_tokens", "requests", "index_users"))


def built(folder: Path) -> Row:
    """Indexes that the server built and refused, by what its report says."""
    path = folder / "built.jsonl"
    rows = engines.read([path]) if path.exists() else []
    return dict(Counter(f"{row['status']} {row.get('reason', '')}".strip() for row in rows))


def together(histories: Sequence[int], size: int) -> bool:
    """Whether all tensor-parallel ranks told their paths' checksum, and it is the same."""
    return size == 1 or (len(histories) == size and len(set(histories)) == 1)


def held(engine: Any) -> Row:
    """What the plugin still holds; waits a little for the last steps to be over."""
    for _ in range(50):
        state = engines.plugin_state(engine.get_server_info())
        left = {"requests": state["requests"], **state["decode"]}
        if not left["requests"]:
            break
        time.sleep(0.1)
    counted = (
        "cascade_steps",
        "cascade_rows",
        "sparse_steps",
        "sparse_rows",
        "dense_rows",
        "largest_group",
        "fallbacks",
    )
    ranks = {"ranks": [rank["history"] for rank in state["ranks"]]} if "ranks" in state else {}
    return {**left, **{name: state[name] for name in counted}, **ranks}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="models/needle")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192, 16384], metavar="TOKENS")
    parser.add_argument("--questions", type=int, default=8, help="per document")
    parser.add_argument("--tokens", type=int, default=96, help="generated by a request, at most")
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--aborted", type=float, default=0.05, help="share of the requests")
    parser.add_argument("--control", type=float, default=0.0, metavar="SECONDS", help="of dense traffic before")
    parser.add_argument("--sparse-seconds", type=float, default=0.0, help="of the sparse half; 0: none")
    parser.add_argument("--sparse-documents", type=int, default=10)
    parser.add_argument("--sparse-lengths", nargs="+", type=int, default=[12288, 16384], metavar="TOKENS")
    parser.add_argument("--dense", type=float, default=0.1, help="share of the sparse half's requests that opt out")
    parser.add_argument(
        "--traced", type=float, default=0.02, help="share of the others; a traced step waits for the device"
    )
    parser.add_argument(
        "--traced-dense", type=float, default=0.2, help="share of those that opt out: what rounding does in the replay"
    )
    parser.add_argument("--index-bytes", type=int, default=20 << 20, help="index_gpu_bytes: few indexes fit")
    parser.add_argument("--stall", type=float, default=30.0, help="seconds that no request may wait for its next token")
    parser.add_argument("--trace", metavar="FOLDER", help="new; keeps store, trace and requests for replay.py")
    parser.add_argument("--replay", type=int, default=100, help="traced requests replayed at the end; 0: none")
    parser.add_argument("--replay-seconds", type=float, default=300.0, help="begin no further one behind that")
    parser.add_argument(
        "--tie",
        type=float,
        default=0.13,
        help="nats; two tokens that near are equally good. Default: two steps of bf16 between 8 and 16",
    )
    parser.add_argument("--config", default='{"share_prefixes": true}', help="--sparse-attn-config as JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="", help="of the code measured, where there is no git checkout")
    parser.add_argument("--out", default="soak.json")
    parser.add_argument("sglang_flags", nargs="*", metavar="-- SGLANG FLAGS")
    return parser.parse_args(argv)


def main() -> int:
    """Run; 1 where a token was wrong, a request hung, or something is still held."""
    args = parse()
    if args.trace:
        os.makedirs(args.trace)  # a folder of its own: the trace of one server
        row = run(args, Path(args.trace))
    else:
        with tempfile.TemporaryDirectory() as folder:
            row = run(args, Path(folder))
    Path(args.out).write_text(json.dumps(row, indent=1) + "\n")
    shown = ("good", "verdicts", "chance", "detectable", "found", "farthest", "ran", "longest_wait")
    shown += ("built", "memory", "held", "examples", "replay")
    print(json.dumps({key: row[key] for key in shown}, indent=1))
    if verdicts.TOO_FEW in row["verdicts"].values():
        print("the control had too few answers to tell: raise --control", file=sys.stderr)
    return 0 if row["good"] else 1


def run(args: argparse.Namespace, folder: Path) -> Row:
    """All traffic on one engine, then the replay; the row. The folder gets store, trace and traced requests."""
    config = sparse_config(args, folder) if args.sparse_seconds else json.loads(args.config)
    (folder / "store").mkdir()
    flags = ["--model-path", args.model_path, *engines.sparse_flags(config, folder / "store"), *args.sglang_flags]
    engine = engines.start_engine(flags)
    hung, longest, found, ran = 0, 0.0, {}, {}

    def drive(traffic: Traffic, name: str, seconds: float, turn: Callable[[], Awaitable[None]]) -> None:
        nonlocal hung, longest
        begun = time.monotonic()
        hung += engine.loop.run_until_complete(traffic.run(seconds, turn))
        ran[name] = ran.get(name, 0.0) + time.monotonic() - begun
        longest = max(longest, traffic.longest_wait)

    try:
        soak = Soak(engine, args)
        references = soak.references()
        engine.flush_cache()
        used = {"before": memory(engine)}
        for name, seconds in (("control", args.control), ("shared", args.seconds)):
            if seconds:
                drive(soak, name, seconds, partial(soak.one, references, name))
        if args.sparse_seconds:
            used["between"] = memory(engine)
            sparse = SparseTraffic(engine, args, folder, partial(soak.one, references, "beside"))
            drive(sparse, "sparse", args.sparse_seconds / 2, sparse.turn)
            used["halfway"] = memory(engine)  # what grows once has grown: what grows on, leaks
            if not hung:
                drive(sparse, "sparse", args.sparse_seconds / 2, sparse.turn)
            sparse.found["hung"] = hung
            longest = max(longest, soak.longest_wait)
            found = {"sparse": sparse.found, "sparse prompts": {"tokens": sparse.tokens}}
        left = held(engine)
        used["after"] = memory(engine)
        ranks = engine.tokenizer_manager.server_args.tp_size
        dtype = str(engine.tokenizer_manager.model_config.dtype).removeprefix("torch.")
    finally:
        engine.shutdown()
    replayed = None
    if args.sparse_seconds and args.replay:
        limits = {"requests": args.replay, "dense_requests": args.replay // 2, "seconds": args.replay_seconds}
        replayed = replay(folder, Path(args.model_path), **limits, tie=args.tie)
    control = soak.found.get("control")
    excuse = verdicts.excusing(control, dtype)
    treated = {name: soak.found[name] for name in ("shared", "beside") if name in soak.found}
    good = (
        all(verdicts.verdict(excuse, of) == verdicts.GOOD for of in treated.values())
        and not (control is not None and excuse is None and control["wrong"])
        and not left["requests"]
        and not left["compared"]
        and together(left.get("ranks", []), ranks)
        and same(used["before"], used["after"])
        and not hung
        and longest <= args.stall
        and (replayed is None or replay_good(replayed))
    )
    return {
        "good": good,
        "found": {name: dict(of) for name, of in {**soak.found, **found}.items()},
        "farthest": {name: round(gap, 4) if gap < math.inf else None for name, gap in soak.farthest.items()},
        "verdicts": {name: verdicts.verdict(excuse, of) for name, of in treated.items()},
        "chance": {name: verdicts.chance(excuse, of) for name, of in treated.items()},
        "detectable": {name: verdicts.detectable(excuse, of) for name, of in treated.items()},
        "ran": {name: round(seconds, 1) for name, seconds in ran.items()},
        "longest_wait": round(longest, 3),
        "built": built(folder),
        "memory": used,
        "held": left,
        "examples": soak.examples,
        "replay": replayed,
        **{key: value for key, value in vars(args).items() if key not in _NO_SETTINGS},
        "config": {key: value for key, value in config.items() if key not in _FOLDERS},
        "sum_every": summed_every(parse_profiled(json.dumps(config), args.model_path)[0]),
        "flags": args.sglang_flags,
        "dtype": dtype,
        **origin(args),
    }


if __name__ == "__main__":
    sys.exit(main())
