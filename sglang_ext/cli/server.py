"""`sglang-ext server`: what a running server does with indexes, and what it is told."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from prefix_index import printable
from sglang_ext.cli.arguments import add_subcommands, argument, flag, named_indexes
from sglang_ext.cli.asking import ServerError, add_arguments, ask
from sglang_ext.cli.index.text import SHORT, emit, retention, size, span, table

_DESCRIPTION = """\
Commands act on every tensor-parallel rank between two decode steps. Indexes are named by the id that their prompt had
in prebuild, by their digest, or by enough of its first digits (4 or more).

Exit status: 0 good, 1 the server refuses or does not answer, 2 wrong usage.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand and its own subcommands."""
    parser = commands.add_parser(
        "server", help="ask a running server, and tell it what to do", description=_DESCRIPTION
    )
    common = add_arguments, flag("--json", "print the server's answer as JSON")
    add_subcommands(parser, _SUBCOMMANDS, common, (ServerError,), _complain)


def _complain(subcommand: str, message: str) -> None:
    print(f"sglang-ext server {subcommand}: {printable(message)}", file=sys.stderr)


# -- what is asked -------------------------------------------------------------------------------------------


def _asked(args: argparse.Namespace, command: str, field: str) -> dict[str, Any]:
    """The server's answer. Raises ServerError, also where the answer lacks that field."""
    found = ask(args, command)
    if field not in found:
        raise ServerError(
            f"expected an answer of {args.url} with the field {field!r}, got {', '.join(found) or 'no field'}; "
            "check --url"
        )
    return found


def run_status(args: argparse.Namespace) -> int:
    """A table of two columns."""
    found = _asked(args, "status", "state")
    if args.json:
        emit(found)
        return 0
    print(*table(("SERVER", args.url), list(_status_rows(found).items())), sep="\n")
    return 0


def _status_rows(found: Mapping[str, Any]) -> dict[str, str]:
    state, budget = found["state"], found["budget"]
    held = f"{size(state['resident_bytes'])} of {size(found['index_bytes'])}, in use by {state['index_users']}"
    usable = f"{state['indexes_usable']} usable of {state['indexes_in_store']} indexes"
    builds = [f"{name} {value}" for name, value in state["builds"].items() if isinstance(value, int) and value]
    rows = {
        "versions": ", ".join(f"{name} {value}" for name, value in found["versions"].items()),
        "shared prefixes": _mode(found["shared_prefixes"]),
        "indexes": _mode(found["indexes"]),
        "budget": ", ".join(f"{name} {value}" for name, value in budget.items() if value is not None) or "default",
        "decoded rows": ", ".join(f"{path} {share:.1%}" for path, share in found["path_shares"].items()),
        "index hits": f"{state['hits']} requests",
        "fallbacks": ", ".join(f"{reason} {n}" for reason, n in sorted(state["fallbacks"].items())) or "none",
        "on the device": f"{held} requests",
        "in the store": f"{usable}, {size(state['store_bytes'])}",
        "builds": ", ".join(builds) or "none",
    }
    return rows | {f"problem {n}": text for n, text in enumerate(state["store_problems"], 1)}


def _mode(mode: Mapping[str, Any]) -> str:
    return "on" if mode["on"] else f"off: {mode['why_not']}"


def run_indexes(args: argparse.Namespace) -> int:
    """One row an index, or its JSON."""
    found = _asked(args, "indexes", "indexes")
    if args.json:
        for one in found["indexes"]:
            emit(one)
        return 0
    now, rows = time.time(), []
    for one in found["indexes"]:
        where = "+".join(one["tiers"]) or "-"
        state = one["state"] or "-"
        kept = "pin" if one["pinned"] else retention(one["pinned_in_store"], None, now)
        cells = (one["digest"][:SHORT], str(one["tokens"]), size(one["device_bytes"]), size(one["store_bytes"]), where)
        rows.append((*cells, state, str(one["users"]), str(one["hits"]), kept, span(now - one["created"]), _named(one)))
    header = ("INDEX", "TOKENS", "DEVICE", "STORE", "WHERE", "STATE", "USERS", "HITS", "KEPT", "AGE", "NAME")
    print(*table(header, rows, (1, 2, 3, 6, 7, 9)), sep="\n")
    if found["not_shown"]:
        print(f"and {found['not_shown']} more in the store that nobody uses: sglang-ext index ls lists all")
    return 0


def _named(one: Mapping[str, Any]) -> str:
    return f"{one['name'] or '-'}" + (f" ({one['why_not']})" if one["why_not"] else "")


# -- what is told --------------------------------------------------------------------------------------------


def _tell(args: argparse.Namespace, body: dict[str, Any]) -> int:
    """One command; its answer in words or as JSON."""
    found = ask(args, args.subcommand.replace("-", "_"), body)
    if args.json:
        emit(found)
    else:
        print(", ".join(f"{name.replace('_', ' ')}: {_said(value)}" for name, value in found.items()))
    return 0


def _said(value: Any) -> str:
    words = {True: "on", False: "off", None: "not set"}
    return words[value] if value is None or isinstance(value, bool) else printable(str(value))


def _about_one(args: argparse.Namespace) -> int:
    return _tell(args, {"index": args.index})


def _build(args: argparse.Namespace) -> int:
    """All prompts of a file, one after another; those that are refused keep none of the others."""
    import msgspec

    from sglang_ext.prefill.prompts import LineNumber, PromptError, read_prompts

    try:
        prompts = read_prompts(args.prompts)
    except PromptError as error:
        _complain(args.subcommand, str(error))
        return 2
    status = 0
    for prompt in prompts:
        given = msgspec.structs.asdict(prompt)
        body = {name: value for name, value in given.items() if value is not None and name != "id"}
        named = f"line {prompt.id}" if isinstance(prompt.id, LineNumber) else prompt.id
        try:
            if not args.json:
                print(f"{printable(named)}: ", end="")
            _tell(args, body)
        except ServerError as error:
            if not args.json:
                print("refused")
            _complain(args.subcommand, f"{named}: {error}")
            status = 1
    return status


def _budget(args: argparse.Namespace) -> int:
    given = {"keep_ratio": args.keep_ratio, "top_k": args.top_k}
    return _tell(args, {name: None if value == "none" else value for name, value in given.items() if value is not None})


def _or_none(kind: type[float], what: str, text: str) -> float | str:
    try:
        return text if text == "none" else kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected {what}, or none; got {text!r}") from None


_ratio = partial(_or_none, float, "a fraction such as 0.1")
_tokens = partial(_or_none, int, "a number of tokens")


_SUBCOMMANDS: dict[str, tuple[Any, ...]] = {
    "status": (run_status, "what is on, which ways steps went, and why not by an index", ()),
    "indexes": (run_indexes, "the indexes in the store and on the device, the most used first", ()),
    "prefetch": (_about_one, "load an index onto the device now", (), named_indexes()),
    "pin": (
        _about_one,
        "keep an index on the device, and in the store until nothing else can leave",
        (),
        named_indexes(),
    ),
    "unpin": (_about_one, "take the pin off", (), named_indexes()),
    "evict": (
        lambda args: _tell(args, {"index": args.index, "store": args.store}),
        "take an index that nobody uses off the device",
        (),
        named_indexes(),
        flag("--store", "remove it from the store, too"),
    ),
    "build": (
        _build,
        "have indexes of prompts built from the next requests that begin with them",
        (),
        argument("--prompts", required=True, metavar="FILE.jsonl", help="as for sglang-ext prebuild"),
    ),
    "budget": (
        _budget,
        "set how many tokens of a prefix are attended, from the next step on",
        (),
        argument("--keep-ratio", type=_ratio, metavar="RATIO|none", help="budget as a fraction of the prefix"),
        argument("--top-k", type=_tokens, metavar="TOKENS|none", help="most tokens of a budget"),
    ),
    "off": (
        lambda args: _tell(args, {"shared_prefixes": args.shared_prefixes}),
        "use no index until it is on again; running requests go on, exactly",
        (),
        flag("--shared-prefixes", "leave steps of requests that share slots to SGLang, too"),
    ),
    "on": (lambda args: _tell(args, {}), "use indexes and shared prefixes again", ()),
    "reload-profile": (lambda args: _tell(args, {}), "take over the keep ratio of a changed profile", ()),
}
