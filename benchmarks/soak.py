#!/usr/bin/env python3
"""Mixed traffic on a real SGLang engine with `--sparse-attn`, every token compared with dense decode.

    python benchmarks/soak.py --seconds 240 --out soak.json -- --attention-backend flashinfer ...SGLang's flags

First each question is asked alone and dense (the request opts out). Then requests come and go: questions about
documents that share prefixes, of different lengths, some aborted, more of them than the KV pool holds. A token that
differs is wrong, unless the dense run's logarithm of its probability was within `--tie` of the best one's: two tokens
of equal logits, within the rounding of the model's dtype. Behind a difference nothing is compared. At the end nothing
may be held any more.

`--control SECONDS` runs the same traffic dense first: a batch is rounded otherwise than a request alone, without the
plugin, too. In 16 bits that changes answers, so as many wrong ones as the control's are allowed; with `--dtype float32`
there are none to allow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kernel_rows import commit

from sglang_ext.quality.tasks import TASKS, make_document

_BEST = 8
"""Tokens whose probability is asked for."""


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


class Soak:
    """Traffic on one engine.

    Args:
        engine: SGLang's, started, with the plugin.
        args: the command line.
    """

    def __init__(self, engine: Any, args: argparse.Namespace) -> None:
        self._engine = engine
        self._args = args
        self._rng = random.Random(args.seed)
        self._next = 0
        self.found: dict[str, Counter[str]] = {}
        self.examples: list[dict[str, Any]] = []

    def references(self) -> list[Reference]:
        """Dense answers, each asked alone."""
        args, encode = self._args, self._engine.tokenizer_manager.tokenizer.encode
        found = []
        for number in range(args.documents):
            task = list(TASKS)[number % len(TASKS)]
            length = args.lengths[number % len(args.lengths)]
            document = make_document(task, seed=args.seed + number, num_tokens=length, num_questions=args.questions)
            for question in document.questions:
                prompt = encode(f"{document.text} {question.text}")
                out = self._engine.generate(
                    input_ids=prompt,
                    sampling_params=_sampling(args.tokens, dense=True),
                    return_logprob=True,
                    top_logprobs_num=_BEST,
                )
                best = out["meta_info"]["output_top_logprobs"]
                gaps = [{int(one[1]): float(of[0][0] - one[0]) for one in of} for of in best]
                found.append(Reference(prompt, out["output_ids"], gaps))
        return found

    async def traffic(self, references: Sequence[Reference], seconds: float, *, dense: bool) -> None:
        """Requests for the given time, so many at once; what comes of them goes to `found`."""
        ends = time.monotonic() + seconds
        found = self.found.setdefault("control" if dense else "shared", Counter())

        async def client() -> None:
            while time.monotonic() < ends:
                await self._one(references, found, dense=dense)

        await asyncio.gather(*(client() for _ in range(self._args.concurrency)))

    async def _one(self, references: Sequence[Reference], found: Counter[str], *, dense: bool) -> None:
        # Documents come in waves: most requests ask about a few of them, the rest about any.
        few = len(references) // self._args.documents * 2
        wave = int(time.monotonic() / 5) * few % len(references)
        near = [(wave + i) % len(references) for i in range(few)]
        reference = references[self._rng.choice(near) if self._rng.random() < 0.8 else self._next % len(references)]
        self._next += 1
        tokens = self._rng.randint(1, self._args.tokens)
        aborted = self._rng.random() < self._args.aborted
        rid = f"soak-{self._next}-{self._rng.random()}"
        stream = await self._engine.async_generate(
            input_ids=reference.prompt, sampling_params=_sampling(tokens, dense=dense), stream=True, rid=rid
        )
        ids: list[int] = []
        async for chunk in stream:
            ids = chunk["output_ids"]  # all so far
            if aborted and len(ids) > tokens // 2:
                self._engine.tokenizer_manager.abort_request(rid=rid)
                aborted = False
                found["aborted"] += 1
        verdict, equal, gap = compare(reference, ids, self._args.tie)
        found[verdict] += 1
        found["tokens equal"] += equal
        if verdict == "wrong" and len(self.examples) < 8:
            self.examples.append({"dense": dense, "token": equal, "of": len(ids), "gap": gap})


def no_worse(control: Counter[str] | None, shared: Counter[str]) -> bool:
    """Whether wrong answers are no more than dense batches give by their own rounding: three standard deviations of a
    count above the control's share. Without a control, or where that has none, none is allowed.
    """

    def answers(of: Counter[str]) -> int:
        return of["equal"] + of["tie"] + of["wrong"]

    share = control["wrong"] / answers(control) if control and answers(control) else 0.0
    expected = share * answers(shared)
    return shared["wrong"] <= expected + 3 * math.sqrt(expected)


def _sampling(tokens: int, *, dense: bool) -> dict[str, Any]:
    own = {"custom_params": {"sparse_attn": False}} if dense else {}
    return {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True, **own}


def held(engine: Any) -> dict[str, Any]:
    """What the plugin still holds; waits a little for the last steps to be over."""
    for _ in range(50):
        state = engine.get_server_info()["internal_states"][0]["sparse_attn"]
        left = {"requests": state["requests"], **state["shared"]}
        if not left["requests"]:
            break
        time.sleep(0.1)
    return {**left, "shared_steps": state["shared_steps"], "shared_rows": state["shared_rows"]}


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
    """Run; 1 where a token was wrong or something is still held."""
    args = parse()
    import torch
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import prepare_server_args

    with tempfile.TemporaryDirectory() as store:
        flags = ["--model-path", args.model_path, "--sparse-attn", "--sparse-attn-store", store]
        flags += ["--sparse-attn-config", args.config, *args.sglang_flags]
        engine = Engine(server_args=prepare_server_args(flags))
        try:
            soak = Soak(engine, args)
            references = soak.references()
            engine.flush_cache()
            for seconds, dense in ((args.control, True), (args.seconds, False)):
                if seconds:
                    engine.loop.run_until_complete(soak.traffic(references, seconds, dense=dense))
            left = held(engine)
        finally:
            engine.shutdown()
    good = no_worse(soak.found.get("control"), soak.found["shared"]) and not left["requests"] and not left["compared"]
    row = {
        "good": good,
        "found": {name: dict(of) for name, of in soak.found.items()},
        "held": left,
        "examples": soak.examples,
        **{
            key: getattr(args, key)
            for key in ("seconds", "control", "documents", "lengths", "questions", "tokens", "tie", "seed")
        },
        "config": json.loads(args.config),
        "flags": args.sglang_flags,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "commit": args.commit or commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
    Path(args.out).write_text(json.dumps(row, indent=1) + "\n")
    print(json.dumps({key: row[key] for key in ("good", "found", "held", "examples")}, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
