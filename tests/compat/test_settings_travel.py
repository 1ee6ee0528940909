"""Settings on SGLang's ServerArgs record: put there by flags, by the environment, by `plugin.server_args`. And flags
that stop the start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.profiles import PROFILE_FILE
from tests.compat.sglang_process import GROUP, in_sglang

pytestmark = GROUP

MODEL = Path(__file__).resolve().parents[2] / "models" / "needle"


def made_records(store: str, model: str) -> dict[str, Any]:
    """What each way of making a record leaves on it, after a travel between processes."""
    import os
    import pickle

    from sglang_ext.compat.server_args import settings_of
    from sglang_ext.config import ConfigError
    from sglang_ext.plugin import server_args

    out = {}

    def told(record):
        settings = settings_of(pickle.loads(pickle.dumps(record)))
        return None if settings is None else [settings.config.top_k, settings.store]

    common = {"model_path": model, "device": "cpu", "attention_backend": "torch_native"}
    out["by function"] = told(server_args(config={"top_k": 5}, store=store, **common))
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    flags = ["--model-path", model, "--device", "cpu", "--attention-backend", "torch_native"]
    sparse = ["--sparse-attn", "--sparse-attn-store", store, "--sparse-attn-config", '{"top_k": 6}']
    out["by flags"] = told(prepare_server_args(flags + sparse))
    out["no flag"] = told(prepare_server_args(flags))
    out["user's choice kept"] = prepare_server_args(flags + sparse).attention_backend
    os.environ.update(SGLANG_SPARSE_ATTN="1", SGLANG_SPARSE_ATTN_STORE=store, SGLANG_SPARSE_ATTN_CONFIG='{"top_k": 7}')
    out["by environment, a record of the user"] = told(ServerArgs(**common))
    out["by environment, flags"] = told(prepare_server_args(flags))
    out["flags before environment"] = told(prepare_server_args(flags + sparse))
    try:
        server_args(config={"nope": 1}, store=store, **common)
    except ConfigError as error:
        out["bad config"] = str(error)
    try:
        server_args(store="/nowhere", **common)
    except ConfigError as error:
        out["bad store"] = str(error)
    try:
        server_args(config={"exactness": "verify"}, store=store, speculative_num_steps=3, **common)
    except ConfigError as error:
        out["given twice"] = str(error)
    return out


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    store = str(tmp_path_factory.mktemp("store"))
    return {"store": store, **in_sglang("tests.compat.test_settings_travel:made_records", store, str(MODEL))}


@pytest.mark.parametrize(
    ("how", "top_k"),
    [
        ("by function", 5),
        ("by flags", 6),
        ("by environment, a record of the user", 7),
        ("by environment, flags", 7),
        ("flags before environment", 6),
    ],
)
def test_settings_survive_pickling_as_they_go_to_the_scheduler(records: Any, how: str, top_k: int) -> None:
    assert records[how] == [top_k, records["store"]]


def test_other_records_have_none_and_a_bad_configuration_raises(records: Any) -> None:
    assert records["no flag"] is None
    assert records["user's choice kept"] == "torch_native", "the attention backend stays the user's"
    assert "nope" in records["bad config"]
    assert "/nowhere" in records["bad store"]
    assert "expected no --speculative-num-steps with exactness verify" in records["given twice"]


#: Flags, and words of the message: each from another place that refuses. What else a configuration or tensor
#: parallelism cannot be: tests/serving/test_config.py, test_flags.py.
BAD_FLAGS: dict[str, tuple[list[str], list[str]]] = {
    "missing store": (["--sparse-attn-store", "/nowhere/store"], ["/nowhere/store", "expected an existing folder"]),
    "unknown key": (["--sparse-attn-config", '{"keep_ration": 0.1}'], ["keep_ration", "Known keys"]),
    "tp, capturing": (
        ["--tp-size", "2", "--sparse-attn-config", '{"build": "capture", "capture_folder": "c"}'],
        ["tensor parallelism (--tp-size)", "build='capture'", "tp_size=2", "calibrate on one GPU"],
    ),
    "verify, with speculation of SGLang's own": (
        ["--sparse-attn-config", '{"exactness": "verify"}', "--speculative-algorithm", "NGRAM"],
        ["expected no --speculative-algorithm with exactness verify", "remove --speculative-algorithm"],
    ),
    "verify, with more drafts than the table of slots has room for": (
        ["--sparse-attn-config", '{"exactness": "verify", "draft_tokens": 8}'],  # SGLang's pages are of one token
        ["draft_tokens of at most 7 with pages of one token", "got 8", "--page-size 16"],
    ),
    "verify, with several ranks": (
        ["--sparse-attn-config", '{"exactness": "verify"}', "--tp-size", "2"],
        ["tensor parallelism (--tp-size) beside exactness verify", "tp_size=2"],
    ),
    "verify's algorithm without verify": (
        ["--speculative-algorithm", "SPARSE_VERIFY"],
        ["expected exactness verify", "got selected"],
    ),
    "what another flag sets": (
        ["--rl-on-policy-target", "fsdp", "--attention-backend", "triton"],
        ["expected no deterministic inference", "got enable_deterministic_inference=True"],
    ),
    "dp of attention": (
        ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"],
        ["data parallelism", "_size=2"],
    ),
    "pp": (["--pp-size", "2"], ["pipeline parallelism (--pp-size)"]),
    "another model's profile": (
        ["--sparse-attn-config", '{"profile": "OTHER"}'],
        ["profile: expected config_digest=", "it is of another model", "set 'profile' to \"none\""],
    ),
    "another model's layer plan": (
        ["--sparse-attn-config", '{"profile": "none", "layer_plan": ["dense", "anchor"]}'],
        ["layer_plan: expected 6 layers in the plan (the model's), got 2"],
    ),
    "a layer plan that ranks cannot share": (
        [
            "--tp-size",
            "2",
            "--sparse-attn-config",
            '{"profile": "none", "layer_plan": ["dense", "anchor", {"reuse": 1, "head_map": [1, 0]}, "dense", "dense", '
            '"dense"]}',
        ],
        ["layer_plan: layer 2: expected KV head 0 to reuse a selection of its own rank 0 of 2", "Serve with fewer"],
    ),
}


def said_of(given: dict[str, list[str]]) -> dict[str, tuple[Any, str]]:
    """(exit status, what is said of them) of each set of flags."""
    import contextlib
    import io

    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    results: dict[str, tuple[Any, str]] = {}
    for name, flags in given.items():
        error, status = io.StringIO(), None
        with contextlib.redirect_stderr(error):
            try:
                record = prepare_server_args(flags)
                getattr(record, "resolve_once", lambda: None)()  # as 0.5.23 does when it launches
                record.check_server_args()
            except SystemExit as ended:
                status = ended.code
        results[name] = (status, error.getvalue())
    return results


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Any:
    profile = json.loads((MODEL / PROFILE_FILE).read_text())
    profile["model"]["config_digest"] = "f" * 64
    other = tmp_path_factory.mktemp("other") / "profile.json"
    other.write_text(json.dumps(profile))
    base = ["--model-path", str(MODEL), "--device", "cpu", "--sparse-attn"]
    wanted = {
        name: base + [flag.replace("OTHER", str(other)) for flag in flags] for name, (flags, _) in BAD_FLAGS.items()
    }
    return in_sglang("tests.compat.test_settings_travel:said_of", wanted)


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags_stop_the_start_with_a_message(refused: dict[str, Any], name: str) -> None:
    status, output = refused[name]
    assert status == 2, output
    assert "Traceback" not in output
    line = next(line for line in output.splitlines() if line.startswith("sglang-ext:"))
    for word in BAD_FLAGS[name][1]:
        assert word in line
