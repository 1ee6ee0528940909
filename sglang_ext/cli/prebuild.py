"""`sglang-ext prebuild`: prompts in, indexes in the store out."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from prefix_index import IndexStoreError
from prefix_index.connect import locate
from sglang_ext.cli.arguments import INTERRUPTED, checkpoint_options, names_cpu, parse_seconds
from sglang_ext.storage import StoreConfig, configured_store, make_folder

if TYPE_CHECKING:  # imports torch, which the help text need not wait for
    from sglang_ext.config import Settings

_DESCRIPTION = """\
Prefill each prompt once through SGLang, record its queries, build its index, verify it and store it.

Prompts are JSON lines: {"id": "travel", "messages": [...], "tools": [...]} for chat requests, {"id": "a",
"text": "..."} or {"id": "a", "input_ids": [...]} for others, optionally with "extra_key" and "cache_salt" as the
requests will carry them. The id is the index's name. An index covers the prompt rounded down to build_align tokens.
Running the job again skips what is stored already, so an interrupted job resumes.
Several jobs may share a store: each index is built by one of them, and the others wait for it at their end.
Flags after -- go to SGLang (device, dtype, attention backend, context length, ...): use those of the server.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "prebuild",
        help="build indexes of shared prompts offline",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model-path", required=True, help="the model that will be served")
    parser.add_argument("--prompts", required=True, metavar="JSONL", help="shared prompts, one JSON object a line")
    parser.add_argument(
        "--store",
        required=True,
        metavar="DIR|ipc://SOCKET",
        help="index store; a folder is made when it does not exist",
    )
    parser.add_argument(
        "--sparse-attn-config", metavar="JSON|@FILE", help="as for the server; must build the same methods"
    )
    parser.add_argument("--report", metavar="JSONL", help="where one JSON line per prompt goes (default: stdout)")
    parser.add_argument("--pin", action="store_true", help="pin the prompts' indexes: they leave a full store last")
    parser.add_argument(
        "--ttl", type=parse_seconds, metavar="TIME", help="when they expire, from now: seconds, or 90m, 12h, 30d"
    )
    parser.add_argument(
        "--wait",
        type=parse_seconds,
        default=600.0,
        metavar="TIME",
        help="how long to wait, at the end, for indexes that another job builds (default: 10m)",
    )
    parser.add_argument("sglang_flags", nargs="*", metavar="-- SGLANG FLAGS", help="flags of SGLang")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Entry of the subcommand; returns the exit status."""
    from sglang_ext.cli.prebuild_job import PrebuildJob
    from sglang_ext.config import ConfigError, make_settings, parse_profiled
    from sglang_ext.prefill.prompts import PromptError, read_prompts
    from sglang_ext.profiles import local_folder

    try:
        prompts = read_prompts(args.prompts)
        model_folder = local_folder(args.model_path, *checkpoint_options(args.sglang_flags))
        config, _ = parse_profiled(args.sparse_attn_config, model_folder)  # before a folder is made for a store
        _make_folder(args.store, config)
        settings = make_settings(args.sparse_attn_config, args.store, model_folder)
        store = configured_store(settings.store, settings.config)
    except (PromptError, ConfigError) as error:
        print(f"sglang-ext prebuild: {error}", file=sys.stderr)
        return 2
    except IndexStoreError as error:
        print(f"sglang-ext prebuild: {error}", file=sys.stderr)
        return 1
    from sglang_ext.compat.engine import OfflineEngine

    with closing(store), tempfile.TemporaryDirectory() as folder:
        events = os.path.join(folder, "events.jsonl")
        engine = OfflineEngine(_flags(args, settings, events))
        print(f"starting SGLang for {args.model_path} ...", file=sys.stderr, flush=True)
        try:
            engine.open()
            with _report_to(args.report) as report:
                return PrebuildJob(engine, store, settings, events, report, args).run(prompts)
        except KeyboardInterrupt:
            print("interrupted; run the same command again to go on", file=sys.stderr)
            return INTERRUPTED
        finally:
            engine.close()


def _make_folder(address: str, config: StoreConfig) -> None:
    """A store's folder is made when it is missing. What is no folder is left to the check of the settings."""
    with suppress(IndexStoreError, OSError):
        kind, folder, _ = locate(address)
        if kind == "file":
            make_folder(folder, config)


def _flags(args: argparse.Namespace, settings: Settings, events: str) -> list[str]:
    from sglang_ext.config import Build, DecodePath

    # Nothing decodes here: no memory has to be kept for indexes.
    building = msgspec.structs.replace(
        settings.config, build=Build.PREFILL, build_report=events, decode_path=DecodePath.STOCK
    )
    flags = ["--model-path", args.model_path, "--log-level", "error", *args.sglang_flags]
    flags += ["--disable-radix-cache", "--sparse-attn", "--sparse-attn-store", settings.store]
    flags += ["--sparse-attn-config", msgspec.json.encode(building).decode()]
    if not names_cpu(flags) and "--disable-decode-cuda-graph" not in flags:
        flags.append("--disable-decode-cuda-graph")
    return flags


@contextmanager
def _report_to(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    with open(path, "a") as file:
        yield file
