"""Text from outside at each border where it leaves: the log, /get_server_info, reports, traces, captures."""

from __future__ import annotations

import io
import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from prefix_index import printable, printable_values
from sglang_ext import logs
from sglang_ext.config import Settings
from sglang_ext.decode.trace import Prefill, read_trace
from sglang_ext.prefill.recorder import MAX_CAPTURES
from sglang_ext.prefix.explanation import explain_prompt
from tests.serving import admitting
from tests.serving.test_captures import _captures, _events, _run
from tests.serving.test_trace import prefill

HOSTILE = "a\n[2026-01-01] INFO all is well\r\x1b[2J\x9b2J\u2028\u202e\ud800\udce9\x00"
SHOWN = r"a\n[2026-01-01] INFO all is well\r\x1b[2J\x9b2J\u2028\u202e\ud800\xe9\x00"


def test_what_does_not_print_is_shown_as_python_writes_it() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("Grüße, 世界: 1 < 2") == "Grüße, 世界: 1 < 2"
    assert printable("") == ""
    values = {HOSTILE: [HOSTILE, (1, 2.5, None, True)], "deep": {"in": {1: HOSTILE}}}
    assert printable_values(values) == {SHOWN: [SHOWN, [1, 2.5, None, True]], "deep": {"in": {1: SHOWN}}}


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What stands in a log that somebody else writes, as SGLang does."""
    logs.install()
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("[now] %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    yield written
    logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("name", ["sglang_ext.some.room", "prefix_index.service", "prefix_kernels"])
def test_a_line_of_the_log_cannot_be_forged(log: io.StringIO, name: str) -> None:
    logger = logging.getLogger(name)
    logger.warning("request %s: %s", HOSTILE, ValueError(HOSTILE))
    try:
        raise OSError(HOSTILE)
    except OSError:
        logger.exception("request %s failed", HOSTILE)
    first, second, *traceback = log.getvalue().splitlines()
    assert first == f"[now] WARNING request {SHOWN}: {SHOWN}"
    assert second == f"[now] ERROR request {SHOWN} failed"
    assert all(line.startswith("  | ") for line in traceback)
    assert printable("".join(traceback)) == "".join(traceback)
    assert any("OSError: a" in line for line in traceback)


def test_a_long_message_is_cut_and_a_wrong_one_ends_nothing(log: io.StringIO) -> None:
    logging.getLogger("sglang_ext").warning("request %s", "x" * (1 << 20))
    assert len(log.getvalue()) < 2 * logs.MAX_CHARS
    logging.getLogger("sglang_ext").warning("request %s %s", "one")
    assert log.getvalue().endswith("[now] WARNING request %s %s ('one',)\n")


def test_a_process_without_a_log_still_says_its_warnings(capfd: Any) -> None:
    import subprocess
    import sys

    code = (
        "import logging; from sglang_ext import logs; logs.install(); logs.install(); "
        "logging.getLogger('sglang_ext.x').warning('once'); logging.getLogger('sglang_ext.x').info('not said')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert capfd.readouterr().err.splitlines() == ["once"]


def test_a_refusal_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from sglang_ext.compat.server_args import refuse

    with pytest.raises(SystemExit):
        refuse(f"expected a profile, got {HOSTILE}")
    assert capsys.readouterr().err == f"sglang-ext: expected a profile, got {SHOWN}\n"


def test_server_info_can_be_sent_whatever_lies_in_the_store(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang sends it as msgpack between its processes, and as JSON to who asks."""
    from sglang_ext.compat import scheduler_hooks

    runtime = start()
    folder = os.fsencode(runtime.store.folder)
    for name in (b"N\xe9", b"line\nend", b"\x1b[2J"):
        Path(os.fsdecode(folder + b"/" + name)).write_bytes(b"not ours")
    runtime.store.rescan(full=True)
    monkeypatch.setattr(scheduler_hooks, "_runtime", runtime)
    result = SimpleNamespace(internal_state={})
    scheduler_hooks.after_get_internal_state(result, None)
    problems = msgspec.msgpack.decode(msgspec.msgpack.encode(result.internal_state))["sparse_attn"]["store_problems"]
    assert json.loads(json.dumps(result.internal_state, ensure_ascii=False).encode())
    assert len(problems) == 3
    for name in (r"/N\xe9:", r"/line\nend:", r"/\x1b[2J:"):
        assert any(name in problem for problem in problems), problems


def test_an_explanation_can_be_sent_whatever_lies_in_the_store(start: Any) -> None:
    runtime = start()
    folder = os.fsencode(runtime.store.folder)
    Path(os.fsdecode(folder + b"/N\xe9")).write_bytes(b"not ours")
    settings = Settings(config=runtime.config, store=str(runtime.store.folder))
    found = explain_prompt(settings, runtime.model, range(64), {"extra_key": None}, str)
    assert json.loads(json.dumps(msgspec.to_builtins(found), ensure_ascii=False).encode())
    (problem,) = found.problems
    assert problem.count(r"/N\xe9: ") == 1, "its path, once"


def test_reports_and_traces_hold_text(start: Any, tmp_path: Path) -> None:
    runtime = start(build="prefill", trace_folder=str(tmp_path / "trace"))
    request = runtime.came(f"trace-{HOSTILE}", range(100, 140))
    admitting.prefill(runtime, f"trace-{HOSTILE}", 40)
    runtime.slot_freed(request, 0, finished=True)
    (line,), (path,) = admitting.report(runtime), (tmp_path / "trace").iterdir()
    assert line["rid"] == f"trace-{SHOWN}"
    assert list(read_trace(path))[1:] == [Prefill(f"trace-{SHOWN}", 0, 40)]


def test_a_trace_is_for_its_user_alone_and_bounded(
    start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(trace_folder=str(tmp_path / "new"))
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    folder = tmp_path / "trace"
    folder.mkdir(mode=0o755)
    left = folder / f"steps-{os.getpid()}.trace"  # of an earlier process of this number, as containers have them
    left.write_bytes(b"x" * 100)
    left.chmod(0o644)
    runtime = start(trace_folder=str(folder))
    runtime.forwards.trace._left = 100
    for number in range(20):
        prefill(runtime, [f"trace-{number}"], [0], [10])
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    written = list(read_trace(path))[1:]
    assert 1 <= len(written) < 10
    assert sum(len(msgspec.msgpack.encode(one)) + 4 for one in written) <= 100
    assert [r.getMessage() for r in caplog.records].count(
        "sparse attention: the trace ends before its time; expected less to write down; trace fewer requests, or "
        "restart the server"
    ) == 1


def test_a_step_that_cannot_be_traced_ends_the_trace_and_not_the_server(
    start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = start(trace_folder=str(tmp_path / "trace"))
    prefill(runtime, ["trace-a"], ["odd"], [10])
    prefill(runtime, ["trace-b"], [0], [10])
    assert "the trace ends before its time" in caplog.text
    (path,) = (tmp_path / "trace").iterdir()
    assert len(list(read_trace(path))) == 1


def test_captures_are_for_their_user_alone_and_few(tmp_path: Path) -> None:
    captures = _captures(tmp_path)
    for number in range(MAX_CAPTURES + 2):
        _run(captures, str(number), 1)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == MAX_CAPTURES
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    lost = _events(tmp_path)[MAX_CAPTURES:]
    assert [(event["status"], event["reason"]) for event in lost] == [("failed", "capture_memory")] * 2
    assert f"fewer than {MAX_CAPTURES} captures" in lost[0]["detail"]
    files[0].unlink()
    _run(captures, "again", 1)
    assert _events(tmp_path)[-1]["status"] == "captured"
