"""Selections of a real model's decode in a server with random weights, whose own have no locality.

`offload_serving.py` makes this module a plugin of SGLang. In each step, behind a layer's own selection, whose cost is
paid, the lists of prefixes in host memory get the positions of a trace. A step's number lies on the device and counts
within the captured graph. At the end of the trace the steps go back, then forth again, so that none is a jump.

A trace has `positions` uint16 [layers, kv_heads, steps, budget], ascending, of a prefix of `prefix_len` tokens. Of n
layers that select, the one of number l takes trace layer round(l (L - 1) / (n - 1)); KV head h takes trace head h % H,
and prefixes are at different steps. A group that selects more or fewer tokens, as of a short prefix, keeps its own.
Each page of 16 tokens of the trace stands for as many of the served prefix as the served budget is times the trace's,
drawn once. So which tokens are wanted when is the trace's, and |T_t| / |M_t| with it, and which lie side by side. Where
their pages lie is not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from prefix_kernels.residents import PAGE_TOKENS

SETTINGS = "OFFLOAD_REPLAY"
"""Environment variable: JSON of the arguments of `positions_of`."""
_FIELDS = 4
_BLOCK = 8192


def trace_of(path: str | None, churn: float, budget: int, prefix_len: int) -> tuple[np.ndarray, int]:
    """(positions [layers, kv_heads, steps, budget], prefix_len) of a file; or drawn ones, of which `churn` change."""
    if path is not None:
        with np.load(path) as file:
            return file["positions"].astype(np.int64), int(file["prefix_len"])
    rng = np.random.default_rng(0)
    positions = np.empty((4, 2, 64, budget), dtype=np.int64)
    for lists in positions.reshape(-1, *positions.shape[2:]):
        lists[0] = rng.choice(prefix_len, budget, replace=False)
        for before, after in pairwise(lists):
            count = min(round(churn * budget), prefix_len - budget)
            after[:] = before
            others = np.setdiff1d(np.arange(prefix_len), before)
            after[rng.choice(budget, count, replace=False)] = rng.choice(others, count, replace=False)
    return positions, prefix_len


def positions_of(path: str | None, churn: float, budget: int, prefix_len: int) -> Tensor:
    """Positions of all steps, int32 [trace layers, trace heads, steps, budget], ascending.

    Args:
        path: of a trace; None: draw one.
        churn: of a drawn one, share of the tokens that each step changes.
        budget: tokens of a list, a multiple of the trace's.
        prefix_len: of the shortest prefix that is selected from.

    Raises:
        ValueError: the trace does not fit.
    """
    trace, length = trace_of(path, churn, budget, prefix_len)
    times = budget // trace.shape[3]
    if times * trace.shape[3] != budget or times * length > prefix_len or trace.shape[2] < 2:
        raise ValueError(
            f"expected a trace of 2 steps or more, whose budget times a whole number is {budget}, and whose prefix "
            f"times that number is at most {prefix_len}; got {trace.shape[2]}, {trace.shape[3]} and {length}"
        )
    pages = np.random.default_rng(0).permutation(prefix_len // PAGE_TOKENS)[: times * length // PAGE_TOKENS]
    page, inside = np.divmod(np.arange(length), PAGE_TOKENS)
    places = pages.reshape(-1, times)[page] * PAGE_TOKENS + inside[:, None]
    spread = np.sort(places[trace].reshape(*trace.shape[:3], budget), axis=3)
    return torch.from_numpy(spread.astype(np.int32))


class Replay:
    """Writes positions from `positions_of`, for prefixes so long, into lists of `num_sets` layers that select."""

    def __init__(
        self, positions: Tensor, prefix_len: int, num_sets: int, max_groups: int, device: torch.device
    ) -> None:
        self._positions, self._prefix_len = positions.to(device).contiguous(), prefix_len
        last = len(positions) - 1
        self._layers = [round(number * last / max(1, num_sets - 1)) for number in range(num_sets)]
        self._groups = torch.zeros(max_groups, _FIELDS, dtype=torch.int32, device=device)
        self.step = torch.zeros(1, dtype=torch.int32, device=device)

    def plan(self, groups: Sequence[Any], hosts: Sequence[Any]) -> None:
        """Which lists: those of groups (`SelectionGroup`) with a prefix in host memory (`HostPrefix`)."""
        budget, rows = self._positions.shape[3], []
        for group, host in zip(groups, hosts, strict=True):
            if host is not None and group.count == budget and group.prefix_len >= self._prefix_len:
                rows.append((group.list_begin, group.head_stride, budget, 7919 * int(host.pages[0]) % 10007))
        table = torch.zeros(self._groups.shape, dtype=torch.int32)
        table[: len(rows)] = torch.tensor(rows, dtype=torch.int32).view(-1, _FIELDS)
        self._groups.copy_(table)

    def run(self, number: int, lists: Any, *, kernel: bool) -> None:
        """Write those of a layer that selects, by its number among them, into `lists` (`SelectedLists`). With the first
        one a step begins.
        """
        if number == 0:
            self.step += 1
        heads = lists.counts.shape[1]
        if not kernel:
            self._run_here(self._layers[number], heads, lists.positions)
            return
        positions = self._positions[self._layers[number]]
        grid = (len(self._groups), heads)
        replay_kernel[grid](lists.positions, self._groups, self.step, positions, *positions.shape, _BLOCK, num_warps=8)

    def _run_here(self, layer: int, heads: int, arena: Tensor) -> None:
        _, num_heads, steps, _ = self._positions.shape
        for begin, stride, count, offset in self._groups.tolist():
            phase = (int(self.step) + offset) % (2 * steps - 2)
            now = phase if phase < steps else 2 * steps - 2 - phase
            for head in range(heads if count else 0):
                at = begin + head * stride
                arena[at : at + count] = self._positions[layer, head % num_heads, now, :count]


@triton.jit
def replay_kernel(p_lists, p_groups, p_step, p_positions, num_heads, num_steps, budget, BLOCK: tl.constexpr):  # noqa: N803
    """Grid: (groups, KV heads). `p_positions` is of one layer: [num_heads, num_steps, budget] int32."""
    i_group, i_head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(p_groups + 4 * i_group)
    stride = tl.load(p_groups + 4 * i_group + 1)
    count = tl.load(p_groups + 4 * i_group + 2)
    phase = (tl.load(p_step) + tl.load(p_groups + 4 * i_group + 3)) % (2 * num_steps - 2)
    now = tl.where(phase < num_steps, phase, 2 * num_steps - 2 - phase)
    row = p_positions + ((i_head % num_heads) * num_steps + now).to(tl.int64) * budget
    for at in range(0, count, BLOCK):
        o_token = at + tl.arange(0, BLOCK)
        m_token = o_token < count
        b_position = tl.load(row + o_token, mask=m_token)
        tl.store(p_lists + begin + i_head * stride + o_token, b_position, mask=m_token)


def register() -> None:
    """SGLang's plugin: lists are written in `SwapIn`, and its state tells bytes."""
    from sglang_ext.decode.swap import SwapIn
    from sglang_ext.runtime import SparseRuntime

    settings = json.loads(os.environ[SETTINGS])
    made, plan, before, snapshot = SwapIn.__init__, SwapIn.plan, SwapIn.before, SparseRuntime.snapshot

    def make(self: Any, host: Any, layer_plan: Any, num_kv_heads: int, max_groups: int, *more: Any) -> None:
        made(self, host, layer_plan, num_kv_heads, max_groups, *more)
        sizes = (settings["prefix_len"], len(layer_plan.anchor_layers), max_groups)
        self.replay = Replay(positions_of(**settings), *sizes, more[-1])

    def planned(self: Any, groups: Any, hosts: Any) -> None:
        plan(self, groups, hosts)
        self.replay.plan(groups, hosts)

    def replayed(self: Any, layer: int, lists: Any, kv: Any) -> None:
        if self._set_of[layer] is not None and self._head_maps[layer] is None:  # it selects
            self.replay.run(self._set_of[layer], lists, kernel=lists.positions.is_cuda)
        before(self, layer, lists, kv)

    def told(self: Any) -> Any:
        return snapshot(self) | {"bytes": bytes_of(self)}

    SwapIn.__init__, SwapIn.plan, SwapIn.before = make, planned, replayed  # type: ignore[method-assign]
    SparseRuntime.snapshot = told  # type: ignore[method-assign]


def bytes_of(runtime: Any) -> dict[str, int]:
    """Device bytes of a server, by what they are for; of `indexes` what they may have at most, and have now."""
    pool, offload, swap = runtime.view.runner.token_to_kv_pool, runtime.offload, runtime.offload.swap
    buffers = (*pool.k_buffer, *pool.v_buffer)
    row = sum(one[0].nbytes for one in buffers)
    selection = offload._attention.selection
    residents = len(offload._residents) * row
    pool_bytes = (int(pool.size) + int(pool.page_size)) * row
    return {
        "pool": pool_bytes,
        "staging": offload._attention.places.nbytes + (0 if selection is None else selection.nbytes),
        "residents": residents,
        "dense_layers": sum(one.nbytes for one in buffers) - pool_bytes - residents,
        "resident_state": swap.nbytes,
        "indexes_at_most": runtime.index_bytes,
        "indexes": runtime.residency.resident_bytes(),
        "buffers": sum(one.nbytes for one in runtime.planner._backends) - swap.nbytes,
    }
