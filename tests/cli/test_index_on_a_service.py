"""`sglang-ext index` on a running service: the same commands, the same answers as on its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.serving.test_store_in_serving import Service


def test_all_commands_work_through_the_socket(served: Service, shelf: Any, index: Any, tmp_path: Path) -> None:
    url = ["--store", served.url]
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


def test_verify_through_a_service_finds_damage(served: Service, shelf: Any, index: Any) -> None:
    shelf.flip(0)
    said = index("verify", "--json", "--store", served.url)
    assert said.status == 1
    assert [line["digest"] for line in said.lines if line["status"] == "corrupt"] == [shelf.entries[0].digest]


def test_a_service_that_is_not_there_ends_with_1_and_what_to_do(index: Any, tmp_path: Path) -> None:
    said = index("ls", "--store", f"ipc://{tmp_path}/none")
    assert said.status == 1
    assert "sglang-ext store serve" in " ".join(said.err.split())
