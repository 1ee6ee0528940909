"""The recorder: a uniform sample of what passed, bounded, and nothing at all where something is missing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from sglang_ext.prefill.recorder import MAX_CAPTURES, Capture, QueryRecorder

LAYERS, HEADS, DIM = 2, 4, 3
CPU = torch.device("cpu")


def _queries(num_tokens: int, layer: int) -> torch.Tensor:
    """q[token, head, 0] tells the token, [.., 1] the layer, [.., 2] the head."""
    q = torch.zeros(num_tokens, HEADS, DIM)
    q[..., 0] = torch.arange(num_tokens)[:, None]
    q[..., 1] = layer
    q[..., 2] = torch.arange(HEADS)
    return q


def _recorder(capacity: int, seed: int = 0, late: tuple[int, int] = (0, 0)) -> QueryRecorder:
    return QueryRecorder(LAYERS, HEADS, capacity * 2, 2, seed, late)


def _taken(recorder: QueryRecorder, rid: str = "a") -> Capture:
    capture = recorder.take(rid)
    assert capture is not None
    return capture


def _started(capacity: int, num_tokens: int, seed: int = 0, late: tuple[int, int] = (0, 0)) -> QueryRecorder:
    """Recording request a; of late tokens so many of the prompt, and so many behind it."""
    recorder = _recorder(capacity, seed, late)
    recorder.start("a", num_tokens)
    return recorder


def _feed(recorder: QueryRecorder, rid: str, num_tokens: int, chunks: list[int], first: int = 0) -> None:
    queries = [_queries(num_tokens, layer) for layer in range(LAYERS)]
    for size in chunks:
        step = recorder.begin_step([rid], [first], [size], CPU)
        for layer, of_layer in enumerate(queries):
            recorder.record(step, layer, of_layer[first : first + size])
        first += size


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([40], id="one", marks=pytest.mark.full),
        pytest.param([7, 20, 13], id="three"),
        pytest.param([1] * 40, id="forty"),
        pytest.param([39, 1], id="late", marks=pytest.mark.full),
    ],
)
def test_the_reservoir_is_uniform_however_the_prefill_is_chunked(chunks: list[int]) -> None:
    draws, capacity, num_tokens = 300 if len(chunks) > 10 else 1500, 6, 40
    counts: Counter[int] = Counter()
    for seed in range(draws):
        recorder = _started(capacity, num_tokens, seed)
        _feed(recorder, "a", num_tokens, chunks)
        kept = _taken(recorder).queries(num_kv_heads=2)[0, 0, ::2, 0].tolist()
        assert len(set(kept)) == capacity
        counts.update(kept)
    expected = draws * capacity / num_tokens
    square = sum((counts[token] - expected) ** 2 for token in range(num_tokens)) / expected
    # Sampling without replacement: the variance of a cell is smaller by 1 - capacity / num_tokens.
    # 39 degrees of freedom: mean 39, standard deviation 8.8; 85 is the 1 - 3e-5 quantile.
    assert square / (1 - capacity / num_tokens) < 85


@pytest.mark.parametrize(
    ("first", "rows", "layers", "message"),
    [
        (16, 34, 2, "go on at token 0, got token 16"),
        (0, 20, 2, "expected 50 recorded tokens in every layer, got 20 in layer 0"),
        (0, 50, 1, "got 0 in layer 1"),
        (0, 49, 2, "expected at least 50 query rows, got 49"),
    ],
    ids=["gap", "too few tokens", "a layer did not run", "too few rows"],
)
def test_what_is_not_whole_is_rejected_and_says_where(first: int, rows: int, layers: int, message: str) -> None:
    recorder = _started(8, 50)
    step = recorder.begin_step(["a"], [first], [50 if rows == 49 else rows], CPU)
    assert (step == []) == (first > 0)
    for layer in range(layers):
        recorder.record(step, layer, _queries(rows, layer))
    assert message in str(_taken(recorder).problem())


def test_no_device_memory_for_queries_ends_the_capture_and_not_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, asked = _recorder(4), []
    recorder.start("a", 10)

    def none_left(*_: object, **__: object) -> torch.Tensor:
        asked.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    step, queries = recorder.begin_step(["a"], [0], [6], CPU), [_queries(6, layer) for layer in range(LAYERS)]
    monkeypatch.setattr(torch, "zeros", none_left)
    for layer, q in enumerate(queries):
        recorder.record(step, layer, q)
    assert recorder.begin_step(["a"], [6], [4], CPU) == [], "of a capture that broke no more is decided, nor said"
    capture = _taken(recorder)
    assert capture.problem() == "no device memory for queries: CUDA out of memory"
    assert len(asked) == 1, "it is not tried again in every layer"


def test_decode_rows_of_a_mixed_batch_are_not_recorded_and_do_not_spoil_the_capture() -> None:
    recorder = _started(8, 50)
    recorder.start("b", 30)
    _feed(recorder, "a", 50, [50])
    # Mixed batch: b's prompt first, then a's decoded tokens, three steps of them.
    for position in (50, 51, 52):
        begin = {50: 0, 51: 10, 52: 20}[position]
        step = recorder.begin_step(["b", "a"], [begin, position], [10, 1], CPU)
        assert [chunk.capture.rid for chunk in step] == ["b"]
        for layer in range(LAYERS):
            q = torch.cat([_queries(30, layer)[begin : begin + 10], torch.full((1, HEADS, DIM), -1.0)])
            recorder.record(step, layer, q)
    for rid in ("a", "b"):
        assert (_taken(recorder, rid).queries(2) >= 0).all()


def test_requests_of_one_step_are_told_apart_by_their_rows() -> None:
    recorder = _started(64, 20)
    recorder.start("c", 10)
    step = recorder.begin_step(["a", "b", "c"], [0, 0, 0], [20, 5, 10], CPU)
    for layer in range(LAYERS):
        recorder.record(step, layer, _queries(35, layer).reshape(35, HEADS * DIM))
    kept = {rid: _taken(recorder, rid).queries(2)[0, 0, ::2, 0].tolist() for rid in ("a", "c")}
    assert kept == {"a": list(range(20)), "c": list(range(25, 35))}


@pytest.mark.parametrize(("gqa", "tokens"), [(1, 2048), (16, 128), (64, 32), (128, 32)])
def test_tokens_of_many_query_heads_do_not_become_too_few(gqa: int, tokens: int) -> None:
    assert QueryRecorder(1, gqa, query_samples=2048, gqa=gqa, seed=0).capacity == tokens


def test_only_so_many_requests_are_recorded_at_a_time() -> None:
    recorder = QueryRecorder(num_layers=1, num_qo_heads=2, query_samples=4, gqa=2, seed=0)
    assert all(recorder.start(str(i), 8) for i in range(MAX_CAPTURES))
    assert not recorder.start("one too many", 8)
    assert recorder.start("0", 8)  # starting again is no new one
    recorder.take("1")
    assert recorder.start("one too many", 8)


@pytest.mark.parametrize("broken", ["cached", "scale", "rows"])
def test_what_cannot_become_whole_keeps_nobody_from_being_recorded(broken: str) -> None:
    """A request of which the prefix cache had a part holds no samples, however long it decodes."""
    recorder = _recorder(4)
    for number in range(MAX_CAPTURES):
        recorder.start(str(number), 8)
        step = recorder.begin_step([str(number)], [4 if broken == "cached" else 0], [4], CPU)
        for layer in range(LAYERS):
            rows = 3 if broken == "rows" and layer else 4
            recorder.record(step, layer, _queries(rows, layer), 1.0 + layer if broken == "scale" else 1.0)
    assert recorder.start("cold", 8)
    captures = [_taken(recorder, str(number)) for number in range(MAX_CAPTURES)]
    assert all(capture.problem() and capture.samples is None for capture in captures)


@pytest.mark.parametrize("chunks", [[30], [11, 19], [28, 1, 1]], ids=["one", "two", "three"])
def test_late_tokens_are_kept_beside_the_sample(chunks: list[int]) -> None:
    recorder = _started(6, 30, late=(4, 3))
    _feed(recorder, "a", 30, chunks)
    _feed(recorder, "a", 35, [1] * 5, first=30)
    capture = _taken(recorder)
    assert capture.problem() is None
    assert capture.positions[6:].tolist() == [26, 27, 28, 29, 30, 31, 32], "two more steps than asked for"
    for layer in range(LAYERS):
        assert capture.samples[layer, :, 0, 0].tolist() == capture.positions.tolist()
        assert (capture.samples[layer, ..., 1] == layer).all()
    plain = _started(6, 30)
    _feed(plain, "a", 30, chunks)
    assert torch.equal(capture.queries(2), _taken(plain).queries(2)), "it does not depend on what else is kept"


def test_a_capture_is_complete_without_decode_steps() -> None:
    recorder = _started(6, 3, late=(4, 3))
    _feed(recorder, "a", 3, [3])
    capture = _taken(recorder)
    assert capture.problem() is None
    assert capture.positions.tolist() == [0, 1, 2, 0, 1, 2, -1, -1, -1]


def test_layers_of_different_scales_break_a_capture() -> None:
    recorder = _started(4, 6)
    step = recorder.begin_step(["a"], [0], [6], CPU)
    recorder.record(step, 0, _queries(6, 0), 0.5)
    recorder.record(step, 1, _queries(6, 1), 0.25)
    assert "expected one attention scale in all layers, got 0.5 and 0.25 (layer 1)" in str(_taken(recorder).problem())
