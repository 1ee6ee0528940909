"""Writes docs/reference.md from the docstrings of the options and methods, and from the commands' own help.

python scripts/reference_page.py
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sglang_ext.cli import COMMANDS
from sglang_ext.cli.arguments import Parser
from sglang_ext.cli.store import default_endpoint
from sglang_ext.config import SparseAttnConfig
from sglang_ext.methods import METHODS
from sglang_ext.storage import default_store

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"
HEAD = """\
# Reference

Written by `python scripts/reference_page.py`: change the docstrings and help texts, not this page.

## Settings

Keys of `--sparse-attn-config`, which takes a JSON object or `@FILE`. An unknown key is an error. Lengths are tokens,
sizes are bytes. What each is for: [using.md](using.md), [operating.md](operating.md).
"""
METHODS_HEAD = """\
## Parameters of the methods

Values of `methods`, by the method's name: `{"methods": {"token_index": {"channel_ratio": 1.0}}}`. What the methods do:
[selection.md](selection.md).
"""
COMMANDS_HEAD = """\
## Commands

`-h` prints the same and says more. Behind `--` stand flags of SGLang.
"""


def attributes(kind: type) -> dict[str, str]:
    """What the docstring's section "Attributes" says of each name."""
    section = (kind.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    parts = re.split(r"^ {8}(\w[\w, ]*): ", section, flags=re.M)[1:]
    said = zip(parts[::2], parts[1::2], strict=True)
    return {name: " ".join(text.split()) for names, text in said for name in names.split(", ")}


def table(head: str, defaults: Mapping[str, Any], said: Mapping[str, str]) -> str:
    """One row a name: its default in JSON, and what is said of it."""
    rows = [f"| `{name}` | `{json.dumps(value)}` | {cell(said[name])} |" for name, value in defaults.items()]
    return "\n".join([f"| {head} | default | meaning |", "|---|---|---|", *rows])


def cell(text: str) -> str:
    """As text of a table's cell, and with this machine's folders as anybody's."""
    text = text.replace(default_store(), "~/.cache/sglang-ext/store")
    text = text.replace(default_endpoint(), "ipc:///tmp/sglang-ext-UID/store")
    return text.replace("|", "\\|")


def methods() -> Iterator[str]:
    """A table for each method that has parameters."""
    for name, method in METHODS.items():
        spec = method.spec()
        defaults = {**vars(spec), **spec.to_dict()}
        own = [field.name for field in dataclasses.fields(method.spec)]
        said = attributes(method.spec)
        if own:
            yield f"### `{name}`\n\n" + table("parameter", {key: defaults[key] for key in own}, said)


def parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Every command without commands of its own, with its summary."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, one in action.choices.items():
                below = list(parsers(one))
                yield from below or [(one, summaries[name])]


def commands() -> Iterator[str]:
    """A section for each command: what it does, its arguments."""
    top = Parser(prog="sglang-ext")
    subcommands = top.add_subparsers()
    for name in COMMANDS:
        importlib.import_module(f"sglang_ext.cli.{name}").add_parser(subcommands)
    for parser, summary in parsers(top):
        rows = [
            f"| {cell(written(action))} | {cell(action.help % vars(action) if action.help else '')} |"
            for action in parser._actions
            if action.dest != "help" and action.help != "flags of SGLang"
        ]
        rule = ["| argument | meaning |", "|---|---|", *rows]
        yield f"### `{parser.prog}`\n\n{summary[0].upper()}{summary[1:]}.\n\n" + "\n".join(rule)


def written(action: argparse.Action) -> str:
    """An argument as it is typed."""
    value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    return ", ".join(
        f"`{' '.join([*([word] if word else []), *([str(value)] if value else [])])}`"
        for word in action.option_strings or [""]
    )


def page() -> str:
    """The text of docs/reference.md."""
    defaults: dict[str, Any] = msgspec.to_builtins(SparseAttnConfig())
    settings = table("key", defaults, attributes(SparseAttnConfig))
    parts = (f"{HEAD}\n{settings}", METHODS_HEAD.strip(), *methods(), COMMANDS_HEAD.strip(), *commands())
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
