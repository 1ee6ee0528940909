"""One prebuild job: prompt after prompt through an engine, and what became of each."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import msgspec
from msgspec.structs import replace
from tqdm import tqdm

from prefix_index import (
    IndexIdentity,
    IndexStore,
    IndexStoreError,
    ModelFingerprint,
    Retention,
    StoreFull,
    StoreUnavailable,
    namespace_digest,
    page_hashes,
)
from sglang_ext.cli.engines import plugin_engine, reported
from sglang_ext.compat.engine import EngineDiedError, unknown_ids
from sglang_ext.config import PAGE_TOKENS, Settings
from sglang_ext.offload.kv_files import kv_file_name
from sglang_ext.options import Build, DecodePath
from sglang_ext.prefill.builder import covered_tokens, profile_digest, short_refusal
from sglang_ext.prefill.prompt_tokens import prefix_tokens
from sglang_ext.prefill.prompts import LineNumber, Prompt

#: A prompt, the digest of its index where another job was seen to build it (else ""), and how long to wait for that.
Task = tuple[Prompt, str, float]
#: What becomes of prompts, as lines of the report. They may come in another order.
Lines = Callable[[Iterable[Task]], Iterable[tuple[Prompt, dict[str, Any]]]]


class PrebuildJob:
    """One run over all prompts: what became of each by `lines` is counted, and is one JSON line of the report."""

    def __init__(self, lines: Lines, report: TextIO, args: argparse.Namespace) -> None:
        self._lines, self._report, self._args = lines, report, args
        self._bytes = self._kv_files = 0
        self._statuses: Counter[str] = Counter()

    def run(self, prompts: Sequence[Prompt]) -> int:
        """Build what is missing; returns the exit status. Raises EngineDiedError."""
        begun, elsewhere = time.perf_counter(), []
        with tqdm(total=len(prompts), unit="prompt", file=sys.stderr, desc="prebuild") as bar:
            for prompt, line in self._lines((prompt, "", 0.0) for prompt in prompts):
                bar.update()
                if line.get("reason") == "building_elsewhere":
                    elsewhere.append((prompt, line["digest"]))
                    said = f"{prompt.id}: another job builds this index; looked at again at the end"
                    tqdm.write(said, file=sys.stderr)
                    continue
                self._take(line)
                bar.set_postfix(dict(self._statuses))
        deadline, in_vain = time.monotonic() + self._args.wait, 0
        # Stored by now, given up by its builder, or still under way.
        again = ((prompt, digest, deadline - time.monotonic()) for prompt, digest in elsewhere)
        for _, line in self._lines(again):
            in_vain += line.get("reason") == "building_elsewhere"
            self._take(line)
        counts = ", ".join(f"{count} {status}" for status, count in sorted(self._statuses.items()))
        kv = f", {self._kv_files} files of KV" if self._kv_files else ""
        print(
            f"{len(prompts)} prompts: {counts}; {self._bytes / 1e6:.1f} MB of new indexes in "
            f"{self._args.store}{kv}; {time.perf_counter() - begun:.1f} s",
            file=sys.stderr,
        )
        if in_vain:
            why = "others held their leases longer than --wait; run it again"
            print(f"{in_vain} of them not built: {why}", file=sys.stderr)
        return 1 if self._statuses["failed"] or in_vain else 0

    def _take(self, line: dict[str, Any]) -> None:
        """Count and report what became of a prompt."""
        for text in line.get("warnings", ()):
            tqdm.write(f"{line['id']}: warning: {text}", file=sys.stderr)
        self._statuses[line["status"]] += 1
        self._bytes += line.get("index_bytes", 0)
        self._kv_files += "kv_file" in line
        self._report.write(json.dumps(line) + "\n")
        self._report.flush()
        if line["status"] in ("failed", "skipped"):
            tqdm.write(f"{line['id']}: {line['status']}: {line.get('detail', '')}", file=sys.stderr)


class PromptBuilder:
    """Builds with one engine, whose scheduler writes `events`: prompt after prompt, beside whoever builds into the same
    store.
    """

    def __init__(
        self, engine: Any, store: IndexStore, settings: Settings, events: str, args: argparse.Namespace
    ) -> None:
        self._engine, self._store, self._config = engine, store, settings.config
        self._profile = profile_digest(settings.config, settings.profile)
        self._events, self._args = Path(events), args
        offload = settings.config.offload
        self._kv = None if offload is None or offload.folder is None else Path(offload.folder)
        self._attempts = 0
        self._full: tuple[int, str] | None = None
        """Tokens of the shortest prefix that the store had no room for, and what it said."""
        self._model = msgspec.convert(engine.state()["model"], ModelFingerprint)
        self._named: dict[str, str] = {}
        """By digest the first prompt with an id whose index it is."""

    def lines(self, tasks: Iterable[Task]) -> Iterator[tuple[Prompt, dict[str, Any]]]:
        """One after another. Raises EngineDiedError behind the line of the prompt that it died of."""
        for task in tasks:
            try:
                yield task[0], self.line(*task)
            except EngineDiedError as error:
                yield task[0], {"id": task[0].id, **_failed("engine_died", error)}
                raise

    def line(self, prompt: Prompt, digest: str, wait: float) -> dict[str, Any]:
        """What becomes of one prompt, as a line of the report. Raises EngineDiedError."""
        line = self._after_others(prompt, digest, wait) if digest else self._one(prompt)
        return self._retained(prompt, line) if line["status"] in ("built", "exists") else line

    def _retained(self, prompt: Prompt, line: dict[str, Any]) -> dict[str, Any]:
        """The prompt's id is its index's name from now on; --pin and --ttl count, too, where they are given. Of several
        prompts with one index the first one's id is, and stays so when the same job runs again.
        """
        change: dict[str, Any] = {}
        if not isinstance(prompt.id, LineNumber):
            change["name"] = first = self._named.setdefault(line["digest"], prompt.id)
            if first != prompt.id:
                said = (
                    f"expected prompts that differ before their last {self._config.build_align} tokens, got the index "
                    f"of {first!r}, whose name stays: it serves both. Remove one, or name it by its digest"
                )
                line = {**line, "warnings": [*line.get("warnings", ()), said]}
        if self._args.pin:
            change["pinned"] = True
        if self._args.ttl is not None:
            change["expires"] = time.time() + self._args.ttl
        try:
            self._store.rescan()  # somebody may have pinned it meanwhile
            entry = self._store.entry(line["digest"])
            old = Retention() if entry is None else entry.retention
            # What cannot be read counts as a pin, and must not become one for the sake of a name.
            unread = any(line["digest"] in problem.path for problem in self._store.problems())
            if replace(old, **change) != old and not (unread and change.keys() <= {"name"}):
                self._store.retain(line["digest"], replace(old, **change))
        except IndexStoreError as error:
            return {**line, **_failed("not_retained", error)}
        return line

    def _after_others(self, prompt: Prompt, digest: str, wait: float) -> dict[str, Any]:
        """What becomes of a prompt whose index another process was building; it is tried at least once."""
        deadline = time.monotonic() + wait
        while True:
            try:
                lease = self._store.lease(digest)
            except IndexStoreError as error:
                return {"id": prompt.id, **_failed(type(error).__name__, error)}
            if lease is not None:  # the index is there, or its builder died; the engine leases it anew
                lease.release()
                line = self._one(prompt)
                if line.get("reason") != "building_elsewhere":
                    return line
            left = deadline - time.monotonic()
            if left <= 0:
                detail = f"expected the job that builds it to end within {self._args.wait:.0f} s (--wait), it did not"
                reason = "building_elsewhere"
                return {"id": prompt.id, "status": "skipped", "reason": reason, "digest": digest, "detail": detail}
            time.sleep(min(0.5, left))  # after a refusal too: another was faster, and builds now

    def _one(self, prompt: Prompt) -> dict[str, Any]:
        try:
            return {"id": prompt.id, **self._build(prompt)}
        except Exception as error:  # one prompt must not end the job
            reason = error.reason if isinstance(error, StoreUnavailable) else type(error).__name__
            return {"id": prompt.id, **_failed(reason, str(error) or repr(error))}

    def _build(self, prompt: Prompt) -> dict[str, Any]:
        try:
            ids, warnings = prefix_tokens(prompt, self._engine.tokens)
        except ValueError as error:
            return _failed("refused_by_sglang", error)
        line = self._build_tokens(prompt, ids)
        return {**line, "warnings": warnings} if warnings else line

    def _build_tokens(self, prompt: Prompt, ids: Sequence[int]) -> dict[str, Any]:
        if refused := self._refused(ids):
            return refused
        tokens = covered_tokens(len(ids), self._config.build_align)
        identity = IndexIdentity.for_prefix(
            namespace=namespace_digest({"extra_key": prompt.extra_key, "cache_salt": prompt.cache_salt}),
            page_hashes=page_hashes(ids[:tokens], PAGE_TOKENS),
            model=self._model,
            profile_digest=self._profile,
        )
        lacks_kv = self._kv is not None and not (self._kv / kv_file_name(identity.digest)).exists()
        exists = self._store.contains(identity)
        if exists and not lacks_kv:
            return {"status": "exists", "digest": identity.digest, "num_tokens": tokens}
        if not exists and self._full is not None and tokens >= self._full[0]:
            least, said = self._full
            detail = (
                f"not prefilled: there was no room for an index of {least} tokens, nor is for one of {tokens}: {said}"
            )
            return _failed(StoreFull.__name__, detail)
        begun = time.perf_counter()
        self._attempts += 1
        rid = f"prebuild-{self._attempts}-{prompt.id}"
        try:
            self._engine.prefill(rid, ids, prompt.extra_key, prompt.cache_salt)
        except ValueError as error:
            return _failed("refused_by_sglang", error)
        event = reported(self._events, rid)
        if event.get("reason") == StoreFull.__name__:
            self._full = tokens, event["detail"]
        with suppress(IndexStoreError):  # a report of what was built is not lost with the service
            self._store.rescan()
        return {"prompt_tokens": len(ids), "seconds": time.perf_counter() - begun, **event}

    def _refused(self, ids: Sequence[int]) -> dict[str, Any] | None:
        """Why a prompt is not sent to the engine, as a line of the report; None if it is."""
        if unknown := unknown_ids(ids, self._engine.vocab_size):
            return _failed("unknown_tokens", unknown)
        num_tokens, room = len(ids), self._engine.context_len - 1
        if num_tokens > room:
            detail = (
                f"expected at most {room} tokens (context length less one), got {num_tokens}; "
                "raise --context-length or shorten the prompt"
            )
            return _failed("too_long", detail)
        if (short := short_refusal(num_tokens, self._config)) is not None:
            return {"status": "skipped", "reason": "short_prefix", "detail": short}
        return None


@contextmanager
def open_builder(args: argparse.Namespace, settings: Settings, store: IndexStore) -> Iterator[PromptBuilder]:
    """A builder with an engine of its own, which ends with the block.

    Raises:
        EngineStartError, SystemExit, EngineDiedError: as `OfflineEngine.open`.
    """
    with tempfile.TemporaryDirectory() as folder:
        events = os.path.join(folder, "events.jsonl")
        # Nothing decodes here: no memory has to be kept for indexes.
        building = replace(settings.config, build=Build.PREFILL, build_report=events, decode_path=DecodePath.STOCK)
        config, flags = msgspec.json.encode(building).decode(), [*args.sglang_flags, "--disable-radix-cache"]
        no_graphs = ["--disable-decode-cuda-graph"]
        with plugin_engine(args.model_path, flags, settings.store, config, no_graphs) as engine:
            yield PromptBuilder(engine, store, settings, events, args)


def _failed(reason: str, detail: object) -> dict[str, Any]:
    return {"status": "failed", "reason": reason, "detail": str(detail)}
