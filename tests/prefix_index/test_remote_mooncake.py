"""Runs the conformance suite and ``mooncake_cases.py`` against a real Mooncake, in a network namespace."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest

from prefix_index import InvalidPayload
from prefix_index.remote import BlobMissing, BlobsFailed, MooncakeBlobs
from tests.prefix_index import mooncake_cluster

HERE = Path(__file__).parent


@pytest.mark.full
@pytest.mark.skipif(mooncake_cluster.why_not() is not None, reason=str(mooncake_cluster.why_not()))
def test_everything_over_mooncake_in_a_network_namespace(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--hypothesis-profile=full"]
    command += ["-k", "mooncake", f"--junitxml={report}"]
    modules = ("mooncake_cases.py", "test_index_stores.py")
    command += [*(str(HERE / name) for name in modules), "--durations=8"]
    done = mooncake_cluster.run_inside(command, timeout_s=800)
    assert done.returncode == 0, done.stdout[-20_000:]
    suites = ET.parse(report).getroot().findall("testsuite")
    count = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "skipped", "failures")}
    print(done.stdout[-2000:])
    assert count["tests"] >= 25
    assert count["skipped"] == count["failures"] == 0


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(BlobsFailed, match=r"mooncake.store.*: install mooncake-transfer-engine and libibverbs1"):
        MooncakeBlobs("127.0.0.1:1", host="127.0.0.1").open(1)


@pytest.mark.parametrize(("code", "error"), [(-704, BlobMissing), (-707, BlobMissing), (-800, BlobsFailed)])
def test_a_value_that_is_gone_before_it_is_read_or_meanwhile_is_a_miss(code: int, error: type[Exception]) -> None:
    blobs = MooncakeBlobs("127.0.0.1:1")
    registering = {"register_buffer": lambda *_: 0, "unregister_buffer": lambda _: 0}
    blobs._client = SimpleNamespace(get_size=lambda _: 4, get_into=lambda *_: code, **registering)
    with pytest.raises(error):
        blobs.fetch("a", 10)


@pytest.mark.parametrize("master", ["", "host", "host:", ":50051", "host:port"])
def test_a_master_without_host_or_port(master: str) -> None:
    with pytest.raises(InvalidPayload, match=r"Mooncake master: expected host:port, found "):
        MooncakeBlobs(master)
