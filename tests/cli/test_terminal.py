"""`sglang-ext index` in a terminal and a shell: pipes that close, Ctrl-C, start-up time, help, units."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.cli import main
from sglang_ext.cli.arguments import parse_bytes, parse_seconds
from sglang_ext.cli.index.text import retention, size, span
from tests.cli.conftest import PROGRAM, fill


def test_a_reader_that_leaves_is_no_error(tmp_path: Path, program: Any) -> None:
    fill(tmp_path / "store", 200, values=2)
    read, write = os.pipe()
    ran = program("index", "ls", "--json", "--store", tmp_path / "store", stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    os.read(read, 10)
    os.close(read)
    err = ran.communicate(timeout=120)[1]
    assert (ran.returncode, err) == (141, b"")


def test_output_that_has_no_room_is_one_line(shelf: Any, program: Any) -> None:
    with open("/dev/full", "wb") as full:
        ran = program("index", "ls", stdout=full, stderr=subprocess.PIPE)
        err = ran.communicate(timeout=120)[1]
    assert (ran.returncode, err.count(b"\n")) == (1, 1), err
    assert b"No space left on device" in err


@pytest.mark.parametrize(
    ("words", "closed", "status"), [("ls", "<&- >&- 2>&-", 0), ("ls", ">&-", 0), ("gc --unused-for 0", "<&-", 2)]
)
def test_a_standard_stream_that_is_closed_is_one_that_says_nothing(
    words: str, closed: str, status: int, shelf: Any
) -> None:
    ran = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *PROGRAM, "index", *words.split()], timeout=120)
    assert ran.returncode == status
    assert len(shelf.digests()) == len(shelf.entries)


@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_ctrl_c_and_sigterm_end_with_one_line(
    number: signal.Signals, status: int, word: str, shelf: Any, program: Any
) -> None:
    master, slave = pty.openpty()  # a terminal, so that rm asks, and waits
    ran = program("index", "rm", shelf.entries[0].digest, stdin=slave, stderr=subprocess.PIPE)
    asked = b""
    while b"[y/N]" not in asked:
        said = ran.stderr.read(1)
        assert said, asked
        asked += said
    ran.send_signal(number)
    err = ran.communicate(timeout=120)[1]
    os.close(master)
    os.close(slave)
    assert ran.returncode == status
    assert err.endswith(f"sglang-ext: {word}\n".encode())
    assert b"Traceback" not in err
    assert len(shelf.digests()) == 5


def test_a_job_that_is_terminated_twice_closes_what_it_opened_and_says_how_to_go_on() -> None:
    code = """if True:
        import os, signal, sys, time
        from sglang_ext import cli

        def job(words):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.1)
                print("closed")

        cli._run = job
        cli.heed_sigterm()
        sys.exit(cli.main(["prebuild"]))
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (143, "closed\n"), ran.stderr
    assert ran.stderr == "sglang-ext: terminated; run the same command again to go on\n"


def test_a_listing_imports_neither_torch_nor_sglang(shelf: Any) -> None:
    """0.3 s beside 1.9 of an import of torch."""
    code = (
        "import sys; from sglang_ext.cli import main; "
        f"status = main(['index', 'ls', '--store', {str(shelf.folder)!r}]); "
        "loaded = {'torch', 'sglang', 'transformers', 'zmq', 'obstore', 'scipy', 'pandas'} & set(sys.modules); "
        "sys.exit(f'loaded {loaded}' if loaded else status)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=120).returncode == 0


KEPT = {(False, None): "-", (True, None): "pin", (False, 8200.0): "2h left", (True, 8200.0): "pin 2h"}
SPANS = {-5: "0s", 0: "0s", 119: "119s", 120: "2m", 7199: "119m", 7200: "2h", 172800: "2d", 86400 * 731: "2y"}
SIZES = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 14.5 * 2**20: "14.5 MiB", 2**30: "1.0 GiB"}


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (size, {**SIZES, 3.2 * 2**40: "3.2 TiB"}),
        (span, SPANS),
        (lambda one: retention(*one, 1000.0), KEPT),
        (parse_bytes, {"0": 0, "1000": 1000, "1K": 1024, "2MiB": 2 << 20, "1.5g": 3 << 29, "1TB": 1 << 40}),
        (parse_seconds, {"0": 0, "90": 90, "90s": 90, "2m": 120, "1.5h": 5400, "30d": 30 * 86400}),
    ],
    ids=["size", "span", "retention", "bytes", "seconds"],
)
def test_sizes_times_and_retentions(function: Callable[[Any], Any], wanted: dict[Any, Any]) -> None:
    assert {given: function(given) for given in wanted} == wanted


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("index gc --max-bytes many", "expected bytes, or a size such as 50G; found 'many'"),
        ("index gc --max-bytes=-1", "found '-1'"),
        ("index gc --max-bytes 8192T", "expected a size below 8192T; found '8192T'; give a smaller one"),
        ("index expire abcd --after soon", "expected seconds, or a time such as 90m"),
        ("index expire abcd --after=-5", "found '-5'"),
        ("index expire abcd --after nan", "found 'nan'"),
        ("index expire abcd", "one of the arguments --after --never is required"),
        ("index verify --jobs 0", "expected a whole number of at least 1, got '0'"),
        ("index gc --model abc", "expected 4 or more digits of a model's digest; found 'abc'"),
        ("index", "SUBCOMMAND"),
        ("calibrate --dense-layers 1", "expected the first layers (0, or 0,1, ..., or nothing), got '1'"),
        ("calibrate --dense-layers 0,2", "got '0,2'"),
        ("profile import a.npy --anchors=0,x", "expected layer numbers such as 0,2,8, got '0,x'"),
        ("profile import a.npy --anchors=", "expected layer numbers such as 0,2,8"),
        ("profile import a.npy --anchors=0,-1", "got '0,-1'"),
        ("index ls --colour", "unrecognized arguments: --colour"),
        (
            "prebuild --model-path m --prompts p --store s --page-size 16",
            "unrecognized arguments: --page-size; flags of SGLang go behind --, as in: sglang-ext prebuild ... -- "
            "--page-size ...",
        ),
        (
            "calibrate --model m --data d --out o --dtype=float32",
            "flags of SGLang go behind --, as in: sglang-ext calibrate ... -- --dtype=float32 ...",
        ),
    ],
)
def test_wrong_usage_ends_with_2_and_the_usage_of_the_command_it_was_given_to(
    words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    said = capsys.readouterr().err
    command = words.split(" -")[0].removesuffix(" abcd").removesuffix(" a.npy")
    assert said.startswith(f"usage: sglang-ext {command} ")
    assert expected in " ".join(said.split())
