"""`sglang-ext index`: removing, collecting, pinning, and carrying indexes from store to store."""

from __future__ import annotations

import errno
import io
import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from prefix_index import FileStore, Retention, canonical_digest
from tests.cli.conftest import flip, kept
from tests.prefix_index.samples import sample_payload
from tests.prefix_index.small_stores import refuse

# -- rm ----------------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rm_without_a_terminal_needs_yes_and_lists_what_would_go(shelf: Any, index: Any) -> None:
    shelf.flip(1, at=70)
    digests = [entry.digest for entry in shelf.entries[:2]]
    said = index("rm", *digests)
    assert (said.status, said.out) == (2, "")
    for words in ("expected --yes", *(digest[:12] for digest in digests)):
        assert words in said.message
    assert shelf.path(0).exists()
    lines = index("rm", "--yes", "--json", *(digest[:8] for digest in digests)).lines
    assert lines == [{"digest": digest, "removed": True, "detail": None} for digest in digests]
    assert not any(shelf.path(number).exists() for number in (0, 1)), "damaged ones go, too"


@pytest.mark.parametrize(("answer", "left", "status"), [("y\n", 4, 0), ("yes\n", 4, 0), ("\n", 5, 1), ("n\n", 5, 1)])
def test_rm_asks_on_a_terminal(
    answer: str, left: int, status: int, shelf: Any, index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    said = index("rm", shelf.entries[0].digest)
    assert said.status == status
    assert "remove 1 index," in said.err
    assert len(shelf.digests()) == left


# -- pin, expire, gc ---------------------------------------------------------------------------------------------------


def test_name_pin_and_expiry_do_not_undo_each_other(shelf: Any, index: Any) -> None:
    digest = shelf.entries[0].digest
    with FileStore(shelf.folder) as store:
        store.retain(digest, Retention(name="tools"))
    assert index("pin", "tools").out == f"{digest[:12]}  pin\n"
    begun = time.time()
    (line,) = index("expire", "--after", "2h", "--json", digest).lines
    assert line["pinned"] is True
    assert 7200 <= line["expires"] - begun < 7260
    index("unpin", digest)
    assert kept(shelf.folder)[digest] == Retention(name="tools", expires=line["expires"])
    index("expire", "--never", digest)
    assert kept(shelf.folder)[digest] == Retention(name="tools")


def test_a_damaged_index_cannot_be_pinned(shelf: Any, index: Any) -> None:
    shelf.flip(0, at=70)
    said = index("pin", shelf.entries[0].digest, shelf.entries[1].digest)
    assert said.status == 1
    assert "is damaged" in said.err
    assert kept(shelf.folder)[shelf.entries[1].digest].pinned, "the good one is"


def test_gc_over_a_limit_does_what_its_dry_run_says(shelf: Any, index: Any) -> None:
    now = time.time()
    for number in range(5):  # the first one was used last
        shelf.use(number, now - 1000 * (number + 1))
    index("pin", shelf.entries[4].digest)
    index("expire", "--after", "0", shelf.entries[0].digest)
    assert len(shelf.digests()) == 4, "an expired index is a miss already"
    flags = ["--max-bytes", str(sum(entry.nbytes for entry in shelf.entries[1:3]))]
    (plan,) = index("gc", "--dry-run", "--json", *flags).lines
    text = index("gc", "--dry-run", *flags).text
    assert "over limit" in text
    assert "would remove 3 indexes" in text
    assert shelf.path(0).exists()
    (done,) = index("gc", "--json", *flags).lines
    assert [e["digest"] for e in plan["removed"]] == [e["digest"] for e in done["removed"]]
    wanted = {0: "expired", 3: "over limit", 2: "over limit"}
    assert [(e["digest"], e["why"]) for e in done["removed"]] == [(shelf.entries[n].digest, wanted[n]) for n in wanted]
    assert done["nbytes"] == sum(shelf.entries[number].nbytes for number in wanted)
    assert not any(shelf.path(number).exists() for number in wanted)


@pytest.fixture
def held(shelf: Any) -> Iterator[Path]:
    """The lease of a build that is under way, for an hour."""
    with FileStore(shelf.folder) as store, store.lease("f" * 64):
        path = shelf.folder / "ff" / f".lease-{'f' * 64}"
        os.utime(path, (time.time() - 3600,) * 2)
        yield path


def test_gc_clears_what_dead_writers_left_and_leaves_young_partials(shelf: Any, index: Any, held: Path) -> None:
    shard, old = shelf.path(0).parent, time.time() - 3600
    dead = [shard / ".partial-1-0000000000000000", shard / f".lease-{shelf.entries[0].digest}"]
    dead += [shelf.folder / "00" / f"{'0' * 64}.pfxkeep", shelf.folder / ".removed-1"]
    young = {shard / ".partial-1-0000000000000001", shelf.folder / "00" / f"00{'1' * 62}.pfxkeep"}
    dead[2].parent.mkdir(exist_ok=True)
    for path in (*dead, *young):
        path.write_bytes(b"{}")
        if path not in young:
            os.utime(path, (old, old))
    names = sorted(str(path.relative_to(shelf.folder)) for path in dead)
    limit = held.stat().st_size + sum(entry.nbytes for entry in shelf.entries) + len(b"{}")  # the young one counts
    for flags in (["--dry-run"], []):
        (done,) = index("gc", "--json", "--max-bytes", limit, *flags).lines
        assert (done["leftovers"], done["removed"]) == (names, [])
    left = {path for path in shelf.folder.rglob("*") if path.is_file() and path.suffix != ".pfxindex"}
    assert left == {*young, held}


# -- gc of what was chosen ---------------------------------------------------------------------------------------------


def make_newer(path: Path) -> None:
    """The header says, with its checksum, that a later version wrote the file."""
    raw = bytearray(path.read_bytes())
    raw[8:12] = struct.pack("<I", 2)
    raw[56:64] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(raw[:56])))
    path.write_bytes(raw)


def model_of(entry: Any) -> str:
    return canonical_digest(entry.identity.model)


def test_gc_removes_the_indexes_of_an_old_model_and_is_resumed_by_the_same_command(shelf: Any, index: Any) -> None:
    old = shelf.entries[2]
    (usage,) = index("du", "--json").lines
    assert {one["model"] for one in usage["by_model"]} == {model_of(old), model_of(shelf.entries[0])}
    flags = ["gc", "--model", model_of(old)[:8]]
    (plan,) = index(*flags, "--dry-run", "--json").lines
    assert [(one["digest"], one["why"]) for one in plan["removed"]] == [(old.digest, "asked for")]
    said = index(*flags)
    assert (said.status, said.out) == (2, "")
    assert "expected --yes" in said.err
    assert old.digest[:12] in said.err
    assert shelf.path(2).exists()
    with FileStore(shelf.folder) as server:  # which has it open, and looks for it again
        with server.get(old.identity) as held:
            (done,) = index(*flags, "--yes", "--json").lines
            held.verify()
        server.rescan(full=True)
        assert not server.contains(old.identity)
    assert done["removed"] == plan["removed"]
    assert len(shelf.digests()) == 4
    again = index(*flags, "--yes")
    assert (again.status, "no index is of a model" in again.err) == (0, True)
    assert "removed 0 indexes" in again.out


def test_gc_leaves_what_was_used_lately_or_is_pinned(shelf: Any, index: Any) -> None:
    for number, hours in enumerate((50, 1, 50, 50, 1)):
        shelf.use(number, time.time() - 3600 * hours)
    index("pin", shelf.entries[3].digest)
    flags = ["gc", "--yes", "--json", "--unused-for", "2d"]
    (done,) = index(*flags, "--model", model_of(shelf.entries[0])).lines
    assert [one["digest"] for one in done["removed"]] == [shelf.entries[0].digest], "both must hold"
    (done,) = index(*flags).lines
    assert [one["digest"] for one in done["removed"]] == [shelf.entries[2].digest]
    assert len(shelf.digests()) == 3


def test_gc_removes_damaged_indexes_when_told_and_never_pinned_ones_or_newer_formats(shelf: Any, index: Any) -> None:
    for number in (2, 3):
        index("pin", shelf.entries[number].digest)
        shelf.flip(number, at=70)
    shelf.path(3).with_suffix(".pfxkeep").write_bytes(b"nobody can read this")
    shelf.flip(0, at=70)
    make_newer(shelf.path(1))
    index("gc")
    assert all(shelf.path(number).exists() for number in range(5))
    damaged = shelf.entries[0].digest
    for flag in ("--dry-run", "--yes"):
        (done,) = index("gc", "--unusable", flag, "--json").lines
        assert (done["removed"], done["leftovers"]) == ([], [f"{damaged[:2]}/{damaged}.pfxindex"])
    assert [shelf.path(number).exists() for number in range(5)] == [False, True, True, True, True]


class Slow(Terminal):
    """A person who thinks about it for a while."""

    def __init__(self, meanwhile: Any) -> None:
        super().__init__("y\n")
        self._meanwhile = meanwhile

    def readline(self, *_: Any) -> str:
        self._meanwhile()
        return super().readline()


def test_gc_leaves_what_was_built_again_or_pinned_while_it_asked(
    shelf: Any, index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    again, pinned = sample_payload(shelf.entries[0].identity), shelf.entries[1].digest
    for number in range(3):
        shelf.use(number, time.time() - 3600)
    shelf.flip(4, at=70)

    def meanwhile() -> None:
        with FileStore(shelf.folder) as store:
            store.put(again)
            store.retain(pinned, Retention(pinned=True))
            store.put(sample_payload(shelf.entries[4].identity))

    monkeypatch.setattr(sys, "stdin", Slow(meanwhile))
    said = index("gc", "--unused-for", "30m", "--unusable")
    assert said.status == 0, said.err
    assert [shelf.path(number).exists() for number in range(5)] == [True, True, False, True, True]
    assert said.err.count("stays: it has changed since it was chosen") == 3


def test_gc_beside_a_limit_counts_damaged_indexes_that_leave(shelf: Any, index: Any) -> None:
    for number in range(5):
        shelf.use(number, time.time() - 1000 * (number + 1))
    for number in (2, 3, 4):
        shelf.flip(number, at=70)
    damaged = sorted(str(shelf.path(number).relative_to(shelf.folder)) for number in (2, 3, 4))
    flags = ["gc", "--json", "--unusable", "--max-bytes"]
    (plan,) = index(*flags, shelf.entries[0].nbytes + shelf.entries[1].nbytes, "--dry-run").lines
    assert (plan["removed"], plan["leftovers"]) == ([], damaged)
    said = index(*flags, shelf.entries[0].nbytes, "--yes")
    assert (said.status, said.err) == (0, "")
    (done,) = said.lines
    assert ([one["digest"] for one in done["removed"]], done["leftovers"]) == ([shelf.entries[1].digest], damaged)


def test_gc_beside_a_limit_counts_what_leaves_anyway(shelf: Any, index: Any) -> None:
    limit = sum(entry.nbytes for entry in shelf.entries) - shelf.entries[2].nbytes
    for flag in ("--dry-run", "--yes"):
        (done,) = index("gc", flag, "--json", "--model", model_of(shelf.entries[2]), "--max-bytes", limit).lines
        assert [one["digest"] for one in done["removed"]] == [shelf.entries[2].digest]


# -- export and import -------------------------------------------------------------------------------------------------


def test_a_store_survives_export_and_import_byte_for_byte(shelf: Any, index: Any, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    said = index("export", "--all", "--to", out)
    assert (said.status, said.out.splitlines()[-1]) == (0, "5 exported")
    assert sorted(path.name for path in out.iterdir()) == sorted(f"{e.digest}.pfxindex" for e in shelf.entries)
    lines = index("import", "--json", out, "--store", other).lines
    assert {line["status"] for line in lines} == {"imported"}
    for number, entry in enumerate(shelf.entries):
        copy = other / shelf.path(number).relative_to(shelf.folder)
        assert copy.read_bytes() == shelf.path(number).read_bytes() == (out / f"{entry.digest}.pfxindex").read_bytes()
    again = index("import", out, shelf.folder, "--store", other)
    assert (again.status, again.out.splitlines()[-1]) == (0, "10 exists")


def test_one_index_goes_to_one_file_which_is_not_overwritten(shelf: Any, index: Any, tmp_path: Path) -> None:
    file, digest = tmp_path / "tools.pfxindex", shelf.entries[0].digest
    assert index("export", digest[:8], "--to", file).status == 0
    assert index("export", digest, "--to", f"{tmp_path}/new/").status == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == [f"{digest}.pfxindex"]
    file.write_bytes(b"somebody's")
    said = index("export", digest, "--to", file)
    assert (said.status, "--replace" in said.err, file.read_bytes()) == (1, True, b"somebody's")
    assert index("export", digest, "--replace", "--to", file).status == 0
    assert file.read_bytes() == shelf.path(0).read_bytes()


def test_a_damaged_index_is_not_exported_and_leaves_no_file(shelf: Any, index: Any, tmp_path: Path) -> None:
    shelf.flip(0)
    shelf.flip(1, at=70)
    words = [entry.digest for entry in shelf.entries[:3]]
    said = index("export", *words, "--to", tmp_path / "out")
    assert said.status == 1
    assert said.out.splitlines()[-1] == "1 damaged, 1 exported, 1 failed"
    assert "checksum of ('csa." in " ".join(said.out.split())
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"{words[2]}.pfxindex"]
    said = index("export", "--all", "--json", "--to", tmp_path / "all")
    (row,) = (line for line in said.lines if line["status"] == "damaged")
    assert (row["digest"], row["path"], row["nbytes"]) == (words[1], str(shelf.path(1)), 0)
    assert row["detail"]
    assert (said.status, sum(line["status"] == "exported" for line in said.lines)) == (1, 3)


def test_export_needs_indexes_or_all(index: Any, shelf: Any, tmp_path: Path) -> None:
    for words in ([], ["--all", shelf.entries[0].digest]):
        assert index("export", *words, "--to", tmp_path / "out").status == 2
    assert not (tmp_path / "out").exists()


def test_export_to_standard_output_is_refused(index: Any, shelf: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["--all"], [shelf.entries[0].digest]):
        said = index("export", *words, "--to", "-")
        assert (said.status, "found - for standard output; name a file" in said.message) == (2, True)
    assert not Path("-").exists()


def test_import_refuses_what_is_not_whole_by_name_and_goes_on(shelf: Any, index: Any, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.pfxindex" for name in ("good", "flipped", "cut", "header", "newer", "notes", "none")]
    for number, file in enumerate(files[:5]):
        file.write_bytes(shelf.path(number).read_bytes())
    flip(files[1], -5000)
    files[2].write_bytes(files[2].read_bytes()[:8192])
    flip(files[3], 20)
    make_newer(files[4])
    files[5].write_text("shopping list")
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    order = [*files[1:], tmp_path / "empty", tmp_path / "loop", tmp_path / ("x" * 300), files[0]]
    said = index("import", "--json", *order, "--store", tmp_path / "new")
    assert said.status == 1
    statuses = [line["status"] for line in said.lines]
    assert statuses[:7] == ["corrupt", "corrupt", "corrupt", "too_new", "foreign", "missing", "missing"]
    assert statuses[9:] == ["imported"], "also behind paths that the system refuses"
    assert all(line["detail"] for line in said.lines[:-1])
    with FileStore(tmp_path / "new") as store:
        assert [entry.digest for entry in store.list()] == [shelf.entries[0].digest]
        assert store.problems() == ()
    text = index("import", *order, "--store", tmp_path / "new2")
    assert (text.status, text.text.count("corrupt")) == (1, 4)
    before = shelf.path(1).read_bytes()
    assert index("import", "--replace", files[1]).status == 1
    assert shelf.path(1).read_bytes() == before, "a good one is not replaced by a damaged one"


def test_import_keeps_what_is_there_unless_told_to_replace(shelf: Any, index: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with FileStore(other, create=True) as store:
        store.put(sample_payload(shelf.entries[0].identity, fill=99))
    for flags, said, fill in (([], "exists", 99), (["--replace"], "imported", 0)):
        assert index("import", *flags, shelf.path(0), "--store", other).out.startswith(said)
        (shown,) = index("show", "--json", shelf.entries[0].digest, "--store", other).lines
        assert shown["stats"] == {"fill": fill}


def test_import_does_not_lose_a_pin_that_cannot_be_read(
    shelf: Any, index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index("pin", shelf.entries[0].digest)
    with monkeypatch.context() as patch:
        refuse(patch, shelf.path(0).with_suffix(".pfxkeep"), errno.EMFILE)
        (line,) = index("import", "--json", shelf.path(0), "--store", tmp_path / "other").lines
    assert line["status"] == "unreadable"
    assert ".pfxkeep: retention: expected readable bytes, found Too many open files" in line["detail"]
    assert index("import", shelf.path(0), "--store", tmp_path / "other").status == 0
    assert kept(tmp_path / "other") == {shelf.entries[0].digest: Retention(pinned=True)}


def test_a_store_whose_name_is_empty_is_not_the_default_one(index: Any) -> None:
    """As of a variable that is not set."""
    said = index("gc", "--yes", "--store", "")
    assert (said.status, "a folder, file:///FOLDER" in said.err) == (1, True)
