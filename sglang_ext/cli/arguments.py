"""What commands share: their parser, tables of subcommands, and arguments with units."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

Run: TypeAlias = Callable[[argparse.Namespace], int]
"""Runs a command; returns the exit status."""
Adder: TypeAlias = Callable[[argparse.ArgumentParser], object]
"""Adds an argument, or several."""

#: Name of the argument that takes SGLang's flags.
_PASSED_ON = "sglang_flags"


class Parser(argparse.ArgumentParser):
    """Shows the usage of the command that an unknown argument was given to, and says where SGLang's flags go.

    Descriptions are shown as they are written.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # of subcommands, too
        """As argparse's, but what is unknown is an error here; argparse would leave it to the top-level parser.

        What stands behind -- is kept from argparse, which finds no place for it where an argument without a name came
        first.
        """
        passes_on = any(action.dest == _PASSED_ON for action in self._actions)
        own, behind = args, None
        if passes_on and "--" in args:
            cut = args.index("--")
            own, behind = args[:cut], args[cut + 1 :]
        found, unknown = super().parse_known_args(own, namespace)
        if behind is not None:
            setattr(found, _PASSED_ON, [*getattr(found, _PASSED_ON), *behind])
        if unknown:
            message = f"unrecognized arguments: {' '.join(unknown)}"
            if passes_on:
                message += f"; flags of SGLang go behind --, as in: {self.prog} ... -- {unknown[0]} ..."
            self.error(message)
        return found, unknown


def refuse(command: str, why: object, status: int = 2) -> int:
    """Say what a command is refused for; returns the exit status."""
    print(f"sglang-ext {command}: {why}", file=sys.stderr)
    return status


def add_sglang_flags(parser: argparse.ArgumentParser) -> None:
    """What stands behind -- and is passed on."""
    parser.add_argument(_PASSED_ON, nargs="*", metavar="-- SGLANG FLAGS", help="flags of SGLang")


def add_subcommands(
    parser: argparse.ArgumentParser,
    subcommands: Mapping[str, tuple[Any, ...]],
    common: Sequence[Adder],
    errors: tuple[type[Exception], ...],
    complain: Callable[[str, str], object],
) -> None:
    """Add subcommands to a command's parser.

    Args:
        subcommands: by name, (Run, a summary in one line, examples of what follows the name, Adders of its own).
        common: arguments of all.
        errors: of a run, each one message and status 1.
        complain: gets the subcommand and the message.
    """

    def guarded(run: Run, args: argparse.Namespace) -> int:
        try:
            return run(args)
        except errors as error:
            complain(args.subcommand, str(error))
            return 1

    group = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    for name, (run, summary, examples, *arguments) in subcommands.items():
        lines = "".join(f"  {parser.prog} {name} {example}\n" for example in examples)
        description = f"{summary[0].upper()}{summary[1:]}."
        one = group.add_parser(name, help=summary, description=description, epilog=lines and f"examples:\n{lines}")
        for add in (*common, *arguments):
            add(one)
        one.set_defaults(run=partial(guarded, run))


def argument(*words: str, **options: Any) -> Adder:
    """As `add_argument`, of a parser to come."""
    return lambda parser: parser.add_argument(*words, **options)


def flag(word: str, text: str) -> Adder:
    """True where it is given; `text` is its help."""
    return argument(word, action="store_true", help=text)


def named_indexes(nargs: str | None = None, least: int = 4) -> Adder:
    """INDEX, or as many as `nargs` says; `least` digits of a digest stand for it."""
    return argument("index", nargs=nargs, metavar="INDEX", help=f"name, digest, or its first digits ({least} or more)")


def parse_bytes(text: str) -> int:
    """argparse type of sizes: bytes, or a number with K, M, G, T (of 1024)."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d*)?)(?:([KMGT])(?:i?B)?)?", text, re.IGNORECASE | re.ASCII)
    if not found:
        raise argparse.ArgumentTypeError(f"expected bytes, or a size such as 50G; found {text!r}")
    size = int(float(found[1]) * 1024 ** " KMGT".index((found[2] or " ").upper()))
    if size >= 1 << 53:  # what messages of the store's service carry
        raise argparse.ArgumentTypeError(f"expected a size below 8192T; found {text!r}; give a smaller one")
    return size


def parse_seconds(text: str) -> float:
    """argparse type of durations: seconds, or a number with m, h, d."""
    factor = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}.get(text[-1:], 0.0)
    try:
        seconds = float(text[:-1]) * factor if factor else float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < 1e10:
        raise argparse.ArgumentTypeError(f"expected seconds, or a time such as 90m, 12h or 30d; found {text!r}")
    return seconds


def parse_count(text: str) -> int:
    """argparse type of numbers of things: 1 or more."""
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def parse_layers(text: str) -> tuple[int, ...]:
    """argparse type of layer numbers, in the order given."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"expected layer numbers such as 0,2,8, got {text!r}")
    return tuple(map(int, parts))


def names_cpu(sglang_flags: Sequence[str]) -> bool:
    """Whether SGLang's flags choose the CPU, in either spelling (`--device cpu`, `--device=cpu`)."""
    return sglang_option(sglang_flags, "--device") == "cpu"


def checkpoint_options(sglang_flags: Sequence[str]) -> tuple[str | None, str | None]:
    """(revision, download folder) that SGLang's flags name, for `profiles.local_folder`."""
    return sglang_option(sglang_flags, "--revision"), sglang_option(sglang_flags, "--download-dir")


def sglang_option(sglang_flags: Sequence[str], name: str) -> str | None:
    """The last value of one of SGLang's options, in either spelling; None where it is not given."""
    value = None
    for place, word in enumerate(sglang_flags):
        if word == name and place + 1 < len(sglang_flags):
            value = sglang_flags[place + 1]
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


def tp_size(sglang_flags: Sequence[str]) -> int:
    """Tensor-parallel ranks by SGLang's flags."""
    names = ("--tp-size", "--tp", "--tensor-parallel-size")
    sizes = [sglang_option(sglang_flags, name) or "1" for name in names]
    return max(int(size) if size.isdecimal() else 1 for size in sizes)
