"""`sglang-ext`: one command, one module per subcommand."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence

from sglang_ext import __version__, logs
from sglang_ext.cli.arguments import Parser
from sglang_ext.cli.stopping import BROKEN_PIPE, INTERRUPTED, TERMINATED, Terminated, heed_sigterm

#: Subcommands; each is a module. Only the one that is asked for is imported: a listing must not wait for torch.
COMMANDS = ("prebuild", "calibrate", "profile", "index", "store", "doctor", "explain", "server")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Returns the exit status: 0 good, 1 something failed, 2 wrong usage, 130 interrupted, 141 nobody reads the
    output any more, 143 terminated.
    """
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except Terminated:
        print("sglang-ext: terminated", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:  # while modules are imported, too
        print("sglang-ext: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered has no reader; the interpreter would complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


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
    sys.stdout.flush()
    return status


def console() -> None:
    """The console script.

    SGLang ends its process tree, multiprocessing's resource tracker included, when an engine shuts down; the
    interpreter's own exit would start another one and print its complaints. All of ours is closed by then.
    """
    heed_sigterm()
    status = main()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
