"""Files that several processes may write at the same time."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sglang_ext.files import partial_file, write_whole


@pytest.mark.parametrize("private", [False, True])
def test_writers_of_one_file_do_not_meet_and_the_last_one_counts(tmp_path: Path, private: bool) -> None:
    path = tmp_path / "results.json"
    with partial_file(path, private=private) as first:
        with partial_file(path, private=private) as second:
            first.write_bytes(b"1" * 4096)
            second.write_bytes(b"2")
            assert not path.exists()
        assert path.read_bytes() == b"2"
    assert path.read_bytes() == b"1" * 4096
    assert os.listdir(tmp_path) == [path.name]
    if private:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_writer_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_whole(path, b"whole")
    with pytest.raises(RuntimeError), partial_file(path) as partial:  # noqa: PT012
        partial.write_bytes(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"whole"
    assert os.listdir(tmp_path) == [path.name]
    with pytest.raises(OSError, match="missing"):
        write_whole(tmp_path / "missing" / "results.json", b"")
