"""An update of weights in place by SGLang's own code: the plugin hears of one that changes them, whatever it says.

Real are the scheduler's manager, the worker's method, the updater, the loader, the files; the model has two layers.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sglang.srt.managers import tp_worker
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from tests.compat.sglang_process import GROUP, in_sglang

pytestmark = GROUP

NAMES = ("first.weight", "second.weight")


class Model(torch.nn.Module):
    """Two layers, loaded as SGLang's models load theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            default_weight_loader(parameters[name], tensor)


def save(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    save_file({name: weight.clone() for name, weight in weights.items()}, str(folder / "model.safetensors"))


class Server:
    """One server: its model, its manager, and how often the plugin hears of an update."""

    def __init__(self, hooks: Any, folder: Path, args: ServerArgs, ranks: int = 1) -> None:
        self.model = Model()
        config = SimpleNamespace(
            model_path=str(folder), dtype=torch.float32, revision=None, hf_config=None, quantization=None
        )
        updater = WeightUpdater(
            tp_rank=0, device="cpu", gpu_id=0, model_config=config, custom_weight_loaders={},
            get_model=lambda: self.model, update_model_fields=lambda *_, **__: None,
            recapture_cuda_graph=lambda: None, get_model_runner=lambda: SimpleNamespace(server_args=args),
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
        self.heard, self.ranks = 0, SimpleNamespace(size=ranks)
        self.hooks = hooks

    def weights_updated(self) -> None:
        self.heard += 1

    def update(self, folder: Path) -> tuple[bool | None, bool, int]:
        """What it says, whether the weights are what they were, and how often it was heard of."""
        request = UpdateWeightFromDiskReqInput(model_path=str(folder), load_format="auto", flush_cache=True)
        before = [parameter.clone() for parameter in self.model.parameters()]
        self.hooks._runtime, success = self, None
        with suppress(KeyError):  # SGLang means to roll back, and reads the same folder again
            success = self.manager.update_weights_from_disk(request).success
        same = all(torch.equal(*pair) for pair in zip(before, self.model.parameters(), strict=True))
        return success, same, self.heard

    def open_session(self) -> int:
        """How often it is heard of one, in which others may write to the weights."""
        self.hooks._runtime, self.manager._session, self.manager.tp_cpu_group = self, None, None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "barrier", lambda group: None)
            assert self.manager.begin_weight_update(SimpleNamespace(selector="all")).success
        return self.heard


def weight_updates(folder: Path) -> dict[str, Any]:
    """By kind, what `Server.update` says; of a session, which a release may lack, what `Server.open_session` does."""
    load_plugins()
    from sglang_ext.compat import scheduler_hooks as hooks

    args = ServerArgs(model_path="models/needle", device="cpu")
    set_global_server_args_for_scheduler(args)
    good, missing, part, turned = (folder / name for name in ("good", "nowhere", "part", "turned"))
    twos = torch.full((8, 8), 2.0)
    save(good, dict.fromkeys(NAMES, twos))
    save(part, dict.fromkeys(("second.weight", "third.weight"), twos))
    again = Server(hooks, folder, args)
    again.update(good)
    values = torch.arange(64.0).view(8, 8)
    save(folder / "rows", dict.fromkeys(NAMES, values))
    save(turned, dict.fromkeys(NAMES, values.flip(0)))
    exchanged = Server(hooks, folder, args)
    exchanged.update(folder / "rows")
    unreadable = Server(hooks, folder, args)
    unreadable.model.register_buffer("table", torch.empty(4, device="meta"))
    sessions = hasattr(SchedulerWeightUpdaterManager, "begin_weight_update")
    return {
        "session": Server(hooks, folder, args).open_session() if sessions else 1,
        "good": Server(hooks, folder, args).update(good),
        "good, again": again.update(good),
        "missing": Server(hooks, folder, args).update(missing),
        "missing, two ranks": Server(hooks, folder, args, ranks=2).update(missing),
        "half of it": Server(hooks, folder, args).update(part),
        "in another order": exchanged.update(turned),
        "unreadable": unreadable.update(missing),
    }


def test_an_update_is_heard_of_where_weights_may_have_changed(tmp_path: Path) -> None:
    found = in_sglang("tests.compat.test_weight_updates:weight_updates", tmp_path)
    assert found == {
        "session": 1,
        "good": (True, False, 1),
        "good, again": (True, True, 1),
        "missing": (False, True, 0),
        "missing, two ranks": (False, True, 1),
        "half of it": (None, False, 1),
        "in another order": (True, False, 2),
        "unreadable": (False, True, 1),
    }
