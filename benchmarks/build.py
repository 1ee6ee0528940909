"""What an index costs where it is made: building it, and recording queries, against the prefill of the same prompt.

The Llama-3.1-8B shape with random weights, in bf16, on one GPU. Two parts, each row one JSON line:

`prefill`    stock SGLang without our flag: seconds to the first token
`recording`  one engine with `--sparse-attn` and `build: prefill`: pairs of prompts, one recorded and one not
             (per-request opt-out), in alternating order; what each build took

    python benchmarks/build.py --out build.jsonl                # all parts, about 5 minutes on an H200
    python benchmarks/build.py --table build.jsonl
    python benchmarks/build.py --out tiny.jsonl --shape tiny --lengths 1024 2048     # a CPU is enough

The time of a prefill is the caller's time to the first streamed token, with its request admitted. Every
prompt is new: random tokens, radix cache off. Shares are of the fastest prefill of that length in the file.

Dummy weights are uniform in -0.001..0.001: keys and queries are finite and tiny, attention is near uniform. They
serve to time, never to judge a selection. Rows that the file holds already are skipped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import engines
import torch
from engines import SHAPES, Row, markdown, sampling, streamed
from kernel_rows import origin

from sglang_ext.cli.engines import reported

PARTS = ("prefill", "recording")
_TRIES = 20
"""Prompts that are timed in vain, at most: on a busy machine two tokens often come together."""


class Timing(NamedTuple):
    """Of one request, seconds since it was sent: its first token, and its end, by when an index was stored."""

    rid: str
    first: float
    end: float


def spread(values: Sequence[float]) -> Row:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": list(values)}


class Prompts(engines.Asked):
    """New prompts for one engine, each timed. A building engine reports in the file `events`."""

    def __init__(self, args: argparse.Namespace, flags: Sequence[str], events: Path) -> None:
        super().__init__(flags, args.shape, args.seed)
        self.events, self._sent = events, 0

    def prefill(self, num_tokens: int, *, recorded: bool | None) -> Timing:
        """Time a new prompt. Two tokens are generated: the build comes with the last one, so the first is before it.

        Args:
            num_tokens: of the prompt.
            recorded: in a building engine, whether this prompt is recorded and indexed; None in a stock one.

        Raises:
            RuntimeError: a token was cached, or the first token came together with the second every time.
        """
        for _ in range(_TRIES):
            self._sent += 1
            rid = f"build-{self._sent}"
            parameters = sampling(2, dense=recorded is False)
            got = self.wait(streamed(self.engine, self.tokens(num_tokens), parameters, rid=rid))
            if got.meta.get("cached_tokens"):
                raise RuntimeError(f"expected no cached token, got {got.meta['cached_tokens']}")
            (first, first_at), (last, last_at) = got.arrivals[0], got.arrivals[-1]
            if (first, last) == (1, 2):
                return Timing(rid, first_at - got.begun, last_at - got.begun)
        raise RuntimeError(f"expected the first token before the second one, got {got.arrivals}")


def prefill_row(prompts: Prompts, num_tokens: int, repeats: int) -> Row:
    """Seconds to the first token in a stock engine."""
    return {"seconds": spread([prompts.prefill(num_tokens, recorded=None).first for _ in range(repeats)])}


def recording_row(prompts: Prompts, num_tokens: int, pairs: int) -> Row:
    """Pairs of a recorded and an unrecorded prompt, and what became of the recorded ones.

    Raises:
        RuntimeError: an index was not built, or one was for a prompt that opted out.
    """
    plain, recorded, held, events = [], [], [], []
    for number in range(pairs):
        for record in (True, False) if number % 2 else (False, True):  # drift of the clocks hits both alike
            timing = prompts.prefill(num_tokens, recorded=record)
            event = reported(prompts.events, timing.rid)
            wanted = "built" if record else "skipped"
            if event["status"] != wanted:
                raise RuntimeError(f"expected {timing.rid} to be {wanted}, got {event}")
            if record:
                recorded.append(timing.first)
                held.append(timing.end - timing.first)
                events.append(event)
                Path(event["path"]).unlink(missing_ok=True)  # 2 GB each at 131,072 tokens
            else:
                plain.append(timing.first)
    ratios = [r / p for r, p in zip(recorded, plain, strict=True)]
    parts = {name: [event[name] for event in events] for name in events[0] if name.endswith("_seconds")}
    last = {name: events[-1].get(name) for name in ("index_bytes", "kv_bytes", "method_bytes", "recall")}
    return {
        "plain": spread(plain),
        "recorded": spread(recorded),
        "ratio": spread(ratios),
        # Device seconds of the builders, as the index itself reports them; held: until it was stored and verified too.
        "build": spread(parts.pop("build_seconds")),
        "held": spread(held),
        "other_seconds": parts,
        **last,
    }


def missing(args: argparse.Namespace, part: str, own: Row) -> list[Row]:
    """Beginnings of the rows that the result file does not hold yet, measured as is asked for, at any commit."""
    common: Row = {"config": json.loads(args.config)} if part == "recording" else {}
    rows = [{"bench": part, **common, "num_tokens": length, **own} for length in args.lengths]
    return engines.unmeasured(args.out, rows, [name for name in rows[0] if name not in ("date", "commit")])


def engine_flags(args: argparse.Namespace, folder: Path, *, building: bool) -> list[str]:
    """Command line of a stock engine, or of one that builds; those after `--` come last and win."""
    longest = max(args.lengths)
    model = engines.write_model(folder / "model", args.shape)
    flags = [*engines.base_flags(args, "flashinfer", model), "--skip-tokenizer-init"]
    flags += ["--disable-radix-cache", "--max-running-requests", "4", "--context-length", str(longest + 64)]
    flags += ["--max-total-tokens", str(longest + 8192), *([] if args.cpu else ["--disable-decode-cuda-graph"])]
    if building:
        (folder / "store").mkdir()
        config = {**json.loads(args.config), "build": "prefill", "build_report": str(folder / "events.jsonl")}
        flags += engines.sparse_flags(config, folder / "store")
    return [*flags, *args.sglang_flags]


def measure(args: argparse.Namespace, part: str, folder: Path) -> None:
    """One part, but for the rows that the result file holds."""
    rows = missing(args, part, provenance(args))
    if not rows:
        return
    building = part == "recording"
    prompts = Prompts(args, engine_flags(args, folder, building=building), folder / "events.jsonl")
    chunk = {"chunked_prefill_size": prompts.engine.tokenizer_manager.server_args.chunked_prefill_size}
    try:
        for record in (True, False) if building else (None,):
            prompts.prefill(min(args.lengths), recorded=record)
        for row in rows:
            length = row["num_tokens"]
            pairs = args.pairs[min(args.lengths.index(length), len(args.pairs) - 1)]
            of = recording_row(prompts, length, pairs) if building else prefill_row(prompts, length, args.repeats)
            row |= {**of, **chunk}
            engines.append(args.out, row)
            # Medians, in seconds.
            spreads = {name: one for name, one in of.items() if isinstance(one, dict) and "median" in one}
            medians = (f"{name} {one['median']:.4f}" for name, one in spreads.items())
            print(f"{row['bench']} {length} tokens: {', '.join(medians)}", flush=True)
    finally:
        prompts.engine.shutdown()


# -- table ------------------------------------------------------------------------------------------------------


def fastest_prefill(rows: Sequence[Row]) -> dict[int, float]:
    """Per prompt length, the fastest median of all servers, the unrecorded prompts of a building one included."""
    fastest: dict[int, float] = {}
    for row in rows:
        seconds = (row["seconds"] if row["bench"] == "prefill" else row["plain"])["median"]
        fastest[row["num_tokens"]] = min(seconds, fastest.get(row["num_tokens"], seconds))
    return fastest


def table(rows: Sequence[Row]) -> str:
    """As Markdown, a section for each shape, device and version of SGLang."""
    measured, parts = [row for row in rows if row["bench"] in PARTS], []  # not those of an older part, `layer`
    for (shape, device, sglang), of in engines.grouped(measured, ("shape", "device", "sglang")):
        parts += [f"{shape}, {device}, SGLang {sglang}", _server_table(of, fastest_prefill(of))]
    return "\n\n".join(parts)


def _range(values: Row, digits: int) -> str:
    return f"{values['median']:.{digits}f} ({values['min']:.{digits}f}-{values['max']:.{digits}f})"


def _server_table(rows: Sequence[Row], fastest: dict[int, float]) -> str:
    head = ["tokens", "chunks of", "server", "prefill s", "recorded s", "ratio", "build s", "of the fastest prefill"]
    head += ["until verified s", "index of KV"]
    lines = []
    for row in sorted(rows, key=lambda r: (r["num_tokens"], r["bench"])):
        first = [str(row["num_tokens"]), str(row["chunked_prefill_size"])]
        if row["bench"] == "prefill":
            lines.append([*first, "stock", _range(row["seconds"], 3), *[""] * 6])
            continue
        methods = ", ".join(row["config"].get("methods") or [row["config"].get("method", "default")])
        times = [_range(row["plain"], 3), _range(row["recorded"], 3), _range(row["ratio"], 4), _range(row["build"], 3)]
        share = f"{row['build']['median'] / fastest[row['num_tokens']]:.1%}"
        of_kv = f"{row['index_bytes'] / row['kv_bytes']:.1%}"
        lines.append([*first, f"building {methods}", *times, share, _range(row["held"], 2), of_kv])
    return markdown(head, lines)


# -- command line ----------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="build.jsonl", help="result file; rows are appended")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="print result files as Markdown, measure nothing")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, help="parts to measure")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768, 131072], metavar="TOKENS")
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--config", default="{}", help="--sparse-attn-config of the building engine, as JSON")
    parser.add_argument("--repeats", type=int, default=3, help="prompts per stock prefill row")
    parser.add_argument(
        "--pairs", nargs="+", type=int, default=[7, 3], metavar="N", help="per length; the last for all others"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="where the temporary store and logs lie")
    parser.add_argument("sglang_flags", nargs="*", metavar="-- SGLANG FLAGS", help="added to those of the device")
    args = parser.parse_args(argv)
    args.lengths, args.cpu = sorted(set(args.lengths)), not torch.cuda.is_available()
    return args


def provenance(args: argparse.Namespace) -> Row:
    """What a row needs to be repeated, beside its key."""
    settings = {"shape": args.shape, "weights": "random", "seed": args.seed, "flags": args.sglang_flags}
    return {**settings, **origin(args)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, each part in a process of its own, what the result file does not hold yet; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv)
    if args.table:
        print(table(engines.read(args.table)))
        return 0
    if args.part:
        with tempfile.TemporaryDirectory(dir=args.dir) as name:
            measure(args, args.part, Path(name))
        return 0
    commands = [[sys.executable, __file__, "--part", part, *argv] for part in args.only]
    return max(abs(subprocess.run(command, check=False).returncode) for command in commands)


if __name__ == "__main__":
    sys.exit(main())
