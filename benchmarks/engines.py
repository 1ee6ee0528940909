"""Engines that benchmarks start: SGLang's flags, the plugin's, requests to them, and where a row comes from."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from dummy_server import SHAPES
from kernel_rows import commit

Row = dict[str, Any]

STOCK = ("flashinfer", "triton")
"""SGLang without the plugin, by attention backend."""
INDEXED = ("sparse", "auto")
"""With `--sparse-attn`; an index of each prompt is built from its prefill."""

BUILDING = "building"
"""With `--sparse-attn`; indexes are built beside serving, of what requests turn out to share."""

_FLAGS = ["--load-format", "dummy", "--random-seed", "0", "--sampling-backend", "pytorch"]
_FLAGS += ["--grammar-backend", "none", "--log-level", "info"]
_GPU_FLAGS = ["--disable-prefill-cuda-graph", "--chunked-prefill-size", "32768"]
_CPU_FLAGS = ["--device", "cpu", "--dtype", "float32", "--disable-cuda-graph", "--disable-overlap-schedule"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The part of the command line that both scripts have."""
    parser.add_argument("--starts", type=int, default=1, help="starts of each engine, in turns")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--plan", default="kascade", choices=["kascade", "anchors"], help="of `sparse` and `auto`")
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--config", default="{}", help="--sparse-attn-config of the plugin's engines, as JSON")
    parser.add_argument("--commit", default="", help="of the code measured, where there is no git checkout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", nargs="+", metavar="FILE", help="print result files as Markdown, measure nothing")
    parser.add_argument("sglang_flags", nargs="*", metavar="-- SGLANG FLAGS", help="added to those of each server")


def base_flags(args: argparse.Namespace, engine: str, model: Path) -> list[str]:
    """SGLang's flags of one engine, without sizes. On a CPU every engine has the backend torch_native."""
    backend = "torch_native" if args.cpu else (engine if engine in STOCK else "flashinfer")
    flags = [*_FLAGS, *(_CPU_FLAGS if args.cpu else _GPU_FLAGS), "--model-path", str(model)]
    return [*flags, "--attention-backend", backend, "--page-size", str(args.page)]


def plugin_flags(args: argparse.Namespace, engine: str, store: Path) -> list[str]:
    """The plugin's flags of one engine; none for a stock one."""
    if engine in STOCK:
        return []
    config = {"share_prefixes": True, "profile": "none", **json.loads(args.config)}
    if engine in (*INDEXED, BUILDING):
        roles = layer_plan(args.plan, int(SHAPES[args.shape]["num_hidden_layers"]))
        config |= {"decode_path": engine, "build": "prefill", "keep_ratio": 0.05, "group_growth": "sqrt"}
        config |= {"layer_plan": roles, "prefetch_policy": "wait_complete", "index_gpu_bytes": 8 << 30}
    if engine == BUILDING:
        config |= {"decode_path": "auto", "build": "shared", "prefetch_policy": "best_effort"}
    return ["--sparse-attn", "--sparse-attn-config", json.dumps(config), "--sparse-attn-store", str(store)]


def layer_plan(name: str, num_layers: int) -> list[Any]:
    """Roles of all layers, as `layer_plan` of the configuration takes them; see the module."""
    if name == "anchors":
        return ["dense", *["anchor"] * (num_layers - 1)]
    heads = [(head + 1) % 8 for head in range(8)]
    roles: list[Any] = ["dense", "dense"]
    anchor = 2
    for layer in range(2, num_layers):
        anchor = layer if layer in (2, 8, 13, 14) else anchor
        roles.append("anchor" if layer == anchor else {"reuse": anchor, "head_map": heads})
    return roles


def provenance(args: argparse.Namespace) -> Row:
    """What a row needs to be repeated, beside its key."""
    import torch

    return {
        "shape": args.shape,
        "page": args.page,
        "plan": args.plan,
        "config": json.loads(args.config),
        "flags": args.sglang_flags,
        "device": "CPU" if args.cpu else torch.cuda.get_device_name(),
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "commit": args.commit or commit(),
        "seed": args.seed,
        "date": time.strftime("%Y-%m-%d"),
    }


def read(paths: Sequence[str]) -> list[Row]:
    """Rows of result files."""
    return [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]


def unmeasured(path: str, rows: Sequence[Row], key: Sequence[str]) -> list[Row]:
    """Those of the rows that a result file, if it is there, has no row of the same key for."""
    known = [[row[name] for name in key] for row in read([path])] if Path(path).exists() else []
    return [row for row in rows if [row[name] for name in key] not in known]


def append(path: str, row: Row) -> None:
    """Write one more row."""
    with Path(path).open("a") as file:
        file.write(json.dumps(row) + "\n")


def start_engine(flags: Sequence[str]) -> Any:
    """SGLang's engine in this process, with the plugins that are installed."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import prepare_server_args

    return Engine(server_args=prepare_server_args(list(flags)))


def sampling(tokens: int, *, dense: bool = False) -> Row:
    """Sampling parameters: greedy, so many tokens; dense: opted out of the plugin."""
    own = {"custom_params": {"sparse_attn": False}} if dense else {}
    return {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True, **own}


@dataclass
class Streamed:
    """What came of a request.

    Attributes:
        tokens: ids that were generated.
        meta: SGLang's, of the last piece.
        begun: when it was sent, seconds of `time.perf_counter`.
        arrivals: of each piece, how many tokens there were by then, and when it came.
        aborted: whether it was, by us.
    """

    tokens: list[int]
    meta: Row
    begun: float
    arrivals: list[tuple[int, float]]
    aborted: bool = False

    @property
    def longest_wait(self) -> float:
        """Seconds that the next piece was waited for, at most."""
        times = [self.begun, *(seconds for _, seconds in self.arrivals)]
        return max((after - before for before, after in pairwise(times)), default=0.0)


async def streamed(
    engine: Any, prompt: Sequence[int], parameters: Row, *, rid: str | None = None, end_at: int = 0, **options: Any
) -> Streamed:
    """Ask an engine of this process, streamed.

    Args:
        engine: SGLang's.
        prompt: token ids.
        parameters: from `sampling`.
        rid: the request's id.
        end_at: abort it when so many tokens have come; 0: never.
        options: of `async_generate`.
    """
    found = Streamed([], {}, time.perf_counter(), [])
    stream = await engine.async_generate(
        input_ids=list(prompt), sampling_params=parameters, stream=True, rid=rid, **options
    )
    async for chunk in stream:
        found.tokens, found.meta = list(chunk["output_ids"]), chunk["meta_info"]  # all so far
        found.arrivals.append((int(found.meta["completion_tokens"]), time.perf_counter()))
        if end_at and not found.aborted and len(found.tokens) >= end_at:
            engine.tokenizer_manager.abort_request(rid=rid)
            found.aborted = True
    return found
