"""`sglang-ext profile import`: a head map that others have published in, the model's profile out."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from prefix_index import printable
from sglang_ext.cli.arguments import add_sglang_flags, parse_layers, refuse

if TYPE_CHECKING:  # imports torch, which the help text need not wait for
    from sglang_ext.methods.layer_plan import LayerPlan

_IMPORT = """\
Write the profile of a model whose head map microsoft/kascade has published (results/head_mappings/*.npy there): its
layer plan alone. Method and budget stay the server's defaults. Layer 0 attends everything, and layers that reuse it in
the publication select for themselves.

The model's configuration is read, as a server reads it; weights are not. Flags after -- go to SGLang (quantization,
revision, ...): use those of the server.

Answers of an imported plan were not measured here. Measure them before you serve it.
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand and its own subcommand."""
    parser = commands.add_parser("profile", help="make a model's profile of what others have published")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    one = actions.add_parser(
        "import",
        help="write a profile with the layer plan of a published head map",
        description=_IMPORT,
    )
    one.add_argument("file", metavar="FILE.npy", help="the head map, int32 [layers, KV heads]")
    one.add_argument("--model-path", "--model", required=True, help="the model that will be served")
    one.add_argument("--out", required=True, metavar="FILE", help="where the profile goes")
    one.add_argument(
        "--anchors",
        type=parse_layers,
        metavar="0,2,8",
        help="layers that select in the publication (default: those in the file's name, ..._layers_0_2_8.npy)",
    )
    one.add_argument("--replace", action="store_true", help="overwrite a profile that is there")
    add_sglang_flags(one)
    one.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Entry of the subcommand; returns the exit status."""
    from sglang_ext.calibration.published import load_published_plan
    from sglang_ext.cli.checks import preview_server
    from sglang_ext.compat.engine import EngineStartError
    from sglang_ext.methods.profile import CalibrationData, Profile, ProfiledModel

    file, out = Path(args.file), Path(args.out)
    refusal = _refusal(args, file, out)
    if refusal:
        return refuse("profile import", refusal)
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        model = preview_server(args, plugin=False).model(weights=False)
        plan = load_published_plan(
            file, num_layers=model.num_layers, num_kv_heads=model.num_kv_heads, anchors=args.anchors
        )
        profile = Profile(
            model=msgspec.convert(model, ProfiledModel, from_attributes=True),
            layer_plan=plan.to_dict(),
            calibration=CalibrationData(
                description=f"layer plan imported from {printable(file.name)} (SHA-256 {digest}). Answers of this plan "
                "were not measured here: benchmarks/answers.py measures them, sglang-ext calibrate --judge yes judges "
                "a plan of your prompts"
            ),
        )
    except (EngineStartError, ValueError) as error:
        return refuse("profile import", error)
    except OSError as error:
        return refuse(
            "profile import", f"expected to be able to read the head map and the model's configuration, got: {error}"
        )
    try:
        profile.save(out)
    except OSError as error:
        return refuse(
            "profile import", f"expected to be able to write --out, got: {error}; name a file in a folder that exists"
        )
    _say(args, plan)
    return 0


def _refusal(args: argparse.Namespace, file: Path, out: Path) -> str | None:
    """What is wrong with the arguments before SGLang is imported; None if nothing is."""
    if not file.is_file():
        return f"expected a head map (.npy), got no file {args.file!r}; correct the path, or download it"
    if out.is_dir():
        return f"expected --out to be a file, got the folder {args.out!r}; name a file in it"
    if out.exists() and not args.replace:
        return f"expected no file at --out, got {args.out!r}; name another one, or overwrite it with --replace"
    return None


def _say(args: argparse.Namespace, plan: LayerPlan) -> None:
    anchors = ", ".join(map(str, plan.anchor_layers))
    reused = len(plan) - len(plan.anchor_layers) - len(plan.dense_layers)
    print(
        f"layer 0 attends everything, layers {anchors} select, {reused} others reuse their selections; method and "
        f"budget are the server's defaults; profile {args.out}",
        file=sys.stderr,
    )
    refused = refused_sizes(plan)
    if refused:
        sizes = ", ".join(map(str, refused))
        print(
            f"a server with --tp-size {sizes} refuses this plan: heads reuse selections of other ranks", file=sys.stderr
        )
    config = f'imported={{"profile": "{args.out}"}}'
    print(
        "warning: answers of this plan were not measured here; such plans may lose some. Measure before you serve it: "
        f"python benchmarks/answers.py --model-path {args.model_path} --config dense --config '{config}'; or have a "
        "plan judged that is fitted on your prompts: sglang-ext calibrate --judge yes",
        file=sys.stderr,
    )


def refused_sizes(plan: LayerPlan) -> list[int]:
    """Tensor-parallel sizes, of those that divide the KV heads, at which a rank would need another one's selection."""
    heads, refused = plan.num_kv_heads, []
    for size in [size for size in range(2, heads + 1) if heads % size == 0]:
        try:
            for rank in range(size):
                plan.for_rank(rank, size)
        except ValueError:
            refused.append(size)
    return refused
