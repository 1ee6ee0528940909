"""A planner of decode steps with decode graphs on a CPU, and indexes of zeros for it: which way a step goes, not its
values.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from prefix_kernels.types import PagedKV
from sglang_ext.config import SparseAttnConfig
from sglang_ext.decode.planner import DecodePlanner
from sglang_ext.decode.swap import HostKV
from sglang_ext.decode.types import StepPath
from sglang_ext.methods.base import IndexSpec
from sglang_ext.methods.layer_plan import LayerPlan
from sglang_ext.methods.token_index import TokenIndexSpec
from sglang_ext.metrics import Counters
from sglang_ext.prefix.requests import RequestTable
from sglang_ext.prefix.residency import ResidentIndex
from sglang_ext.ranks import Ranks

PREFIX, LONGEST, DIM = 128, 256, 64


def blank_index(layers: int, digest: str = "d") -> ResidentIndex:
    """Of `PREFIX` tokens and one KV head."""
    index = ResidentIndex(SimpleNamespace(digest=digest, created=1.0, identity=SimpleNamespace(num_tokens=PREFIX)))
    channels = TokenIndexSpec().kept_channels(DIM)
    arrays = {
        "channels": torch.zeros(1, channels, dtype=torch.int16),
        "keys_packed": torch.zeros(1, PREFIX, channels // 2, dtype=torch.uint8),
        "keys_scale": torch.ones(1, channels),
        "keys_zero": torch.zeros(1, channels),
    }
    index.layers = [dict(arrays) for _ in range(layers)]
    return index


def planner(
    config: SparseAttnConfig, requests: RequestTable, counters: Counters, plan: LayerPlan, rows: int,
    documents: int | None = None, ranks: Ranks | None = None, spec: IndexSpec | None = None,
    host: HostKV | None = None, trial: bool = False,
) -> DecodePlanner:  # fmt: skip
    """With a table of `rows` requests: each on slots of its own, or in turns on prefixes of so many documents."""
    table = torch.arange(rows * LONGEST, dtype=torch.int32).reshape(rows, LONGEST)
    for row in range(rows if documents else 0):
        table[row, :PREFIX] = table[row % documents, :PREFIX]
    heads, cpu = plan.num_kv_heads, torch.device("cpu")
    kv = PagedKV(*(torch.zeros(rows * LONGEST, heads, DIM) for _ in "kv"))
    view: Any = SimpleNamespace(
        num_qo_heads=2 * heads, num_kv_heads=heads, head_dim=DIM, v_head_dim=DIM, dtype=torch.float32,
        kv_dtype=torch.float32, num_slots=rows * LONGEST, max_requests=rows, decode_graphs=True, device=cpu,
        req_to_token=table, kv=lambda layer: kv,
    )  # fmt: skip
    made = DecodePlanner(
        config, view, requests, counters, spec or TokenIndexSpec(), plan, ranks or Ranks(), trial=trial, host=host
    )
    assert made.sparse is not None or spec is not None
    return made


def forward_of(rids: list[str], rows: list[int], lens: list[int], beams: bool = False) -> Any:
    """SGLang's batch of a decode step."""
    tokens = torch.tensor(lens)
    return SimpleNamespace(
        rids=rids, batch_size=len(rids) + beams, seq_lens_cpu=tokens, seq_lens=tokens,
        req_pool_indices=torch.tensor(rows),
    )  # fmt: skip


def capture_all(made: DecodePlanner, size: int) -> None:
    for path in made.paths_of(size):
        with made.capturing(size, path):
            pass


def path_of(made: DecodePlanner, forward: Any, usable: Any) -> StepPath | None:
    step = made.prepare(forward, usable)
    return None if step is None else step.path
