"""What `serving.py` asks of a server: SGLang's own `bench_serving`, its arguments, its data sets and its results.

`bench_serving` sends text that it decodes from random ids, and counts a token when text comes back. So the tokenizer of
dummy models has a word for every id: every text has as many tokens after encoding as it was made of.
"""

from __future__ import annotations

import importlib.util
import json
import os
import string
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from itertools import chain, islice, product
from pathlib import Path
from statistics import mean, median
from typing import Any

from engines import Row, plugin_state

Sizes = dict[str, Any]

RUNS: dict[str, Sizes] = {
    "groups": {
        "groups": 4,
        "prefix": 65536,
        "question": 128,
        "output": 512,
        "requests": 128,
        "zipf": 1.0,
        "concurrency": 32,
    },
    "agent": {
        "groups": 4,
        "prefix": 16384,
        "question": 128,
        "output": 256,
        "conversations": 32,
        "turns": 8,
        "concurrency": 32,
    },
}
"""Sizes of each run; lengths are tokens, `question` and `output` are those of a turn.

`groups`: system prompts of `prefix` tokens, requests spread over them by zipf. `agent`: conversations behind system
prompts.
"""

#: Contents alone, in their order. Roles would be tokens that no row could tell from a prompt's.
_CHAT = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
_SPARE = 64
"""Tokens beyond those of the sizes, for each request."""
_REHEARSAL = 8192
"""Tokens of the rehearsal's prefix, at most."""

# The module as it is, once per list of arguments: its import takes most of a short run. It draws from the tokenizer's
# vocabulary, which comes in another order from each tokenizer that is loaded; only in one order makes a seed the same
# prompts, in both passes and for every engine.
_BENCH = """
import json, runpy, sys
from transformers import PreTrainedTokenizerFast

unordered = PreTrainedTokenizerFast.get_vocab
PreTrainedTokenizerFast.get_vocab = lambda self: dict(sorted(unordered(self).items(), key=lambda item: item[1]))
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["bench_serving", *arguments]
    runpy.run_module("sglang.bench_serving", run_name="__main__")
"""

# bench_serving imports the data sets of images, whose module imports `datasets`, whatever is measured. Where that
# package is missing its process gets this instead.
_NO_DATASETS = """
def load_dataset(*args, **kwargs):
    raise ImportError("expected no data set to be loaded: this is a stand-in for the package `datasets`")
"""


def sizes_of(run: str, changes: Sequence[str]) -> Sizes:
    """Sizes of a run after changes such as `groups.prefix=4096`; those of other runs are left out.

    Raises:
        ValueError: no such run or size, or sizes that do not fit each other.
    """
    sizes = dict(RUNS[run])
    for change in changes:
        name, _, value = change.partition("=")
        of, _, key = name.partition(".")
        if key not in RUNS.get(of, {}) or not value:
            raise ValueError(f"expected RUN.SIZE=NUMBER, RUN one of {', '.join(RUNS)}, got {change!r}")
        if of == run:
            sizes[key] = type(RUNS[of][key])(value)
    if _every(sizes) % sizes["groups"]:
        what = "requests" if "requests" in sizes else "conversations"
        found = f"{_every(sizes)} and {sizes['groups']}"
        raise ValueError(f"{run}: expected {what} to be a multiple of groups, got {found}")
    return sizes


def _every(sizes: Sizes) -> int:
    """Requests, or conversations, of all groups."""
    return int(sizes.get("requests") or sizes["conversations"])


def own_tokens(sizes: Sizes) -> int:
    """Tokens of a request, or conversation, behind what it shares, answers included."""
    return int(sizes.get("turns", 1) * (sizes["question"] + sizes["output"]) + _SPARE)


def context_tokens(sizes: Sizes) -> int:
    """Tokens of the longest request."""
    return int(sizes["prefix"] + own_tokens(sizes))


def pool_tokens(sizes: Sizes) -> int:
    """Slots of KV that hold all of a run, so that nothing is evicted during it."""
    shared = sizes["groups"] * (sizes["prefix"] + _SPARE)
    return int(shared + (_every(sizes) + sizes["concurrency"]) * (own_tokens(sizes) + _SPARE))


def commands(run: str, sizes: Sizes, seed: int, model: Path, folder: Path, port: int) -> list[list[str]]:
    """Arguments of `bench_serving` for three passes; it writes to `folder`.

    1. A rehearsal behind another prefix, short, so that no kernel is compiled later.
    2. The warm-up: an empty prefix cache, then every shared prompt, one at a time.
    3. What is measured. With one seed the system prompts of both passes of `generated-shared-prefix` are the same: it
       makes them first.
    """
    always = ["--host", "127.0.0.1", "--port", str(port), "--model", str(model), "--tokenizer", str(model)]
    always += ["--output-file", str(result_file(folder, run)), "--output-details", "--cache-report", "--disable-tqdm"]
    always += ["--warmup-requests", "0"]
    chat = ["--backend", "sglang-oai-chat" if "turns" in sizes else "sglang"]
    timed = [*always, *chat, "--seed", str(seed), "--max-concurrency", str(sizes["concurrency"])]
    warm_up = [*always, *chat, "--seed", str(seed), "--max-concurrency", "1", "--flush-cache"]
    rehearsal = [*always, "--backend", "sglang", "--seed", str(seed + 1000)]
    rehearsal += _prefixes(1, sizes["concurrency"], min(sizes["prefix"], _REHEARSAL), sizes["question"], 32)
    groups, prefix = sizes["groups"], sizes["prefix"]
    timed += _prefixes(groups, _every(sizes) // groups, prefix, sizes["question"], sizes["output"])
    if "turns" in sizes:
        timed += ["--gsp-num-turns", str(sizes["turns"])]
    else:
        timed += ["--gsp-group-distribution", "zipf", "--gsp-zipf-alpha", str(sizes["zipf"])]
    return [rehearsal, [*warm_up, *_prefixes(groups, 1, prefix, 1, 2), "--gsp-ordered"], timed]


def _prefixes(groups: int, prompts: int, prefix: int, question: int, output: int) -> list[str]:
    numbers = {"num-groups": groups, "prompts-per-group": prompts, "system-prompt-len": prefix}
    numbers |= {"question-len": question, "output-len": output}
    words = [word for name, number in numbers.items() for word in (f"--gsp-{name}", str(number))]
    return ["--dataset-name", "generated-shared-prefix", *words]


def result_file(folder: Path, run: str) -> Path:
    """Where `bench_serving` appends a line for each pass."""
    return folder / f"{run}.jsonl"


def bench(passes: Sequence[Sequence[str]], run: str, folder: Path, logs: Path, home: Path) -> list[Row]:
    """Run `bench_serving` once per list of arguments, in one process of its own; what it found, one for each.

    Args:
        logs: folder of what it prints.
        home: of that process. It keeps prompts there, by lengths and the tokenizer's class: another model's would be
            taken for this one's in the user's own.

    Raises:
        RuntimeError: it failed.
    """
    stand_ins = home / "stand_ins"
    stand_ins.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "HOME": str(home)}
    if importlib.util.find_spec("datasets") is None:
        (stand_ins / "datasets.py").write_text(_NO_DATASETS)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(stand_ins), os.environ.get("PYTHONPATH")]))
    log = logs / f"bench-{run}.log"
    with log.open("w") as out:
        command = [sys.executable, "-c", _BENCH, json.dumps(passes)]
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment, check=False)
    lines = result_file(folder, run).read_text().splitlines() if result_file(folder, run).exists() else []
    if done.returncode or len(lines) < len(passes):
        raise RuntimeError(f"bench_serving failed ({done.returncode}); the end of its log:\n{log.read_text()[-4000:]}")
    return [json.loads(line) for line in lines[-len(passes) :]]


def figures(results: Sequence[Row], sizes: Sizes, page: int) -> Row:
    """What a row holds of the results of all passes.

    Times are in ms. `prompt_tokens` and `cached_tokens` are (least, most) of all requests: as the tokenizer of
    `bench_serving` counts them (SGLang 0.5.16: of the first turn), and as the server found them in its prefix cache. By
    turn: medians over the conversations. `suffix_keep_ratio` is the server's, since its start; None where nothing was
    selected from requests' suffix tokens.

    Raises:
        RuntimeError: a request failed, or did not find what it shares in the prefix cache.
    """
    *_, before, found = results
    errors = [error for error in found["errors"] if error]
    if errors or found["completed"] != len(found["output_lens"]):
        raise RuntimeError(f"expected every request to be answered, got {found['completed']} and {errors[:1]}")
    cached = found["cached_tokens"]
    if min(cached) < sizes["prefix"] // page * page:
        raise RuntimeError(f"expected {sizes['prefix']} tokens of each request in the prefix cache, got {min(cached)}")
    row = {
        "requests": found["completed"],
        "seconds": found["duration"],
        "output_tokens": found["total_output_tokens"],
        "output_throughput": found["output_throughput"],
        "prompt_tokens": [min(found["input_lens"]), max(found["input_lens"])],
        "cached_tokens": [min(cached), max(cached)],
    }
    for name in ("ttft", "tpot", "itl"):
        row |= {f"{name}_ms": found[f"median_{name}_ms"], f"{name}_ms_p99": found[f"p99_{name}_ms"]}
    if "turns" in sizes:
        turns = range(sizes["turns"])
        row["ttft_ms_by_turn"] = [1e3 * median(found["ttfts"][turn :: len(turns)]) for turn in turns]
        row["tpot_ms_by_turn"] = [_tpot_ms(found["itls"][turn :: len(turns)]) for turn in turns]
    row["suffix_keep_ratio"] = plugin_state(found["server_info"]).get("suffix_keep_ratio")
    return row | {name: counted(found)[name] - counted(before)[name] for name in counted(found)}


def _tpot_ms(requests: Sequence[Sequence[float]]) -> float | None:
    """Median over requests; one whose tokens all came at once has no time between them, and does not count.

    None: that goes for all of them.
    """
    times = [mean(one) for one in requests if one]
    return 1e3 * median(times) if times else None


def counted(result: Row) -> dict[str, int]:
    """Steps that the plugin attended until a pass was over, exactly and sparsely, and requests that found an index; 0
    in a stock server.
    """
    state = plugin_state(result["server_info"])
    return {name: int(state.get(name, 0)) for name in ("cascade_steps", "sparse_steps", "hits")}


@cache
def words(count: int) -> tuple[str, ...]:
    """`count` different words of letters and digits, the shortest first; a word's place is its token id."""
    letters = string.digits + string.ascii_letters
    longer = (map("".join, product(letters, repeat=length)) for length in range(1, 5))
    return tuple(islice(chain.from_iterable(longer), count))


def write_tokenizer(folder: Path, vocab: int) -> Path:
    """`tokenizer.json` and `tokenizer_config.json` with ids 0 to `vocab` - 1, no special tokens; words are parted by
    white space. The chat template joins the contents of all messages.
    """
    model = {"type": "WordLevel", "vocab": {word: token for token, word in enumerate(words(vocab))}, "unk_token": "0"}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    tokenizer |= {"pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None, "model": model}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"model_max_length": 1 << 20, "chat_template": _CHAT}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
