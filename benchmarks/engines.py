"""SGLang as benchmarks start it: models of a known shape, flags, servers, engines and requests; rows of result files.

Of a model only the configuration is written: weights are random (`random_weights.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import lzma
import os
import random
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kernel_rows import Row, origin

from scripts.servers import free_ports, process_group

STOCK = ("flashinfer", "triton")
"""SGLang without the plugin, by attention backend."""
INDEXED = ("sparse", "auto")
"""With `--sparse-attn`; an index of each prompt is built from its prefill."""
LOSSLESS = "lossless"
"""Likewise; steps with an index draft, exact ones verify."""

BUILDING = "building"
"""With `--sparse-attn`; indexes are built beside serving, of what requests turn out to share."""

READY = "The server is fired up and ready to roll!"

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
}


def _shape(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, dim: int, vocab: int, dtype: str) -> Row:
    return _LLAMA | {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": vocab,
        "max_position_embeddings": 262144,
        "torch_dtype": dtype,
    }


def _latent_shape() -> Row:
    """DeepSeek-V2-Lite's attention, and feed-forward layers as wide as the experts that one token takes."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096}
    return _shape(2048, 8 * 1408, 27, 16, 16, 64, 102400, "bfloat16") | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 27,
        "moe_layer_freq": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "rope_scaling": {**rope, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
    }


#: config.json of the models timed. `tiny` is for trying this script, not for figures.
SHAPES = {
    "llama-3.1-8b": _shape(4096, 14336, 32, 32, 8, 128, 128256, "bfloat16"),
    "deepseek-v2-lite": _latent_shape(),
    "tiny": _shape(256, 512, 2, 8, 2, 64, 1024, "float32"),
}

_FLAGS = ["--load-format", "dummy", "--random-seed", "0", "--sampling-backend", "pytorch"]
_FLAGS += ["--grammar-backend", "none", "--log-level", "info"]
_GPU_FLAGS = ["--disable-prefill-cuda-graph", "--chunked-prefill-size", "32768", "--mem-fraction-static", "0.85"]
_CPU_FLAGS = ["--device", "cpu", "--dtype", "float32", "--disable-cuda-graph", "--disable-overlap-schedule"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The part of the command line that benchmarks of several engines have; `cpu` says that there is no GPU."""
    import torch

    parser.set_defaults(cpu=not torch.cuda.is_available())
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
    config: dict[str, Any] = {"share_prefixes": True, "profile": "none"}
    if engine in (*INDEXED, LOSSLESS, BUILDING):
        config |= {"decode_path": engine, "build": "prefill", "prefetch_policy": "wait_complete"}
        config |= {"layer_plan": layer_plan(args.plan, args.shape), "index_gpu_bytes": 8 << 30}
    if engine == LOSSLESS:
        config |= {"decode_path": "auto", "exactness": "verify"}
    if engine == BUILDING:
        config |= {"decode_path": "auto", "build": "shared", "prefetch_policy": "best_effort"}
    return sparse_flags({**config, **json.loads(args.config)}, store)


def sparse_flags(config: Row, store: Path) -> list[str]:
    """The plugin's, by its configuration."""
    return ["--sparse-attn", "--sparse-attn-config", json.dumps(config), "--sparse-attn-store", str(store)]


def layer_plan(name: str, shape: str) -> list[Any]:
    """Roles of all layers, as `layer_plan` of the configuration takes them; see `decode.py`."""
    num_layers = SHAPES[shape]["num_hidden_layers"]
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
    settings = {name: getattr(args, name) for name in ("shape", "page", "plan", "seed")}
    settings |= {"weights": "random", "config": json.loads(args.config), "flags": args.sglang_flags}
    return {**settings, **origin(args)}


def read(paths: Sequence[str]) -> list[Row]:
    """Rows of result files, packed ones (`.xz`) too."""
    found = []
    for path in paths:
        with lzma.open(path, "rt") if str(path).endswith(".xz") else Path(path).open() as file:
            found += [json.loads(line) for line in file]
    return found


def unmeasured(path: str, rows: Sequence[Row], key: Sequence[str]) -> list[Row]:
    """Those of the rows that a result file, if it is there, has no row of the same key for."""
    known = [[row.get(name) for name in key] for row in read([path])] if Path(path).exists() else []
    return [row for row in rows if [row.get(name) for name in key] not in known]


def grouped(rows: Iterable[Row], names: Sequence[str]) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Rows by the values of these fields, in the order of their first."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(found.items())


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "\n".join("| " + " | ".join(one) + " |" if one else "|---" * len(head) + "|" for one in (head, (), *rows))


def append(path: str, row: Row) -> None:
    """Write one more row."""
    with Path(path).open("a") as file:
        file.write(json.dumps(row) + "\n")


def forget(path: Path) -> None:
    """Its pages leave the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plugin_environment(folder: Path, name: str, settings: dict[str, str]) -> dict[str, str]:
    """Environment in which SGLang finds a module beside this one, which has `register`, as a plugin.

    Args:
        folder: where its distribution is written.
        name: of the module.
        settings: that it reads of the environment.
    """
    about = folder / f"{name}-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    shutil.copy(Path(__file__).with_name(f"{name}.py"), folder)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, **settings}


def start_engine(flags: Sequence[str]) -> Any:
    """SGLang's engine in this process, with the plugins that are installed."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import prepare_server_args

    return Engine(server_args=prepare_server_args(list(flags)))


class Asked:
    """An engine of this process, and what it is asked: prompts of random tokens by a seed."""

    def __init__(self, flags: Sequence[str], shape: str, seed: int) -> None:
        self.engine, self._vocab, self._rng = start_engine(flags), SHAPES[shape]["vocab_size"], random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        """New ones."""
        return self._rng.choices(range(16, self._vocab), k=count)

    def wait(self, awaitable: Any, seconds: float | None = None) -> Any:
        """What comes of it. Raises TimeoutError."""
        return self.engine.loop.run_until_complete(asyncio.wait_for(awaitable, seconds))

    def state(self) -> Row:
        """See `plugin_state`."""
        return plugin_state(self.engine.get_server_info())


def plugin_state(info: Row) -> Row:
    """The plugin's part of SGLang's state of a server or an engine; empty in a stock one."""
    return info["internal_states"][0].get("sparse_attn") or {}


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
        aborted: by us.
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


def write_model(folder: Path, shape: str) -> Path:
    """A model folder for `--load-format dummy`: the configuration alone. Engines that this process starts behind that
    have random weights (`random_weights.py`) while the folder is there."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= plugin_environment(folder / "plugins", "random_weights", {})
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    return folder


def tail(log: Path, size: int = 4000) -> str:
    return log.read_text(errors="replace")[-size:]


@contextmanager
def launched(flags: Sequence[str], log: Path, seconds: float, port: int | None = None) -> Iterator[str]:
    """URL of an SGLang server on loopback; ends with its whole process group.

    Args:
        flags: SGLang's, without ports.
        log: what the server writes.
        seconds: how long it may take to start.
        port: that it listens on; None for any that is free.

    Raises:
        RuntimeError: it stopped, or was not ready in that time.
    """
    free = free_ports(2)
    port = free[0] if port is None else port
    command = [sys.executable, "-m", "sglang.launch_server", *flags, "--port", str(port), "--nccl-port", str(free[1])]
    deadline = time.monotonic() + seconds
    with process_group(command, log) as process:
        while READY not in tail(log, 20_000):
            if process.poll() is not None:
                raise RuntimeError(f"the server stopped; the end of its log:\n{tail(log)}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server was not ready within {seconds:.0f} s; the end of its log:\n{tail(log)}")
            time.sleep(0.25)
        yield f"http://127.0.0.1:{port}"
