"""`sglang-ext index`: listing, showing, summing and verifying real stores, damaged ones too."""

from __future__ import annotations

import os
import pty
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefix_index import FileStore, Retention
from prefix_index.connect import open_store
from sglang_ext.cli.index.text import size

ENTRY_KEYS = {"digest", "name", "num_tokens", "nbytes", "created", "build_seconds"}
ENTRY_KEYS |= {"namespace", "model", "profile", "pinned", "expires", "path"}


# -- what is there -----------------------------------------------------------------------------------------------------


def test_ls_shows_each_index_on_a_line_of_80_columns(shelf: Any, index: Any) -> None:
    index("pin", shelf.entries[0].digest)
    index("expire", "--after", "30d", shelf.entries[0].digest)
    shelf.flip(4, at=70)
    good = shelf.entries[:4]
    said = index("ls")
    header, *rows, total = said.text.splitlines()
    assert (said.status, said.err) == (0, "1 more cannot be used: see sglang-ext index verify\n")
    assert header.split() == ["INDEX", "TOKENS", "SIZE", "AGE", "BUILD", "MODEL", "PROFILE", "KEPT"]
    assert [row.split()[0] for row in rows] == sorted(entry.digest[:12] for entry in good)
    first = next(row for row in rows if row.startswith(good[0].digest[:12]))
    for words in ("pin 30d", " 5d ", size(good[0].nbytes)):
        assert words in first
    assert total == f"4 indexes, {size(sum(entry.nbytes for entry in good))}"


def test_an_index_whose_retention_is_damaged_is_none_that_cannot_be_used(shelf: Any, index: Any) -> None:
    shelf.path(4).with_suffix(".pfxkeep").write_bytes(b"scribble")
    said = index("ls")
    assert (len(said.text.splitlines()), said.err) == (1 + 5 + 1, "")
    (usage,) = index("du", "--json").lines
    assert (usage["indexes"], usage["unusable"], usage["unusable_nbytes"]) == (5, 0, 0)
    assert index("verify").status == 1, "it is damage"


def test_ls_in_json_is_one_object_per_index_with_the_documented_keys(shelf: Any, index: Any) -> None:
    lines = index("ls", "--json").lines
    assert [line["digest"] for line in lines] == sorted(entry.digest for entry in shelf.entries)
    entry, last = max(shelf.entries, key=lambda e: e.digest), lines[-1]
    assert set(last) == ENTRY_KEYS
    assert (last["num_tokens"], last["nbytes"]) == (entry.identity.num_tokens, entry.nbytes)
    assert (last["namespace"], last["profile"]) == (entry.identity.namespace, "profile-1")
    assert (last["pinned"], last["expires"], last["path"]) == (False, None, entry.path)


@pytest.mark.parametrize("form", ["path", "file URL", "environment", "default"])
def test_the_store_is_named_in_several_ways(
    form: str, shelf: Any, index: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SGLANG_SPARSE_ATTN_STORE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    named = {"path": ["--store", shelf.folder], "file URL": ["--store", f"file://{shelf.folder}"]}
    if form == "environment":
        monkeypatch.setenv("SGLANG_SPARSE_ATTN_STORE", str(shelf.folder))
    if form == "default":
        (tmp_path / "cache" / "sglang-ext").mkdir(parents=True)
        shelf.folder.rename(tmp_path / "cache" / "sglang-ext" / "store")
    assert len(index("ls", "--json", *named.get(form, [])).lines) == 5


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("s4://bucket", ["index store's address", "ipc://SOCKET", "s3://", "mooncake://HOST:PORT", "s4://bucket"]),
        ("s3://bucket/x", ["expected a folder, file:///FOLDER or a service's", "a remote store, 's3://bucket/x'"]),
        ("/nowhere/at/all", ["/nowhere/at/all", "expected an existing folder", "found nothing"]),
        ("ipc:///nowhere/none", ["sglang-ext store serve"]),
        ("file://host/folder", ["index store's address", "file:///FOLDER"]),
    ],
)
def test_a_store_that_is_none_ends_with_1_and_a_message(
    address: str, words: list[str], index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_ext.cli.index.targets.open_store", partial(open_store, timeout_s=0.2))
    said = index("ls", "--store", address)
    assert (said.status, said.out) == (1, "")
    assert said.message.startswith("sglang-ext index ls:")
    for word in words:
        assert word in said.message


def test_show_prints_everything_of_an_index(shelf: Any, index: Any) -> None:
    entry = shelf.entries[2]
    said = index("show", entry.digest[:8])
    for word in (entry.digest, "48 tokens", "profile-1", "csa.ids", "bfloat16", "2x1024", "csattention", "float32"):
        assert word in said.text
    (details,) = index("show", "--json", entry.digest[:8]).lines
    assert set(details) >= ENTRY_KEYS | {"spec", "stats", "arrays", "model_fields", "prefix_hash", "format_version"}
    assert details["stats"] == {"fill": 2}
    ids = next(group for group in details["arrays"] if group["name"] == "csa.ids")
    assert (ids["count"], ids["dtype"], ids["shapes"], ids["nbytes"]) == (4, "int32", [[2, 1024]], 4 * 2048 * 4)


@pytest.mark.parametrize("at", [70, 1000], ids=["what listings read", "what only opening reads"])
def test_show_of_a_damaged_index_says_why_and_ends_with_1(shelf: Any, index: Any, at: int) -> None:
    shelf.flip(1, at)
    said = index("show", shelf.entries[1].digest, shelf.entries[0].digest)
    assert said.status == 1
    assert "xxh3" in said.out or "checksum" in said.out
    assert "16 tokens" in said.out, "the good one is shown all the same"
    lines = index("show", "--json", shelf.entries[1].digest).lines
    assert [set(line) for line in lines] == [{"digest", "error"}]


def test_du_sums_by_model_profile_and_namespace(shelf: Any, index: Any) -> None:
    shelf.flip(4, at=70)
    (usage,) = index("du", "--json").lines
    good = shelf.entries[:4]
    assert (usage["indexes"], usage["nbytes"]) == (4, sum(entry.nbytes for entry in good))
    assert (usage["unusable"], usage["unusable_nbytes"]) == (1, shelf.entries[4].nbytes)
    for by, counts in (("model", [3, 1]), ("profile", [4]), ("namespace", [2, 2])):
        assert [group["indexes"] for group in usage[f"by_{by}"]] == counts
        assert sum(group["nbytes"] for group in usage[f"by_{by}"]) == usage["nbytes"]
        assert all(set(group) == {by, "indexes", "nbytes"} for group in usage[f"by_{by}"])
    assert 0 < usage["free_bytes"] <= usage["disk_bytes"]
    text = index("du").text
    for words in ("total      4 indexes", "unusable   1,", "free disk"):
        assert words in text


# -- which index is meant ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["12", "xyzw", "../../etc", "", "0" * 64])
def test_a_word_that_names_no_index_ends_with_1(word: str, shelf: Any, index: Any) -> None:
    said = index("show", "--", word)
    assert (said.status, said.out) == (1, "")
    assert "expected" in said.err


@pytest.fixture
def named(shelf: Any) -> Any:
    """Two indexes are called `tools`, one has a long name, one the first digits of another one."""
    names = ("tools", "tools", "a long name of a shared prompt", shelf.entries[4].digest[:5])
    with FileStore(shelf.folder) as store:
        for entry, name in zip(shelf.entries, names, strict=False):
            store.retain(entry.digest, Retention(name=name))
    return shelf


def test_ls_shows_names_and_takes_them(named: Any, index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [entry.digest[:12] for entry in named.entries]
    said = index("ls")
    header, *rows, _ = said.text.splitlines()
    assert header.split()[-1] == "NAME"
    names = {row.split()[0]: row.split()[-1] for row in rows}
    assert (names[digests[0]], names[digests[4]]) == ("tools", "-")
    monkeypatch.setenv("COLUMNS", "120")
    assert "  a long name of a shared prompt\n" in index("ls").out
    said = index("ls", "tools")
    assert sorted(row.split()[0] for row in said.out.splitlines()[1:-1]) == sorted(digests[:2])
    assert said.out.splitlines()[-1].startswith("2 indexes")
    (line,) = index("ls", "--json", "a long name of a shared prompt").lines
    assert (line["digest"], line["name"]) == (named.entries[2].digest, "a long name of a shared prompt")
    assert index("ls", "tool").status == 1
    assert f"\nname      {line['name']}\n" in index("show", line["name"]).out


def test_a_name_that_several_have_removes_none(named: Any, index: Any) -> None:
    said = index("rm", "--yes", "tools")
    assert (said.status, "found 2 of them" in said.message) == (1, True)
    assert len(named.digests()) == 5
    assert named.entries[0].digest[:12] in index("show", "tools").err


def test_what_goes_is_not_what_a_name_begins_the_digest_of(named: Any, index: Any) -> None:
    """A number may be the name of an index that is gone by now."""
    third, fourth = (named.entries[number].digest for number in (3, 4))
    assert "found 2 of them" in index("show", fourth[:5]).message
    assert index("rm", "--yes", fourth[:5]).status == 0
    assert (third in named.digests(), fourth in named.digests()) == (False, True)
    said = index("rm", "--yes", fourth[:5])
    assert (said.status, "8 or more digits" in said.message) == (1, True)
    assert fourth in named.digests()


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_names_each_damaged_one_with_its_reason(shelf: Any, index: Any) -> None:
    said = index("verify")
    assert (said.status, said.out[:8], said.out[-9:]) == (0, "5 read, ", ": 5 good\n")
    shelf.flip(0)
    shelf.flip(1, at=70)
    shelf.path(2).write_bytes(shelf.path(2).read_bytes()[:-4096])
    shelf.path(3).write_bytes(b"something else entirely" * 1000)
    (shelf.folder / "notes.txt").write_text("not an index")
    said = index("verify")
    assert said.status == 1
    assert said.text.endswith(": 3 corrupt, 2 foreign, 1 good\n")
    found = {line["digest"]: line for line in index("verify", "--json").lines}
    assert all(set(line) == {"digest", "path", "nbytes", "status", "detail"} for line in found.values())
    statuses = {digest: line["status"] for digest, line in found.items()}
    wanted = ("corrupt", "corrupt", "corrupt", "foreign", "good", "foreign")
    assert statuses == dict(zip([*(entry.digest for entry in shelf.entries), None], wanted, strict=True))
    assert "checksum of ('csa." in found[shelf.entries[0].digest]["detail"]
    assert "notes.txt" in found[None]["detail"]
    for entry in shelf.entries[:4]:
        assert entry.digest[:12] in said.out


def test_verify_takes_named_indexes_and_samples(shelf: Any, index: Any) -> None:
    shelf.flip(0)
    assert [index("verify", entry.digest[:8]).status for entry in shelf.entries[:2]] == [1, 0]
    samples = [{line["digest"] for line in index("verify", "--json", "--sample", "2").lines} for _ in range(60)]
    assert {len(one) for one in samples} == {2}
    assert len(set.union(*samples)) == 5, "another part every time"
    assert len(index("verify", "--json", "--sample", "60", "--jobs", "1").lines) == 5


def test_verify_shows_its_progress_on_a_terminal(shelf: Any, program: Any) -> None:
    master, slave = pty.openpty()
    ran = program("index", "verify", stdout=subprocess.PIPE, stderr=slave)
    os.close(slave)
    out, seen = ran.communicate(timeout=120)[0], os.read(master, 1 << 16)
    os.close(master)
    assert ran.returncode == 0
    assert b"verify" in seen
    assert b"%|" in seen
    assert b"%|" not in out
