#!/usr/bin/env python3
"""Check a server's sparse answers: the needle model in plain float32 torch, teacher-forced, with the same selections.

    python benchmarks/replay.py FOLDER --requests 200 --out replay.json

FOLDER is what `soak.py --trace FOLDER` wrote: `requests.jsonl`, and the trace of `trace_folder`. Each generated token
is given in again. Where the step that read it was sparse, each layer and KV head attends the positions that the server
selected there, and everything behind the prefix; else all. Then a token that the server chose must be the best one, or
at most `--tie` nats behind it. Requests that opted out of sparse attention are replayed, too, dense: how far those are
behind is rounding. In 16 bits as many wrong answers as their share are allowed, and three standard deviations.

A retraction: SGLang prefills the prompt and what was generated again, densely. Tokens before it are judged with what
was attended before it. Where that prefill took generated tokens out of the prefix cache, nobody knows how another
request had attended them: what follows is not judged, and counted (`unknown`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engines import read
from kernel_rows import commit
from replay_model import Replayer
from verdicts import GOOD, TOO_FEW, chance, counted, detectable, excusing, verdict

from scripts.needle_network import load
from sglang_ext.decode.trace import Prefill, Record, Selected, Start, read_trace
from sglang_ext.methods.layer_plan import LayerPlan

REQUESTS = "requests.jsonl"


@dataclass
class Epoch:
    """One stay of a request in the KV pool.

    Attributes:
        cached: positions that came from the prefix cache.
        end: positions before it were prefilled or came from the cache.
        steps: by position of the token that was read, what its step selected.
    """

    cached: int
    end: int
    steps: dict[int, Selected] = field(default_factory=dict)


def histories(records: Iterable[Record]) -> dict[str, list[Epoch]]:
    """What the trace says of each request, in order."""
    found: dict[str, list[Epoch]] = {}
    for record in records:
        if isinstance(record, Prefill):
            epochs = found.setdefault(record.rid, [])
            if epochs and record.start == epochs[-1].end and not epochs[-1].steps:
                epochs[-1].end = record.end  # the next chunk
            else:
                epochs.append(Epoch(record.start, record.end))
        elif not isinstance(record, Start):
            for group in record.groups:
                for rid, seq_len in zip(group.rids, group.seq_lens, strict=True):
                    if rid in found:
                        found[rid][-1].steps[seq_len - 1] = group
    return found


class Answer(NamedTuple):
    """What the server gave.

    Attributes:
        rid: its id.
        dense: it opted out.
        prompt, tokens: token ids.
        logprobs: of the tokens, natural; empty where they were not asked for.
    """

    rid: str
    dense: bool
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


@dataclass
class Judged:
    """What the replay says of one answer.

    Attributes:
        gaps: per judged token, how many nats it is behind the best one.
        off: per judged token, |logarithm of its probability here less the server's|; empty where that is not known.
        sparse: judged tokens that a sparse step chose.
        unknown: tokens that were not judged.
        retractions: how often it lost its slots.
    """

    gaps: list[float] = field(default_factory=list)
    off: list[float] = field(default_factory=list)
    sparse: int = 0
    unknown: int = 0
    retractions: int = 0

    def verdict(self, tie: float) -> str:
        """ "equal", "tie" or "wrong"; "unknown" where no token was judged."""
        if not self.gaps:
            return "unknown"
        return "equal" if max(self.gaps) == 0 else "tie" if max(self.gaps) <= tie else "wrong"


def judge(replayer: Replayer, answer: Answer, epochs: Sequence[Epoch]) -> Judged:
    """Replay one answer by the epochs of its trace, on the model that the server ran; without any it is not judged."""
    judged, first = Judged(retractions=max(0, len(epochs) - 1)), len(answer.prompt)
    behind = [*(epoch.end for epoch in epochs[1:]), first + len(answer.tokens)]
    for epoch, limit in zip(epochs, behind, strict=True):
        # The tokens chosen in this stay: those at the positions from `epoch.end` on, before the next stay's first one.
        chosen = range(epoch.end - first, min(limit - first, len(answer.tokens)))
        if not chosen:
            continue
        if epoch.cached > first:
            judged.unknown += len(chosen)
            continue
        read = answer.tokens[: chosen.stop - 1]
        steps = [epoch.steps.get(first + i) if first + i >= epoch.end else None for i in range(len(read))]
        logprobs = replayer.run(answer.prompt, read, steps)[chosen.start :].log_softmax(-1)
        tokens = torch.tensor(answer.tokens[chosen.start : chosen.stop], device=logprobs.device)
        own = logprobs.gather(1, tokens[:, None])[:, 0]
        judged.gaps += (logprobs.amax(-1) - own).tolist()
        judged.sparse += sum(step is not None for step in steps)
        if answer.logprobs:
            given = torch.tensor(answer.logprobs[chosen.start : chosen.stop])
            judged.off += (own.cpu() - given).abs().tolist()
    if not epochs:
        judged.unknown = len(answer.tokens)
    return judged


def summary(judged: Sequence[Judged], tie: float) -> dict[str, Any]:
    """Counts, and how far off the farthest ones are, in nats."""
    gaps = torch.tensor([gap for one in judged for gap in one.gaps] or [0.0])
    off = torch.tensor([value for one in judged for value in one.off] or [0.0])
    return {
        **Counter(one.verdict(tie) for one in judged),
        "tokens": sum(len(one.gaps) for one in judged),
        "tokens of sparse steps": sum(one.sparse for one in judged),
        "tokens not judged": sum(one.unknown for one in judged),
        "tokens behind": int((gaps > 0).sum()),
        "tokens behind more than a tie": int((gaps > tie).sum()),
        "retractions": sum(one.retractions for one in judged),
        "max_nats": round(float(gaps.max()), 5),
        "p99_nats": round(float(gaps.quantile(0.99)), 5),
        "max_logprob_off": round(float(off.max()), 5),
        "p99_logprob_off": round(float(off.quantile(0.99)), 5),
    }


def read_answers(folder: Path) -> list[Answer]:
    """Requests that `soak.py` wrote down; prompts stand in a line of their own, once."""
    rows = read([folder / REQUESTS])
    prompts = {row["prompt"]: row["ids"] for row in rows if "ids" in row}
    return [Answer(**{**row, "prompt": prompts[row["prompt"]]}) for row in rows if "rid" in row]


def sample(answers: Sequence[Answer], traced: dict[str, list[Epoch]], count: int) -> list[Answer]:
    """At most so many, the retracted ones first, then evenly over time; sorted so that prompts that begin alike follow
    each other.
    """
    known = [one for one in answers if one.tokens and one.rid in traced]
    retracted = [one for one in known if len(traced[one.rid]) > 1][: count // 4]
    rest = [one for one in known if one not in retracted]
    wanted = max(0, min(count - len(retracted), len(rest)))
    return sorted(retracted + [rest[i * len(rest) // wanted] for i in range(wanted)], key=lambda one: one.prompt)


def replay(folder: Path, model: Path, requests: int, dense_requests: int, seconds: float, tie: float) -> dict[str, Any]:
    """Replay a sample of a folder's requests; a summary of the sparse and of the dense ones.

    Args:
        requests, dense_requests: of each kind, at most.
        seconds: no further request begins behind that.
        tie: nats; two tokens that near are equally good.

    Raises:
        OSError: no trace or no requests there.
    """
    traces = sorted(folder.glob("steps-*.trace"))
    if len(traces) != 1:
        raise FileNotFoundError(f"expected one trace in {folder}, found {len(traces)}: one server, one folder")
    records = list(read_trace(traces[0]))
    start = records[0]
    traced, answers = histories(records), read_answers(folder)
    kinds = {
        "sparse": sample([one for one in answers if not one.dense], traced, requests),
        "dense": sample([one for one in answers if one.dense], traced, dense_requests),
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = load(model, torch.float32, device)
    plan = LayerPlan.from_dict(start.layer_plan, num_layers=network.shape.layers, num_kv_heads=start.num_kv_heads)
    longest = max((len(one.prompt) + len(one.tokens) for of in kinds.values() for one in of), default=1)
    replayer = Replayer(network, plan, max_len=longest)
    row: dict[str, Any] = {"traced": len(traced), "answers": len(answers)}
    ends = time.monotonic() + seconds
    for kind, chosen in kinds.items():
        judged, examples = list[Judged](), []
        for answer in chosen:
            if time.monotonic() > ends:
                break
            one = judge(replayer, answer, traced[answer.rid])
            judged.append(one)
            if one.verdict(tie) == "wrong" and len(examples) < 8:
                worst = max(range(len(one.gaps)), key=one.gaps.__getitem__)
                examples.append({"rid": answer.rid, "token": worst, "gap": one.gaps[worst], "of": len(one.gaps)})
        row[kind] = {"replayed": len(judged), "asked": len(chosen), **summary(judged, tie), "examples": examples}
    row["dtype"] = start.dtype
    control, sparse = excusing(row["dense"], start.dtype), counted(row["sparse"])
    row |= {"verdict": verdict(control, sparse), "chance": chance(control, sparse)}
    row["detectable"] = detectable(control, sparse)
    return row


def replay_good(row: dict[str, Any]) -> bool:
    """Whether no more sparse answers are wrong than rounding makes of dense ones, and some were sparse at all; of a
    server in float32: whether no answer is, dense or sparse.
    """
    if row["dtype"] == "float32" and row["dense"].get("wrong"):
        return False
    return bool(row["verdict"] == GOOD and row["sparse"]["tokens of sparse steps"] > 0)


def main() -> int:
    """Run; 1 where an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model-path", type=Path, default=Path("models/needle"))
    parser.add_argument("--commit", default="", help="of the code measured, where there is no git checkout")
    parser.add_argument("--out", help="file for the row")
    parser.add_argument("--requests", type=int, default=200, help="sparse ones replayed, at most")
    parser.add_argument("--dense-requests", type=int, default=100, help="dense ones, at most")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no further request behind that")
    parser.add_argument("--tie", type=float, default=0.13, help="nats; two tokens that near are equally good")
    args = parser.parse_args()
    row = replay(args.folder, args.model_path, args.requests, args.dense_requests, args.seconds, args.tie)
    row = {"good": replay_good(row), **row, "tie": args.tie, "commit": args.commit or commit()}
    print(json.dumps(row, indent=1))
    if row["verdict"] == TOO_FEW:
        print("too few dense requests to tell: raise --dense-requests, or trace more of them", file=sys.stderr)
    if args.out:
        Path(args.out).write_text(json.dumps(row, indent=1) + "\n")
    return 0 if row["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
