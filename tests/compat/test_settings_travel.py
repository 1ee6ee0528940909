"""Settings on SGLang's ServerArgs record: put there by flags, by the environment, by `plugin.server_args`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from tests.compat.sglang_process import GROUP, in_sglang

pytestmark = GROUP


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
    return out


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    store = str(tmp_path_factory.mktemp("store"))
    model = Path(__file__).resolve().parents[2] / "models" / "needle"
    return {"store": store, **in_sglang("tests.compat.test_settings_travel:made_records", store, str(model))}


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


_BAD_VALUES = {"disaggregation_mode": "prefill", "speculative_algorithm": "EAGLE", "dllm_algorithm": "x"}


def test_every_mode_that_is_not_supported_is_refused_by_name() -> None:
    import dataclasses
    from types import SimpleNamespace

    from sglang.srt.server_args import ServerArgs

    from sglang_ext.compat.server_args import _UNSUPPORTED, unsupported

    known = getattr(ServerArgs, "__struct_fields__", None) or [f.name for f in dataclasses.fields(ServerArgs)]
    fine = {"load_format": "auto", **{field: value for field, value, _ in _UNSUPPORTED}}
    assert unsupported(SimpleNamespace(**fine)) is None
    for field, value, name in _UNSUPPORTED:
        assert field in known, f"this SGLang has no {field}: the check never fires"
        bad = _BAD_VALUES.get(field, 2 if value == 1 else True)
        message = unsupported(SimpleNamespace(**{**fine, field: bad}))
        assert message is not None
        assert name in message
        assert f"{field}={bad!r}" in message
    message = unsupported(SimpleNamespace(**{**fine, "load_format": "remote"}))
    assert message is not None
    assert "--load-format" in message
    assert "'remote'" in message
