"""What `doctor` looks at, and what it says of each: good or not, what was found, what to do."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from prefix_index import IndexStore, IndexStoreError, ModelFingerprint
from prefix_index.connect import locate
from prefix_index.folder import free_bytes
from sglang_ext.cli.checks import SAID, preview_server
from sglang_ext.cli.index.targets import open_unused
from sglang_ext.cli.index.text import size
from sglang_ext.compat import versions
from sglang_ext.compat.engine import EngineStartError
from sglang_ext.config import Settings
from sglang_ext.decode.select_op import graph_refusal
from sglang_ext.decode.self_test import LEAST_AGREEMENT, run_self_test
from sglang_ext.methods import method_specs
from sglang_ext.options import Build, SparseAttnConfig
from sglang_ext.prefill.builder import profile_digest
from sglang_ext.prefix.mismatch import Specs, differences, misfit
from sglang_ext.storage import ENV_STORE, configured_store, default_store, holds_indexes

if TYPE_CHECKING:  # imports SGLang, which may not be there
    from sglang_ext.compat.preview import ServerPreview

OK, WARN, FAIL = "ok", "warn", "fail"
_PLUGINS = "sglang.srt.plugins"
_NAMES = ("sparse_attn", "sparse_attn_cpu")


class Finding(NamedTuple):
    """One row of the table: what was looked at, what is there, and what to do about it (empty: nothing)."""

    what: str
    verdict: str
    found: str
    todo: str = ""


def examine(args: argparse.Namespace) -> list[Finding]:
    """All findings, in the order in which a start would meet what they are about."""
    found = [*_versions(), _plugin(), *_gpus()]
    config, dtype = SparseAttnConfig(), None
    if args.model_path is not None and versions.unsupported_message(versions.installed()) is None:
        try:
            preview = preview_server(args)
        except EngineStartError as error:
            found.append(Finding("start", FAIL, str(error), "correct what is named, and run doctor again"))
        else:
            settings = preview.settings
            assert settings is not None, "--sparse-attn is among the flags"
            config, dtype = settings.config, preview.dtype
            found += [*_start(preview), _profile(settings), *_stored(preview, settings, args)]
    return [*found, _kernels(config, dtype)]


# -- the machine -------------------------------------------------------------------------------------------------------


def _versions() -> Iterator[Finding]:
    python, good = platform.python_version(), (3, 10) <= sys.version_info[:2] <= (3, 12)
    todo = "" if good else "use Python 3.10 to 3.12"
    yield Finding("python", OK if good else WARN, f"{python} on {platform.system()}", todo)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield Finding("torch", OK, f"{torch.__version__}, {built}")
    triton = versions.installed("triton")
    todo = "pip install triton: without it nothing is attended on a GPU"
    yield Finding("triton", OK if triton else FAIL, triton or "not installed", "" if triton else todo)
    message = versions.unsupported_message(versions.installed())
    found = f"{versions.installed()}, supported" if message is None else message.removeprefix(SAID)
    yield Finding("sglang", OK if message is None else FAIL, found)


def _plugin() -> Finding:
    """Whether SGLang finds the entry points, and may load them."""
    found = {one.name for one in entry_points(group=_PLUGINS)}
    missing = [name for name in _NAMES if name not in found]
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    left_out = [name for name in _NAMES if allowed and name not in allowed]
    if missing:
        told = f"no entry point {', '.join(missing)} in the group {_PLUGINS}"
        return Finding("plugin", FAIL, told, "install sglang-ext with pip in SGLang's environment")
    if left_out:
        verdict = FAIL if _NAMES[0] in left_out else WARN
        todo = f"unset SGLANG_PLUGINS, or add {','.join(left_out)}"
        return Finding("plugin", verdict, f"SGLANG_PLUGINS leaves out {', '.join(left_out)}", todo)
    return Finding("plugin", OK, f"SGLang finds {', '.join(_NAMES)}")


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("gpu", OK, "none; plain torch attends, which shows that things work, not how fast")
        return
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = ["unknown"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        driver = ran.stdout.split() or driver
    for number in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        told = f"{one.name}, sm_{one.major}{one.minor}, {size(free)} of {size(total)} free"
        yield Finding(f"gpu {number}", OK, f"{told}, driver {driver[0]}")


# -- the start ---------------------------------------------------------------------------------------------------------


def _start(preview: ServerPreview) -> Iterator[Finding]:
    refusal = preview.refusal
    if preview.device == "cuda" and not torch.cuda.is_available():
        refusal = refusal or "expected a GPU for --device cuda, found none; run this where the server will, or say cpu"
    prefill, decode = preview.attention_backends
    backends = decode if prefill == decode else f"{prefill} (prefill), {decode} (decode)"
    yield Finding("attention backend", OK, f"{backends}, on {preview.device}, TP {preview.tp_size}")
    graphs = "captured, ours beside SGLang's" if preview.decode_graphs else "none: a ready index is always used"
    yield Finding("decode graphs", OK, graphs)
    if refusal is not None:
        yield Finding("start", FAIL, refusal)
        return
    yield Finding("start", OK, "nothing in flags, settings and the model's configuration is refused")
    memory = torch.cuda.get_device_properties(0).total_memory if preview.device == "cuda" else 0
    promised = preview.promised_bytes(memory)
    if promised:
        todo = "lower index_gpu_bytes, or set decode_path to cascade (no indexes)" if 2 * promised > memory else ""
        told = f"{size(promised)} of {size(memory)} are kept for indexes and buffers at most, beside weights and KV"
        yield Finding("memory", WARN if todo else OK, told, todo)


def _profile(settings: Settings) -> Finding:
    """A profile of another model would have been refused with the flags."""
    config = settings.config
    if settings.profile is None:
        told = f"none; every layer but the first selects by {config.method}"
        todo = "optional: sglang-ext calibrate finds layers that need not select"
        return Finding("profile", OK, told, "" if config.layer_plan else todo)
    anchors = len(settings.profile.plan().anchor_layers)
    told = f"{config.profile}: of this model, {anchors} layers select by {config.method}"
    return Finding("profile", OK, told)


# -- the store ---------------------------------------------------------------------------------------------------------


def _stored(preview: ServerPreview, settings: Settings, args: argparse.Namespace) -> Iterator[Finding]:
    """The store: whether it can be used, and what of it this server could."""
    config, address = settings.config, settings.store
    named = args.store if args.store is not None else os.environ.get(ENV_STORE) or None
    if named is None and not holds_indexes(default_store()):
        wanted = 'name one with --store, or set "build": "shared", where indexes are wanted'
        todo = wanted if config.build is Build.OFF else ""
        yield Finding("store", OK, f"none named, and the default one, {default_store()}, has no index", todo)
        return
    try:
        store = configured_store(address, config, write=False, publish=False)
    except IndexStoreError as error:
        yield Finding("store", FAIL, str(error))
        return
    with contextlib.closing(store):
        yield _rights(address, config)
        try:
            yield from _indexes(store, preview.model(), settings)
        except (OSError, ValueError, IndexStoreError) as error:
            yield Finding("indexes", FAIL, str(error))


def _rights(address: str, config: SparseAttnConfig) -> Finding:
    kind, folder, _ = locate(address)
    if kind != "file":
        return Finding("store", OK, f"{address} answers")
    builds, free = config.build in (Build.SHARED, Build.PREFILL), free_bytes(Path(folder))
    told = f"{folder}, {size(free)} free on its disk"
    if not os.access(folder, os.W_OK):
        todo = "change its owner or mode, or set build to off" if builds else ""
        return Finding("store", FAIL if builds else OK, f"{told}; it cannot be written to", todo)
    if free < config.store_min_free_bytes:
        todo = "free disk space, or lower store_min_free_bytes: new indexes push out old ones, or find no room"
        return Finding("store", WARN, f"{told}, less than store_min_free_bytes", todo)
    return Finding("store", OK, told)


def _indexes(store: IndexStore, model: ModelFingerprint, settings: Settings) -> Iterator[Finding]:
    """How many could serve, and of those that could not one of each kind, with the fields that differ."""
    entries, problems = store.list(), store.problems()
    digest = profile_digest(settings.config, settings.profile)
    kinds = Counter(misfit(entry.identity, model, digest) for entry in entries)
    usable = kinds.pop(None, 0)
    told = f"{usable} of {len(entries)} usable, {size(sum(entry.nbytes for entry in entries))}"
    if entries and not usable:
        todo = "give the server's --sparse-attn-config and its flags behind --, or build some (sglang-ext prebuild)"
        yield Finding("indexes", WARN, told, todo)
    else:
        yield Finding("indexes", OK, told)
    specs = {name: spec.to_dict() for name, spec in method_specs(settings.config).items()}
    for kind, count in kinds.most_common():
        one = next(entry for entry in entries if misfit(entry.identity, model, digest) == kind)
        built_by: Specs | None = None
        with contextlib.suppress(IndexStoreError, AssertionError), open_unused(one) as index:
            built_by = index.spec
        fields = "; ".join(differences(one.identity, built_by, model, digest, specs))
        yield Finding("unusable", OK if usable else WARN, f"{count} {kind}; {one.digest[:12]}: {fields}")
    for path, error in problems[:3]:
        yield Finding("damaged", WARN, str(error.at(path)))


# -- kernels -----------------------------------------------------------------------------------------------------------


def _kernels(config: SparseAttnConfig, dtype: torch.dtype | None) -> Finding:
    """Selection and attention against the reference, where kernels can run: on a GPU, or interpreted."""
    on_gpu, interpreted = torch.cuda.is_available(), os.environ.get("TRITON_INTERPRET") == "1"
    if not (on_gpu or interpreted):
        return Finding("kernels", OK, "not run: they need a GPU")
    if interpreted:
        dtype = torch.float32
    device = torch.device("cuda" if on_gpu else "cpu")
    try:
        found = run_self_test(config, dtype or torch.bfloat16, device)
    except Exception as error:  # a compiler's, a driver's
        todo = "check driver, torch and triton; serve without --sparse-attn meanwhile"
        return Finding("kernels", FAIL, f"{type(error).__name__}: {str(error)[:500]}", todo)
    told = f"attention differs from torch by {found.error:.2g} of what the dtype allows"
    if found.agreement is None:
        told += f"; {graph_refusal(config.method)}"
    else:
        told += f"; {config.method} selects {found.agreement:.1%} of the reference's positions"
    if found.passed:
        return Finding("kernels", OK, told)
    todo = f"at least {LEAST_AGREEMENT:.0%} and less than 1 are wanted: report GPU, driver, torch and triton"
    return Finding("kernels", FAIL, told, todo)
