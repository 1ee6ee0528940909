"""`sglang-ext`: one command, one module per subcommand."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from sglang_ext import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status (0 good, 1 something failed, 2 wrong usage)."""
    from sglang_ext.cli import prebuild

    parser = argparse.ArgumentParser(
        prog="sglang-ext", description="Sparse attention for shared prefixes on SGLang: offline jobs."
    )
    parser.add_argument("--version", action="version", version=f"sglang-ext {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    prebuild.add_parser(commands)
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    status: int = args.run(args)
    return status


def console() -> None:
    """The console script.

    SGLang ends its process tree, multiprocessing's resource tracker included, when an engine shuts down; the
    interpreter's own exit would start another one and print its complaints. All of ours is closed by then.
    """
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
