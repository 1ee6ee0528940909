"""Engines of jobs, whose scheduler process builds or records, and writes down what became of each request."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from prefix_index import ModelFingerprint
from sglang_ext.calibration.prompt_capture import PromptCapture, load_capture
from sglang_ext.cli.arguments import names_cpu
from sglang_ext.options import Build, DecodePath
from sglang_ext.prefill.prompt_tokens import TokenSource

if TYPE_CHECKING:
    from sglang_ext.compat.engine import OfflineEngine


@contextmanager
def plugin_engine(
    model_path: str, flags: Sequence[str], store: str, config: str, on_gpu: Sequence[str]
) -> Iterator[OfflineEngine]:
    """An engine of SGLang with the plugin, which ends with the block. `on_gpu`: flags more, unless the CPU is named.

    Raises:
        EngineStartError, SystemExit, EngineDiedError: as `OfflineEngine.open`.
    """
    from sglang_ext.compat.engine import OfflineEngine

    own = ["--model-path", model_path, "--log-level", "error", *flags, *(() if names_cpu(flags) else on_gpu)]
    own += ["--sparse-attn", "--sparse-attn-store", store, "--sparse-attn-config", config]
    with closing(OfflineEngine(own)) as engine:
        engine.open()
        yield engine


#: Seconds that a report may take to be written after its request ended.
REPORT_TIMEOUT_S = 600.0


def reported(events: Path, rid: str) -> dict[str, Any]:
    """What the scheduler process wrote of a request (`build_report`), which it does when the request gives its slot
    back; a failure where it wrote nothing in time.
    """
    deadline, written = time.monotonic() + REPORT_TIMEOUT_S, json.dumps(rid)
    while time.monotonic() < deadline:
        if events.exists():
            # Behind the last end of a line somebody may be writing.
            for text in events.read_text().rpartition("\n")[0].splitlines():
                if written not in text:
                    continue  # a long job has many lines, and looks often
                event: dict[str, Any] = json.loads(text)
                if event.pop("rid") == rid:
                    return event
        time.sleep(0.02)
    detail = f"the scheduler reported nothing within {REPORT_TIMEOUT_S:.0f} s; see its log"
    return {"status": "failed", "reason": "no_report", "detail": detail}


class CaptureSession:
    """One engine for many captures: see `open_session`."""

    def __init__(self, engine: OfflineEngine, events: Path, decode_steps: int) -> None:
        self._engine, self._events, self._decode_steps = engine, events, decode_steps
        self.model = msgspec.convert(engine.state()["model"], ModelFingerprint)
        self._count = 0

    @property
    def tokens(self) -> TokenSource:
        """Token ids as the server makes them of requests."""
        return self._engine.tokens

    def capture(self, name: str, input_ids: Sequence[int], prefix_len: int | None = None) -> PromptCapture:
        """Run one prompt and return what was recorded, on the CPU; without a `prefix_len` all of it is the prefix.

        Raises:
            ValueError: SGLang refuses the prompt, or what was recorded cannot be used.
        """
        room = self._engine.context_len - 1 - self._decode_steps
        if not 1 <= len(input_ids) <= room:
            raise ValueError(
                f"{name}: expected 1..{room} tokens (context length less what is generated), got {len(input_ids)}; "
                "raise --context-length or shorten the prompt"
            )
        self._count += 1
        rid = f"capture-{self._count}"
        try:
            self._engine.prefill(rid, input_ids, max_new_tokens=self._decode_steps + 1)
        except ValueError as error:
            raise ValueError(f"{name}: refused by SGLang: {error}") from error
        event = reported(self._events, rid)
        if event["status"] != "captured":
            raise ValueError(f"{name}: not captured: {event.get('reason')}: {event.get('detail')}")
        capture = load_capture(event["path"])
        os.unlink(event["path"])
        return capture if prefix_len is None else capture.behind(prefix_len)


@contextmanager
def open_session(
    model_path: str,
    sglang_flags: Sequence[str],
    *,
    query_samples: int,
    tail_tokens: int,
    decode_steps: int,
) -> Iterator[CaptureSession]:
    """A session whose engine ends with the block.

    Args:
        model_path, sglang_flags: as for the server.
        query_samples: sampled query rows per KV head over the whole prompt.
        tail_tokens: last tokens of a prompt that are kept beside the sample.
        decode_steps: tokens generated behind the first one; fewer when the model ends earlier.

    Raises:
        EngineStartError, SystemExit, EngineDiedError: as `OfflineEngine.open`.
    """
    with tempfile.TemporaryDirectory(prefix="sparse-attn-captures-") as folder:
        store, events = Path(folder) / "store", Path(folder) / "events.jsonl"
        store.mkdir()
        config = {
            "build": Build.CAPTURE.value,
            "decode_path": DecodePath.STOCK.value,
            "query_samples": query_samples,
            "capture_tail": tail_tokens,
            "capture_steps": decode_steps,
            "capture_folder": folder,
            "build_report": str(events),
        }
        flags = [*sglang_flags, "--disable-radix-cache"]
        no_graphs = ["--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"]
        with plugin_engine(model_path, flags, str(store), json.dumps(config), no_graphs) as engine:
            yield CaptureSession(engine, events, decode_steps)
