"""`sglang-ext index`: looking is no use, commands on a service, limits out of reach, one of many that fails."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefix_index import FileStore, Retention, StoreFolderError, canonical_digest
from sglang_ext.cli import main
from sglang_ext.storage import holds_indexes
from tests.cli.conftest import fill, kept
from tests.prefix_index import tiers
from tests.prefix_index.samples import sample_identity, sample_payload
from tests.prefix_index.small_stores import flip as flip_in_place
from tests.prefix_index.small_stores import fork, reap, refused

NOBODY = 65534


def unprivileged(work: Callable[[], None]) -> None:
    """Does it in a child that is not root."""

    def child() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        work()

    assert reap(fork(child), 120) == 0


# -- looking is no use; services ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["folder", "service"])
def test_verify_show_and_export_do_not_count_as_a_use(
    where: str, shelf: Any, request: pytest.FixtureRequest, index: Any, tmp_path: Path
) -> None:
    url = request.getfixturevalue("served").endpoint if where == "service" else str(shelf.folder)
    long_ago = time.time() - 5000
    for number in range(5):
        shelf.use(number, long_ago)
    digest = shelf.entries[0].digest
    for words in (["verify"], ["show", digest], ["export", "--all", "--to", tmp_path / "out"], ["ls"], ["du"]):
        assert index(*words, "--store", url).status == 0
        used = [shelf.path(number).stat().st_atime for number in range(5)]
        assert used == pytest.approx([long_ago] * 5, abs=1e-3), words
    with FileStore(shelf.folder) as store:
        store.get(digest).close()
    assert shelf.path(0).stat().st_atime > long_ago + 1000, "as a server's look does"


def test_verify_through_a_service_reads_the_disk_and_not_the_copy_in_memory(
    tmp_path: Path, index: Any, patient: None
) -> None:
    """One byte on the disk changes behind the service's back; the copy in DRAM is good, and is served."""
    with tiers.served(tmp_path, tiers.two_tiers(tmp_path)) as url:
        with tiers.patient(url) as client:
            entry = client.put(sample_payload(values_per_array=4096))

            def is_copied() -> bool:
                client.get(entry.digest).close()
                return bool(list((tmp_path / "dram").glob("*/*.pfxindex")))

            tiers.eventually(is_copied)
        flip_in_place(Path(entry.path or ""), entry.nbytes // 2)
        said = index("verify", "--json", "--store", url)
    assert (said.status, [line["status"] for line in said.lines]) == (1, ["corrupt"])


def test_all_commands_work_through_the_socket(served: tiers.Service, shelf: Any, index: Any, tmp_path: Path) -> None:
    url = ["--store", served.endpoint]
    digests = [entry.digest for entry in shelf.entries]
    listed = index("ls", "--json", *url).lines
    assert [line["digest"] for line in listed] == sorted(digests)
    assert index("ls", *url).out.splitlines()[-1].startswith("5 indexes")
    assert index("verify", *url).status == 0
    assert index("pin", "--json", *url, digests[0][:8]).lines[0]["pinned"] is True
    assert index("ls", "--json").lines[sorted(digests).index(digests[0])]["pinned"] is True
    assert index("show", *url, digests[1]).status == 0
    assert index("du", "--json", *url).lines[0]["indexes"] == 5
    assert index("export", digests[2], "--to", tmp_path / "one.pfxindex", *url).status == 0
    assert index("rm", "--yes", digests[2], *url).status == 0
    assert not shelf.path(2).exists()
    assert index("import", tmp_path / "one.pfxindex", *url).status == 0
    assert (shelf.path(2).read_bytes(), len(shelf.digests())) == ((tmp_path / "one.pfxindex").read_bytes(), 5)
    assert index("gc", *url).status == 0
    assert index("gc", "--max-bytes", "1", *url).status == 2
    chosen = ["gc", *url, "--model", canonical_digest(shelf.entries[2].identity.model)]
    assert index(*chosen).status == 2
    (done,) = index(*chosen, "--yes", "--json").lines
    assert [one["digest"] for one in done["removed"]] == [digests[2]]
    assert not shelf.path(2).exists()


# -- gc ----------------------------------------------------------------------------------------------------------------


def test_gc_frees_what_it_can_of_a_limit_out_of_reach_and_says_so(shelf: Any, index: Any) -> None:
    shelf.flip(0, at=70)  # no index any more, so nobody may evict it: its bytes stay
    index("pin", shelf.entries[4].digest)
    flags = ["--max-bytes", "1"]
    plan = index("gc", "--dry-run", "--json", *flags)
    assert len(shelf.digests()) == 4, "a dry run"
    done = index("gc", "--json", *flags)
    assert (plan.status, done.status) == (1, 1)
    wanted = [shelf.entries[number].digest for number in (1, 2, 3)]
    assert sorted(e["digest"] for e in plan.lines[0]["removed"]) == sorted(wanted)
    assert [e["digest"] for e in plan.lines[0]["removed"]] == [e["digest"] for e in done.lines[0]["removed"]]
    assert shelf.digests() == [shelf.entries[4].digest], "a pin does not give way to what cannot be had"
    too_few = shelf.path(0).stat().st_size + shelf.path(4).stat().st_size - 1
    for said in (plan, done):
        assert f"limit not reached: {too_few} bytes too few" in said.message


def test_a_dry_run_lives_with_files_that_go_meanwhile(shelf: Any, index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, victim = Path.lstat, shelf.path(2)

    def vanishing(path: Path) -> os.stat_result:
        if path == victim:
            victim.unlink(missing_ok=True)
        return real(path)

    monkeypatch.setattr(Path, "lstat", vanishing)
    said = index("gc", "--dry-run", "--json", "--max-bytes", "1G")
    assert (said.status, said.lines[0]["removed"]) == (0, [])


# -- export and import -------------------------------------------------------------------------------------------------


def test_import_of_a_stores_folder_keeps_pins_and_expiry(shelf: Any, index: Any, tmp_path: Path) -> None:
    soon = time.time() + 5000
    with FileStore(shelf.folder) as store:
        store.retain(shelf.entries[0].digest, Retention(pinned=True))
        store.retain(shelf.entries[1].digest, Retention(expires=soon))
        store.retain(shelf.entries[2].digest, Retention(expires=1.0))
    shelf.path(3).with_suffix(".pfxkeep").write_bytes(b"scribble")
    lines = index("import", "--json", shelf.folder, "--store", tmp_path / "new").lines
    assert {line["digest"]: line["status"] for line in lines} == {
        entry.digest: "expired" if number == 2 else "imported" for number, entry in enumerate(shelf.entries)
    }
    new = kept(tmp_path / "new")
    with FileStore(tmp_path / "new") as store:
        store.retain(shelf.entries[4].digest, Retention(pinned=True))
    wanted = [Retention(pinned=True), Retention(expires=soon), None, Retention(), Retention()]
    assert [new.get(entry.digest) for entry in shelf.entries] == wanted
    assert index("import", "--replace", shelf.path(4), "--store", tmp_path / "new").status == 0
    assert kept(tmp_path / "new")[shelf.entries[4].digest].pinned, "a source that says nothing changes nothing"


def test_export_to_a_folder_and_import_keep_names_pins_and_expiry(shelf: Any, index: Any, tmp_path: Path) -> None:
    wanted = [Retention(pinned=True, name="tools"), Retention(expires=time.time() + 5000), *[Retention()] * 3]
    with FileStore(shelf.folder) as store:
        for entry, retention in zip(shelf.entries, wanted, strict=True):
            store.retain(entry.digest, retention)
    assert index("export", "--all", "--to", tmp_path / "out").status == 0
    assert index("import", tmp_path / "out", "--store", tmp_path / "new").status == 0
    assert kept(tmp_path / "new") == {entry.digest: of for entry, of in zip(shelf.entries, wanted, strict=True)}
    index("unpin", "tools")
    assert index("export", "tools", "--replace", "--to", tmp_path / "out").status == 0
    index("import", "--replace", tmp_path / "out", "--store", tmp_path / "new")
    assert kept(tmp_path / "new")[shelf.entries[0].digest] == Retention(name="tools")


def test_export_to_a_name_that_cannot_be_ends_with_1(shelf: Any, index: Any, tmp_path: Path) -> None:
    said = index("export", shelf.entries[0].digest, "--to", tmp_path / ("x" * 300))
    assert said.status == 1
    assert "File name too long" in " ".join(said.err.split() + said.out.split())


def test_export_takes_no_devices_place(shelf: Any, index: Any, tmp_path: Path) -> None:
    to = tmp_path / "null"
    os.mkfifo(to)
    said = index("export", shelf.entries[0].digest, "--replace", "--to", to)
    assert (said.status, to.is_fifo()) == (1, True)
    assert "found a pipe, socket or device; name another" in said.message


# -- one of many that fails --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["rm", "--yes"], ["pin"], ["unpin"], ["expire", "--never"]])
def test_one_that_fails_does_not_keep_the_others(
    words: list[str], shelf: Any, index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = shelf.entries[0].digest
    for name in ("delete", "retain"):
        real = getattr(FileStore, name)

        def failing(self: Any, key: Any, *args: Any, real: Any = real) -> Any:
            if key == bad:
                raise StoreFolderError("index store", expected="a usable folder", found="no permission", remedy="look")
            return real(self, key, *args)

        monkeypatch.setattr(FileStore, name, failing)
    said = index(*words, "--json", *(entry.digest for entry in shelf.entries[:3]))
    assert said.status == 1
    assert "no permission" in said.message
    by_digest = {line["digest"]: line for line in said.lines}
    assert len(by_digest) == 3
    assert "no permission" in (by_digest[bad].get("detail") or by_digest[bad].get("error"))


def test_an_import_tells_of_folders_that_it_cannot_look_through() -> None:
    with tempfile.TemporaryDirectory() as name:  # as another user, to whom pytest's folders are closed
        folder, to = Path(name), Path(name) / "to"
        folder.chmod(0o755)
        to.mkdir()
        to.chmod(0o777)
        entries = fill(folder / "from", 3)
        for one in (folder / "from").rglob("*"):
            one.chmod(0o755)
        (folder / "from").chmod(0o755)
        closed = Path(entries[0].path or "").parent
        closed.chmod(0)

        def read() -> None:
            with (to / "said").open("w") as out, contextlib.redirect_stdout(out):
                words = ["--json", str(folder / "from"), str(closed), "--store", str(to / "store")]
                assert main(["index", "import", *words]) == 1

        unprivileged(read)
        lines = [json.loads(line) for line in (to / "said").read_text().splitlines()]
        closed.chmod(0o700)
    assert [line["status"] for line in lines].count("imported") == 2
    refused = [line for line in lines if line["status"] != "imported"]
    assert {(line["status"], line["path"]) for line in refused} == {("failed", str(closed))}
    assert all("can be read, found Permission denied" in line["detail"] for line in refused)


def test_a_folder_that_cannot_be_looked_through_may_hold_indexes() -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        assert not holds_indexes(f"{name}/gone")
        assert not holds_indexes(name)
        Path(name, "ab").mkdir(mode=0)

        def look() -> None:
            assert holds_indexes(name)

        unprivileged(look)


def test_gc_tells_of_an_index_that_cannot_leave(shelf: Any, index: Any) -> None:
    stuck = shelf.entries[0].digest
    index("expire", "--after", "0", stuck, shelf.entries[1].digest)
    with refused("unlink", lambda name, *_: stuck in str(name), errno.EPERM):
        said = index("gc", "--json")
    assert (said.status, [one["digest"] for one in said.lines[0]["removed"]]) == (1, [shelf.entries[1].digest])
    assert "index that must leave" in said.message
    assert stuck in said.err.replace("\n  ", "")
    assert index("gc").status == 0


def test_rm_of_a_file_in_the_wrong_place_says_that_it_is_still_there(shelf: Any, index: Any) -> None:
    digest = shelf.entries[0].digest
    wrong = shelf.folder / ("00" if not digest.startswith("00") else "01")
    wrong.mkdir(exist_ok=True)
    misplaced = wrong / shelf.path(0).name
    shelf.path(0).rename(misplaced)
    said = index("rm", "--yes", digest)
    assert (said.status, said.out) == (1, "")
    assert misplaced.exists()
    assert "remove it by hand" in said.message
    line = index("rm", "--yes", "--json", digest).lines[0]
    assert (line["removed"], str(misplaced) in line["detail"]) == (False, True)


# -- the terminal ------------------------------------------------------------------------------------------------------


def test_a_folder_whose_name_is_no_text_is_listed_all_the_same(tmp_path: Path, index: Any, program: Any) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/N\xe9")
    with FileStore(folder, create=True) as store:
        digest = store.put(sample_payload(sample_identity(range(32)))).digest
    (Path(folder) / digest[:2] / f"{'0' * 64}.pfxindex").write_bytes(b"not ours")
    for words in (["ls"], ["show", digest], ["verify"], ["du"], ["export", "--all", "--to", folder + "/out"]):
        index(*words, "--store", folder)
        assert all(isinstance(line, dict) for line in index(*words, "--json", "--store", folder).lines)
    ran = program("index", "ls", "--json", "--store", folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = ran.communicate(timeout=120)
    assert b"Traceback" not in err
    assert json.loads(out)["path"].endswith(f"N\\xe9/{digest[:2]}/{digest}.pfxindex")


def test_json_is_json_also_where_the_output_takes_no_umlauts(shelf: Any, index: Any, program: Any) -> None:
    named, digest = "Köln \U0001f600", shelf.entries[0].digest
    with FileStore(shelf.folder) as store:
        store.retain(digest, Retention(name=named))
    latin = {"PYTHONIOENCODING": "latin-1"}
    ran = program("index", "ls", "--json", digest, env=latin, stdout=subprocess.PIPE)
    assert json.loads(ran.communicate(timeout=120)[0])["name"] == named


def test_an_interrupt_while_modules_are_imported_ends_with_130_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert main(["index", "ls"]) == 130
    assert capsys.readouterr().err == "sglang-ext: interrupted\n"
