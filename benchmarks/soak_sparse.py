"""The sparse half of `soak.py`: traffic on prompts with indexes, and what is written down to replay it."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from engines import sampling, streamed
from replay import REQUESTS

from scripts.needle.tasks import TASKS, make_document
from sglang_ext.decode.trace import TRACED

_LONG = 4
"""A tenth of the requests may generate so many times as many tokens as the others: memory runs out under them."""


def sparse_config(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
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


class SparseTraffic:
    """Requests on documents with indexes: joins and leaves, aborted ones, equal prompts at the same time, groups whose
    first member ends first, requests that opted out, long ones that make memory run out.

    Args:
        engine: SGLang's, started, with the plugin.
        args: the command line.
        folder: receives the requests that are traced.
        beside: what to do in a tenth of the turns: a request of the exact half.
    """

    def __init__(
        self, engine: Any, args: argparse.Namespace, folder: Path, beside: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._engine, self._args, self._folder, self._beside = engine, args, folder, beside
        self._rng = random.Random(args.seed + 1)
        self._number = itertools.count()
        self._written: set[str] = set()
        self._requests = folder / REQUESTS
        self._requests.write_text("")
        self.found: Counter[str] = Counter()
        self.longest_wait = 0.0
        encode = engine.tokenizer_manager.tokenizer.encode
        self._documents: list[list[list[int]]] = []
        for number in range(args.sparse_documents):
            length = args.sparse_lengths[number % len(args.sparse_lengths)]
            task = list(TASKS)[number % len(TASKS)]
            document = make_document(task, args.seed + 1000 + number, length, args.questions)
            self._documents.append([encode(f"{document.text} {question.text}") for question in document.questions])

    @property
    def tokens(self) -> int:
        """Of all documents together."""
        return sum(len(of[0]) for of in self._documents)

    async def run(self, seconds: float) -> bool:
        """Traffic for the given time; whether all of it came to an end. May be called again."""
        ends = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < ends:
                await self._turn()

        clients = [asyncio.ensure_future(client()) for _ in range(self._args.concurrency)]
        _, hung = await asyncio.wait(clients, timeout=seconds + 2 * self._args.stall)
        for one in hung:
            one.cancel()
        for one in clients:
            if one not in hung:
                one.result()
        self.found["hung"] += len(hung)
        return not hung

    async def _turn(self) -> None:
        rng, documents = self._rng, self._documents
        wave = int(time.monotonic() / 5) * 2
        near = rng.random() < 0.8
        document = (wave + rng.randrange(2)) % len(documents) if near else rng.randrange(len(documents))
        questions = [(document, rng.randrange(len(documents[document]))) for _ in range(4)]
        kind = rng.random()
        if kind < 0.1 and self._beside is not None:
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
        got = await streamed(self._engine, prompt, parameters, rid=rid, end_at=end_at, return_logprob=traced)
        self.longest_wait = max(self.longest_wait, got.longest_wait)
        self.found["aborted"] += got.aborted
        self.found["dense" if dense else "sparse"] += 1
        self.found["tokens"] += len(got.tokens)
        self.found["retractions"] += int(got.meta.get("num_retractions") or 0)
        if traced:
            self._write(rid, which, dense, got.tokens, got.meta)

    def _write(self, rid: str, which: tuple[int, int], dense: bool, ids: list[int], meta: dict[str, Any]) -> None:
        name = f"{which[0]}-{which[1]}"
        rows: list[dict[str, Any]] = []
        if name not in self._written:
            self._written.add(name)
            rows.append({"prompt": name, "ids": self._documents[which[0]][which[1]]})
        known = [float(one[0]) for one in meta.get("output_token_logprobs") or []]
        logprobs = known if len(known) == len(ids) else []
        rows.append({"rid": rid, "dense": dense, "prompt": name, "tokens": ids, "logprobs": logprobs})
        with self._requests.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        self.found["traced"] += 1


def memory(engine: Any) -> dict[str, Any]:
    """What is in use while nothing runs, as SGLang and the plugin say. SGLang itself ends an idle server whose slots do
    not add up.
    """
    used: int | None = None
    greedy = {"temperature": 0.0, "max_new_tokens": 2}
    with suppress(AttributeError, IndexError):  # a release that does not say
        for _ in range(20):
            engine.generate(input_ids=[1, 2, 3], sampling_params=greedy)  # SGLang says it behind batches only
            time.sleep(0.1)
            loads = engine.loop.run_until_complete(engine.tokenizer_manager.get_loads())
            used = int(loads[0].num_used_tokens)
            if not used:
                break
    state = engine.get_server_info()["internal_states"][0]["sparse_attn"]
    device: int | None = None
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        device = total - free
    return {
        "used_kv_tokens": used,
        "requests": state["requests"],
        "index_users": state["index_users"],
        "resident_bytes": state["resident_bytes"],
        "allocated_bytes": state["allocated_bytes"],
        "device_bytes": device,
    }


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether slots, requests and users of indexes are as before. Indexes may stay resident, within their limit."""
    return all(before[key] == after[key] for key in ("used_kv_tokens", "requests", "index_users"))


def built(folder: Path) -> dict[str, Any]:
    """Indexes that the server built and refused, by what its report says."""
    path = folder / "built.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return dict(Counter(f"{row['status']} {row.get('reason', '')}".strip() for row in rows))
