"""Captures for calibration: what the model made of each prompt, written down when its request ends."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sglang_ext.calibration.prompt_capture import PromptCapture, attention_importance, save_capture
from sglang_ext.model_view import ModelView
from sglang_ext.options import SparseAttnConfig
from sglang_ext.prefill.recorder import MAX_CAPTURES, Admission, Capture, Chunk, Recording

logger = logging.getLogger(__name__)


class PrefillCaptures(Recording):
    """All captures of one process, whose configuration has a `capture_folder`. Scheduler thread only."""

    records_decode = True

    def __init__(self, config: SparseAttnConfig, view: ModelView) -> None:
        assert config.capture_folder is not None
        super().__init__(config, view, late=(config.capture_tail, config.capture_steps))
        self._folder = Path(config.capture_folder)
        self._written = 0

    def __len__(self) -> int:
        return self.recorder.num_captures

    def admit(self, request: Admission) -> None:
        """Record a prompt from its first token on, unless its request is refused or too many are being recorded."""
        rid = request.rid
        self.discard(rid)
        if request.again:  # what there was of it was written when it gave its slot back
            return
        if request.refusal:
            self._report(rid, status="skipped", reason=request.refusal[0], detail=request.refusal[1])
        elif not self.recorder.start(rid, len(request.prompt)):
            detail = "expected fewer prompts being recorded at a time; send it again"
            self._report(rid, status="skipped", reason="capture_memory", detail=detail)

    def finish(self, rid: str, row: int) -> None:
        """Write the capture of a request that gives its slot back; nothing for one that was not recorded."""
        capture = self.recorder.take(rid)
        if capture is None:
            return
        problem = capture.problem()
        if problem or capture.samples is None:
            self._report(rid, status="failed", reason="capture_rejected", detail=problem or "nothing was recorded")
            return
        waiting = sum(1 for _ in self._folder.glob("*.safetensors"))
        if waiting >= MAX_CAPTURES:  # whoever reads them has gone, or never was
            detail = f"expected fewer than {MAX_CAPTURES} captures in {self._folder}, got {waiting}; take them away"
            self._report(rid, status="failed", reason="capture_memory", detail=detail)
            return
        # A request id is the client's: never part of a path.
        self._written += 1
        path = self._folder / f"{os.getpid()}-{self._written}.safetensors"
        try:
            save_capture(self._whole(capture, row), path)
        except Exception as error:  # one prompt must not end the job
            logger.error("sparse attention: request %s was not captured", rid, exc_info=error)
            self._report(rid, status="failed", reason=type(error).__name__, detail=str(error))
        else:
            self._report(rid, status="captured", path=str(path))

    def observe(self, chunks: Sequence[Chunk], layer: int, x: Tensor, y: Tensor) -> None:
        """Keep one layer's importance of the kept tokens of the running step.

        Args:
            chunks: of the step.
            x, y: [num_tokens, hidden_size] residual stream before and behind the layer's attention block.
        """
        for chunk in chunks:
            capture = chunk.capture
            if capture.importance is None:
                shape = (self._view.num_layers, len(capture.positions))
                capture.importance = torch.full(shape, torch.nan, device=x.device)
            if chunk.offsets.numel():
                value = attention_importance(x[chunk.offsets], y[chunk.offsets])
                capture.importance[layer].index_copy_(0, chunk.rows, value.float())

    def _whole(self, capture: Capture, row: int) -> PromptCapture:
        """The capture with the prompt's keys, its tokens in the order of their positions.

        A late token that is also in the sample stands there twice, once as each.
        """
        assert capture.samples is not None
        device = capture.samples.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a step that overlaps may still write
        positions = torch.from_numpy(capture.positions)
        order = positions.argsort(stable=True)
        order = order[(positions[order] >= 0) & (positions[order] < min(capture.seen))]
        slots = self._view.req_to_token[row, : capture.prompt_len].to(torch.int64)
        layers, dtype = range(self._view.num_layers), self._view.dtype
        importance = capture.importance
        if importance is None:
            importance = torch.full(capture.samples.shape[:2], torch.nan)
        return PromptCapture(
            queries=capture.samples[:, order.to(device)],
            positions=positions[order],
            sampled=order < capture.reservoir_rows,
            keys=torch.stack([self._view.kv(layer).keys(slots, dtype).cpu() for layer in layers]),
            importance=importance[:, order.to(importance.device)],
            prompt_len=capture.prompt_len,
            sm_scale=capture.scale(self._view.head_dim),
        )
