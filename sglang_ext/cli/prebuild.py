"""`sglang-ext prebuild`: prompts in, indexes in the store out."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import msgspec
from tqdm import tqdm

from prefix_index import FileStore, IndexIdentity, ModelFingerprint, namespace_digest, page_hashes
from sglang_ext.config import PAGE_TOKENS, ConfigError, SparseAttnConfig, parse_config
from sglang_ext.prefill.builder import covered_tokens, profile_digest
from sglang_ext.prefill.prompts import Prompt, PromptError, read_prompts

_DESCRIPTION = """\
Prefill each prompt once through SGLang, record its queries, build its index, verify it and store it.

Prompts are JSON lines: {"id": "tools", "text": "..."} or {"id": "tools", "input_ids": [...]}, optionally
with "extra_key" and "cache_salt" as the requests will carry them. An index covers the prompt rounded down
to build_align tokens. Running the job again skips what is stored already, so an interrupted job resumes.
Flags after -- go to SGLang (device, dtype, attention backend, context length, ...): use those of the server.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "prebuild",
        help="build indexes of shared prompts offline",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model-path", required=True, help="the model that will be served")
    parser.add_argument("--prompts", required=True, metavar="JSONL", help="shared prompts, one JSON object a line")
    parser.add_argument("--store", required=True, metavar="DIR", help="index store; made when it does not exist")
    parser.add_argument(
        "--sparse-attn-config", metavar="JSON|@FILE", help="as for the server; must build the same methods"
    )
    parser.add_argument("--report", metavar="JSONL", help="where one JSON line per prompt goes (default: stdout)")
    parser.add_argument("sglang_flags", nargs="*", metavar="-- SGLANG FLAGS", help="flags of SGLang")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Entry of the subcommand; returns the exit status."""
    try:
        prompts = read_prompts(args.prompts)
        config = parse_config(args.sparse_attn_config)
    except (PromptError, ConfigError) as error:
        print(f"sglang-ext prebuild: {error}", file=sys.stderr)
        return 2
    from sglang_ext.compat.engine import PrebuildEngine

    with FileStoreAt(args.store) as store, tempfile.TemporaryDirectory() as folder:
        events = os.path.join(folder, "events.jsonl")
        engine = PrebuildEngine(_flags(args, config, events))
        print(f"starting SGLang for {args.model_path} ...", file=sys.stderr, flush=True)
        try:
            engine.open()
            with _report_to(args.report) as report:
                return _Job(engine, store, config, events, report).run(prompts)
        except KeyboardInterrupt:
            print("interrupted; run the same command again to go on", file=sys.stderr)
            return 1
        finally:
            engine.close()


def _flags(args: argparse.Namespace, config: SparseAttnConfig, events: str) -> list[str]:
    building = msgspec.structs.replace(config, build="prefill", build_report=events)
    flags = ["--model-path", args.model_path, "--log-level", "error", *args.sglang_flags]
    flags += ["--disable-radix-cache", "--sparse-attn", "--sparse-attn-store", args.store]
    flags += ["--sparse-attn-config", msgspec.json.encode(building).decode()]
    if "--device" not in flags and "--disable-decode-cuda-graph" not in flags:
        flags.append("--disable-decode-cuda-graph")
    return flags


class FileStoreAt:
    """A file store for the length of a job, its folder made when missing."""

    def __init__(self, folder: str) -> None:
        self._store = FileStore(folder, create=True)

    def __enter__(self) -> FileStore:
        self._store.open()
        return self._store

    def __exit__(self, *_: object) -> None:
        self._store.close()


@contextmanager
def _report_to(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    with open(path, "a") as file:
        yield file


class _Job:
    """One run over all prompts."""

    def __init__(self, engine: Any, store: FileStore, config: SparseAttnConfig, events: str, report: TextIO) -> None:
        self._engine = engine
        self._store = store
        self._config = config
        self._events = Path(events)
        self._report = report
        self._statuses: Counter[str] = Counter()
        self._bytes = 0

    def run(self, prompts: Sequence[Prompt]) -> int:
        begun = time.perf_counter()
        model = msgspec.convert(self._engine.state()["model"], ModelFingerprint)
        bar = tqdm(prompts, unit="prompt", file=sys.stderr, desc="prebuild")
        for prompt in bar:
            line = self._one(prompt, model)
            self._statuses[line["status"]] += 1
            self._bytes += line.get("index_bytes", 0)
            self._report.write(json.dumps(line) + "\n")
            self._report.flush()
            bar.set_postfix(dict(self._statuses))
            if line["status"] in ("failed", "skipped"):
                tqdm.write(f"{prompt.id}: {line['status']}: {line.get('detail', '')}", file=sys.stderr)
        counts = ", ".join(f"{count} {status}" for status, count in sorted(self._statuses.items()))
        print(
            f"{len(prompts)} prompts: {counts}; {self._bytes / 1e6:.1f} MB of new indexes in "
            f"{self._store.folder}; {time.perf_counter() - begun:.1f} s",
            file=sys.stderr,
        )
        return 1 if self._statuses["failed"] else 0

    def _one(self, prompt: Prompt, model: ModelFingerprint) -> dict[str, Any]:
        ids = prompt.input_ids if prompt.input_ids is not None else self._engine.tokenize(prompt.text or "")
        refused = self._refused(len(ids))
        if refused:
            return {"id": prompt.id, **refused}
        tokens = covered_tokens(len(ids), self._config.build_align)
        identity = IndexIdentity.for_prefix(
            namespace=namespace_digest({"extra_key": prompt.extra_key, "cache_salt": prompt.cache_salt}),
            page_hashes=page_hashes(ids[:tokens], PAGE_TOKENS),
            model=model,
            profile_digest=profile_digest(self._config),
        )
        if self._store.contains(identity):
            return {"id": prompt.id, "status": "exists", "digest": identity.digest, "num_tokens": tokens}
        begun = time.perf_counter()
        rid = f"prebuild-{prompt.id}"
        try:
            self._engine.prefill(rid, ids, prompt.extra_key, prompt.cache_salt)
        except ValueError as error:
            return {"id": prompt.id, "status": "failed", "reason": "refused_by_sglang", "detail": str(error)}
        event = self._event(rid)
        return {"id": prompt.id, "prompt_tokens": len(ids), "seconds": time.perf_counter() - begun, **event}

    def _refused(self, num_tokens: int) -> dict[str, Any] | None:
        room = self._engine.context_len - 1
        if num_tokens > room:
            detail = (
                f"expected at most {room} tokens (context length less one), got {num_tokens}; "
                "raise --context-length or shorten the prompt"
            )
            return {"status": "failed", "reason": "too_long", "detail": detail}
        least = max(self._config.min_sparse_prompt_len, self._config.build_align)
        if num_tokens < least:
            detail = f"expected at least {least} tokens (min_sparse_prompt_len), got {num_tokens}"
            return {"status": "skipped", "reason": "short_prefix", "detail": detail}
        return None

    def _event(self, rid: str, timeout: float = 600.0) -> dict[str, Any]:
        """What the scheduler process wrote of this request; it writes when the request gives its slot back."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._events.exists():
                for text in self._events.read_text().splitlines():
                    event: dict[str, Any] = json.loads(text)
                    if event.pop("rid") == rid:
                        self._store.rescan()
                        return event
            time.sleep(0.02)
        detail = f"the scheduler reported nothing within {timeout:.0f} s; see its log"
        return {"status": "failed", "reason": "no_report", "detail": detail}
