"""Tests of the Triton kernels: in Triton's interpreter on the CPU (in fp32 and fp16), or on a GPU (also bf16).

The interpreter is chosen before Triton is imported and changes every kernel of the process, so `make test` runs this
folder in processes of their own. Without `TRITON_INTERPRET=1` or a GPU nothing of it is collected.
"""

from __future__ import annotations

import pytest
import torch

from prefix_kernels.anchor_selection import Form
from prefix_kernels.types import PagedKV
from tests.prefix_kernels.interpreting import INTERPRETED

RUNS = INTERPRETED or torch.cuda.is_available()

#: The interpreter multiplies bf16 wrongly, so it is left to a GPU.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
FORMS = [Form.UNFUSED] if INTERPRETED else list(Form)
collect_ignore_glob = [] if RUNS else ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(params=FORMS, ids=lambda form: form.name)
def form(request: pytest.FixtureRequest) -> Form:
    """How a selection is launched; in the interpreter no program can wait for another."""
    return request.param


def paged_kv(keys: torch.Tensor, values: torch.Tensor) -> tuple[PagedKV, torch.Tensor]:
    """A pool that holds keys and values [prefix_len, num_kv_heads, dim] in random slots, and NaN in all others.

    Returns:
        The pool, and slots [prefix_len] int64.
    """
    num_slots = 2 * len(keys) + 3
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(0))[: len(keys)].to(keys.device)
    k_cache = keys.new_full((num_slots, *keys.shape[1:]), torch.nan)
    v_cache = values.new_full((num_slots, *values.shape[1:]), torch.nan)
    k_cache[slots], v_cache[slots] = keys, values
    return PagedKV(k_cache, v_cache), slots
