"""Captures of prompts through SGLang itself: an engine whose scheduler process records what the model does."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from prefix_index import ModelFingerprint
from sglang_ext.calibration.prompt_capture import PromptCapture, load_capture
from sglang_ext.cli.arguments import names_cpu
from sglang_ext.cli.checks import reported
from sglang_ext.options import Build, DecodePath
from sglang_ext.prefill.prompt_tokens import TokenSource


class CaptureError(ValueError):
    """A prompt that could not be captured; the message says why and what to do."""


class CaptureSession:
    """One engine for many captures; a context manager that starts and ends it.

    Args:
        model_path: the model.
        sglang_flags: device, dtype, attention backend, context length and so on, as for the server.
        query_samples: sampled query rows per KV head over the whole prompt.
        tail_tokens: last tokens of a prompt that are kept beside the sample.
        decode_steps: tokens generated behind the first one; fewer when the model ends earlier.
    """

    def __init__(
        self,
        model_path: str,
        sglang_flags: Sequence[str],
        *,
        query_samples: int,
        tail_tokens: int,
        decode_steps: int,
    ) -> None:
        self._model_path = model_path
        self._given_flags = list(sglang_flags)
        self._decode_steps = decode_steps
        self._settings: dict[str, Any] = {
            "build": Build.CAPTURE.value,
            "decode_path": DecodePath.STOCK.value,
            "query_samples": query_samples,
            "capture_tail": tail_tokens,
            "capture_steps": decode_steps,
        }
        self._count = 0

    def __enter__(self) -> CaptureSession:
        from sglang_ext.compat.engine import OfflineEngine

        self._folder = tempfile.TemporaryDirectory(prefix="sparse-attn-captures-")
        self._events = Path(self._folder.name) / "events.jsonl"
        self._engine = OfflineEngine(self._flags())
        try:
            self._engine.open()
            self.model = msgspec.convert(self._engine.state()["model"], ModelFingerprint)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.close()
        self._folder.cleanup()

    def _flags(self) -> list[str]:
        folder = Path(self._folder.name)
        (folder / "store").mkdir()
        config = {**self._settings, "capture_folder": str(folder), "build_report": str(self._events)}
        flags = ["--model-path", self._model_path, "--log-level", "error", *self._given_flags]
        flags += ["--disable-radix-cache", "--sparse-attn", "--sparse-attn-store", str(folder / "store")]
        flags += ["--sparse-attn-config", json.dumps(config)]
        if not names_cpu(flags):  # on a GPU, where SGLang captures graphs unless told not to
            flags += ["--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"]
        return flags

    @property
    def tokens(self) -> TokenSource:
        """Token ids as the server makes them of requests."""
        return self._engine.tokens

    def capture(self, name: str, input_ids: Sequence[int], prefix_len: int | None = None) -> PromptCapture:
        """Run one prompt and return what was recorded, on the CPU.

        Args:
            name: of the prompt, for messages.
            input_ids: the prompt.
            prefix_len: leading tokens that are the prefix; None for the whole prompt.

        Raises:
            CaptureError: SGLang refuses the prompt, or what was recorded cannot be used.
        """
        room = self._engine.context_len - 1 - self._decode_steps
        if not 1 <= len(input_ids) <= room:
            raise CaptureError(
                f"{name}: expected 1..{room} tokens (context length less what is generated), got {len(input_ids)}; "
                "raise --context-length or shorten the prompt"
            )
        self._count += 1
        rid = f"capture-{self._count}"
        try:
            self._engine.prefill(rid, input_ids, max_new_tokens=self._decode_steps + 1)
        except ValueError as error:
            raise CaptureError(f"{name}: refused by SGLang: {error}") from error
        event = reported(self._events, rid)
        if event["status"] != "captured":
            raise CaptureError(f"{name}: not captured: {event.get('reason')}: {event.get('detail')}")
        path = Path(event["path"])
        try:
            capture = load_capture(path)
        finally:
            path.unlink(missing_ok=True)
        return capture if prefix_len is None else capture.behind(prefix_len)
