"""Tests of the Triton kernels: in Triton's interpreter on the CPU (in fp32 and fp16), or on a GPU (also bf16).

The interpreter is chosen before Triton is imported and changes every kernel of the process, so
`tests/prefix_kernels/test_triton.py` runs this folder in a process of its own; elsewhere nothing of it is collected.
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNS = INTERPRETED or torch.cuda.is_available()

collect_ignore_glob = [] if RUNS else ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")
