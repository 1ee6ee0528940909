"""The longest index of a prompt, and the named reason where there is none."""

from __future__ import annotations

import logging
import shutil
from typing import Any

import msgspec
import pytest

from prefix_index import page_hashes
from sglang_ext.prefix.directory import PrefixDirectory

PROMPT = list(range(200))


def _directory(bench: Any, **changes: Any) -> PrefixDirectory:
    fields = {"min_prefix_len": 16, "rescan_seconds": 0.0, **changes}
    return PrefixDirectory(
        bench.store, fields.pop("model", bench.model), fields.pop("profile", bench.profile), **fields
    )


def test_another_model_or_profile_is_a_mismatch_that_names_the_field(bench: Any) -> None:
    bench.put(PROMPT[:96])
    other = msgspec.structs.replace(bench.model, kv_dtype="bfloat16")
    found = _directory(bench, model=other).lookup({"extra_key": None}, PROMPT)
    assert (found.entry, found.reason) == (None, "index_mismatch")
    assert "kv_dtype" in str(found.detail)
    assert "float32" in str(found.detail)
    assert "bfloat16" in str(found.detail)
    found = _directory(bench, profile="other").lookup({"extra_key": None}, PROMPT)
    assert found.reason == "index_mismatch"
    assert "profile_digest" in str(found.detail)


def test_short_prompts_and_short_indexes_are_short_prefix(bench: Any) -> None:
    bench.put(PROMPT[:64])
    directory = _directory(bench, min_prefix_len=100)
    assert directory.lookup({"extra_key": None}, PROMPT[:99]).reason == "short_prefix"
    assert directory.lookup({"extra_key": None}, PROMPT).reason == "short_prefix"


def test_a_store_folder_that_goes_away_leaves_what_is_known(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    bench.put(PROMPT[:96])
    directory = _directory(bench)
    assert directory.lookup({"extra_key": None}, PROMPT).entry is not None
    shutil.rmtree(bench.store.folder)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert directory.lookup({"extra_key": None}, PROMPT[:96]).entry is not None
    assert len(caplog.records) == 1, "said once, not at every request"
    assert "cannot be scanned" in caplog.text


def test_a_look_up_hands_on_the_hashes_that_it_made(bench: Any) -> None:
    expected = page_hashes(PROMPT[:120])
    assert list(_directory(bench).lookup({"extra_key": None}, PROMPT[:120]).hashes) == expected
    bench.put(PROMPT[:64])
    assert list(_directory(bench).lookup({"extra_key": None}, PROMPT[:120]).hashes) == expected
    assert _directory(bench).lookup({"extra_key": None}, PROMPT[:3]).hashes == ()
