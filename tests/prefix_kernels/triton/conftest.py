"""Tests of the Triton kernels: in Triton's interpreter on the CPU (in fp32 and fp16), or on a GPU (also bf16).

The interpreter is chosen before Triton is imported and changes every kernel of the process, so `make test` runs this
folder in processes of their own. Without `TRITON_INTERPRET=1` or a GPU nothing of it is collected.
"""

from __future__ import annotations

import os
from inspect import getmembers
from typing import Any

import pytest
import torch

from prefix_kernels.anchor_selection import Form
from prefix_kernels.types import PagedKV

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNS = INTERPRETED or torch.cuda.is_available()

#: The interpreter multiplies bf16 wrongly, so it is left to a GPU.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
FORMS = [Form.UNFUSED] if INTERPRETED else list(Form)
collect_ignore_glob = [] if RUNS else ["test_*.py"]


def _look_for_builtins_once() -> None:
    """The interpreter puts its own in the place of Triton's builtins at a launch, and looks again for builtins among
    all members of the language at every call of a function within a kernel, where none is left: a third of its time.

    They are replaced and put back together, so the first one tells whether there is anything to do.
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    replace = interpreter._patch_builtin
    firsts: dict[Any, str | None] = {}

    def replace_what_is_left(of: Any, *arguments: Any) -> None:
        if of not in firsts:
            firsts[of] = next((name for name, member in getmembers(of) if is_builtin(member)), None)
        first = firsts[of]
        if first is not None and is_builtin(getattr(of, first)):
            replace(of, *arguments)

    interpreter._patch_builtin = replace_what_is_left


if INTERPRETED:
    _look_for_builtins_once()


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
