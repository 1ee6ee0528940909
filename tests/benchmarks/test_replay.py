"""`benchmarks/replay.py`: a right answer is the replay's best token by token, and a wrong selection shows.

The server is played by the simplest decode there is: one token at a time, one head at a time, the positions gathered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from scripts.needle_network import Needle, load, rms_norm
from sglang_ext.decode.trace import Prefill, Selected, SparseStep, Start
from sglang_ext.methods.layer_plan import LayerPlan
from tests.benchmarks.results import RESULTS, ROOT, prose, rows_of

PREFIX, PROMPT, TOKENS = 128, 150, 12
ROLES: list[Any] = ["dense", "anchor", {"reuse": 1, "head_map": [1, 0]}, "anchor", "anchor", "anchor"]
PLAN = LayerPlan.from_dict({"layers": ROLES}, num_layers=6, num_kv_heads=2)
TIE = 0.002
Masks = dict[int, np.ndarray[Any, Any]]


def test_the_documented_recall_of_guarded_steps_is_the_rows() -> None:
    off: dict[int, float] = {}
    for row in rows_of(RESULTS / "guard-h100.jsonl"):
        off[row["tokens"]] = max(off.get(row["tokens"], 0.0), row["off"]["recall"])
    said = "is {:.4f} (shipped model, 4,096 tokens) and {:.4f} (Qwen2.5-Coder-0.5B, 8,192 tokens)"
    assert said.format(off[4096], off[8192]) in prose("quality")


@pytest.fixture
def replay(load: Any) -> Any:
    return load("replay").replay


@pytest.fixture
def replayer(replay: Any, model: Needle) -> Any:
    return replay.Replayer(model, PLAN, max_len=PROMPT + TOKENS, rows=40)


@pytest.fixture(scope="module")
def model() -> Needle:
    torch.manual_seed(0)
    return load(ROOT / "models" / "needle", torch.float32, "cpu")


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return torch.randint(3, 900, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()


def masks(seed: int, kept: float = 0.3) -> Masks:
    """By anchor layer, [num_kv_heads, PREFIX]."""
    rng = np.random.default_rng(seed)
    return {layer: rng.random((2, PREFIX)) < kept for layer in (1, 3, 4, 5)}


def selected(masks: Masks, position: int, rid: str = "trace-0") -> Selected:
    counts = {layer: mask.sum(1).tolist() for layer, mask in masks.items()}
    bits = {layer: [np.packbits(head).tobytes() for head in mask] for layer, mask in masks.items()}
    return Selected([rid], [position + 1], "d", PREFIX, counts, bits)


def step(model: Needle, token: int, cache: list[list[torch.Tensor]], chosen: Masks | None) -> torch.Tensor:
    """Logits [vocab_size] behind one more token; its K and V go to the cache: per layer [tokens, num_kv_heads, dim]."""
    position = cache[0][0].shape[0]
    cos, sin = model.rope(position, 1, torch.device("cpu"))
    x = model.embed[[token]]
    for layer, weights in enumerate(model.layer_weights()):
        q, k, v = model.before(x, cos, sin, weights, 64, model.shape.eps)
        cache[layer][0], cache[layer][1] = torch.cat([cache[layer][0], k]), torch.cat([cache[layer][1], v])
        source = PLAN.layers[layer].anchor_layer
        outs = []
        for head in range(8):
            kv_head = head // 4
            positions = list(range(position + 1))
            if chosen is not None and layer > 0:
                mask = chosen[layer if source is None else source]
                listed = mask[kv_head if source is None else PLAN.layers[layer].head_map[kv_head]].nonzero()[0]
                positions = [*listed.tolist(), *range(PREFIX, position + 1)]
            weight = (cache[layer][0][positions, kv_head] @ q[0, head] / 8).softmax(0)
            outs.append(weight @ cache[layer][1][positions, kv_head])
        x = model.after(x, torch.cat(outs)[None], weights, model.shape.eps)
    return model.logits(rms_norm(x, model.final_norm, model.shape.eps))[0]


@torch.no_grad()
def serve(model: Needle, prompt: list[int], steps: list[Masks | None]) -> tuple[list[int], list[float]]:
    """Greedy tokens and their logarithms; the i-th of `steps` reads the i-th generated token."""
    cache = [[torch.zeros(0, 2, 64), torch.zeros(0, 2, 64)] for _ in range(6)]
    for token in prompt:
        logits = step(model, token, cache, None)
    tokens, logprobs = [], []
    for masks_of_step in [*steps, None]:
        tokens.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(0).max()))
        logits = step(model, tokens[-1], cache, masks_of_step)
    return tokens, logprobs


@pytest.fixture(scope="module")
def served(model: Needle, prompt: list[int]) -> tuple[list[int], list[float], list[Masks | None]]:
    """Two dense steps, then sparse ones; every one selects otherwise."""
    steps = [None, None, *(masks(seed) for seed in range(TOKENS - 3))]
    return *serve(model, prompt, steps), steps


def judged(replay: Any, replayer: Any, prompt: list[int], served: Any, steps: list[Masks | None]) -> Any:
    tokens, logprobs, _ = served
    epoch = replay.Epoch(0, PROMPT, {PROMPT + i: selected(m, PROMPT + i) for i, m in enumerate(steps) if m})
    answer = replay.Answer("trace-0", False, prompt, tokens, logprobs)
    return replay.judge(replayer, answer, [epoch])


@pytest.mark.full
def test_the_same_selections_give_the_same_tokens(replay: Any, replayer: Any, prompt: Any, served: Any) -> None:
    one = judged(replay, replayer, prompt, served, served[2])
    assert (one.verdict(TIE), one.sparse) == ("equal", TOKENS - 3)
    assert len(one.gaps) == len(one.off) == TOKENS
    assert max(one.off) < 1e-3
    another = [*served[0][:-1], (served[0][-1] + 1) % 900]
    one = judged(replay, replayer, prompt, (another, [], None), served[2])
    assert (one.verdict(TIE), max(one.gaps[:-1]), one.off) == ("wrong", 0, [])


@pytest.mark.full
@pytest.mark.parametrize("wrong", ["others", "one head", "dense", "a step late"])
def test_other_selections_show(replay: Any, replayer: Any, prompt: Any, served: Any, wrong: str) -> None:
    steps = list(served[2])
    if wrong == "others":
        steps = [m and {layer: ~mask for layer, mask in m.items()} for m in steps]
    elif wrong == "one head":
        steps = [m and {layer: np.stack([mask[0], ~mask[1]]) for layer, mask in m.items()} for m in steps]
    elif wrong == "dense":
        steps = [None] * len(steps)
    else:
        steps = [None, *steps[:-1]]
    one = judged(replay, replayer, prompt, served, steps)
    assert max(one.off) > 0.05
    if wrong == "others":
        assert one.verdict(TIE) == "wrong"


@pytest.mark.full
def test_a_retraction_divides_a_request_and_what_nobody_knows_is_not_judged(
    replay: Any, replayer: Any, model: Needle, prompt: Any, served: Any
) -> None:
    """After five tokens it lost its slots: all of them were prefilled again, and the rest chosen behind that."""
    tokens = served[0][:5]
    again, _ = serve(model, [*prompt, *tokens], [])
    tokens = [*tokens, *again, 3, 4]  # the last two: behind another retraction
    groups = [selected(m, PROMPT + i) for i, m in enumerate(served[2]) if m][:4]  # one step ran ahead of it
    records = [
        Start(PLAN.to_dict(), 2, []),
        Prefill("trace-0", 0, 128),
        Prefill("trace-0", 128, PROMPT),
        *(SparseStep([group]) for group in groups),
        Prefill("trace-0", 64, PROMPT + 5),
        SparseStep([selected(masks(9), 600, "trace-unknown")]),
        Prefill("trace-0", PROMPT + 3, PROMPT + 6),
    ]
    epochs = replay.histories(records)["trace-0"]
    assert [(one.cached, one.end, len(one.steps)) for one in epochs] == [
        (0, PROMPT, 4),
        (64, PROMPT + 5, 0),
        (PROMPT + 3, PROMPT + 6, 0),
    ]
    one = replay.judge(replayer, replay.Answer("trace-0", False, prompt, tokens), epochs)
    assert one.verdict(TIE) == "equal"
    assert (len(one.gaps), one.unknown, one.retractions) == (6, 2, 2)


def test_a_damaged_selection_is_refused() -> None:
    mask = masks(0)
    group = selected(mask, 200)
    assert (group.mask(1) == mask[1]).all()
    assert group.mask(2) is None
    group.counts[1][0] += 1
    with pytest.raises(ValueError, match="different positions of layer 1"):
        group.mask(1)


@pytest.mark.parametrize(
    ("verdict", "dtype", "wrong_dense", "wanted"),
    [
        ("good", "bfloat16", 3, True),
        ("worse", "bfloat16", 0, False),
        ("too few to tell", "bfloat16", 0, False),
        ("good", "float32", 0, True),
        ("good", "float32", 1, False),
    ],
)
def test_a_replay_is_good_by_its_verdict_and_where_something_was_sparse(
    replay: Any, verdict: str, dtype: str, wrong_dense: int, wanted: bool
) -> None:
    row = {"verdict": verdict, "dtype": dtype, "dense": {"wrong": wrong_dense}, "sparse": {"tokens of sparse steps": 9}}
    assert replay.replay_good(row) is wanted
    row["sparse"] = {"tokens of sparse steps": 0}
    assert not replay.replay_good(row)
