"""SGLang's own update of weights from disk, hooked, on a small model. `test_weight_updates` calls it.

Real are the scheduler's manager, the worker's method, the updater, the loader, the files; the model has two layers.
"""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from sglang.srt.managers import tp_worker
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

NAMES = ("first.weight", "second.weight")


class Model(torch.nn.Module):
    """Two layers, loaded as SGLang's models load theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
        self.register_buffer("table", torch.zeros(3), persistent=False)

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            default_weight_loader(parameters[name], tensor)


def checkpoint(folder: Path, value: float, second: tuple[int, int] = (8, 8)) -> Path:
    """A folder with a file for each layer; the loader takes them in order."""
    folder.mkdir()
    for number, (name, shape) in enumerate(zip(NAMES, ((8, 8), second), strict=True)):
        save_file({name: torch.full(shape, value)}, str(folder / f"model-{number}.safetensors"))
    return folder


class Server:
    """One server: its model, its manager, and what the plugin makes of an update."""

    def __init__(self, hooks: Any, folder: Path) -> None:
        from sglang_ext.compat.runner import RunnerView
        from sglang_ext.ranks import Ranks
        from sglang_ext.weights import ServedWeights

        self.model = Model()
        config = SimpleNamespace(
            model_path=str(folder), dtype=torch.float32, revision=None, hf_config=None, quantization=None
        )
        updater = WeightUpdater(
            tp_rank=0, device="cpu", gpu_id=0, model_config=config, custom_weight_loaders={},
            get_model=lambda: self.model, update_model_fields=lambda *_, **__: None,
            recapture_cuda_graph=lambda: None, get_model_runner=lambda: None,
        )  # fmt: skip
        self.runner = SimpleNamespace(model=self.model, weight_updater=updater)
        # The worker's own methods, without its constructor, which starts a model.
        worker = object.__new__(tp_worker.TpModelWorker)
        worker._model_runner = self.runner
        self.manager = object.__new__(SchedulerWeightUpdaterManager)
        fields = {
            "tp_worker": worker, "draft_worker": None, "metrics_collector": None, "offload_tags": set(),
            "flush_cache": lambda **_: True,
            "scheduler": SimpleNamespace(record_weight_version_change=lambda **_: None),
        }  # fmt: skip
        for name, value in fields.items():
            setattr(self.manager, name, value)
        self.served = ServedWeights(lambda: RunnerView.weights(self), Ranks())
        self.served.note()
        self.kept: list[bool] = []
        hooks._runtime = self

    def weights_updated(self, *, replaced: bool) -> None:
        self.kept.append(self.served.unchanged(replaced=replaced))

    def update(self, folder: Path) -> dict[str, Any]:
        request = UpdateWeightFromDiskReqInput(model_path=str(folder), load_format="auto", flush_cache=True)
        before = [parameter.clone() for parameter in self.model.parameters()]
        result = self.manager.update_weights_from_disk(request)
        same = all(torch.equal(*pair) for pair in zip(before, self.model.parameters(), strict=True))
        return {"success": result.success, "same": same, "kept": self.kept, "said": result.message}


def weight_updates(folder: Path) -> dict[str, dict[str, Any]]:
    """For each kind of folder: what the update says, and what became of the weights and of indexes."""
    load_plugins()
    from sglang_ext.compat import scheduler_hooks as hooks

    set_global_server_args_for_scheduler(ServerArgs(model_path="models/needle", device="cpu"))
    found: dict[str, Any] = {}
    found["good"] = Server(hooks, folder).update(checkpoint(folder / "good", 2.0))
    found["missing"] = Server(hooks, folder).update(folder / "nowhere")
    (folder / "empty").mkdir()
    found["empty"] = Server(hooks, folder).update(folder / "empty")

    server, torn = Server(hooks, folder), checkpoint(folder / "torn", 3.0, second=(4, 4))

    def completed(phase: str, _: Any) -> None:
        """Whoever copies the checkpoint is done just before SGLang rolls back. SGLang collects garbage, then reads the
        path that it was given: the new one."""
        gc.callbacks.remove(completed)
        save_file({NAMES[1]: torch.full((8, 8), 3.0)}, str(torn / "model-1.safetensors"))

    real = gc.collect
    gc.collect = lambda *a: (gc.callbacks.append(completed), real(*a))[1]  # SGLang's own call, and no earlier one
    found["torn"] = server.update(torn)
    gc.collect = real

    server = Server(hooks, folder)
    server.model.table += 1  # no weight: it grows while serving
    server.manager.offload_tags.add("kv_cache")
    found["a table grew"] = server.update(folder / "nowhere")
    server = Server(hooks, folder)
    server.manager.offload_tags.add("weights")
    found["given away"] = server.update(folder / "nowhere")
    return found
