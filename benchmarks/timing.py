"""Seconds of one piece of work, on the CPU or on the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def timed(work: Callable[[], Any], *, cpu: bool) -> tuple[Any, float]:
    """What `work` returns, and its seconds: by CUDA events, host gaps between kernels included."""
    if cpu:
        begun = time.perf_counter()
        return work(), time.perf_counter() - begun
    import torch

    torch.cuda.synchronize()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = work()
    stop.record()
    torch.cuda.synchronize()
    return result, start.elapsed_time(stop) / 1e3
