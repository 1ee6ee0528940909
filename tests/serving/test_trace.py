"""The trace of sparse steps, with the reference operation: what was selected, of whom, and what was prefilled."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.decode.trace import Prefill, SparseStep, Start, read_trace
from sglang_ext.runtime import SparseRuntime
from tests.serving.admitting import DIM, GQA, KV_HEADS, PROMPT, decode_batch, decode_layers, mode

#: A quarter of the prefix, and a plan with all roles.
SELECTING: dict[str, Any] = {"keep_ratio": 0.25, "min_top_k": 0, "num_sink_tokens": 1, "num_recent_pages": 0}
SELECTING |= {"layer_plan": ["dense", "anchor", {"reuse": 1}]}


def prefill(runtime: SparseRuntime, rids: list[str], starts: list[int], lens: list[int]) -> None:
    batch = SimpleNamespace(
        forward_mode=mode("extend"), rids=rids, extend_prefix_lens_cpu=starts, extend_seq_lens_cpu=torch.tensor(lens)
    )
    with runtime.forwards.step(batch):
        pass


def decode(runtime: SparseRuntime, rids: list[str], lens: list[int], queries: list[Any] | None = None) -> Any:
    """One decode step of all layers; by group, (positions, counts) of each anchor layer. `queries` receives those of
    each layer: [rows, num_qo_heads, DIM].
    """
    batch = decode_batch(runtime, rids, lens)
    with runtime.forwards.step(batch):
        for _, q, _, _ in decode_layers(runtime, batch):
            if queries is not None:
                queries.append(q.view(len(rids), KV_HEADS * GQA, DIM))
    copies = runtime.planner.sparse.copies
    return copies.take(range(len(copies.groups)))


def test_a_trace_holds_what_was_selected_for_requests_that_ask_for_it(start: Any, tmp_path: Path) -> None:
    runtime = start([PROMPT], trace_folder=str(tmp_path / "trace"), **SELECTING)
    rids = ["trace-1", "quiet", "trace-2"]
    for rid in rids:
        runtime.came(rid, [*PROMPT, 1] if rid != "trace-2" else [7] * 70)
    prefill(runtime, rids, [0, 16, 32], [65, 49, 38])
    chosen = decode(runtime, rids, [66, 66, 71])
    decode(runtime, ["quiet"], [67])
    (path,) = (tmp_path / "trace").iterdir()
    head, *records = read_trace(path)
    assert isinstance(head, Start)
    assert head.dtype == "float32"
    assert head.layer_plan == {"layers": ["dense", "anchor", {"reuse": 1, "head_map": [0, 1]}]}
    assert records[:2] == [Prefill("trace-1", 0, 65), Prefill("trace-2", 32, 70)]
    (step,) = records[2:]
    assert isinstance(step, SparseStep)
    (group,) = step.groups  # the second request is a group of its own in its first step, and not traced
    assert (group.rids, group.seq_lens, group.prefix_len) == (["trace-1"], [66], 64)
    mask = group.mask(1)
    assert group.mask(0) is None
    assert [head.nonzero()[0].tolist() for head in mask] == chosen[0][1][0][:, :16].tolist()
    assert mask.sum(1).tolist() == [16, 16]


def test_a_trace_holds_the_queries_that_a_layer_searched_by(start: Any, tmp_path: Path) -> None:
    """With a period of two the fifth step searches again; the one before it kept the selection, and has none."""
    runtime = start([PROMPT], trace_folder=str(tmp_path / "trace"), search_period=2, **SELECTING)
    rids = ["trace-1", "trace-2"]
    for rid in rids:
        runtime.came(rid)
    runtime.share_slots(1)
    given: list[list[torch.Tensor]] = [[] for _ in range(5)]
    for number, queries in enumerate(given):
        decode(runtime, rids, [66 + number, 66 + number], queries)
    steps = [one for one in read_trace(next((tmp_path / "trace").iterdir())) if isinstance(one, SparseStep)]
    # In their first steps two requests are two groups: nothing is known of their slots.
    assert [[group.rids for group in step.groups] for step in steps] == [*[[rids[:1], rids[1:]]] * 2, *[[rids]] * 3]
    assert torch.equal(steps[0].groups[1].query(1, DIM), given[0][1][1:])
    assert torch.equal(steps[2].groups[0].query(1, DIM), given[2][1])
    assert torch.equal(steps[4].groups[0].query(1, DIM), given[4][1])
    assert [list(group.queries) for step in steps for group in step.groups] == [*[[1]] * 5, [], [1]]
    assert steps[3].groups[0].bits == steps[2].groups[0].bits != steps[4].groups[0].bits
    with pytest.raises(KeyError):
        steps[3].groups[0].query(1, DIM)


def test_a_record_that_was_cut_off_is_left_out(start: Any, tmp_path: Path) -> None:
    runtime = start(trace_folder=str(tmp_path / "trace"))
    for first in (0, 10):
        prefill(runtime, ["trace-1"], [first], [10])
    (path,) = (tmp_path / "trace").iterdir()
    whole = path.read_bytes()
    for cut in (1, len(whole) // 6):
        path.write_bytes(whole[:-cut])
        assert list(read_trace(path))[1:] == [Prefill("trace-1", 0, 10)]
