"""`sglang-ext`: one command, one module per subcommand."""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from sglang_ext import __version__, logs
from sglang_ext.cli.arguments import Parser, refuse
from sglang_ext.compat.engine import EngineDiedError, EngineStartError

#: Subcommands; each is a module. Only the one that is asked for is imported: a listing must not wait for torch.
COMMANDS = ("prebuild", "calibrate", "profile", "index", "store", "doctor", "explain", "server")


#: Those of them that go on where they ended before.
JOBS = ("prebuild", "calibrate")
#: As a shell reports a process that SIGINT, SIGPIPE or SIGTERM ended.
INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143


class Terminated(KeyboardInterrupt):
    """SIGTERM came. Whatever lets Ctrl-C pass lets this pass, too: asyncio does, for instance."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Returns the exit status: 0 good, 1 something failed, 2 wrong usage, 130 interrupted, 141 nobody reads the
    output any more, 143 terminated.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words else ""
    again = "; run the same command again to go on" if command in JOBS else ""
    try:
        return _run(words)
    except EngineStartError as error:
        return refuse(command, error)
    except EngineDiedError as error:
        return refuse(command, f"{error}{again}", 1)
    except Terminated:
        print(f"sglang-ext: terminated{again}", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:  # while modules are imported, too
        print(f"sglang-ext: interrupted{again}", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            raise
        # What is still buffered has nowhere to go; the interpreter would complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE if error.errno == errno.EPIPE else refuse(command, f"{error}; free room for the output", 1)


def _run(words: list[str]) -> int:
    logs.install()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for paths that are no valid text
    parser = Parser(
        prog="sglang-ext",
        description="Sparse attention for shared prefixes on SGLang: offline jobs, the store, running servers.",
    )
    parser.add_argument("--version", action="version", version=f"sglang-ext {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = [words[0]] if words and words[0] in COMMANDS else COMMANDS
    for name in wanted:
        importlib.import_module(f"sglang_ext.cli.{name}").add_parser(commands)
    args = parser.parse_args(words)
    status: int = args.run(args)
    if sys.stdout is not None:  # as where it is closed
        sys.stdout.flush()
    return status


def heed_sigterm() -> None:
    """From now on SIGTERM raises `Terminated` in the main thread, once: another one does not stop the closing."""
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise Terminated


def _open_closed_streams() -> None:
    """Standard streams that are closed go to /dev/null, here and in processes to come. An index or a report would get
    their number otherwise, and what libraries write to it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # each takes the lowest number that is free
        if getattr(sys, name) is None:
            opened = open(os.devnull, mode)  # noqa: SIM115 (to the process's end)
            os.set_inheritable(opened.fileno(), True)
            setattr(sys, name, opened)


def console() -> None:
    """The console script.

    SGLang ends its process tree, multiprocessing's resource tracker included, when an engine shuts down; the
    interpreter's own exit would start another one and print its complaints. All of ours is closed by then.
    """
    _open_closed_streams()
    heed_sigterm()
    status = main()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
