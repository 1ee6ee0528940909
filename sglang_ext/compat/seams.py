"""Every place where the plugin enters SGLang, with the reason.

`docs/sglang-seams.md` is the same list in prose; a test keeps the two equal. Each hook does nothing but
delegate when the server runs without `--sparse-attn`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FunctionType, NoneType

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ext import logs
from sglang_ext.compat import memory, scheduler_hooks, server_args
from sglang_ext.compat.seam import Seam, declare, here

SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        HookType.AFTER,
        server_args.after_add_cli_args,
        "every",
        "adds the three flags; SGLang has no registry for flags",
        ("parser",),
    ),
    Seam(
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        HookType.AROUND,
        server_args.around_from_cli_args,
        "every",
        "checks the flags' values and puts the settings on the record that travels to the scheduler",
        ("args",),
    ),
    Seam(
        "sglang.srt.server_args.ServerArgs.check_server_args",
        HookType.AFTER,
        server_args.after_check_server_args,
        "every",
        "last check before processes start: refuses unsupported modes by name, asserts the seams",
        (),
    ),
    Seam(
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        HookType.AROUND,
        scheduler_hooks.around_attn_backend_wrapper,
        "scheduler",
        "adopts the attention backend that SGLang built, whatever the user named",
        ("runner", "full_attn_backend"),
    ),
    Seam(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        HookType.AFTER,
        memory.after_profile_available_bytes,
        "scheduler",
        "the KV pool is sized without the memory that indexes and our buffers may take",
        ("pre_model_load_memory",),
        {"": int},
    ),
    Seam(
        "sglang.srt.mem_cache.registry.create_tree_cache",
        HookType.AFTER,
        scheduler_hooks.after_create_tree_cache,
        "scheduler",
        "observes match_prefix of the prefix cache that SGLang's own chain built: admission and namespace",
        ("ctx",),
        {"match_prefix": FunctionType},
    ),
    Seam(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward",
        HookType.AROUND,
        scheduler_hooks.around_model_runner_forward,
        "scheduler",
        "the live ForwardBatch with its request ids, before a graph runner builds its replay view; warm-up "
        "and capture forwards do not pass here",
        ("forward_batch",),
        {"can_run_graph": bool},
    ),
    Seam(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture_one_shape",
        HookType.AROUND,
        scheduler_hooks.around_capture_one_shape,
        "scheduler",
        "captures more decode graphs of each batch size, in which our kernels are the attention",
        ("size", "forward", "stream_idx", "variant_label"),
    ),
    Seam(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._resolve_lora_variant",
        HookType.AFTER,
        scheduler_hooks.after_resolve_lora_variant,
        "scheduler",
        "the label of the graph that a step replays: the host chooses before the replay",
        ("forward_batch",),
        {"": (str, NoneType)},
    ),
    Seam(
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc",
        HookType.AFTER,
        scheduler_hooks.after_req_to_token_alloc,
        "scheduler",
        "a request gets its slot: from here until it gives it back it may hold something",
        ("reqs",),
        {"": (list, NoneType)},
    ),
    Seam(
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free",
        HookType.BEFORE,
        scheduler_hooks.before_req_to_token_free,
        "scheduler",
        "a request gives its slot back: finish, abort and retraction alike",
        ("req",),
    ),
    *(
        Seam(
            f"sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.{method}",
            HookType.AFTER,
            scheduler_hooks.after_weights_update,
            "scheduler",
            "weights changed in place make every index of the served model stale",
            ("recv_req",),
            {"success": bool},
        )
        for method in (
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
        )
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.end_weight_update",
        HookType.AFTER,
        scheduler_hooks.after_end_weight_update,
        "scheduler",
        "0.5.23: weights may have been written into between begin and end by nobody who passes elsewhere",
        ("recv_req",),
        releases=("0.5.23",),
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.__init__",
        HookType.AFTER,
        scheduler_hooks.after_scheduler_init,
        "scheduler",
        "asserts in the scheduler process that backend, cache and seams are ours before serving starts",
        ("server_args",),
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        HookType.AFTER,
        scheduler_hooks.after_get_internal_state,
        "scheduler",
        "adds the sparse_attn counters to /get_server_info",
        ("recv_req",),
        {"internal_state": dict},
    ),
)


declare(SEAMS)


def wanted(loaded: Iterable[str]) -> tuple[Seam, ...]:
    """The seams of this process: those of the scheduler only where its module is already imported."""
    in_scheduler = "sglang.srt.managers.scheduler" in loaded
    return tuple(seam for seam in here() if seam.process == "every" or in_scheduler)


def register() -> None:
    """Register this process's hooks; SGLang applies them right after all plugins registered theirs."""
    logs.install()
    for seam in wanted(sys.modules):
        HookRegistry.register(seam.target, seam.hook, seam.kind)
