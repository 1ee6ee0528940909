"""The longest index of a prompt, and the named reason where there is none."""

from __future__ import annotations

import logging
import shutil
from typing import Any

import msgspec
import pytest

from prefix_index import FileStore, page_hashes
from sglang_ext.prefix.directory import PrefixDirectory

PROMPT = list(range(200))


def _directory(bench: Any, **changes: Any) -> PrefixDirectory:
    fields = {"min_prefix_len": 16, "rescan_seconds": 0.0, **changes}
    return PrefixDirectory(
        bench.store, fields.pop("model", bench.model), fields.pop("profile", bench.profile), **fields
    )


def test_the_longest_index_of_the_prompt_wins(bench: Any) -> None:
    for length in (32, 96, 64):
        bench.put(PROMPT[:length])
    directory = _directory(bench)
    for length, expected in ((200, 96), (96, 96), (95, 64), (64, 64), (33, 32)):
        found = directory.lookup({"extra_key": None}, PROMPT[:length])
        assert found.entry is not None
        assert found.entry.identity.num_tokens == expected


def test_an_index_of_which_one_token_differs_is_not_found(bench: Any) -> None:
    bench.put(PROMPT[:96])
    bench.put(PROMPT[:32])
    directory = _directory(bench)
    for changed, expected in ((95, 32), (32, 32), (31, None), (0, None)):
        prompt = [*PROMPT]
        prompt[changed] += 1000
        found = directory.lookup({"extra_key": None}, prompt)
        assert (found.entry.identity.num_tokens if found.entry else None) == expected
        assert found.reason == (None if expected else "no_index")


@pytest.mark.parametrize("namespace", [{"extra_key": "b"}, {"cache_salt": "a"}, {"extra_key": ""}, {"extra_key": None}])
def test_another_namespace_does_not_see_it(bench: Any, namespace: dict[str, str | None]) -> None:
    bench.put(PROMPT[:96], namespace={"extra_key": "a", "cache_salt": None})
    directory = _directory(bench)
    assert directory.lookup(namespace, PROMPT).reason == "no_index"
    assert directory.lookup({"extra_key": "a"}, PROMPT).entry is not None


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


def test_a_longer_index_of_another_model_does_not_hide_a_shorter_usable_one(bench: Any) -> None:
    bench.put(PROMPT[:96], model=msgspec.structs.replace(bench.model, weights_digest="other"))
    bench.put(PROMPT[:64])
    found = _directory(bench).lookup({"extra_key": None}, PROMPT)
    assert found.entry is not None
    assert found.entry.identity.num_tokens == 64


def test_short_prompts_and_short_indexes_are_short_prefix(bench: Any) -> None:
    bench.put(PROMPT[:64])
    directory = _directory(bench, min_prefix_len=100)
    assert directory.lookup({"extra_key": None}, PROMPT[:99]).reason == "short_prefix"
    assert directory.lookup({"extra_key": None}, PROMPT).reason == "short_prefix"


def test_an_index_of_another_process_is_found_without_a_restart(bench: Any) -> None:
    reader = FileStore(bench.store.folder)
    reader.open()
    directory = PrefixDirectory(reader, bench.model, bench.profile, 16, rescan_seconds=0.0)
    assert directory.lookup({"extra_key": None}, PROMPT).reason == "no_index"
    bench.put(PROMPT[:96])
    assert directory.lookup({"extra_key": None}, PROMPT).entry is not None
    reader.close()


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
