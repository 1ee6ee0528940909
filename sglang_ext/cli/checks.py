"""What jobs check before they start SGLang: each problem is one line, and the exit status of wrong usage. And how they
start it, and learn what became of a request."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ext.cli.arguments import checkpoint_options, names_cpu, sglang_option
from sglang_ext.profiles import local_folder

if TYPE_CHECKING:
    from sglang_ext.compat.engine import OfflineEngine


def engine_refusal(model_path: str, sglang_flags: Sequence[str]) -> str | None:
    """Why SGLang cannot be started with this model on this machine, as far as that is seen at once; None if it may."""
    return model_refusal(model_path, sglang_flags) or _device_refusal(sglang_option(sglang_flags, "--device"))


def model_refusal(model_path: str, sglang_flags: Sequence[str]) -> str | None:
    """Why SGLang cannot be started with this model, as far as that is seen at once; None if it may."""
    if local_folder(model_path, *checkpoint_options(sglang_flags)) is not None:
        return None
    owner, _, name = model_path.partition("/")  # of a name on the hub, which SGLang would download
    is_path = owner in ("", ".", "..", "~") or "/" in name or os.path.exists(model_path) or os.path.isdir(owner)
    if is_path or os.environ.get("HF_HUB_OFFLINE") == "1":
        return not_local(model_path)
    return None


def not_local(model_path: str) -> str:
    """What to tell of a model that is not on this machine."""
    return (
        f"expected --model-path to be a folder, or a name in the local Hugging Face cache; got {model_path!r}. Correct "
        "it, or download the model first"
    )


def _device_refusal(device: str | None) -> str | None:
    """Of SGLang's; without one it takes an accelerator."""
    import torch

    if device is None and not torch.accelerator.is_available() and os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return "expected a GPU, or --device among SGLang's flags (behind --); got neither. Add -- --device cpu"
    if device is not None and device.partition(":")[0] == "cuda" and not torch.cuda.is_available():
        return f"expected a GPU for --device {device}, got none. Say --device cpu, or run where there is one"
    return None


def measuring_refusal(device: str) -> str | None:
    """Why `--device` of calibrate cannot be used here; None if it can."""
    import torch

    kind, _, number = device.partition(":")
    if device in ("auto", "cpu"):
        return None
    if kind != "cuda" or not (number or "0").isdecimal():
        return f"expected --device to be cpu, cuda, cuda:NUMBER or auto, got {device!r}. Choose one of them"
    if int(number or 0) >= torch.cuda.device_count():
        return f"expected --device {device} to be there, got {torch.cuda.device_count()} CUDA devices. Say cpu"
    return None


def num_layers_of(model_path: str, sglang_flags: Sequence[str]) -> int | None:
    """Layers of a model, where its folder says so before it is loaded."""
    folder = local_folder(model_path, *checkpoint_options(sglang_flags))
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((Path(folder or "") / "config.json").read_text())["num_hidden_layers"])
    return None


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Make a folder, and a file in it that goes again. Raises OSError where that cannot be done."""
    os.makedirs(folder, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def plugin_engine(
    model_path: str, flags: Sequence[str], store: str, config: str, on_gpu: Sequence[str]
) -> Iterator[OfflineEngine]:
    """An engine of SGLang with the plugin, which ends with the block. `on_gpu`: flags more, unless the CPU is named.

    Raises:
        EngineStartError, SystemExit, EngineDiedError: as `OfflineEngine.open`.
    """
    from sglang_ext.compat.engine import OfflineEngine

    own = ["--model-path", model_path, "--log-level", "error", *flags, *(() if names_cpu(flags) else on_gpu)]
    engine = OfflineEngine([*own, "--sparse-attn", "--sparse-attn-store", store, "--sparse-attn-config", config])
    try:
        engine.open()
        yield engine
    finally:
        engine.close()


#: Seconds that a report may take to be written after its request ended.
REPORT_TIMEOUT_S = 600.0


def reported(events: Path, rid: str) -> dict[str, Any]:
    """What the scheduler process wrote of a request (`build_report`), which it does when the request gives its slot
    back; a failure where it wrote nothing in time.
    """
    deadline = time.monotonic() + REPORT_TIMEOUT_S
    while time.monotonic() < deadline:
        if events.exists():
            for text in events.read_text().splitlines():
                event: dict[str, Any] = json.loads(text)
                if event.pop("rid") == rid:
                    return event
        time.sleep(0.02)
    detail = f"the scheduler reported nothing within {REPORT_TIMEOUT_S:.0f} s; see its log"
    return {"status": "failed", "reason": "no_report", "detail": detail}
