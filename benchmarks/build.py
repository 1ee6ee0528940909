"""What an index costs where it is made: building it, and recording queries, against the prefill of the same prompt.

The Llama-3.1-8B shape with SGLang's dummy weights, in bf16, on one GPU. Three parts, each row one JSON line:

`layer`      each method's builder by itself on random keys and queries of one layer: median seconds, bytes
`prefill`    stock SGLang without our flag: seconds to the first token
`recording`  one server with `--sparse-attn` and `build: prefill`: pairs of prompts, one recorded and one not
             (per-request opt-out), in alternating order; what each build took

    python benchmarks/build.py --out build.jsonl                # all parts, about 5 minutes on an H200
    python benchmarks/build.py --table build.jsonl
    python benchmarks/build.py --out tiny.jsonl --shape tiny --lengths 1024 2048     # a CPU is enough

The time of a prefill is the client's time to the first streamed token, with its request parsed and admitted. Every
prompt is new: random tokens, radix cache off. Shares are of the fastest prefill of that length in the file.

Dummy weights are uniform in -0.001..0.001: keys and queries are finite and tiny, attention is near uniform. They
serve to time, never to judge a selection. Rows that the file holds already are skipped.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from build_table import read, table
from dummy_server import SHAPES, Row, Server, prefill, running_server, tail
from engines import append
from engines import read as read_rows
from kernel_rows import commit

# -- rows ------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> Row:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": list(values)}


def prefill_row(server: Server, num_tokens: int, repeats: int) -> Row:
    """Seconds to the first token on a stock server."""
    seconds = [prefill(server, num_tokens, recorded=None).first for _ in range(repeats)]
    return {"seconds": spread(seconds), "chunked_prefill_size": server.chunk}


def recording_row(server: Server, num_tokens: int, pairs: int) -> Row:
    """Pairs of a recorded and an unrecorded prompt, and what became of the recorded ones.

    Raises:
        RuntimeError: an index was not built, or one was for a prompt that opted out.
    """
    plain, recorded, held, events = [], [], [], []
    for number in range(pairs):
        for record in (True, False) if number % 2 else (False, True):  # drift of the clocks hits both alike
            timing = prefill(server, num_tokens, recorded=record)
            event = server.event(timing.rid)
            wanted = "built" if record else "skipped"
            if event["status"] != wanted:
                raise RuntimeError(f"expected {timing.rid} to be {wanted}, got {event}:\n{tail(server.log)}")
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
        "chunked_prefill_size": server.chunk,
    }


def timed(work: Callable[[], Any], *, cpu: bool) -> tuple[Any, float]:
    """What `work` returns, and its seconds: by CUDA events, host gaps between kernels included."""
    if cpu:
        begun = time.perf_counter()
        return work(), time.perf_counter() - begun
    import torch

    torch.cuda.synchronize()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = work()
    stop.record()
    torch.cuda.synchronize()
    return result, start.elapsed_time(stop) / 1e3


def layer_row(args: argparse.Namespace, spec: Row, num_tokens: int) -> Row:
    """One method's builder on random keys and queries: a batch of layers, and its share of the step for all layers."""
    import torch

    from sglang_ext.indexing import make_builder, parse_spec
    from sglang_ext.indexing.preparation import at_layers, build_layer, layer_batches, prepare

    shape = SHAPES[args.shape]
    layers, heads, dim = shape["num_hidden_layers"], shape["num_key_value_heads"], shape["head_dim"]
    dtype = getattr(torch, shape["torch_dtype"])
    device = "cpu" if args.cpu else "cuda"
    generator = torch.Generator(device).manual_seed(args.seed)
    queries = torch.randn(layers, heads, args.query_samples, dim, generator=generator, device=device).to(dtype)
    at_once = layer_batches(layers, num_tokens)[0]
    keys = torch.randn(num_tokens, len(at_once) * heads, dim, generator=generator, device=device).to(dtype)
    own = queries[: len(at_once)].flatten(0, 1)
    parsed = parse_spec(spec)
    builder = make_builder(parsed)
    seconds, of_all = [], []
    for _ in range(args.layer_repeats + 1):
        prepared, together = timed(lambda: prepare(builder, queries), cpu=args.cpu)
        known = at_layers(prepared, at_once)
        built, alone = timed(lambda known=known: build_layer(builder, keys, own, known), cpu=args.cpu)
        of_all.append(together)
        seconds.append(together / layers + alone / len(at_once))
    return {
        "seconds": spread(seconds[1:]),
        "prepare_seconds": spread(of_all[1:]),
        "layers_at_once": len(at_once),
        "index_bytes": sum(array.nbytes for array in built.values()) / len(at_once),
        "kv_bytes": 2 * keys.nbytes / len(at_once),
        "layers": shape["num_hidden_layers"],
        "parameters": parsed.to_dict(),
    }


# -- a run -----------------------------------------------------------------------------------------------------


def brief(row: Row) -> str:
    """One row for the terminal."""
    if row["bench"] == "recording":
        return (
            f"recording {row['num_tokens']:7d} tokens, chunks of {row['chunk']}: plain {row['plain']['median']:.3f} s, "
            f"recorded {row['recorded']['median']:.3f} s, ratio {row['ratio']['median']:.4f} "
            f"[{row['ratio']['min']:.4f}, {row['ratio']['max']:.4f}], build {row['build']['median']:.3f} s, "
            f"until stored and verified {row['held']['median']:.3f} s"
        )
    what = f"layer {row['method']}" if row["bench"] == "layer" else f"prefill, chunks of {row['chunk']}"
    seconds = row["seconds"]
    return (
        f"{what} {row['num_tokens']:7d} tokens: {seconds['median']:.4f} s [{seconds['min']:.4f}, {seconds['max']:.4f}]"
    )


def known(args: argparse.Namespace, origin: Row) -> list[Row]:
    """Rows of the result file that were measured as is asked for, at any commit."""
    rows = read_rows([args.out]) if Path(args.out).exists() else []
    return [row for row in rows if all(row.get(key) == origin[key] for key in origin if key not in ("date", "commit"))]


def measure(args: argparse.Namespace, folder: Path) -> None:
    """All parts that are asked for, but for the rows that the result file holds."""
    origin = provenance(args)
    done, chunk = known(args, origin), args.chunked_prefill_size

    def missing(part: str, **key: Any) -> list[Row]:
        keys = [{"bench": part, **key, "num_tokens": length} for length in args.lengths]
        keys = keys if args.only is None or part in args.only else []
        return [one for one in keys if not any(all(row.get(k) == v for k, v in one.items()) for row in done)]

    def add(key: Row, measured: Row) -> None:
        row = {**key, **measured, **origin}
        append(args.out, row)
        print(brief(row), flush=True)

    for spec in args.methods:
        for key in missing("layer", method=spec["method"], spec=spec, query_samples=args.query_samples):
            add(key, layer_row(args, spec, key["num_tokens"]))
    if not args.cpu:
        import torch

        torch.cuda.empty_cache()
    if keys := missing("prefill", chunk=chunk):
        with running_server(args, folder, chunk, building=False) as server:
            prefill(server, min(args.lengths), recorded=None)
            for key in keys:
                add(key, prefill_row(server, key["num_tokens"], args.repeats))
    if keys := missing("recording", chunk=chunk, config=json.loads(args.config)):
        with running_server(args, folder, chunk, building=True) as server:
            for record in (True, False):
                prefill(server, min(args.lengths), recorded=record)
            for key in keys:
                pairs = args.pairs[min(args.lengths.index(key["num_tokens"]), len(args.pairs) - 1)]
                add(key, recording_row(server, key["num_tokens"], pairs))


# -- command line ----------------------------------------------------------------------------------------------


def method_spec(text: str) -> Row:
    """argparse type: a method's name, or a JSON object with its parameters."""
    from sglang_ext.indexing import parse_spec

    try:
        spec: Row = json.loads(text) if text.startswith("{") else {"method": text}
        parse_spec(spec)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return spec


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="build.jsonl", help="result file; rows are appended")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="print result files as Markdown, measure nothing")
    parser.add_argument("--only", nargs="+", choices=["layer", "prefill", "recording"], help="parts to measure")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768, 131072], metavar="TOKENS")
    parser.add_argument("--chunked-prefill-size", default="32768", metavar="TOKENS|default")
    parser.add_argument("--config", default="{}", help="--sparse-attn-config of the building server, as JSON")
    parser.add_argument(
        "--methods",
        nargs="+",
        type=method_spec,
        default=[{"method": name} for name in ("csattention", "two_level", "token_index", "ab_sparse")],
        metavar="NAME|JSON",
        help="methods of the rows `layer`",
    )
    parser.add_argument("--query-samples", type=int, default=2048, help="query rows per KV head, for the rows `layer`")
    parser.add_argument("--layer-repeats", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="prompts per stock prefill row")
    parser.add_argument(
        "--pairs", nargs="+", type=int, default=[7, 3], metavar="N", help="per length; the last for all others"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="where the temporary store and logs lie")
    parser.add_argument("--start-seconds", type=float, default=300.0, help="how long a server may take to start")
    parser.add_argument("sglang_flags", nargs="*", metavar="-- SGLANG FLAGS", help="added to those of the device")
    args = parser.parse_args(argv)
    args.lengths = sorted(set(args.lengths))
    import torch

    args.cpu = not torch.cuda.is_available()
    return args


def provenance(args: argparse.Namespace) -> Row:
    """What a row needs to be repeated, beside its key."""
    import torch

    return {
        "shape": args.shape,
        "device": (platform.processor() or "CPU") if args.cpu else torch.cuda.get_device_name(),
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "commit": commit(),
        "seed": args.seed,
        "flags": args.sglang_flags,
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> int:
    """Measure what the result file does not hold yet; returns the exit status."""
    args = parse()
    if args.table:
        print(table(read(args.table)))
        return 0
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        measure(args, Path(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
