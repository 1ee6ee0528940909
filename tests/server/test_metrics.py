"""Load of all kinds on a server of its own, and each exported metric against a count that is made without the server:
of what responses say, of files, of the order in which indexes are asked for. OpenAI's routes: `test_exact`.

Requests come one after another where a count depends on their order; steps do not overlap, so all counts are exact.
"""

from __future__ import annotations

import itertools
import json
import re
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefix_index.folder import SUFFIX
from scripts.needle.tasks import Document, make_document
from sglang_ext.cli import main
from sglang_ext.metrics import METRICS, PATHS
from tests.server.harness import DISK, REQUEST_SECONDS, SPARSE_CONFIG, Answer, Server

TOKENS, LONG = 12, 48
BUDGET = 256
LOG_INTERVAL = "4"
"""Decode steps."""
LAYERS, HEADS = 6, 2


def index_bytes(tokens: int) -> int:
    """Of arrays of a token index of 32 channels: packed keys of 4 bits, scales, zeros and numbers of channels."""
    return LAYERS * HEADS * (tokens * 32 // 2 + 32 * (4 + 4 + 2))


CONFIG: dict[str, Any] = {
    **DISK,
    **SPARSE_CONFIG,
    "methods": {"token_index": {}},
    "keep_ratio": 0.0625,
    "min_top_k": BUDGET,
    "build": "prefill",
    "share_prefixes": True,
    "min_shared_tokens": 512,
    "index_gpu_bytes": index_bytes(1152) + 1024,  # of one index
    "store_max_bytes": 1_000_000,  # of two
}


class Load:
    """Asks a server, and counts by the responses alone.

    Attributes:
        answers: all of them.
        crowds: those of requests that ran at the same time.
        seconds: from the first request to the last answer.
        written: bytes of each index file that was seen behind a request, also of those that are gone.
    """

    def __init__(self, server: Server, report: Path, store: Path) -> None:
        self.server, self.report, self.store = server, report, store
        self.before, self._first_line = server.metrics(), len(report.read_text().splitlines())
        self.answers: list[Answer] = []
        self.crowds: list[list[Answer]] = []
        self.damaged = store
        self.written: dict[Path, int] = {}
        self._begun = time.perf_counter()
        self.seconds = 0.0

    def took(self, *answers: Answer) -> Answer:
        """Those of requests that ran at the same time; the first one."""
        self.answers += answers
        self.written |= {file: file.stat().st_size for file in self.files()}
        self.seconds = time.perf_counter() - self._begun
        if len(answers) > 1:
            self.crowds.append([*answers])
        return answers[0]

    def ask(self, text: str, tokens: int = TOKENS, **fields: Any) -> Answer:
        return self.took(self.server.generate(text, tokens, **fields))

    def together(self, texts: list[str]) -> list[Answer]:
        answers = self.server.together([lambda text=text: self.server.generate(text, LONG) for text in texts])
        self.took(*answers)
        return answers

    @property
    def told(self) -> list[dict[str, Any]]:
        return list(map(told_by, self.answers))

    def sum_of(self, key: str) -> int:
        """Over sparse steps."""
        return sum(told["steps"]["sparse"] * told[key] for told in self.told)

    def lines(self) -> list[dict[str, Any]]:
        """Of the report of builds."""
        return [json.loads(line) for line in self.report.read_text().splitlines()][self._first_line :]

    def files(self) -> set[Path]:
        return set(self.store.rglob(f"*{SUFFIX}"))


def told_by(answer: Answer) -> dict[str, Any]:
    """What a response says of its decode: of all its tokens but the first, which prefill makes."""
    assert sum(answer.told["steps"].values()) == answer.meta["completion_tokens"] - 1
    return answer.told


def paths_of(answer: Answer) -> list[str]:
    return [path for path, steps in told_by(answer)["steps"].items() if steps]


def streamed(server: Server, text: str, tokens: int, abort_at: int | None = None) -> tuple[Answer, list[float]]:
    """The answer that a stream's last chunk gives, and when each of them came, in seconds.

    Its id is new each time: two seconds behind a stream SGLang aborts what has that id then.

    Args:
        abort_at: abort the request behind so many chunks.
    """
    sampling, rid = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}, uuid.uuid4().hex
    body = json.dumps({"text": text, "sampling_params": sampling, "stream": True, "rid": rid}).encode()
    request = urllib.request.Request(f"{server.url}/generate", body, {"Content-Type": "application/json"})
    chunks, came = [], []
    with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                chunks.append(json.loads(line[6:]))
                came.append(time.perf_counter())
                if len(chunks) == abort_at:
                    server.post("/abort_request", {"rid": rid})
    *before, last = chunks
    assert all(chunk["meta_info"]["sparse_attn"] == [] for chunk in before), "only the last one says how"
    assert (last["meta_info"]["finish_reason"]["type"] == "abort") == (abort_at is not None)
    return Answer(last["text"], tuple(last["output_ids"]), last["meta_info"]), came


@pytest.fixture(scope="module")
def load(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder = tmp_path_factory.mktemp("metrics")
    report, store = folder / "report.jsonl", folder / "store"
    store.mkdir()
    config = {**CONFIG, "build_report": str(report)}
    server = serve(store, config, enable_metrics="", enable_streaming_session="", decode_log_interval=LOG_INTERVAL)
    return Load(server, report, store)


def asks(document: Document) -> Iterator[str]:
    """Prompts on one document: an index of the document is built of the first one."""
    return (f"{document.text} {question.text}" for question in document.questions)


@pytest.fixture(scope="module")
def loaded(load: Load) -> Load:
    """The load; behind each request what its response has to say of it."""
    server = load.server
    one, two, three = (
        make_document("many_keys", seed=900 + n, num_tokens=n, num_questions=12) for n in (1152, 1088, 1024)
    )
    ones, twos, threes = map(asks, (one, two, three))
    second = next(twos)

    def expect(answer: Answer, path: str, reason: str | None, indexed: int = 0) -> None:
        told = told_by(answer)
        assert paths_of(answer) == [path], told
        assert told["reasons"] == ([] if reason is None else [reason])
        assert (told["prefix_tokens"], told["selected_tokens"]) == (indexed, BUDGET if path == "sparse" else 0)

    expect(load.ask(next(ones)), "dense", "no_index")
    expect(load.ask(next(ones)), "sparse", None, 1152)  # from disk
    expect(load.took(streamed(server, next(ones), TOKENS)[0]), "sparse", None, 1152)
    expect(load.ask(next(ones), sparse=False), "dense", "by_request")
    expect(load.ask(second), "dense", "no_index")
    expect(load.ask(next(twos)), "sparse", None, 1088)  # from disk; the first one's leaves the device
    time.sleep(1.1)  # uses of an index within a second count as one
    expect(load.ask(next(ones)), "sparse", None, 1152)  # and comes back, and the other one's leaves
    before = load.files()
    expect(load.ask(next(threes)), "dense", "no_index")  # its build evicts the second one's from the store
    (load.damaged,) = load.files() - before
    raw = bytearray(load.damaged.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    load.damaged.write_bytes(raw)
    expect(load.ask(next(threes)), "dense", "index_corrupt", 1024)  # for whose load the first one's left the device
    expect(load.ask(next(threes)), "dense", "no_index")  # it is offered no more
    expect(load.ask("a short prompt"), "dense", None)
    server.generate("a short prompt", 1)  # which decodes nothing
    server.post("/open_session", {"session_id": "turns", "capacity_of_str_len": 4096, "streaming": True})
    for turn in (next(ones), " and on"):  # it keeps the slot
        expect(load.ask(turn, session_params={"id": "turns"}), "dense", "unsupported_mode")
        server.settled()
    server.post("/close_session", {"session_id": "turns"})
    expect(load.ask(" ".join(one.text.split()[:128])), "dense", "short_prefix")
    expect(load.took(streamed(server, next(ones), 2000, abort_at=8)[0]), "sparse", None, 1152)  # from disk
    assert all(paths_of(answer) == ["sparse"] for answer in load.together([next(ones) for _ in range(3)]))
    for _ in range(10):  # until two are there at the same time: they share slots of the prefix cache
        if all("cascade" in paths_of(answer) for answer in load.together([second, second])):
            return load
    raise AssertionError("expected two requests to share slots")


@pytest.fixture(scope="module")
def found(loaded: Load) -> dict[str, dict[str, float]]:
    """What the load made of each metric; of gauges, what they are behind it."""
    gauges = {metric.name for metric in METRICS if metric.gauge}
    return {
        name: of
        if name in gauges
        else {label: value - loaded.before[name].get(label, 0) for label, value in of.items()}
        for name, of in loaded.server.metrics().items()
    }


def some(found: dict[str, float]) -> dict[str, float]:
    return {label: value for label, value in found.items() if value}


def test_each_metric_is_what_was_counted_without_the_server(loaded: Load, found: dict[str, dict[str, float]]) -> None:
    by_layer = {metric.name for metric in METRICS if metric.gauge and metric.label}
    assert set(loaded.before) == {metric.name for metric in METRICS} - by_layer, "before anything has happened"
    told, lines, files = loaded.told, loaded.lines(), loaded.files()
    rows = {path: sum(one["steps"][path] for one in told) for path in PATHS}
    best = [next((path for path in PATHS if one["steps"][path]), "dense") for one in told]
    dense = Counter[str]()
    for one in told:
        dense[one["reasons"][-1] if one["reasons"] else "none"] += one["steps"]["dense"]
    hits = sum(one["index"] is not None for one in told)
    built = [line for line in lines if line["status"] == "built"]
    names = {line["digest"][:12]: line["num_tokens"] for line in built}
    assert all(names.get(one["index"], 0) == one["prefix_tokens"] for one in told)
    loads = [index_bytes(tokens) for tokens in (1152, 1088, 1152, 1152)]
    seconds = found.pop("build_seconds")[""]
    assert seconds == pytest.approx(sum(line["build_seconds"] for line in built))
    assert seconds > 0
    for name in ("evicted", "corrupt"):
        taken = some(found.pop(f"{name}_seconds"))
        assert set(taken) == set(some(found[name]))
        assert 0 < sum(taken.values()) < loaded.seconds
    assert set(told[0]) == {"steps", "index", "prefix_tokens", "selected_tokens", "guarded_steps", "reasons"}
    expected: dict[str, Any] = {
        "requests": Counter(best),
        "decode_tokens": rows,
        "fallback": Counter(reason for one in told for reason in one["reasons"]),
        "dense_tokens": dense,
        "prefix_tokens": {"all": loaded.sum_of("prefix_tokens"), "attended": loaded.sum_of("selected_tokens")},
        "hit": {"": hits},
        "index_hits": {"disk": len(loads) + 1, "device": hits - len(loads) - 1},
        "load": {"disk": len(loads)},
        "load_bytes": {"disk": sum(loads)},
        "load_failures": {"index_corrupt": 1},
        "corrupt": {"bytes": 1},
        "corrupt_bytes": {"bytes": loaded.written[loaded.damaged]},
        "build": Counter(line["status"] for line in lines),
        "build_bytes": {"": sum(loaded.written.values())},
        "evicted": {"device": 3, "store": len(built) - len(files)},
        "evicted_bytes": {
            "device": sum(map(index_bytes, (1152, 1088, 1152))),
            "store": sum(nbytes for file, nbytes in loaded.written.items() if file not in files),
        },
        "device_bytes": {"": index_bytes(1152)},
        "store_indexes": {"": len(files) - 1},
        "store_bytes": {"": sum(file.stat().st_size for file in files - {loaded.damaged})},
        "store_problems": {"": 1},
        "saved_seconds": {},
        "lost_seconds": {},  # nothing is measured without a GPU
        "offload": {},  # counted in tests/server/test_offload.py
        "cache_rank": {},  # in tests/server/test_prebuild.py
    }
    assert {name: some(found[name]) for name in expected} == {name: some(of) for name, of in expected.items()}
    assert expected["evicted"]["store"] == 1
    timed = {f"{name}_seconds" for name in ("build", "evicted", "corrupt")}
    assert {*expected, *timed, *BOUNDED} == {metric.name for metric in METRICS}


BOUNDED = ("steps", "groups", "step_seconds", "timed_steps", "load_seconds")
BOUNDED += ("guard_steps", "guard_events", "guard_tokens", "guard_recall", "guard_output_error")


def test_steps_groups_and_times_are_within_what_responses_say(loaded: Load, found: dict[str, dict[str, float]]) -> None:
    """Of requests that ran at the same time nobody outside knows which of their steps were the same ones."""
    crowded = {id(answer) for crowd in loaded.crowds for answer in crowd}
    alone = [told_by(answer)["steps"] for answer in loaded.answers if id(answer) not in crowded]
    crowds = [[told_by(answer)["steps"] for answer in crowd] for crowd in loaded.crowds]
    own = {path: sum(steps[path] for steps in alone) for path in PATHS}
    for path in PATHS:
        least = sum(max(steps[path] for steps in crowd) for crowd in crowds if path != "dense")
        most = sum(steps[path] for crowd in crowds for steps in crowd)
        assert own[path] + least <= found["steps"][path] <= own[path] + most
        pairs = sum(max(0, steps[path] - 1) for steps in alone) - (path == "sparse") * found["guard_steps"][""]
        assert pairs <= found["timed_steps"][path] < found["steps"][path]
        assert 0 < found["step_seconds"][path] < loaded.seconds
    assert found["groups"]["cascade"] == found["steps"]["cascade"], "there was one at a time"
    assert found["steps"]["sparse"] <= found["groups"]["sparse"] < found["decode_tokens"]["sparse"]
    assert 0 < found["load_seconds"]["disk"] < loaded.seconds
    guarded = sum(one["guarded_steps"] for one in loaded.told)
    alone_guarded = sum(told_by(one)["guarded_steps"] for one in loaded.answers if id(one) not in crowded)
    assert 0 < alone_guarded <= found["guard_steps"][""] <= guarded
    assert (sum(found["guard_events"].values()), found["guard_tokens"]["compared"] > 0) == (0, True)
    assert 0 <= found["guard_tokens"]["agreed"] <= found["guard_tokens"]["compared"] <= guarded
    assert set(found["guard_recall"]) == set(found["guard_output_error"]) == {str(layer) for layer in range(LAYERS)}
    assert all(0 < recall <= 1 for recall in found["guard_recall"].values())
    assert all(0 <= error < 2 for error in found["guard_output_error"].values())


def test_without_an_admin_key_no_stored_text_is_told_and_the_command_says_why(load: Load, capsys: Any) -> None:
    assert load.server.get("/sparse_attn/status")["indexes"]["on"]
    assert main(["explain", "--url", load.server.url, "--prompt", "a"]) == 2
    assert "expected a server with --admin-api-key, got one without" in capsys.readouterr().err


def test_the_time_of_a_step_is_what_a_client_sees_and_the_log_says_which_way(loaded: Load) -> None:
    """Of one answer on each path: on a busy machine a client reads many a token late."""
    server, near = loaded.server, dict.fromkeys(("dense", "sparse"), False)
    for seed, path in itertools.product(range(5, 15), near):  # the first answer leaves the index
        text = f"{make_document('many_keys', seed=seed, num_tokens=1152, num_questions=12).text} a"
        before, logged = server.metrics(), server.log.stat().st_size
        answer, came = streamed(server, text, LONG)
        assert paths_of(answer) == [path]
        after = server.metrics()
        seconds, steps = (after[name][path] - before[name][path] for name in ("step_seconds", "timed_steps"))
        assert steps == LONG - 2 - told_by(answer)["guarded_steps"], "what the guard attends twice is no such step"
        # From the first step's end to the last.
        near[path] |= abs(seconds / steps * (LONG - 2) / (came[-1] - came[1]) - 1.0) < 0.3
        lines = re.findall(r"Decode batch.*sparse rows: (.*), cascade rows: (.*)", server.log.read_text()[logged:])
        assert lines[1:-1] == [("1.00" if path == "sparse" else "0.00", "0.00")] * len(lines[1:-1])
        assert len(lines) >= (LONG - 1) // int(LOG_INTERVAL)
        if all(near.values()):
            break
    assert all(near.values()), "expected one answer of ten on each path whose time is the client's"
    assert ("0.00", "1.00") in re.findall(r"sparse rows: (.*), cascade rows: (.*)", server.log.read_text())
