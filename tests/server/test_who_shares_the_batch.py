"""What an answer owes to those who decode beside it, on the shipped model in float32, step by step.

Requests on the same prompt select together with it: more positions, as `group_growth` says. Those on other prompts
change nothing: `tests/serving/test_sparse_decode.py` compares each group's selection with the definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefix_kernels.budget import BudgetGrowth, budget_for_group
from sglang_ext.cli import main
from sglang_ext.decode.trace import Selected, SparseStep, read_trace
from tests.server.harness import ADMIN_KEY, SPARSE_CONFIG

pytestmark = pytest.mark.full

TOKENS = 24
KEEP_RATIO, MAX_KEEP_RATIO = 0.1, 0.5


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("trace")
    kept = {"keep_ratio": KEEP_RATIO, "max_keep_ratio": MAX_KEEP_RATIO, "group_growth": "sqrt", "min_top_k": 64}
    return {**SPARSE_CONFIG, **kept, "trace_folder": str(folder)}


@pytest.fixture(scope="module")
def server(serve: Any, built: Any, config: Any) -> Any:
    return serve(built.store, config, admin_api_key=ADMIN_KEY)


def steps(config: dict[str, Any], rid: str) -> dict[int, Selected]:
    """By sequence length, what was selected for a request."""
    (path,) = Path(config["trace_folder"]).glob("steps-*.trace")

    def found() -> Iterator[tuple[int, Selected]]:
        for record in read_trace(path):
            for group in record.groups if isinstance(record, SparseStep) else ():
                if rid in group.rids:
                    yield group.seq_lens[group.rids.index(rid)], group

    return dict(found())


def masks(step: Selected) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """[num_layers, num_kv_heads, prefix_len]: of all layers, each of which selects."""
    return np.stack([step.mask(layer) for layer in sorted(step.bits)])


def test_requests_on_the_same_prompt_widen_what_is_selected(server: Any, config: Any, texts: Any) -> None:
    """Behind `<end>` the model rambles, and a wider selection may make it ramble otherwise: from the first token that
    differs on, only how much is selected is compared.
    """
    answer = server.generate(texts.ask(texts.first, 0), TOKENS, rid="trace-alone")
    own = steps(config, "trace-alone")
    assert len(own) == TOKENS - 1, "every decode step was sparse"
    end = texts.first.questions[0].max_new_tokens
    prefix, first = next(iter(own.values())).prefix_len, min(own)
    one, most = int(KEEP_RATIO * prefix), int(MAX_KEEP_RATIO * prefix)
    shares: list[float] = []
    for attempt in range(10):
        rid = f"trace-group-{attempt}"
        calls = [partial(server.generate, texts.ask(texts.first, 0), TOKENS, rid=rid)]
        calls += [partial(server.generate, texts.ask(texts.first, n), TOKENS) for n in (1, 2, 3)]
        ids = server.together(calls)[0].ids
        assert ids[:end] == answer.ids[:end], "the words that were asked for, whoever else asks"
        same = first + next((n for n in range(TOKENS) if ids[n] != answer.ids[n]), TOKENS)
        for seq_len, step in steps(config, rid).items():
            found, before = masks(step), masks(own[seq_len])
            grown = budget_for_group(one, len(step.rids), BudgetGrowth("sqrt"), most)
            assert (before.sum(2) == one).all()
            assert (found.sum(2) == grown).all()
            if seq_len < same:
                shares.append((found & before).sum() / before.sum())
                assert len(step.rids) > 1 or shares.pop() == 1.0, "alone again, it selects what it did"
        if len(shares) > TOKENS // 2:
            break
    print(
        f"SHARE {np.median(shares):.3f} ({min(shares):.3f}-{max(shares):.3f}) of what it selects alone, {len(shares)}"
    )
    assert len(shares) > TOKENS // 2, "the requests never decoded at the same time"
    assert min(shares) > 0.8


def test_what_a_request_attends_is_drawn(server: Any, texts: Any, tmp_path: Path, capsys: Any) -> None:
    """`explain --picture` sends a request of its own, and reads its trace from the folder that the server names."""
    prompt, picture = tmp_path / "prompt.txt", tmp_path / "attended.png"
    prompt.write_text(texts.ask(texts.first, 0))
    words = ["explain", "--url", server.url, "--admin-key", ADMIN_KEY, "--prompt", f"@{prompt}"]
    assert main([*words, "--picture", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "served by first" in said
    assert str(picture) in said.replace("\n" + " " * 17, "")
    assert picture.read_bytes().startswith(b"\x89PNG")
