"""Every place where the plugin enters SGLang.

`docs/sglang-seams.md` has the reasons; a test keeps the two lists equal. Each hook does nothing but delegate when the
server runs without `--sparse-attn`.
"""

from __future__ import annotations

import sys

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ext import logs
from sglang_ext.compat import administration, host_pool, lossless_algorithm, memory, response, server_args
from sglang_ext.compat import scheduler_hooks as hooks
from sglang_ext.compat.seam import Seam, declared, here

_BEFORE, _AFTER, _AROUND = HookType.BEFORE, HookType.AFTER, HookType.AROUND
_ARGS = "sglang.srt.server_args.ServerArgs"
_MEMORY = "sglang.srt.mem_cache"
_GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_MANAGERS = "sglang.srt.managers"
_REQUESTS = f"{_MANAGERS}.tokenizer_manager.TokenizerManager.generate_request"
_WEIGHTS = f"{_MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SCHEDULER = f"{_MANAGERS}.scheduler.Scheduler"
_BACKEND = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"
_KV_POOL = f"{_MEMORY}.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes"

SEAMS: tuple[Seam, ...] = (
    Seam(f"{_ARGS}.add_cli_args", _AFTER, server_args.after_add_cli_args, "every"),
    Seam(f"{_ARGS}.from_cli_args", _AROUND, server_args.around_from_cli_args, "every"),
    Seam(f"{_ARGS}.check_server_args", _AFTER, server_args.after_check_server_args, "every"),
    Seam("sglang.srt.utils.auth.decide_request_auth", _AROUND, administration.around_decide_request_auth, "every"),
    Seam(_REQUESTS, _AFTER, response.after_generate_request, "every"),
    Seam(_BACKEND, _AROUND, hooks.around_attn_backend_wrapper),
    Seam(_KV_POOL, _AFTER, memory.after_profile_available_bytes),
    Seam(f"{_MEMORY}.memory_pool.MHATokenToKVPool._create_buffers", _AROUND, host_pool.around_create_buffers),
    Seam(f"{_MEMORY}.registry.create_tree_cache", _AFTER, hooks.after_create_tree_cache),
    Seam("sglang.srt.model_executor.model_runner.ModelRunner.forward", _AROUND, hooks.around_model_runner_forward),
    Seam(f"{_GRAPHS}.capture_one_shape", _AROUND, hooks.around_capture_one_shape),
    Seam(f"{_GRAPHS}.can_run_graph", _AFTER, hooks.after_can_run_graph),
    Seam(f"{_GRAPHS}._resolve_lora_variant", _AFTER, hooks.after_resolve_lora_variant),
    Seam(f"{_MEMORY}.memory_pool.ReqToTokenPool.alloc", _AFTER, hooks.after_req_to_token_alloc),
    Seam(f"{_MEMORY}.memory_pool.ReqToTokenPool.free", _BEFORE, hooks.before_req_to_token_free),
    Seam(f"{_MANAGERS}.schedule_batch.Req.update_finish_state", _AROUND, hooks.around_update_finish_state),
    Seam(f"{_WEIGHTS}.update_weights_from_disk", _AROUND, hooks.around_update_from_disk),
    Seam(f"{_WEIGHTS}.update_weights_from_distributed", _AFTER, hooks.after_weights_update),
    Seam(f"{_WEIGHTS}.update_weights_from_tensor", _AFTER, hooks.after_weights_update),
    Seam(f"{_WEIGHTS}.update_weights_from_ipc", _AFTER, hooks.after_weights_update),
    Seam(f"{_WEIGHTS}.begin_weight_update", _AFTER, hooks.after_weights_update, since="0.5.21"),
    Seam(f"{_SCHEDULER}.__init__", _AFTER, hooks.after_scheduler_init),
    Seam(f"{_SCHEDULER}.get_internal_state", _AFTER, hooks.after_get_internal_state),
    Seam(f"{_SCHEDULER}.init_req_max_new_tokens", _AROUND, hooks.around_init_req_max_new_tokens),
    Seam(f"{_MANAGERS}.scheduler.validate_input_length", _AROUND, hooks.around_validate_input_length),
    Seam(f"{_SCHEDULER}.get_new_batch_prefill", _AROUND, hooks.around_get_new_batch_prefill),
    Seam(f"{_SCHEDULER}.handle_dumper_control", _AROUND, hooks.around_dumper_control),
)

declared.extend(SEAMS)


def register() -> None:
    """Register this process's hooks; SGLang applies them right after all plugins registered theirs. Those of the
    scheduler are registered only where its module is already imported.
    """
    logs.install()
    lossless_algorithm.register()
    for seam in here():
        if seam.process == "every" or "sglang.srt.managers.scheduler" in sys.modules:
            HookRegistry.register(seam.target, seam.hook, seam.kind)
