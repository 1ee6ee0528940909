"""`sglang-ext prebuild`: prompts in, indexes in the store out."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, TextIO

from prefix_index import IndexStoreError
from prefix_index.connect import locate
from sglang_ext.cli.arguments import add_sglang_flags, checkpoint_options, parse_seconds, refuse
from sglang_ext.storage import configured_store, make_folder

_DESCRIPTION = """\
Prefill each prompt once through SGLang, record its queries, build its index, verify it and store it.

Prompts are JSON lines: {"id": "travel", "messages": [...], "tools": [...]} for chat requests, {"id": "a",
"text": "..."} or {"id": "a", "input_ids": [...]} for others, optionally with "extra_key" and "cache_salt" as the
requests will carry them. The id is the index's name. An index covers the prompt rounded down to build_align tokens.
Running the job again skips what is stored already, so an interrupted job resumes.
Several jobs may share a store: each index is built by one of them, and the others wait for it at their end.
Flags after -- go to SGLang (device, dtype, attention backend, context length, ...): use those of the server.
"""

_SHARED = "Name one that all nodes see, or one by the same path on each with store_remote in --sparse-attn-config"


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "prebuild",
        help="build indexes of shared prompts offline",
        description=_DESCRIPTION,
    )
    parser.add_argument("--model-path", required=True, help="the model that will be served")
    parser.add_argument("--prompts", required=True, metavar="JSONL", help="shared prompts, one JSON object a line")
    where = "index store; a folder is made when it does not exist"
    parser.add_argument("--store", required=True, metavar="DIR|ipc://SOCKET", help=where)
    parser.add_argument(
        "--sparse-attn-config", metavar="JSON|@FILE", help="as for the server; must build the same methods"
    )
    parser.add_argument("--report", metavar="JSONL", help="receives one more JSON line per prompt (default: stdout)")
    parser.add_argument("--pin", action="store_true", help="pin the prompts' indexes: they leave a full store last")
    parser.add_argument(
        "--ttl", type=parse_seconds, metavar="TIME", help="when they expire, from now: seconds, or 90m, 12h, 30d"
    )
    wait = "how long to wait, at the end, for indexes that another job builds (default: 10m)"
    parser.add_argument("--wait", type=parse_seconds, default=600.0, metavar="TIME", help=wait)
    where = "spread the prompts over this Ray cluster (auto, HOST:PORT, ray://HOST:PORT): one engine on each GPU"
    parser.add_argument("--ray", metavar="ADDRESS", help=where)
    add_sglang_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status. What can be wrong with the arguments is found before SGLang is started."""
    from sglang_ext.cli.checks import engine_refusal, model_refusal
    from sglang_ext.cli.prebuild_job import PrebuildJob, open_builder
    from sglang_ext.config import ConfigError, make_settings, parse_profiled
    from sglang_ext.prefill.prompts import PromptError, read_prompts
    from sglang_ext.profiles import local_folder

    with ExitStack() as opened:
        try:
            prompts = read_prompts(args.prompts)
            if args.report is not None and os.path.exists(args.report) and os.path.samefile(args.report, args.prompts):
                why = f"expected a --report of its own, got the prompts {args.report}. Name another file"
                return refuse("prebuild", why)
            if args.ray is not None and os.path.isdir(args.model_path):
                args.model_path = os.path.abspath(args.model_path)  # nodes work in folders of their own
            model_folder = local_folder(args.model_path, *checkpoint_options(args.sglang_flags))
            config, _ = parse_profiled(args.sparse_attn_config, model_folder)  # before a folder is made for a store
            check = engine_refusal if args.ray is None else model_refusal  # each node has devices of its own
            if refusal := check(args.model_path, args.sglang_flags):
                return refuse("prebuild", refusal)
            with suppress(IndexStoreError, OSError):  # what is no folder is left to the check of the settings
                kind, folder, _ = locate(args.store)
                if kind != "file" and args.ray is not None:
                    return refuse(
                        "prebuild", f"expected --store to be a folder with --ray, got {args.store}. {_SHARED}"
                    )
                if kind == "file":
                    make_folder(folder, config)
            settings = make_settings(args.sparse_attn_config, args.store, model_folder)
            store = opened.enter_context(closing(configured_store(settings.store, settings.config)))
            report = opened.enter_context(open(args.report, "a")) if args.report is not None else sys.stdout
            if args.report is not None:
                _begin_line(report)
        except (PromptError, ConfigError) as error:
            return refuse("prebuild", error)
        except IndexStoreError as error:
            return refuse("prebuild", f"--store {args.store}: {error}")
        except OSError as error:
            return refuse("prebuild", f"expected a --report that can be written, got: {error}. Name another file")
        if args.ray is None:
            print(f"starting SGLang for {args.model_path} ...", file=sys.stderr, flush=True)
            lines = opened.enter_context(open_builder(args, settings, store)).lines
        else:
            from sglang_ext.cli.prebuild_ray import open_cluster

            lines = opened.enter_context(open_cluster(args, settings, len(prompts))).lines
        return PrebuildJob(lines, report, args).run(prompts)


def _begin_line(report: TextIO) -> None:
    """Of a report that is written on: a full disk may have cut its last line."""
    if os.path.isfile(report.name) and Path(report.name).read_bytes()[-1:] not in (b"", b"\n"):
        report.write("\n")
