"""The configuration: what is accepted, what is refused, and that each message says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from prefix_index import FileStore
from sglang_ext.config import (
    ConfigError,
    Settings,
    SparseAttnConfig,
    config_from_dict,
    default_store,
    make_settings,
    parse_profiled,
    settings_from_env,
)
from sglang_ext.options import DecodePath, Offload
from sglang_ext.prefill.builder import covered_tokens
from tests.prefix_index.samples import sample_identity, sample_payload


def parsed(text: str | None) -> SparseAttnConfig:
    return parse_profiled(text, None)[0]


def test_no_text_gives_the_defaults_and_a_file_what_its_text_gives(tmp_path: Path) -> None:
    assert parsed(None) == parsed("") == parsed("{}") == SparseAttnConfig(profile="none")
    file = tmp_path / "config.json"
    file.write_text('{"keep_ratio": 0.25, "pooling": "mean"}')
    assert parsed(f"@{file}") == parsed(file.read_text())
    file.write_text(file.read_text(), "utf-8-sig")  # with a byte order mark, as editors save it
    assert parsed(f"@{file}") == parsed(file.read_text("utf-8-sig"))


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, 1),
        ({"search_period": 3}, 3),
        ({"exactness": "verify"}, 7),
        ({"exactness": "verify", "search_period": 1}, 1),
    ],
)
def test_drafts_use_a_selection_for_longer_than_steps_that_answer(given: dict[str, Any], steps: int) -> None:
    assert config_from_dict(given).steps_per_search == steps
    ahead = {**given, "method": "two_level", "select_ahead": True}
    if given.get("search_period", 1) == 1:
        assert config_from_dict(ahead).steps_per_search == 1


NAN = float("nan")
VERIFY, OFFLOAD = {"exactness": "verify"}, {"offload": {"host_bytes": 99}}
CAPTURE = {"build": "capture", "capture_folder": "x"}
RANKED = {"method": "two_level", "select_ahead": True, "cache_device": "cuda:1"}
#: The least value of each key that counts something.
LEAST = {
    "top_k": 1, "min_top_k": 0, "search_period": 1, "suffix_dense_tokens": 32, "num_sink_tokens": 0,
    "num_recent_pages": 0, "min_sparse_prompt_len": 1, "query_samples": 1, "index_gpu_bytes": 1, "store_max_bytes": 1,
    "store_min_free_bytes": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"keep_ration": 0.1}, ["unknown key 'keep_ration'; did you mean 'keep_ratio'?", "Known keys: build, "]),
        ({"zzz": 0.1}, ["unknown key 'zzz'. Correct or remove it.", "Known keys: build, "]),
        *[({name: least - 1}, [f"{name} to be {least} or more ", f"got {least - 1}"]) for name, least in LEAST.items()],
        *[({"keep_ratio": ratio}, ["keep_ratio", "above 0 and at most 1", str(ratio)]) for ratio in (0.0, 1.5, NAN)],
        ({"max_keep_ratio": -1}, ["max_keep_ratio", "-1"]),
        *[({"sum_every": every}, ["sum_every", "1 to 64 tokens"]) for every in (0, 65)],
        ({"draft_tokens": 16}, ["draft_tokens", "1 to 15 tokens"]),
        ({"build_align": 24}, ["build_align", "multiple of 16", "24"]),
        *[
            ({"store_timeout_s": seconds}, ["store_timeout_s", "above 0 seconds", str(seconds)])
            for seconds in (0.0, NAN, 1e10)
        ],
        *[({"seed": seed}, ["seed", "0 or more", str(seed)]) for seed in (-1, 1 << 63)],
        ({"store_group": "a\0"}, ["store_group", "a group"]),
        ({"profile": ""}, ["profile", '"none" or null']),
        ({"keep_ratio": "0.1"}, ["keep_ratio", "float", "str"]),
        ({"top_k": 1.5}, ["top_k", "int"]),
        ({"build": True}, ["build", "bool"]),
        ({"build": "share"}, ["build to be one of off, shared, prefill, capture", "got 'share'", "mean 'shared'?"]),
        ({"pooling": "median"}, ["pooling to be one of max, mean", "median"]),
        # What a method has not.
        ({"method": "nope"}, ["method", "nope", "ab_sparse"]),
        ({"method": "token_indx"}, ["method", "did you mean 'token_index'?"]),
        ({"methods": {"ab-sparse": {}}}, ["methods", "did you mean 'ab_sparse'?"]),
        ({"methods": {"ab_sparse": {"block_sizes": 3}}}, ["block_sizes", "did you mean 'block_size'?"]),
        ({"methods": {"ab_sparse": 3}}, ["methods", "int"]),
        ({"select_ahead": True}, ["select_ahead false with a method other than two_level", "'token_index'"]),
        ({"method": "exact", "sum_every": 2}, ["sum_every 1", "other than token_index"]),
        ({"suffix_dense_tokens": 64, "method": "csattention"}, ["other than token_index", "csattention"]),
        # What does not go together.
        ({"method": "two_level", "select_ahead": True, "search_period": 2}, ["search_period 1 with select_ahead", "2"]),
        ({"cache_device": "cuda:1"}, ["cache_device null without select_ahead"]),
        ({**RANKED, "cache_device": "gpu1"}, ["cache_device as cuda:1", "'gpu1'"]),
        ({**RANKED, **OFFLOAD}, ["cache_device null with offload"]),
        ({**RANKED, **VERIFY, "search_period": 1}, ["cache_device null with exactness verify"]),
        ({"suffix_dense_tokens": 64, "trace_folder": "somewhere"}, ["trace_folder", "from prefixes only"]),
        ({**OFFLOAD, **VERIFY}, ["exactness selected with offload"]),
        ({**OFFLOAD, **CAPTURE}, ["build off, shared or prefill with offload"]),
        ({**OFFLOAD, "decode_path": "cascade"}, ["decode_path auto or sparse with offload"]),
        ({**VERIFY, "decode_path": "stock"}, ["decode_path auto or sparse with exactness verify", "does nothing"]),
        ({**RANKED, "cache_device": "cuda:1", "decode_path": "cascade"}, ["auto or sparse with cache_device"]),
        ({**OFFLOAD, "trace_folder": "x"}, ["trace_folder null with offload"]),
        ({**VERIFY, **CAPTURE}, ["build off, shared or prefill with exactness"]),
        ({**VERIFY, "quality_slo": 0.2}, ["quality_slo null", "every draft is compared"]),
        ({"quality_slo": 0.2, "guard_every": 0}, ["quality_slo null with guard_every 0", "0.2"]),
        ({"offload": {}}, ["host_bytes", "offload"]),
        ({"offload": {"host_bytes": 9, "to": 3}}, ["unknown field `to`"]),
        ({"offload": {"host_bytes": 9}}, ["offload.host_bytes", "16 or more", "9"]),
        ({"offload": {"host_bytes": 99, "select_prefill_tokens": 513}}, ["select_prefill_tokens from 1 to 512", "513"]),
        ({"offload": {"host_bytes": 99, "folder_bytes": 99}}, ["offload.folder with offload.folder_bytes"]),
        ({"store_remote": "ftp://host"}, ["store_remote", "s3://BUCKET/PREFIX", "ftp://host"]),
        ({"store_remote": "/a/folder"}, ["store_remote", "folder or service is named by --sparse-attn-store"]),
        ({"store_remote": ["s3://b", 3]}, ["store_remote", "str"]),
        ({"store_remote": ["s3://b", "ipc:///x"]}, ["store_remote", "ipc:///x"]),
        ([], ["object", "array"]),
        (3, ["object", "int"]),
    ],
    ids=str,
)
def test_a_bad_configuration_is_refused_with_what_was_expected_and_what_came(given: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(json.dumps(given))
    message = str(caught.value)
    assert message.startswith("--sparse-attn-config")
    for word in words:
        assert word in message
    assert ("Known keys" in message) == ("unknown key" in message)


def integers(kind: type) -> list[str]:
    return [name for name, hint in get_type_hints(kind).items() if int in (hint, *get_args(hint))]


@pytest.mark.parametrize("number", [10**30, -(10**30), 1 << 63, 1e400])
def test_a_number_that_nothing_can_hold_is_refused_with_its_name(number: float) -> None:
    beside: dict[str, Any] = {"host_bytes": 99, "folder": "x"}
    given = [{name: number} for name in integers(SparseAttnConfig)]
    given += [{"offload": {**beside, name: number}} for name in integers(Offload)]
    names = [*integers(SparseAttnConfig), *integers(Offload)]
    assert len(names) > 25
    for name, one in zip(names, given, strict=True):
        with pytest.raises(ConfigError, match=name) as caught:
            parsed(json.dumps(one))
        assert (f"got {number}" if isinstance(number, int) else "got `float`") in str(caught.value)


def test_a_number_that_no_float_holds_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match="list_ratio to be finite, got -inf"):
        parsed(json.dumps({"methods": {"csattention": {"list_ratio": -(10**400)}}}))


def test_a_missing_file_is_refused_with_its_path_and_one_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(ConfigError, match="readable file after '@'") as caught:
        parsed(f"@{file}")
    assert str(file) in str(caught.value)
    for content, words in ((b"\xff\xfe\x00", "readable file"), (b"{", "JSON error"), (b"9" * 5000, "JSON error")):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            parsed(f"@{file}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"keep_ratio": 0.5, "top_k": 9, "keep_ratio": 0.1}', ["'keep_ratio' stands there twice"]),
        ('{"offload": {"host_bytes": 99, "host_bytes": 98}}', ["'host_bytes' stands there twice"]),
        (r'{"trace_folder": "x\ud800"}', ["text in Unicode", r"'\ud800' is half a character"]),
        ('{"top_k": "caf\udce9"}', ["text in Unicode", r"'\udce9'", "save or type it as UTF-8"]),  # typed in Latin-1
        ('{"quality_slo": Infinity}', ["quality_slo to be a finite error", "inf"]),  # the scheduler would get null
    ],
)
def test_text_of_which_something_would_be_lost_is_refused(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_store_folder_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected an existing folder.*mkdir -p"):
        make_settings(None, str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("store", ["s3://bucket/prefix", "mooncake://m:1", "http://host", "ipc://"])
def test_a_store_that_is_neither_folder_nor_service_is_refused(store: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a folder or a service's ipc://SOCKET.*'store_remote'"):
        make_settings(None, store)


def test_a_service_is_taken_as_it_is_and_a_file_url_as_its_folder(tmp_path: Path) -> None:
    assert make_settings(None, f"ipc://{tmp_path}/none.sock").store == f"ipc://{tmp_path}/none.sock"
    assert make_settings(None, f"file://{tmp_path}").store == str(tmp_path)


def test_limits_and_tiers_of_a_service_are_its_own() -> None:
    for own in ({"store_max_bytes": 5_000_000}, {"store_min_free_bytes": 0}, {"store_remote": "s3://bucket"}):
        with pytest.raises(ConfigError, match=r"together with a store service.*sglang-ext store serve"):
            make_settings(json.dumps(own), "ipc:///run/none.sock")


def test_without_a_store_the_default_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = make_settings(None, None)
    assert settings.store == default_store() == str(tmp_path / "sglang-ext" / "store")
    assert Path(settings.store).is_dir()


def test_the_flag_alone_expects_no_index_that_cannot_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def path(text: str | None = None, store: str | None = None) -> DecodePath:
        return make_settings(text, store).config.decode_path

    assert path() is DecodePath.CASCADE
    for text in ('{"build": "shared"}', '{"store_remote": "file:///shared"}'):
        assert path(text) is DecodePath.AUTO
    for needs in (OFFLOAD, VERIFY, RANKED | {"cache_device": "cuda:1"}):
        assert path(json.dumps(needs)) is DecodePath.AUTO, "it waits for indexes, and would never use one"
    assert path('{"decode_path": "sparse"}') is DecodePath.SPARSE
    assert path(None, str(tmp_path)) is DecodePath.AUTO, "named"
    with FileStore(default_store()) as store:
        store.put(sample_payload(sample_identity(range(64))))
    assert path() is DecodePath.AUTO, "it has an index"


def test_settings_survive_dump_and_load(tmp_path: Path) -> None:
    text = json.dumps({"layer_plan": ["dense", {"reuse": 0, "head_map": [1, 0]}], "top_k": 7, "build": "prefill"})
    settings = make_settings(text, str(tmp_path))
    assert Settings.load(settings.dump()) == settings


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), (" ON ", True), ("0", False), ("", False)])
def test_the_environment_enables(value: str, on: bool, tmp_path: Path) -> None:
    environ = {
        "SGLANG_SPARSE_ATTN": value,
        "SGLANG_SPARSE_ATTN_STORE": str(tmp_path),
        "SGLANG_SPARSE_ATTN_CONFIG": '{"top_k": 5}',
    }
    settings = settings_from_env(environ)
    assert (settings is not None) == on
    if settings:
        assert (settings.config.top_k, settings.store) == (5, str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "budgets"),
    [
        ({"keep_ratio": 0.1}, {2000: 200, 2009: 200, 1000: 128, 100: 100}),
        ({"keep_ratio": 0.1, "min_top_k": 300}, {1000: 300}),
        ({"keep_ratio": 0.001, "min_top_k": 0}, {16: 1}),
        ({"top_k": 64, "keep_ratio": 1.0}, {1000: 64}),
        ({"top_k": 5000}, {1000: 1000}),
        ({"top_k": 300, "keep_ratio": 0.2}, {1000: 200}),
        ({}, {800: 128, 8192: 1024, 16384: 2048, 40_960: 2048, 131_072: 6553}),
        ({"min_top_k": 3000}, {8192: 3000}),
    ],
)
def test_budget(fields: dict[str, Any], budgets: dict[int, int]) -> None:
    config = msgspec.convert(fields, SparseAttnConfig)
    assert {prefix_len: config.budget(prefix_len) for prefix_len in budgets} == budgets


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_k": 8}, 8),
        ({"top_k": 8, "group_growth": "sqrt"}, 12),
        ({"top_k": 60, "group_growth": "sqrt"}, 64),
        ({"keep_ratio": 0.25, "group_growth": "sqrt", "max_keep_ratio": 0.3, "min_top_k": 0}, 19),
    ],
)
def test_the_budget_of_a_group_of_two_behind_64_tokens(fields: dict[str, Any], expected: int) -> None:
    plain = {"group_growth": "none", "max_keep_ratio": 1.0}
    assert msgspec.convert({**plain, **fields}, SparseAttnConfig).group_budget(64, 2) == expected


def test_covered_tokens() -> None:
    assert [covered_tokens(*one) for one in ((1023, 64), (1024, 64), (15, 16))] == [960, 1024, 0]
