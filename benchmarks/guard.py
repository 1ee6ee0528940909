#!/usr/bin/env python3
"""Are the figures of the live quality guard right?

    python benchmarks/guard.py --out guard.jsonl        # on a GPU
    python benchmarks/guard.py --cpu                    # small

Two servers are started here. The first one indexes two documents of `--tokens` tokens: of the needle task for the
shipped model, else this repository's sources. The second one guards every step: recall and output error per layer as
the server reports them stand beside those computed offline of the same steps (`guard_replay.py`). A document is a row
of JSON. Exit status 1 where recall is more than --off away. What the guard costs: `serving.py` or `decode.py` with
`--config '{"guard_every": 0}'` and without.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from engines import Row, append, launched, sampling
from guard_replay import Replay, read
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
        self.model = Path(args.model_path)
        self.documents = [self._document(n) for n in range(2)]
        self.store = work / "store"
        self.store.mkdir()

    def _document(self, number: int) -> list[int]:
        """Token ids of a document and of what comes behind it."""
        wanted = self.args.tokens + _QUESTION
        from transformers import AutoTokenizer

        text = make_document("many_keys", seed=number, num_tokens=wanted, num_questions=1).text
        if self.model.name != "needle":
            paths = sorted((ROOT / "sglang_ext").rglob("*.py"), reverse=bool(number))
            text = "\n".join(path.read_text() for path in paths)
        ids: list[int] = AutoTokenizer.from_pretrained(self.model)(text)["input_ids"]
        if len(ids) < wanted:
            raise ValueError(f"expected {wanted} tokens of text, found {len(ids)}; lower --tokens")
        return ids[:wanted]

    @contextmanager
    def server(self, **config: Any) -> Iterator[str]:
        """Its URL."""
        own = {"method": "token_index", "decode_path": "sparse", "prefetch_policy": "wait_complete"}
        own |= {"profile": "none", "store_min_free_bytes": 0, "min_sparse_prompt_len": 512}
        flags = [*(_CPU if self.args.cpu else _GPU), "--model-path", str(self.model), "--page-size", "16"]
        flags += ["--max-running-requests", "8", "--sparse-attn", "--sparse-attn-store", str(self.store)]
        flags += ["--sparse-attn-config", json.dumps(own | config | json.loads(self.args.config))]
        self._logs += 1
        with launched([*flags, *self.args.sglang_flags], self.work / f"server-{self._logs}.log", 600.0) as url:
            yield url

    def build(self) -> list[str]:
        """Index the documents; the digests."""
        report = self.work / "report.jsonl"

        def built() -> list[str]:
            lines = report.read_text().splitlines() if report.exists() else []
            return [str(one["digest"]) for one in map(json.loads, lines) if "digest" in one]

        with self.server(build="prefill", guard_every=0, build_report=str(report)) as url:
            for number, document in enumerate(self.documents, 1):
                ask(url, document[: self.args.tokens], 1)
                deadline = time.monotonic() + 120
                while len(built()) < number:
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"expected an index to be built, see {self.work}/server-{self._logs}.log")
                    time.sleep(0.1)
        return built()


def ask(url: str, prompt: list[int], tokens: int, rid: str | None = None) -> Any:
    """A greedy answer."""
    return post(url, "/generate", {"input_ids": prompt, "sampling_params": sampling(tokens), "rid": rid})


def recall(bench: Bench) -> Iterator[Row]:
    """Each document's figures, as reported and as computed offline."""
    digests, folder = bench.build(), bench.work / "trace"
    rids = [f"{TRACED}{number}" for number in range(len(digests))]
    every = {"guard_every": 1, "guard_share": 1.0, "trace_folder": str(folder)}
    with bench.server(**every) as url:
        answers = [ask(url, bench.documents[n], _WINDOW, rid) for n, rid in enumerate(rids)]
        found = server_state(url)["guard"]["indexes"]
    device = torch.device("cpu" if bench.args.cpu else "cuda")
    layers = len(found[digests[0]]["recall"])
    trace = read(folder, layers)
    replay = Replay(bench.model, trace.plan, device)
    for number, (rid, digest, answer) in enumerate(zip(rids, digests, answers, strict=True)):
        reported, prompt = found[digest], bench.documents[number]
        offline = replay.run(prompt, answer["output_ids"], trace.steps[rid][: reported["guarded"]])
        off = {
            name: max(abs(a - b) for a, b in zip(reported[name], getattr(offline, name), strict=True))
            for name in offline._fields
        }
        row = {"digest": digest[:12], "reported": reported, "offline": offline._asdict(), "off": off}
        yield {**row, "good": off["recall"] <= bench.args.off}


def main() -> int:
    """Run; 1 where a row is not good."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default=str(ROOT / "models" / "needle"))
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--tokens", type=int, default=4096, help="of a document, a multiple of 64")
    parser.add_argument("--config", default="{}", help="more keys of --sparse-attn-config, as JSON")
    parser.add_argument("--off", type=float, default=0.02, help="that recall may be away from the offline one")
    parser.add_argument("--commit", default="", help="of the code measured, where there is no git checkout")
    parser.add_argument("--out", help="file for the rows")
    parser.add_argument("sglang_flags", nargs="*", metavar="-- SGLANG FLAGS", help="added to those of each server")
    args = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for row in recall(Bench(args, Path(folder))):
            row = {**vars(args), **row, **origin(args)}
            print(json.dumps(row), flush=True)
            if args.out:
                append(args.out, row)
            good = good and bool(row["good"])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
