"""`sglang-ext calibrate`: a development set in, the model's profile and a report out."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from contextlib import suppress
from functools import partial
from typing import Any

from sglang_ext.cli.arguments import add_sglang_flags, parse_count, parse_layers, refuse

_DESCRIPTION = """\
Run every prompt of a development set once through SGLang, measure its attention, and write the model's profile:
block sizes and channels per KV head, layer plan with head maps, near-uniform heads, recommended method and budget.

Prompts are JSON lines: {"id": "task-1", "text": "..."}, or "messages" (with "tools") or "input_ids", optionally with
"question" (it follows the prompt, which is then the prefix) and "task" (default: the id up to its first "-").
Give prompts as long as those that will be served, at least two, better some dozens of several tasks.

Measurements lie in OUT.state, one small file per prompt. Running the job again measures only what is missing; with
all prompts measured, it fits the profile anew without measuring (--anchors, --tau, ...).

Attention mass proposes layer plans and budgets. On a GPU each of them then serves held-out prompts (an engine start
each; every second prompt, all questions about one text together, is held out): dense's tokens are forced through its
decode steps, and the fastest whose KL divergence from dense is surely within the bound is recommended. The profile is
then fitted on all prompts. Where none is faster than every layer selecting, that is. --judge no leaves it out.
Flags after -- go to SGLang (device, dtype, attention backend, context length, ...): use those of the server.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "calibrate",
        help="measure a model and write its profile",
        description=_DESCRIPTION,
    )
    parser.add_argument("--model-path", "--model", required=True, help="the model that will be served")
    parser.add_argument("--data", required=True, metavar="JSONL", help="development set, one JSON object a line")
    parser.add_argument("--out", required=True, metavar="FILE", help="where the profile goes")
    parser.add_argument(
        "--report", metavar="DIR", help="write report.html, report.json and plots (needs sglang-ext[calibrate])"
    )
    parser.add_argument("--state", metavar="DIR", help="where measurements are kept (default: OUT.state)")
    parser.add_argument("--no-resume", action="store_true", help="remove measurements that are there and begin anew")
    parser.add_argument(
        "--description", default="", metavar="TEXT", help="where the prompts come from, for the profile"
    )
    _add_measuring(parser.add_argument_group("what is measured (a state made with other values is refused)"))
    _add_fitting(parser.add_argument_group("what is chosen (may change between runs)"))
    _add_judging(parser.add_argument_group("how proposals are judged"))
    add_sglang_flags(parser)
    parser.set_defaults(run=run)


def _add_measuring(group: Any) -> None:
    add_count = partial(group.add_argument, type=parse_count, metavar="N")
    group.add_argument("--keep-ratio", type=_ratio, default=0.05, metavar="R", help="budget (default: %(default)s)")
    add_count("--decode-steps", default=16, help="tokens generated and measured (default: 16)")
    add_count("--max-tokens", default=32, help="tokens measured per prompt, at most (default: 32)")
    add_count("--query-samples", default=2048, help="sampled query rows per KV head (default: 2048)")
    group.add_argument(
        "--device", default="auto", help="where to measure: cpu, cuda, or auto: cuda where there is one (default)"
    )


def _add_fitting(group: Any) -> None:
    add_count = partial(group.add_argument, type=parse_count, metavar="N")
    group.add_argument("--method", help="that is judged and recommended (default: the server's default)")
    group.add_argument(
        "--dense-layers",
        type=_first_layers,
        default=(0,),
        metavar="0,1",
        help="first layers, which read everything (default: 0)",
    )
    add_count(
        "--anchors",
        help="layers that select (default: the fewest that keep 98%% of the layers' own attention mass); where "
        "proposals are judged, the only plan beside every layer selecting",
    )
    group.add_argument(
        "--tau",
        type=_ratio,
        default=0.98,
        help='recall that block sizes keep; methods take them by "sizes": "profile" (default: %(default)s)',
    )
    group.add_argument(
        "--block-average", type=float, metavar="B", help="instead of --tau: harmonic mean of the block sizes in tokens"
    )
    add_count(
        "--num-channels",
        default=32,
        help="per KV head; methods whose num_channels is this take them (default: %(default)s)",
    )


def _add_judging(group: Any) -> None:
    group.add_argument(
        "--judge",
        choices=("auto", "yes", "no"),
        default="auto",
        help="serve held-out prompts by each proposal and recommend by that; auto: on a GPU (default). On a CPU there "
        "are no decode graphs, and times are those of the reference",
    )
    group.add_argument(
        "--max-kl",
        type=_nats,
        metavar="NATS",
        help="bound of the KL divergence from dense (default: that of every layer selecting at --keep-ratio on the "
        "same prompts, and a quarter)",
    )
    rows = "requests that decode together (default: %(default)s)"
    group.add_argument("--rows", type=parse_count, default=16, metavar="N", help=rows)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status. What can be wrong with the arguments is found before SGLang is started."""
    if args.report is not None and importlib.util.find_spec("matplotlib") is None:
        return refuse(
            "calibrate",
            "expected matplotlib for --report, got none; pip install 'sglang-ext[calibrate]', or leave --report out",
        )
    from sglang_ext.cli.calibrate_job import CalibrateJob
    from sglang_ext.cli.checks import engine_refusal, measuring_refusal, num_layers_of
    from sglang_ext.cli.engines import open_session

    # Without a model, too, a profile can be fitted to measurements that are complete.
    refusal = engine_refusal(args.model_path, args.sglang_flags) or measuring_refusal(args.device)
    try:
        job = CalibrateJob(args)
        num_layers = num_layers_of(args.model_path, args.sglang_flags)
        if num_layers is not None:
            job.check_layers(num_layers)
    except ValueError as error:  # of prompts, measurements and options alike
        return refuse("calibrate", error)
    except OSError as error:
        return refuse(
            "calibrate", f"expected to be able to write the profile, the report and measurements, got: {error}"
        )
    if refusal and (job.missing or job.judges):
        return refuse("calibrate", refusal)
    try:
        if job.missing:
            print(f"starting SGLang for {args.model_path} ...", file=sys.stderr, flush=True)
            sizes = {"query_samples": args.query_samples, "tail_tokens": args.max_tokens}
            with open_session(args.model_path, args.sglang_flags, **sizes, decode_steps=args.decode_steps) as session:
                job.measure(session)
        return job.finish()
    except ValueError as error:
        return refuse("calibrate", error, 1)
    except OSError as error:
        return refuse(
            "calibrate",
            f"expected to be able to write the profile, the report and measurements, and to read these, got: {error}; "
            "make room, and run the same command again: what was measured is kept",
            1,
        )


def _above_zero(most: float, what: str, text: str) -> float:
    with suppress(ValueError):
        if 0.0 < float(text) <= most:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")


_ratio = partial(_above_zero, 1.0, "a number above 0 and at most 1")
_nats = partial(_above_zero, sys.float_info.max, "nats above 0")


def _first_layers(text: str) -> tuple[int, ...]:
    layers = tuple(sorted(set(parse_layers(text)))) if text.strip() else ()
    if layers != tuple(range(len(layers))):
        raise argparse.ArgumentTypeError(
            f"expected the first layers (0, or 0,1, ..., or nothing), got {text!r}; name all layers from 0 on, or fewer"
        )
    return layers
