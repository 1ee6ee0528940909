"""`sglang-ext prebuild --ray`: the prompts of one job over a Ray cluster, an engine in each actor.

Ray starts and places the actors, and says when one is lost: with its process, its node, or the engine in it. What it
had is given to another one, and Ray is asked for a new one, which waits until a node has room. Nothing is lost with the
job itself: what is stored is skipped when it is run again.
"""

from __future__ import annotations

import argparse
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import chain
from typing import Any

from tqdm import tqdm

from prefix_index import IndexStoreError
from sglang_ext.cli.arguments import names_cpu, tp_size
from sglang_ext.cli.checks import engine_refusal
from sglang_ext.cli.prebuild_job import Task, open_builder
from sglang_ext.compat.engine import EngineDiedError, EngineStartError
from sglang_ext.config import Settings
from sglang_ext.prefill.prompts import Prompt
from sglang_ext.storage import configured_store

ATTEMPTS = 3
"""How often a prompt is given to an actor, each of which was lost, and how often actors may fail to start in a row."""
_PATIENCE_S = 60.0


class BuilderActor:
    """One engine; Ray runs its methods one after another in the main thread of a process of its own."""

    def start(self, args: argparse.Namespace, settings: str) -> None:
        """Open store and engine, by settings as `Settings.dump` made them.

        Raises:
            EngineStartError: it cannot be started on this node; another attempt would not help.
            RuntimeError: it ended while it started.
        """
        import ray

        self._node = ray.get_runtime_context().get_node_id()
        loaded = Settings.load(settings)
        if refusal := engine_refusal(args.model_path, args.sglang_flags):
            raise EngineStartError(f"node {self._node}: {refusal}")
        self._opened = ExitStack()
        try:
            store = self._opened.enter_context(closing(configured_store(loaded.store, loaded.config)))
            self._builder = self._opened.enter_context(open_builder(args, loaded, store))
        except IndexStoreError as error:
            raise EngineStartError(f"node {self._node}: --store {args.store}: {error}") from None
        except SystemExit:
            raise EngineStartError(f"node {self._node}: the plugin refuses the flags; see above") from None
        except EngineDiedError as error:  # Ray would take it for Ctrl-C
            raise RuntimeError(str(error)) from None

    def line(self, prompt: Prompt, digest: str, wait: float) -> dict[str, Any]:
        """As `PromptBuilder.line`, with the node's id. Raises RuntimeError: the engine ended."""
        try:
            return {**self._builder.line(prompt, digest, wait), "node": self._node}
        except EngineDiedError as error:
            raise RuntimeError(str(error)) from None

    def close(self) -> None:
        """End the engine."""
        self._opened.close()


class Cluster:
    """The actors of one job on a cluster that this process is connected to: `count` at a time, each with `gpus`."""

    def __init__(self, args: argparse.Namespace, settings: Settings, count: int, gpus: int) -> None:
        import ray

        self._ray, self._lost = ray, ray.exceptions.RayError
        self._start_with = args, settings.dump()
        self._actor = ray.remote(BuilderActor).options(num_cpus=1, num_gpus=gpus, scheduling_strategy="SPREAD")
        self._starting: dict[Any, Any] = {}
        self._idle: list[Any] = []
        self._failed_starts, self._any_started = 0, False
        self._failures: Counter[str] = Counter()
        for _ in range(count):
            self._add()

    def _add(self) -> None:
        actor = self._actor.remote()
        self._starting[actor.start.remote(*self._start_with)] = actor

    def lines(self, tasks: Iterable[Task]) -> Iterator[tuple[Prompt, dict[str, Any]]]:
        """As they are built.

        Raises:
            EngineStartError: no engine can be started.
            EngineDiedError: engines end while they start, or none is left that could.
        """
        tasks = iter(tasks)
        task, busy = next(tasks, None), dict[Any, tuple[Any, Task]]()
        patient = time.monotonic() + _PATIENCE_S
        while task is not None or busy:
            while task is not None and self._idle:
                actor = self._idle.pop()
                busy[actor.line.remote(*task)] = actor, task
                task = next(tasks, None)
            if busy:
                patient = time.monotonic() + _PATIENCE_S
            elif time.monotonic() > patient:
                why = "one still loads its model, or no node has room for it: see `ray status`"
                tqdm.write(f"no engine has started for {_PATIENCE_S:.0f} s: {why}", file=sys.stderr)
                patient = float("inf")
            done, _ = self._ray.wait([*busy, *self._starting], timeout=1.0)
            for ref in done:
                if ref in self._starting:
                    self._started(ref, bool(busy))
                    continue
                actor, given = busy.pop(ref)
                prompt = given[0]
                try:
                    line = self._ray.get(ref)
                except self._lost as error:
                    said = str(error).strip().splitlines()[-1]
                    tqdm.write(f"{prompt.id}: its engine was lost: {said}", file=sys.stderr)
                    self._ray.kill(actor)
                    self._add()
                    self._failures[prompt.id] += 1
                    if self._failures[prompt.id] < ATTEMPTS:
                        tasks = chain([given], tasks)
                        task = next(tasks) if task is None else task
                        continue
                    line = {"id": prompt.id, "status": "failed", "reason": "engine_died", "detail": said}
                else:
                    self._idle.append(actor)
                yield prompt, line

    def _started(self, ref: Any, others: bool) -> None:
        """`others`: whether actors work. One bad node does not end a job that others can do."""
        actor = self._starting.pop(ref)
        try:
            self._ray.get(ref)
        except EngineStartError as error:  # what Ray raises is of this class, too
            said = str(error.args[0] if error.args else error)
            self._ray.kill(actor)
            if not (others or self._idle or self._starting):
                raise (EngineDiedError(said) if self._any_started else EngineStartError(said)) from None
            tqdm.write(f"one engine less: {said}", file=sys.stderr)
        except self._lost as error:
            self._failed_starts += 1
            self._ray.kill(actor)
            if self._failed_starts < ATTEMPTS:
                self._add()
                return
            if not (others or self._idle or self._starting):
                raise EngineDiedError(f"expected engines to start on the cluster, got: {error}") from None
            if others or self._idle:  # if one of them is lost, its successor has all its attempts
                self._failed_starts = 0
            tqdm.write(f"one engine less: {ATTEMPTS} starts in a row failed, the last with: {error}", file=sys.stderr)
        else:
            self._failed_starts, self._any_started = 0, True
            self._idle.append(actor)

    def close(self) -> None:
        """End the engines. Those that are busy end with their actors, when the connection does."""
        with suppress(self._lost):
            self._ray.get([actor.close.remote() for actor in self._idle], timeout=60)


@contextmanager
def open_cluster(args: argparse.Namespace, settings: Settings, prompts: int) -> Iterator[Cluster]:
    """Engines on the nodes of `args.ray`, which end with the block: one for each GPU, or set of `--tp-size`, of the
    cluster; where it has none, or the flags name the CPU, one a node. No more than there are prompts.

    Raises:
        EngineStartError: no Ray here, no cluster there, or fewer GPUs than an engine needs.
    """
    try:
        import ray
    except ImportError as error:
        raise EngineStartError(f"expected Ray for --ray, got: {error}. pip install 'sglang-ext[ray]'") from None
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if place := re.fullmatch(r"(?:ray://)?(.+):(\d+)", args.ray):  # where nobody listens Ray would ask for minutes
            socket.create_connection((place[1], int(place[2])), timeout=10).close()
        ray.init(address=args.ray)
    except Exception as error:
        why = f"{' '.join(str(error).split())}. Start one (ray start --head), or correct the address"
        raise EngineStartError(f"expected a Ray cluster at --ray {args.ray}, got: {why}") from None
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray takes it
    try:
        ranks = tp_size(args.sglang_flags)
        gpus = 0 if names_cpu(args.sglang_flags) else int(ray.cluster_resources().get("GPU", 0))
        nodes = sum(node["Alive"] and node["Resources"].get("CPU", 0) >= 1 for node in ray.nodes())
        count = min(gpus // ranks if gpus else nodes, prompts)
        if count < 1:
            need = f"{ranks} GPUs or, with none at all, a CPU"
            raise EngineStartError(f"expected a cluster with {need}, got {gpus} GPUs on {nodes} nodes; add nodes")
        print(f"starting SGLang {count} times on {nodes} nodes for {args.model_path} ...", file=sys.stderr, flush=True)
        cluster = Cluster(args, settings, count, ranks if gpus else 0)
        with closing(cluster):
            yield cluster
    finally:
        ray.shutdown()
