"""A prebuild job on a real store. The engine is a stand-in that builds as the scheduler process does: with a lease."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefix_index import FileStore, IndexIdentity, Retention, namespace_digest, page_hashes
from sglang_ext.cli.prebuild_job import PrebuildJob, PromptBuilder
from sglang_ext.compat.engine import EngineDiedError
from sglang_ext.config import PAGE_TOKENS, Settings, config_from_dict
from sglang_ext.prefill.builder import profile_digest
from sglang_ext.prefill.prompts import LineNumber, Prompt
from tests.prefix_index.samples import sample_model, sample_payload
from tests.token_sources import TextTokens, word_lengths

CONFIG = config_from_dict({"method": "exact", "methods": {"exact": {}}, "min_sparse_prompt_len": 16, "build_align": 16})


def identity_of(ids: list[int]) -> IndexIdentity:
    return IndexIdentity.for_prefix(
        namespace=namespace_digest({}),
        page_hashes=page_hashes(ids, PAGE_TOKENS),
        model=sample_model(),
        profile_digest=profile_digest(CONFIG),
    )


class Engine:
    """Answers as `OfflineEngine` and the runtime behind it do."""

    context_len, vocab_size = 4096, 10_000
    tokens = word_lengths()

    def __init__(self, store: FileStore, events: Path) -> None:
        self.store, self.events = store, events
        self.prefilled: list[str] = []

    def state(self) -> dict[str, Any]:
        return {"model": msgspec.to_builtins(sample_model())}

    def prefill(self, rid: str, ids: list[int], *more: Any) -> None:
        self.prefilled.append(rid)
        identity = identity_of(ids)
        lease = self.store.lease(identity)
        event: dict[str, Any] = {"status": "skipped", "reason": "building_elsewhere", "digest": identity.digest}
        if lease is not None:
            with lease:
                entry = self.store.put(sample_payload(identity))
                event = {"status": "built", "digest": identity.digest, "index_bytes": entry.nbytes}
        with self.events.open("a") as file:
            file.write(json.dumps({"rid": rid, **event}) + "\n")


class WithBos(Engine):
    """Its tokenizer adds a BOS, which is the token of a word of one letter."""

    tokens = TextTokens(lambda text: [len(word) for word in text.split()], bos_token_id=1)


class Full(Engine):
    """Its store takes no index of more than 32 tokens."""

    def prefill(self, rid: str, ids: list[int], *more: Any) -> None:
        if len(ids) <= 32:
            super().prefill(rid, ids, *more)
            return
        self.prefilled.append(rid)
        event = {"rid": rid, "status": "failed", "reason": "StoreFull", "detail": "expected room; delete something"}
        with self.events.open("a") as file:
            file.write(json.dumps(event) + "\n")


class Refused(Engine):
    """Its scheduler never gets the lease."""

    def prefill(self, rid: str, ids: list[int], *more: Any) -> None:
        with self.store.lease(identity_of(ids)):
            super().prefill(rid, ids, *more)


class Vanishing(Refused):
    """The store's folder goes when it first asks for the lease."""

    def prefill(self, rid: str, ids: list[int], *more: Any) -> None:
        super().prefill(rid, ids, *more)
        shutil.rmtree(self.store.folder)


class HalfTold(Engine):
    """What it says of the first prompt is damaged; the second one it refuses."""

    def prefill(self, rid: str, ids: list[int], *more: Any) -> None:
        if self.prefilled:
            raise ValueError("the request is too long")
        super().prefill(rid, ids, *more)
        self.events.write_text(self.events.read_text()[:-9] + "\n")


class Beside(Engine):
    """A second after it has prefilled two prompts, another job does something: by then both were looked at."""

    def __init__(self, other: threading.Timer, store: FileStore, events: Path) -> None:
        super().__init__(store, events)
        self.other = other

    def prefill(self, rid: str, ids: list[int], *more: Any) -> None:
        super().prefill(rid, ids, *more)
        if len(self.prefilled) == 2:
            self.other.start()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Runs a job over prompts of 64 tokens; gives its status, its report, and the store afterwards."""
    store = FileStore(tmp_path / "store", create=True)
    store.open()

    def run(*names: int | Prompt, pin: bool = False, ttl: float | None = None, wait: float = 60.0) -> Any:
        prompts = [n if isinstance(n, Prompt) else Prompt(id=LineNumber(n), input_ids=prompt(n)) for n in names]
        args = argparse.Namespace(pin=pin, ttl=ttl, wait=wait, store=str(store.folder))
        report, events = io.StringIO(), tmp_path / f"events-{time.monotonic_ns()}.jsonl"
        job.made, settings = job.engine(store, events), Settings(config=CONFIG, store="")
        try:
            builder = PromptBuilder(job.made, store, settings, str(events), args)
            status = PrebuildJob(builder.lines, report, args).run(prompts)
        finally:
            job.lines = [json.loads(line) for line in report.getvalue().splitlines()]
        return status, job.lines, store

    job: Any = run
    job.engine, job.store = Engine, store
    yield job
    store.close()


def prompt(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + 64))


def became(lines: list[dict[str, Any]]) -> dict[str, str]:
    """Statuses by id, in the report's order."""
    return {line["id"]: line["status"] for line in lines}


@pytest.mark.parametrize("ending", ["exists", "built"])
def test_what_another_job_builds_is_waited_for_and_built_here_where_it_gives_up(
    job: Any, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = identity_of(prompt(1))
    lease = job.store.lease(identity)

    def finish() -> None:
        if ending == "exists":
            job.store.put(sample_payload(identity))
        lease.release()  # as the kernel does when its holder dies

    timer = threading.Timer(1.0, finish)
    job.engine = partial(Beside, timer)
    status, lines, store = job(1, 2)
    timer.join()
    assert (status, list(became(lines).items())) == (0, [("2", "built"), ("1", ending)])
    assert store.contains(identity)
    assert "another job builds this index; looked at again at the end" in capsys.readouterr().err


def test_what_another_job_does_not_finish_is_skipped_after_the_wait(
    job: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with job.store.lease(identity_of(prompt(1))):
        begun = time.monotonic()
        status, lines, _ = job(1, wait=1.0)
        assert 1.0 <= time.monotonic() - begun < 60
    (line,) = lines
    assert (status, line["status"], line["reason"]) == (1, "skipped", "building_elsewhere")
    assert "within 1 s (--wait), it did not" in line["detail"]
    assert "1 of them not built: others held their leases longer than --wait" in capsys.readouterr().err


def test_a_lease_that_others_are_always_faster_to_take_is_given_up_after_the_wait(job: Any) -> None:
    """The lease is free whenever the job looks, and held whenever its engine asks."""
    job.engine = Refused
    begun = time.monotonic()
    status, lines, _ = job(1, wait=1.2)
    assert 1.2 <= time.monotonic() - begun < 60
    assert (status, lines[0]["status"], lines[0]["reason"]) == (1, "skipped", "building_elsewhere")
    assert len(job.made.prefilled) <= 5, "it sleeps in between"


def test_a_store_that_goes_away_while_the_job_waits_is_a_failed_line(job: Any) -> None:
    job.engine = Vanishing
    status, lines, _ = job(1, wait=60.0)
    assert (status, lines[0]["status"], lines[0]["reason"]) == (1, "failed", "StoreFolderError")


def test_what_cannot_fit_into_a_full_store_is_not_prefilled(job: Any) -> None:
    """Indexes of shorter prompts may fit."""
    job.engine = Full
    lengths = {"a": 64, "same": 64, "shorter": 48, "longer": 64, "longer than the last": 48, "fits": 32, "exists": 32}
    numbers = {"exists": 6}
    prompts = [
        Prompt(id=name, input_ids=prompt(numbers.get(name, number))[:tokens])
        for number, (name, tokens) in enumerate(lengths.items(), 1)
    ]
    status, lines, _ = job(*prompts)
    assert status == 1
    failed = dict.fromkeys(lengths, "failed")
    assert became(lines) == {**failed, "fits": "built", "exists": "exists"}
    assert [rid.split("-", 2)[2] for rid in job.made.prefilled] == ["a", "shorter", "fits"]
    assert {line["reason"] for line in lines if line["status"] == "failed"} == {"StoreFull"}
    expected = "not prefilled: there was no room for an index of 48 tokens, nor is for one of 64: expected room; delete"
    assert lines[3]["detail"].startswith(expected)


def test_warnings_of_a_prompt_are_reported_and_it_is_built(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    job.engine = WithBos
    text = Prompt(id="twice", text="a " + "word " * 64)
    status, (line,), _ = job(text)
    assert (status, line["status"]) == (0, "built")
    (warning,) = line["warnings"]
    assert '"add_special_tokens": false' in warning
    assert f"twice: warning: {warning}" in capsys.readouterr().err
    _, (line,), _ = job(msgspec.structs.replace(text, id="once", add_special_tokens=False))
    assert "warnings" not in line


def test_only_what_sglang_refuses_is_said_to_be_refused(job: Any) -> None:
    job.engine = HalfTold
    status, lines, _ = job(1, 2)
    assert (status, [line["reason"] for line in lines]) == (1, ["JSONDecodeError", "refused_by_sglang"])
    assert lines[1]["detail"] == "the request is too long"


def test_pin_and_ttl_hold_for_what_is_built_and_for_what_exists(job: Any) -> None:
    _, _, store = job(1)
    assert store.list()[0].retention == Retention(), "a line's number is no name"
    begun = time.time()
    status, lines, store = job(1, 2, pin=True, ttl=3600.0)
    assert (status, became(lines)) == (0, {"1": "exists", "2": "built"})
    for entry in store.list():
        assert entry.retention.pinned
        assert 3600 <= entry.retention.expires - begun < 3700
    _, _, store = job(1, 2)
    assert all(entry.retention.pinned for entry in store.list()), "left as it is when the flags are not given"
    before = {entry.digest: entry.retention.expires for entry in store.list()}
    _, _, store = job(1, ttl=7200.0)
    _, _, store = job(2, pin=True)
    assert all(entry.retention.pinned for entry in store.list()), "one flag takes nothing of the other one back"
    assert [entry.retention.expires > before[entry.digest] for entry in store.list()].count(True) == 1
    assert all(entry.retention.expires for entry in store.list())


def test_an_index_gets_its_prompts_id_as_its_name_and_keeps_the_pin_that_somebody_else_gave(job: Any) -> None:
    _, _, store = job(1)
    with FileStore(store.folder) as other:
        other.retain(identity_of(prompt(1)), Retention(pinned=True))
    for one in (Prompt(id="tools", input_ids=prompt(1)), 1):
        status, lines, _ = job(one)
        assert (status, lines[0]["status"]) == (0, "exists")
        with FileStore(store.folder) as other:
            assert other.list()[0].retention == Retention(pinned=True, name="tools")


def test_of_two_prompts_with_one_index_the_first_one_names_it_and_the_second_is_warned(job: Any) -> None:
    """They differ behind the last whole page."""
    prompts = [Prompt(id=name, input_ids=[*prompt(1), token]) for name, token in (("tools", 7), ("travel", 8))]
    for became_first in ("built", "exists"):
        status, (first, second), store = job(*prompts)
        assert (status, first["status"], second["status"]) == (0, became_first, "exists")
        assert "warnings" not in first
        assert "index of 'tools'" in second["warnings"][0]
        assert [entry.retention.name for entry in store.list()] == ["tools"]


def test_an_id_is_any_text(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's report of it has other characters in their place."""
    monkeypatch.setattr("sglang_ext.cli.engines.REPORT_TIMEOUT_S", 1.0)
    named = 'Köln "am" \\Rhein'
    status, lines, store = job(Prompt(id=named, input_ids=prompt(1)))
    assert (status, became(lines)) == (0, {named: "built"})
    assert [entry.retention.name for entry in store.list()] == [named]


def test_a_prompt_that_is_cut_to_less_than_an_index_serves_is_not_prefilled(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = msgspec.structs.replace(CONFIG, min_sparse_prompt_len=40, build_align=32)
    monkeypatch.setitem(globals(), "CONFIG", config)
    status, (cut, built), _ = job(*(Prompt(id=str(count), input_ids=prompt(1)[:count]) for count in (63, 64)))
    assert (status, cut["status"], cut["reason"], built["status"]) == (0, "skipped", "short_prefix", "built")
    told = "expected at least min_sparse_prompt_len=40 tokens, got 32 (63 cut to a multiple of build_align=32)"
    assert cut["detail"] == f"{told}; give a longer prompt, or lower min_sparse_prompt_len"
    assert job.made.prefilled == ["prebuild-1-64"]


def test_no_prompt_lists_the_store(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileStore, "list", lambda _: pytest.fail("which takes 36 ms where 17,000 indexes are"))
    assert became(job(1, 2, pin=True)[1]) == {"1": "built", "2": "built"}


def _broken(text: str) -> list[int]:
    raise {"zero": ZeroDivisionError("by zero"), "silent": AssertionError()}[text]


class Broken(Engine):
    """What a prompt may run into."""

    tokens = TextTokens(_broken)


UNKNOWN = "expected token ids in 0..9999 (the model's vocabulary), got {} at position 70"


@pytest.mark.parametrize(
    ("given", "reason", "detail"),
    [
        ({"text": "zero"}, "ZeroDivisionError", "by zero"),
        ({"text": "silent"}, "AssertionError", "AssertionError()"),
        ({"messages": []}, "refused_by_sglang", "expected text, got messages"),
        *(({"input_ids": [*range(70), n]}, "unknown_tokens", UNKNOWN.format(n)) for n in (-1, 10_000, 1 << 40)),
    ],
)
def test_whatever_a_prompt_runs_into_is_a_failed_line_and_the_next_is_built(
    job: Any, given: dict[str, Any], reason: str, detail: str
) -> None:
    job.engine = Broken
    status, lines, _ = job(Prompt(id="bad", **given), 1)
    assert (status, became(lines)) == (1, {"bad": "failed", "1": "built"})
    assert (lines[0]["reason"], lines[0]["detail"][: len(detail)]) == (reason, detail)
    assert job.made.prefilled == ["prebuild-1-1"], "the bad one never reaches the engine"


class Dying(Engine):
    """Its scheduler dies of the second prompt."""

    def prefill(self, rid: str, ids: list[int], *more: Any) -> None:
        if len(self.prefilled) == 1:
            raise EngineDiedError("expected SGLang's processes to live, got the end of one")
        super().prefill(rid, ids, *more)


def test_the_prompt_that_an_engine_died_of_is_named(job: Any) -> None:
    job.engine = Dying
    with pytest.raises(EngineDiedError):
        job(1, 2, 3)
    assert became(job.lines) == {"1": "built", "2": "failed"}
    assert job.lines[1]["reason"] == "engine_died"
