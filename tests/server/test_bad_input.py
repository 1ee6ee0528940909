"""Bad input: a clear message, and a server that goes on with dense attention where one index is at fault."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from prefix_index import (
    ArrayKey,
    BuildInfo,
    FileStore,
    IndexIdentity,
    IndexPayload,
    ModelFingerprint,
    namespace_digest,
    page_hashes,
)
from sglang_ext.quality.vocabulary import encode

STEPS = 8

# -- the start ---------------------------------------------------------------------------------------------------


def _launch(model: str, *flags: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--device", "cpu", *flags],
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout + done.stderr


def test_an_unknown_config_key_stops_the_start() -> None:
    status, output = _launch("models/needle", "--sparse-attn", "--sparse-attn-config", '{"keep_ration": 0.1}')
    assert status == 2
    assert "keep_ration" in output
    assert "Known keys" in output
    assert "Traceback" not in output


#: Flags, and words of the message. All are tried in one process: importing SGLang takes seconds.
BAD_FLAGS: dict[str, tuple[list[str], list[str]]] = {
    "wrong type": (["--sparse-attn-config", '{"keep_ratio": "x"}'], ["keep_ratio", "float"]),
    "out of range": (["--sparse-attn-config", '{"keep_ratio": 2}'], ["keep_ratio", "at most 1", "2.0"]),
    "no JSON": (["--sparse-attn-config", "{"], ["JSON"]),
    "missing @file": (["--sparse-attn-config", "@/nowhere/c.json"], ["/nowhere/c.json", "readable file"]),
    "missing store": (["--sparse-attn-store", "/nowhere/store"], ["/nowhere/store", "expected an existing folder"]),
    "store is a file": (["--sparse-attn-store", "/etc/hostname"], ["/etc/hostname", "expected an existing folder"]),
    "tp, capturing": (
        ["--tp-size", "2", "--sparse-attn-config", '{"build": "capture", "capture_folder": "c"}'],
        ["tensor parallelism (--tp-size)", "build='capture'", "tp_size=2", "calibrate on one GPU"],
    ),
    "tp, traced": (
        ["--tp-size", "2", "--sparse-attn-config", '{"trace_folder": "t"}'],
        ["no trace_folder", "tp_size=2"],
    ),
    "pp": (["--pp-size", "2"], ["pipeline parallelism (--pp-size)"]),
    "dp": (["--dp-size", "2"], ["data parallelism (--dp-size)"]),
    "torch.compile": (["--enable-torch-compile"], ["--enable-torch-compile"]),
}

_TRY_ALL = """
import contextlib, io, json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
results = {}
for name, flags in json.loads(sys.argv[1]).items():
    err = io.StringIO()
    status = None
    with contextlib.redirect_stderr(err):
        try:
            record = prepare_server_args(flags)
            getattr(record, "resolve_once", lambda: None)()  # as 0.5.23 does when it launches
            record.check_server_args()
        except SystemExit as error:
            status = error.code
        except BaseException as error:
            status = repr(error)
    results[name] = [status, err.getvalue()]
print("RESULT", json.dumps(results))
"""


@pytest.fixture(scope="module")
def refused(model_path: str) -> dict[str, Any]:
    import json

    base = ["--model-path", model_path, "--device", "cpu", "--sparse-attn"]
    wanted = {name: base + flags for name, (flags, _) in BAD_FLAGS.items()}
    done = subprocess.run(
        [sys.executable, "-c", _TRY_ALL, json.dumps(wanted)], capture_output=True, text=True, timeout=900
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    results: dict[str, Any] = json.loads(lines[0][7:])
    return results


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags_stop_the_start_with_a_message(refused: dict[str, Any], name: str) -> None:
    status, output = refused[name]
    assert status == 2, output
    line = next(line for line in output.splitlines() if line.startswith("sglang-ext:"))
    for word in BAD_FLAGS[name][1]:
        assert word in line


_PATCHED = """
import importlib.metadata as metadata, sys
real = metadata.version
metadata.version = lambda name: "0.5.99" if name == "sglang" else real(name)
sys.argv = ["launch_server", *{argv!r}]
from sglang_ext.plugin import register
register()
print("sglang" in sys.modules)
"""


def _register_with_version_0_5_99(*argv: str, **environment: str) -> tuple[int, str, str]:
    code = _PATCHED.format(argv=list(argv))
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)
    return done.returncode, done.stdout.strip(), done.stderr


@pytest.mark.parametrize(
    ("argv", "environment"),
    [(["--sparse-attn"], {}), (["--sparse-attn-store=x"], {}), ([], {"SGLANG_SPARSE_ATTN": "1"})],
)
def test_an_unsupported_sglang_is_refused_by_name_when_asked_for(argv: list[str], environment: dict[str, str]) -> None:
    status, _, err = _register_with_version_0_5_99(*argv, **environment)
    assert status == 2
    assert "expected SGLang 0.5.16 or 0.5.23; found 0.5.99" in err
    assert "pip install sglang==" in err


def test_an_unsupported_sglang_without_the_flag_is_left_alone() -> None:
    status, imported, err = _register_with_version_0_5_99("--model-path", "x")
    assert (status, imported, err) == (0, "False", "")


def test_the_version_message_names_what_is_missing() -> None:
    from sglang_ext.compat.versions import SUPPORTED, unsupported_message

    assert all(unsupported_message(version) is None for version in SUPPORTED)
    assert "found no SGLang distribution" in str(unsupported_message(None))
    for version in ("0.5.17", "0.5.16.post1", "0.5.23rc1", "0.6.0"):
        assert f"found {version}." in str(unsupported_message(version))


# -- a store with faults -------------------------------------------------------------------------------------------


class Faults:
    """A store whose `first` is cut, whose `long` has a wrong byte in an array, and that holds foreign things."""

    def __init__(self, store: Path, built: Any, texts: Any) -> None:
        self.store = store
        files = {line["id"]: Path(line["path"]).name for line in built.report if "path" in line}
        self.first, self.long, self.named = (
            next(store.rglob(files[name])) for name in ("first", "long", "second-named")
        )
        self.first.write_bytes(self.first.read_bytes()[:-5000])
        raw = bytearray(self.long.read_bytes())
        raw[len(raw) // 2] ^= 0xFF
        self.long.write_bytes(raw)
        self.named.write_bytes(b"not an index at all" * 100)
        (store / "notes.txt").write_text("somebody's notes")
        self.other_model(texts)

    def other_model(self, texts: Any) -> None:
        """An index of `unindexed` by a model in another dtype."""
        with FileStore(self.store) as store:
            own = store.list()[0].identity
            tokens = encode(texts.unindexed.text)
            identity = IndexIdentity.for_prefix(
                namespace=namespace_digest({}),
                page_hashes=page_hashes(tokens),
                model=msgspec.structs.replace(own.model, kv_dtype="bfloat16"),
                profile_digest=own.profile_digest,
            )
            arrays = {ArrayKey("exact.keys", 0, 0): np.zeros(4, np.float32)}
            store.put(
                IndexPayload(
                    identity=identity, arrays=arrays, spec={}, stats={}, info=BuildInfo(created=1.0, build_seconds=1.0)
                )
            )


@pytest.fixture(scope="module")
def faults(built: Any, texts: Any, tmp_path_factory: Any) -> Faults:
    return Faults(Path(shutil.copytree(built.store, tmp_path_factory.mktemp("faults") / "store")), built, texts)


@pytest.fixture
def server(serve: Any, faults: Faults, exact_config: Any) -> Any:
    return serve(faults.store, exact_config)


def test_bad_files_are_listed_and_the_rest_is_used(server: Any, faults: Faults, texts: Any) -> None:
    problems = server.state()["store_problems"]
    assert len(problems) == 3
    for path in (faults.first, faults.named, faults.store / "notes.txt"):
        assert any(str(path) in problem for problem in problems), problems
        assert str(path) in server.log.read_text()
    delta = server.delta()
    answer = server.generate(texts.ask(texts.second, 0), STEPS)
    assert server.done(delta).sparse_rows == answer.decode_steps


def test_a_corrupted_array_makes_its_requests_dense_and_the_answer_stays_right(
    server: Any, faults: Faults, texts: Any
) -> None:
    prompt = f"{texts.long} {texts.first.questions[0].text}"
    dense = server.generate(prompt, STEPS, sparse=False)
    delta = server.delta()
    answer = server.generate(prompt, STEPS)
    server.done(delta)
    assert answer.ids == dense.ids
    assert (delta.sparse_rows, delta.fallbacks) == (0, {"index_corrupt": 1})
    assert str(faults.long) in server.log.read_text()
    assert any(str(faults.long) in problem for problem in server.state()["store_problems"])
    # It is offered no more.
    delta = server.delta()
    assert server.generate(prompt, STEPS).ids == dense.ids
    assert server.done(delta).fallbacks == {"no_index": 1}


def test_an_index_of_another_dtype_is_a_mismatch_that_the_log_explains(server: Any, texts: Any) -> None:
    delta = server.delta()
    server.generate(texts.ask(texts.unindexed, 0), STEPS)
    server.done(delta)
    assert (delta.sparse_rows, delta.fallbacks) == (0, {"index_mismatch": 1})
    log = server.log.read_text()
    assert "model.kv_dtype: expected float32, found bfloat16" in log


def test_a_prompt_longer_than_the_context_gets_sglangs_error_and_the_server_lives(server: Any, texts: Any) -> None:
    with pytest.raises(OSError, match=r"(?i)HTTP 400.*(longer|exceed)"):
        server.generate(" ".join([texts.long] * 5), STEPS)
    assert server.generate(texts.ask(texts.second, 1), STEPS).decode_steps == STEPS - 1
    assert server.settled()["requests"] == 0


@pytest.mark.parametrize("value", [True, "no", 3, [], {"sparse_attn": "off"}])
def test_an_odd_value_of_the_opt_out_does_no_harm(server: Any, texts: Any, value: Any) -> None:
    custom = value if isinstance(value, dict) else {"sparse_attn": value}
    body = {
        "text": texts.ask(texts.second, 2),
        "sampling_params": {"temperature": 0, "max_new_tokens": 3, "custom_params": custom},
    }
    from sglang_ext.quality.evaluate import post

    assert post(server.url, "/generate", body)["meta_info"]["completion_tokens"] >= 1


@pytest.mark.parametrize("custom", [[1], "x", 7])
def test_custom_params_that_are_no_object_do_not_end_the_server(server: Any, texts: Any, custom: Any) -> None:
    from sglang_ext.quality.evaluate import post

    sampling = {"temperature": 0, "max_new_tokens": 3, "custom_params": custom}
    with contextlib.suppress(OSError):  # a release may refuse the request; none may die of it
        post(server.url, "/generate", {"text": texts.ask(texts.second, 2), "sampling_params": sampling}, 60)
    assert server.generate(texts.ask(texts.second, 1), STEPS).decode_steps == STEPS - 1


def test_a_store_that_disappears_leaves_the_server_alive(server: Any, faults: Faults, texts: Any) -> None:
    """Last here: the store is gone afterwards. What is resident is still used."""
    prompt = texts.ask(texts.second, 3)
    dense = server.generate(prompt, STEPS, sparse=False)
    server.generate(prompt, STEPS)
    shutil.rmtree(faults.store)
    for _ in range(3):
        assert server.generate(prompt, STEPS).ids == dense.ids
    delta = server.delta()
    server.generate(texts.ask(texts.first, 0), STEPS)
    assert server.done(delta).fallbacks == {"no_index": 1}
    assert server.alive
    assert isinstance(msgspec.convert(server.state()["model"], ModelFingerprint), ModelFingerprint)
