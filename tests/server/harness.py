"""A real SGLang server per set of flags, one at a time; documents, indexes and requests for it.

Tests get everything through fixtures: `serve(...)` starts a server or hands out the one that runs with the same
flags, `Server` asks it, `stocked` is a store with prebuilt indexes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import distribution
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from prometheus_client.parser import text_string_to_metric_families

from scripts.needle.tasks import Document, Question
from scripts.servers import Reply, ask_many, free_port, free_ports, post, server_state
from sglang_ext.metrics import PREFIX

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "needle"
ADMIN_KEY = "sesame"
"""Of servers that have one; others take any."""
SGLANG = distribution("sglang").version

#: The stores of tests are small: they need not leave a GiB of the disk free, as a server's do.
DISK = {"store_min_free_bytes": 16 << 20}
#: What every index of this suite holds, so that one store serves all configurations.
METHODS: dict[str, Any] = {"ab_sparse": {}, "token_index": {}}
#: The configuration whose accuracy at a keep ratio of 10% over all layers is shown.
SPARSE_CONFIG: dict[str, Any] = {
    "method": "token_index",
    "methods": METHODS,
    "keep_ratio": 0.1,
    "layer_plan": ["anchor"] * 6,
    "prefetch_policy": "wait_complete",
}
#: All positions selected: the sparse path computes what dense attention does.
EXACT_CONFIG: dict[str, Any] = {**SPARSE_CONFIG, "method": "ab_sparse", "keep_ratio": 1.0}
#: As people serve, with an overlap schedule: indexes, groups without one, long suffix tokens selected from. Up to 2,560
#: tokens all positions are selected, so answers behind the small documents equal dense; of `large` half of them are.
PRODUCTION: dict[str, Any] = {
    **SPARSE_CONFIG,
    "min_top_k": 2560,
    "share_prefixes": True,
    "min_shared_tokens": 512,
    "suffix_dense_tokens": 512,
}

CPU_FLAGS = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-cuda-graph"),
    *("--max-running-requests", "8", "--context-length", "12288"),
]
DEFAULTS = {
    "--page-size": "16",
    "--chunked-prefill-size": "4096",
    "--max-total-tokens": "24576",
    "--disable-overlap-schedule": "",
    "--sleep-on-idle": "",  # or a server that nobody asks takes a core from the others
}
SERVED = {"deepseek_v2", "llama", "qwen2", "qwen3"}
"""Modules of the models that tests serve; each process of SGLang imports those of all models otherwise."""
_MODULES = {path.stem for path in Path(str(distribution("sglang").locate_file("sglang/srt/models"))).glob("*.py")}
#: Threads that wait must not spin: the cores are few, and shared.
SPARING = {
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "PASSIVE",
    "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_MODULES - SERVED),
}
if not torch.cuda.is_available():
    SPARING["TORCHDYNAMO_DISABLE"] = "1"  # what SGLang compiles for a penalty takes a CPU 8 s
READY = "The server is fired up and ready to roll!"
START_SECONDS = 480.0
STOP_SECONDS = 15.0
REQUEST_SECONDS = 480.0
JOB_SECONDS = 900.0


def begin(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.Popen[bytes]:
    """A process in a group of its own; `env` holds variables beside those of this process."""
    with log.open("w") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=cwd,
            env={**os.environ, **SPARING, **(env or {})},
        )  # fmt: skip


def rendezvous() -> list[str]:
    """Flags for the port where SGLang's processes meet; by itself 0.5.16 takes one that somebody else may get."""
    return ["--nccl-port", str(free_port())]


@dataclass(frozen=True)
class Answer:
    """One reply of /generate."""

    text: str
    ids: tuple[int, ...]
    meta: dict[str, Any]

    @property
    def cached_tokens(self) -> int:
        return int(self.meta["cached_tokens"])

    @property
    def num_retractions(self) -> int:
        return int(self.meta.get("num_retractions") or 0)

    @property
    def decode_steps(self) -> int:
        """Steps that ran as decode: the first token comes out of the prefill."""
        return len(self.ids) - 1

    @property
    def told(self) -> dict[str, Any]:
        """How it was decoded, of a request with one choice."""
        (found,) = self.meta["sparse_attn"]
        return dict(found)


def tokens_alike(answer: Answer, other: Answer) -> int:
    """Tokens of both up to the first that differs."""
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(answer.ids, other.ids, strict=False)))


def by_transformers(model: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[tuple[int, ...]]:
    """Greedy answers of exactly so many tokens by an implementation that is not SGLang's, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval()
    exactly = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None}
    whole = [network.generate(torch.tensor([list(prompt)]), **exactly)[0] for prompt in prompts]
    return [tuple(ids[len(prompt) :].tolist()) for ids, prompt in zip(whole, prompts, strict=True)]


@dataclass(frozen=True)
class Paired:
    """The same questions answered twice: the shares that were answered right. `difference` is sparse - dense."""

    count: int
    dense: float
    sparse: float

    @property
    def difference(self) -> float:
        return self.sparse - self.dense


@dataclass
class Delta:
    """What the counters of a server did meanwhile."""

    before: dict[str, Any]
    after: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> int:
        if name.startswith("_"):
            raise AttributeError(name)
        return int(self.after[name]) - int(self.before[name])

    @property
    def fallbacks(self) -> dict[str, int]:
        grown = {k: v - self.before["fallbacks"].get(k, 0) for k, v in self.after["fallbacks"].items()}
        return {name: count for name, count in grown.items() if count}

    def per_layer(self, name: str) -> list[float]:
        return [after - before for before, after in zip(self.before[name], self.after[name], strict=True)]


class Server:
    """A running server: its URL, its log, its process group. Ends with `stop()`."""

    def __init__(self, flags: Sequence[str], environment: dict[str, str], log: Path, model: Path = MODEL) -> None:
        self.log, self.model = log, str(model)
        self.overlaps = "--disable-overlap-schedule" not in flags
        self.port, nccl_port = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(self.port)]
        self.process = begin([*command, "--nccl-port", str(nccl_port), *flags], log, environment)

    def wait(self) -> None:
        """Until SGLang's own warm-up request is over; raises with the log's end when it stops or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while READY not in self.log.read_text(errors="replace"):
            if self.process.poll() is not None:
                raise RuntimeError(f"the server stopped with {self.process.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server did not answer within {START_SECONDS:.0f} s:\n{self.tail()}")
            time.sleep(0.1)

    def stop(self) -> None:
        """At once: SGLang's own end takes more than five seconds, which a test of it has."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_SECONDS)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def tail(self, size: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-size:] if self.log.exists() else "(no log)"

    def generate(
        self,
        prompt: str | Sequence[int],
        num_tokens: int = 12,
        *,
        sparse: bool = True,
        to_the_end: bool = False,
        timeout: float = REQUEST_SECONDS,
        **fields: Any,
    ) -> Answer:
        """One greedy answer of exactly `num_tokens` tokens, or up to `<end>` with `to_the_end`."""
        sampling: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": not to_the_end}
        if not sparse:
            sampling["custom_params"] = {"sparse_attn": False}
        body = {"text" if isinstance(prompt, str) else "input_ids": prompt, "sampling_params": sampling, **fields}
        reply = self.post("/generate", body, timeout)
        return Answer(reply["text"], tuple(reply["output_ids"]), reply["meta_info"])

    def behind(self, prompt: Sequence[int], answer: Answer) -> list[float]:
        """Per token of an answer, nats that it is behind the likeliest one, by a dense prefill of those before it."""
        fields = {"return_logprob": True, "logprob_start_len": len(prompt) - 1, "top_logprobs_num": 1}
        meta = self.generate([*prompt, *answer.ids], 1, sparse=False, **fields).meta
        entries = zip(meta["input_top_logprobs"][1:], meta["input_token_logprobs"][1:], strict=True)
        found = [best[0][0] - own[0] for best, own in entries]
        assert len(found) == len(answer.ids)
        return found

    def openai(self, path: str, num_tokens: int = 12, **fields: Any) -> tuple[list[dict[str, Any]], Any]:
        """A greedy answer of a route: its body, or a stream's chunks; the list in its header, None without one."""
        body = {"model": self.model, "max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, **fields}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
            lines = [line.removeprefix(b"data: ") for line in response]
            header = json.loads(response.headers["sglang-sparse-attn"] or "null")
        return [json.loads(line) for line in lines if line.startswith(b"{")], header

    def together(self, calls: Sequence[Callable[[], Answer]]) -> list[Answer]:
        """Run calls at the same time; answers in their order."""
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(call) for call in calls]
            return [future.result() for future in futures]

    def together_until(
        self,
        calls: Sequence[Callable[[], Answer]],
        met: Callable[[Delta], bool],
        said: Callable[[Sequence[Answer]], Any] = lambda answers: [answer.ids for answer in answers],
        attempts: int = 10,
    ) -> tuple[list[Answer], Delta]:
        """Calls at the same time; again while too few of them met: on a busy machine some end before others come.

        Every attempt must say the same, so that what the caller asks of the last one holds for all.
        """
        saying = []
        for _ in range(attempts):
            delta = self.delta()
            answers = self.together(calls)
            self.done(delta)
            saying.append(said(answers))
            if met(delta):
                break
        assert all(one == saying[-1] for one in saying), saying
        return answers, delta

    def during(self, call: Callable[[], Any]) -> tuple[Any, Delta]:
        """What a call gives, and what the counters did meanwhile."""
        delta = self.delta()
        found = call()
        return found, self.done(delta)

    def compared(self, prompts: Sequence[str], num_tokens: int, **fields: Any) -> tuple[list[Answer], Delta]:
        """Prompts one by one, `fields` with them: their answers are those of dense decode. With the counters."""
        dense = [self.generate(prompt, num_tokens, sparse=False).ids for prompt in prompts]
        answers, delta = self.during(lambda: [self.generate(prompt, num_tokens, **fields) for prompt in prompts])
        assert [answer.ids for answer in answers] == dense
        return answers, delta

    def compared_together(
        self, jobs: Sequence[str | tuple[str, int]], num_tokens: int, met: Callable[[Delta], bool] = lambda _: True,
        said: Callable[[Sequence[Answer]], Any] = lambda answers: [answer.ids for answer in answers], times: int = 1,
        cold: bool = False,
    ) -> tuple[list[Answer], Delta]:  # fmt: skip
        """Prompts, or (prompt, its number of tokens), at the same time until they met: answers are those of dense
        decode, asked alone. With the counters of the last attempt. `cold`: the first attempt finds no prefix cached.
        """
        asked = [job if isinstance(job, tuple) else (job, num_tokens) for job in jobs]
        alone = [self.generate(prompt, count, sparse=False) for prompt, count in asked]
        if cold:
            self.flush()
        calls = [lambda p=prompt, n=count: self.generate(p, n) for prompt, count in asked * times]
        batch, delta = self.together_until(calls, met, said)
        assert said(batch) == said(alone * times)
        return batch, delta

    def asked_twice(self, asked: Sequence[tuple[str, Question]]) -> tuple[Paired, Delta, list[Reply]]:
        """Questions behind texts, all dense and all sparse: what was right, the counters and answers of the second."""
        prompts = [f"{text} {question.text}" for text, question in asked]
        longest = max(question.max_new_tokens for _, question in asked)
        for text in dict(asked):
            self.generate(text, 1, sparse=False)
        ask = partial(ask_many, self.url, prompts, concurrency=4, max_new_tokens=longest)
        before, (after, delta) = ask(sparse=False), self.during(partial(ask, sparse=True))
        right = [
            sum(question.score(reply.text) for (_, question), reply in zip(asked, replies, strict=True))
            for replies in (before, after)
        ]
        result = Paired(len(asked), *(score / len(asked) for score in right))
        print(result)
        return result, delta, after

    def post(self, path: str, body: dict[str, Any], timeout: float = REQUEST_SECONDS) -> Any:
        return post(self.url, path, body, timeout, ADMIN_KEY)

    def get(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {ADMIN_KEY}"})
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
            return json.load(response)

    def until(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 120.0) -> dict[str, Any]:
        """The state, once it is so."""
        deadline = time.monotonic() + seconds
        while not condition(state := self.state()):
            assert time.monotonic() < deadline, f"nothing of it within {seconds:.0f} s"
            time.sleep(0.05)
        return state

    def rows(self, steps: int, requests: int = 1) -> range:
        """Rows that may be counted for so many decode steps of so many requests: the overlap schedule runs one step
        ahead, where a request may decode once more than it has tokens to give.
        """
        return range(steps, steps + 1 + (requests if self.overlaps else 0))

    def state(self) -> dict[str, Any]:
        return server_state(self.url)

    def metrics(self) -> dict[str, dict[str, float]]:
        """Those of ours in Prometheus's text, by name and, in each, by the value of its label ("": it has none); once
        they are what the state says: they follow it within a second.
        """
        for _ in range(50):
            state, found = self.settled()["metrics"], self._metrics()
            if all(
                found.get(name, {}).get(label) == value
                for name, of in state.items()
                for label, value in (of.items() if isinstance(of, dict) else [("", of)])
            ):
                break
            time.sleep(0.2)
        return found

    def _metrics(self) -> dict[str, dict[str, float]]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=REQUEST_SECONDS) as response:
            families = text_string_to_metric_families(response.read().decode())
        found: dict[str, dict[str, float]] = {}
        for sample in (sample for family in families for sample in family.samples):
            if sample.name.startswith(PREFIX):
                name = sample.name.removeprefix(PREFIX).removesuffix("_total")
                found.setdefault(name, {})[next(iter(sample.labels.values()), "")] = sample.value
        return found

    def settled(self) -> dict[str, Any]:
        """The state once no request is known any more, and none that ended holds an index; a request leaves a moment
        after its last token does.
        """
        return self.until(lambda state: state["requests"] == state["index_users"] == 0, 60)

    def delta(self) -> Delta:
        return Delta(self.settled())

    def done(self, delta: Delta) -> Delta:
        """Close a delta, once nothing is left of the requests."""
        delta.after = self.settled()
        return delta

    def flush(self) -> None:
        """Empty the radix cache, once that is possible."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return self.post("/flush_cache", {}, 30)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


def flags_of(store: Path | None, config: dict[str, Any] | None, changes: dict[str, str | None]) -> list[str]:
    """SGLang's flags on a CPU, with changes (None removes a flag), and ours when there is a store."""
    flags = list(CPU_FLAGS)
    for name, value in {**DEFAULTS, **changes}.items():
        if value is not None:
            flags += [name, value] if value else [name]
    if store is not None:
        flags += ["--sparse-attn", "--sparse-attn-store", str(store)]
        flags += ["--sparse-attn-config", json.dumps(DISK | (EXACT_CONFIG if config is None else config))]
    return flags


class Pool:
    """At most one live server. The same flags again give the same server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key: Any = None
        self._started = 0
        self.server: Server | None = None

    def __call__(
        self,
        store: Path | None = None,
        config: dict[str, Any] | None = None,
        *,
        fresh: bool = False,
        environment: dict[str, str] | None = None,
        model: Path = MODEL,
        **changes: str | None,
    ) -> Server:
        """A server; `page_size="64"` sets --page-size, None removes a default flag."""
        env = {"SGLANG_EXT_CPU_SHORT_EXTEND": "1"} if environment is None else environment
        flags = flags_of(store, config, {"--" + k.replace("_", "-"): v for k, v in changes.items()})
        key = (tuple(flags), tuple(sorted(env.items())), model)
        if self.server is not None and (fresh or key != self._key or not self.server.alive):
            self.close()
        if self.server is None:
            self._started += 1
            server = Server(flags, env, self._folder / f"server-{self._started}.log", model)
            try:
                server.wait()
            except BaseException:
                server.stop()
                raise
            self.server, self._key = server, key
        return self.server

    def close(self) -> None:
        if self.server is not None:
            self.server.stop()
        self.server, self._key = None, None


@dataclass(frozen=True)
class Texts:
    """The documents of this suite, 1 token a word. `long` begins with `first`, and both are indexed, as are `second`
    and `large`. The index of `damaged` has a wrong byte; of the others there are none.
    """

    first: Document
    second: Document
    tail: Document
    unindexed: Document
    elsewhere: Document
    large: Document
    damaged: Document

    @property
    def long(self) -> str:
        return f"{self.first.text} {self.tail.text}"

    @staticmethod
    def ask(document: Document, number: int) -> str:
        return f"{document.text} {document.questions[number].text}"
