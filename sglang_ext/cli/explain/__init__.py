"""`sglang-ext explain`: why a prompt has the index that it has, or none."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from prefix_index import IndexStoreError
from sglang_ext.cli.arguments import add_sglang_flags, parse_count, refuse
from sglang_ext.cli.asking import ServerError, add_arguments
from sglang_ext.cli.index.text import SHORT, emit, span, wrapped

_DESCRIPTION = """\
Compare one prompt with the indexes of a store: the longest common prefix with
each, the first token that differs as text, and the fields of the identity that
differ (extra_key, model, KV dtype, methods and their parameters).

With --url a running server is asked: it makes the tokens, looks in its own
store, and says whether the index is loaded and what a step would cost. Without,
give --model-path, --store and the server's own settings; what steps cost is
known to a running server only.

--messages takes a JSON file: messages, or an object as in the prompts of
prebuild ({"messages": [...], "tools": [...], "extra_key": ...}, or "text" or
"input_ids"). Exit status: 0 where an index serves the prompt, 1 where none does.

examples:
  sglang-ext explain --url http://127.0.0.1:30000 --messages request.json
  sglang-ext explain --model-path MODEL --store ./store --prompt @prompt.txt
  sglang-ext explain --url http://127.0.0.1:30000 --prompt @prompt.txt --picture attended.png
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "explain",
        help="say why a prompt has an index or none",
        description=_DESCRIPTION,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT|@FILE", help="a text, as of /generate and /v1/completions")
    what.add_argument("--messages", metavar="FILE", help="a chat request, or a line of prebuild's prompts, as JSON")
    parser.add_argument("--extra-key", metavar="TEXT", help="of the request")
    parser.add_argument("--cache-salt", metavar="TEXT", help="of the request, on SGLang 0.5.23")
    add_arguments(parser, url=None)
    parser.add_argument("--api-key", metavar="KEY", help="for --picture: the server's --api-key, if it has both keys")
    parser.add_argument("--picture", metavar="FILE.png", help="with --url: draw what a request of the prompt attends")
    parser.add_argument("--model-path", metavar="MODEL", help="without --url: the model that is served")
    parser.add_argument("--store", metavar="DIR|ipc://SOCKET", help="without --url: the server's store")
    parser.add_argument("--sparse-attn-config", metavar="JSON|@FILE", help="without --url: as for the server")
    parser.add_argument("--limit", type=parse_count, default=3, metavar="N", help="indexes to show (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_sglang_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Entry of the subcommand; returns the exit status."""
    warnings.simplefilter("ignore")  # SGLang's imports have many
    here = ("model_path", "store", "sparse_attn_config")
    if (args.url is None) == (args.model_path is None):
        return refuse("explain", "expected --url, or --model-path and --store; got both or neither. Give one of them")
    if args.url is not None and (args.sglang_flags or any(getattr(args, name) for name in here)):
        return refuse("explain", "expected no settings beside --url: the server has its own; leave them out")
    if args.picture and args.url is None:
        return refuse("explain", "expected --url with --picture: a running server draws on what it attended; name it")
    from sglang_ext.cli.explain.answers import ask_server, compare_here, draw, read_prompt

    try:
        prompt = read_prompt(args)
        found = compare_here(args, prompt) if args.url is None else ask_server(args, prompt)
        if args.picture:
            draw(args, prompt, found)
    except (ServerError, IndexStoreError, OSError, ValueError, RecursionError) as error:
        return refuse("explain", error)
    found.pop("input_ids", None)
    if args.json:
        emit(found)
    else:
        print("\n".join(_told(found, args.limit)))
        if args.picture:
            print(_line("picture", f"{args.picture}: what a request of the prompt attended in its steps"))
    return 0 if found.get("index", found["compared"]["index"]) is not None else 1


def _told(found: Mapping[str, Any], limit: int) -> Iterator[str]:
    compared = found["compared"]
    yield _line("prompt", f"{compared['tokens']} tokens")
    reason = "" if compared["reason"] is None else f"{compared['reason']}: "
    yield _line("index", f"{reason}{compared['summary']}")
    yield from _of_server(found)
    for one in compared["candidates"][:limit]:
        yield from _candidate(one)
    for one in compared["gone"][:limit]:
        ago = span(time.time() - one["removed"])
        fields = "".join(f"; {field}" for field in one["differs"])
        yield _line(f"gone {_name(one)}", f"{one['tokens']} tokens, {one['why']} {ago} ago{fields}")
    for problem in found.get("problems", compared["problems"]):
        yield _line("unusable", problem)
    more = len(compared["candidates"]) - limit + compared["unread"]
    if more > 0:
        yield f"{more} more are not shown (--limit); {compared['unread']} of them were not looked at"


def _of_server(found: Mapping[str, Any]) -> Iterator[str]:
    """What only a running server knows."""
    if "path" not in found:
        yield _line("a step", "what it costs on this GPU is known to a running server only: --url")
        return
    offered = found["compared"]["index"]
    if found["index"] != offered:
        about = [text for text in found["problems"] if offered and offered in text]
        yield _line("server", about[0] if about else f"finds {found['index'] or 'none'}: {found['detail'] or 'as yet'}")
    if found["index"] is not None:
        yield _line("device", found["resident"] or "not loaded; the first request that finds it loads it")
    budget = f"; selecting layers attend {found['budget']} tokens of the prefix" if found["path"] == "sparse" else ""
    yield _line("a step", f"{found['path']}: {found['why']}{budget}")
    for path, us in found["costs_us"].items():
        cost = "not measured (no decode graphs, or no index)" if us is None else f"{us:.0f} us of attention, all layers"
        yield _line("", f"{path}: {cost}")


def _candidate(one: Mapping[str, Any]) -> Iterator[str]:
    common = "?" if one["common"] is None else one["common"]
    yield _line(_name(one), f"{common} of {one['tokens']} tokens common: {one['verdict']}")
    for field in one["differs"]:
        yield _line("", field)
    if one["at"] is not None:
        for side in ("prompt", "index"):
            own = one[side]
            token = "ends" if own["token"] is None else f"{own['token_text']!r} ({own['token']})"
            yield _line("", f"token {one['at']}, {side}: {token} in {own['around']!r}")


def _name(one: Mapping[str, Any]) -> str:
    return str(one["name"] or one["digest"][:SHORT])


def _line(label: str, text: str) -> str:
    return wrapped(text, f"{label[:16]:<16} ", " " * 17)
