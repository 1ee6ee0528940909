#!/usr/bin/env python3
"""The live quality guard: are its figures right, what does it find, what does it cost?

    python benchmarks/guard.py recall --model-path models/needle                 # on a GPU
    python benchmarks/guard.py faults --model-path models/needle --out guard.jsonl
    python benchmarks/guard.py cost --tokens 65536 --requests 8 --new-tokens 4096 --starts 2
    python benchmarks/guard.py recall --cpu                                      # small, on a CPU

Each starts servers of its own, whose indexes are built of documents of `--tokens` tokens: of the needle task for the
shipped model, else this repository's sources.

    recall  every step is guarded: recall and output error per layer as the server reports them, beside those computed
            offline of the same steps (`guard_replay.py`); exit status 1 where recall is more than --off away
    faults  shuffled positions, another prompt's index, a budget of 0.5%: tokens that each served until it was noticed,
            and whether answers were dense from then on; exit status 1 where one was not noticed within --noticed
    cost    tokens per second of --requests decoding behind one document, with the guard and without, in turns (dummy
            weights of --shape where no --model-path is given)

One row of JSON a measurement.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from engines import SHAPES, Row, append, launched, write_model
from guard_replay import Replay, read
from index_faults import exchange, shuffle
from kernel_rows import origin

from scripts.needle.tasks import make_document
from scripts.servers import post, server_state
from sglang_ext.decode.trace import TRACED

ROOT = Path(__file__).resolve().parents[1]
_CPU = ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
_CPU += [
    "--grammar-backend",
    "none",
    "--disable-cuda-graph",
    "--disable-overlap-schedule",
    "--max-total-tokens",
    "49152",
]
_GPU = ["--attention-backend", "flashinfer", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
_GPU += ["--disable-prefill-cuda-graph", "--mem-fraction-static", "0.8"]
_QUESTION = 48
"""Tokens behind a document."""
_WINDOW = 16
"""Guarded steps of the guard's running means."""


class Bench:
    """Documents, their indexes, and servers on them.

    Args:
        args: of the command line.
        work: folder for stores and logs.
    """

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work, self._logs = args, work, 0
        self.model = Path(args.model_path) if args.model_path else write_model(work / "model", args.shape)
        self.documents = [self._document(n) for n in range(2)]
        self.store = work / "store"
        self.store.mkdir()

    def _document(self, number: int) -> list[int]:
        """Token ids of a document and what comes behind it."""
        wanted = self.args.tokens + 8 * _QUESTION
        if not self.args.model_path:
            return torch.randint(10, 1000, (wanted,), generator=torch.Generator().manual_seed(number)).tolist()
        from transformers import AutoTokenizer

        text = make_document("many_keys", seed=number, num_tokens=wanted, num_questions=1).text
        if self.model.name != "needle":
            paths = sorted((ROOT / "sglang_ext").rglob("*.py"), reverse=bool(number))
            text = "\n".join(path.read_text() for path in paths)
        ids: list[int] = AutoTokenizer.from_pretrained(self.model)(text)["input_ids"]
        if len(ids) < wanted:
            raise ValueError(f"expected {wanted} tokens of text, found {len(ids)}; lower --tokens")
        return ids[:wanted]

    def prompt(self, number: int, question: int = 0) -> list[int]:
        """Document and question: the tokens behind it, at another place for each."""
        behind = self.args.tokens + question * _QUESTION
        return [*self.documents[number][: self.args.tokens], *self.documents[number][behind : behind + _QUESTION]]

    @contextmanager
    def server(self, store: Path, **config: Any) -> Iterator[str]:
        """Its URL."""
        own = {"method": "token_index", "decode_path": "sparse", "prefetch_policy": "wait_complete"}
        own |= {"profile": "none", "store_min_free_bytes": 0, "min_sparse_prompt_len": 512}
        flags = [*(_CPU if self.args.cpu else _GPU), "--model-path", str(self.model), "--page-size", "16"]
        flags += (
            [] if self.args.model_path else ["--load-format", "dummy", "--random-seed", "0", "--skip-tokenizer-init"]
        )
        flags += ["--max-running-requests", str(max(8, self.args.requests)), "--sparse-attn"]
        flags += [
            "--sparse-attn-store",
            str(store),
            "--sparse-attn-config",
            json.dumps(own | config | json.loads(self.args.config)),
        ]
        self._logs += 1
        with launched([*flags, *self.args.sglang_flags], self.work / f"server-{self._logs}.log", 600.0) as url:
            yield url

    def build(self) -> list[str]:
        """Index the documents; the digests."""
        report = self.work / "report.jsonl"

        def built() -> list[str]:
            lines = report.read_text().splitlines() if report.exists() else []
            return [str(one["digest"]) for one in map(json.loads, lines) if "digest" in one]

        with self.server(self.store, build="prefill", guard_every=0, build_report=str(report)) as url:
            for number, document in enumerate(self.documents, 1):
                ask(url, [document[: self.args.tokens]], 1)
                deadline = time.monotonic() + 120
                while len(built()) < number:
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"expected an index to be built, see {self.work}/server-{self._logs}.log")
                    time.sleep(0.1)
        return built()


def ask(url: str, prompts: list[list[int]], tokens: int, *, sparse: bool = True, rids: list[str] | None = None) -> Any:
    """Greedy answers, decoded together."""
    sampling: Row = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    if not sparse:
        sampling["custom_params"] = {"sparse_attn": False}
    return post(url, "/generate", {"input_ids": prompts, "sampling_params": sampling, "rid": rids})


def recall(bench: Bench) -> Iterator[Row]:
    """Each document's figures, as reported and as computed offline."""
    digests, folder = bench.build(), bench.work / "trace"
    rids = [f"{TRACED}{number}" for number in range(len(digests))]
    every = {"guard_every": 1, "guard_share": 1.0, "trace_folder": str(folder)}
    with bench.server(bench.store, **every) as url:
        answers = [ask(url, [bench.prompt(n)], _WINDOW, rids=[rid])[0] for n, rid in enumerate(rids)]
        found = server_state(url)["guard"]["indexes"]
    device = torch.device("cpu" if bench.args.cpu else "cuda")
    layers = len(found[digests[0]]["recall"])
    trace = read(folder, layers)
    replay = Replay(bench.model, trace.plan, device)
    for number, (rid, digest, answer) in enumerate(zip(rids, digests, answers, strict=True)):
        reported, prompt = found[digest], bench.prompt(number)
        offline = replay.run(prompt, answer["output_ids"], trace.steps[rid][: reported["guarded"]])
        off = {
            name: max(abs(a - b) for a, b in zip(reported[name], getattr(offline, name), strict=True))
            for name in offline._fields
        }
        row = {"digest": digest[:12], "reported": reported, "offline": offline._asdict(), "off": off}
        yield {**row, "good": off["recall"] <= bench.args.off}


def faults(bench: Bench) -> Iterator[Row]:
    """What each fault served until it was noticed, and what came then; without a fault first."""
    first, second = bench.build()
    tiny = {"keep_ratio": 0.005, "min_top_k": 8}
    for name in ("none", "shuffled positions", "another prompt's index", "a budget of 0.5%"):
        store = bench.work / name.replace(" ", "-")
        shutil.copytree(bench.store, store)
        if name.startswith("shuffled"):
            shuffle(store, first)
        elif name.startswith("another"):
            exchange(store, first, second)
        with bench.server(store, quality_slo=bench.args.slo, **(tiny if "budget" in name else {})) as url:
            answers = [ask(url, [bench.prompt(0, n)], 96)[0] for n in range(6)]
            dense = [ask(url, [bench.prompt(0, n)], 96, sparse=False)[0] for n in range(6)]
            guard = server_state(url)["guard"]
        steps = [answer["meta_info"]["sparse_attn"][0]["steps"] for answer in answers]
        alike = [one["output_ids"] == other["output_ids"] for one, other in zip(answers, dense, strict=True)]
        found = guard["indexes"][first]
        row = {"fault": name, "sparse_steps": [one["sparse"] for one in steps], "alike_dense": alike}
        row |= {name: found[name] for name in ("standing", "factor", "mean_recall", "mean_output_error")}
        first_served, *later = (one["sparse"] for one in steps)
        exact = all(same or sparse for same, sparse in zip(alike[1:], later, strict=True)) or not bench.args.cpu
        mended = found["factor"] > 1 and found["standing"] == "serving"  # with more budget it is within the bound
        noticed = first_served <= bench.args.noticed and (mended or not any(later)) and exact
        yield {**row, "events": guard["events"], "good": noticed if name != "none" else not guard["events"]}


def cost(bench: Bench) -> Iterator[Row]:
    """Tokens per second with the guard and without, in turns."""
    bench.build()
    prompts = [bench.prompt(0, n % 8) for n in range(bench.args.requests)]
    for start in range(bench.args.starts):
        for guarded in (True, False) if start % 2 == 0 else (False, True):
            with bench.server(bench.store, **({} if guarded else {"guard_every": 0})) as url:
                ask(url, prompts, 64)  # the document's prefill, early steps
                begun = time.perf_counter()
                ask(url, prompts, bench.args.new_tokens)
                seconds = time.perf_counter() - begun
                state = server_state(url)
            rate = bench.args.requests * bench.args.new_tokens / seconds
            guard = state["guard"] or {}
            row = {"start": start, "guard": guarded, "tokens_per_s": rate, "sparse_steps": state["sparse_steps"]}
            yield {**row, "guarded_steps": guard.get("steps"), "cost_in_steps": guard.get("cost"), "good": True}


def main() -> int:
    """Run; 1 where a row is not good."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["recall", "faults", "cost"])
    parser.add_argument("--model-path", help="models/needle, but for `cost`")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--tokens", type=int, default=4096, help="of a document, a multiple of 64")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=4096)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--config", default="{}", help="more keys of --sparse-attn-config, as JSON")
    parser.add_argument("--slo", type=float, default=0.25, help="quality_slo of `faults`")
    parser.add_argument("--noticed", type=int, default=11, help="tokens that a fault may serve")
    parser.add_argument("--off", type=float, default=0.02, help="that recall may be away from the offline one")
    parser.add_argument("--commit", default="", help="of the code measured, where there is no git checkout")
    parser.add_argument("--out", help="file for the rows")
    parser.add_argument("sglang_flags", nargs="*", metavar="-- SGLANG FLAGS", help="added to those of each server")
    args = parser.parse_args()
    if args.what != "cost" and not args.model_path:
        args.model_path = str(ROOT / "models" / "needle")
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for row in {"recall": recall, "faults": faults, "cost": cost}[args.what](Bench(args, Path(folder))):
            row = {**vars(args), **row, **origin(args)}
            print(json.dumps(row), flush=True)
            if args.out:
                append(args.out, row)
            good = good and bool(row["good"])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
