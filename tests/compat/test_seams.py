"""Every place where the plugin enters SGLang: it resolves here, and is ours after SGLang loaded its plugins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("sglang")


_LOADED = """
import json
import {module}
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang_ext.compat import seams
print("RESULT", json.dumps(seams.missing({which})))
"""


def _run(code: str, **environment: str) -> tuple[int, Any, str]:
    """Run code in an interpreter of its own; the JSON after RESULT, and all its output."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env={**clean, **environment}
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return done.returncode, json.loads(lines[-1][7:]) if lines else None, done.stdout + done.stderr


def test_seams_of_every_process_are_applied_in_a_launcher() -> None:
    which = "[s for s in seams.SEAMS if s.process == 'every']"
    status, missing, output = _run(_LOADED.format(module="sglang.srt.server_args", which=which))
    assert (status, missing) == (0, []), output[-3000:]


def test_every_seam_resolves_and_is_applied_in_a_process_that_imported_the_scheduler() -> None:
    status, missing, output = _run(_LOADED.format(module="sglang.srt.managers.scheduler", which="seams.SEAMS"))
    assert (status, missing) == (0, []), output[-3000:]


def test_a_seam_that_somebody_replaced_is_reported_by_name() -> None:
    code = """
import json
import sglang.srt.managers.scheduler as s
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang_ext.compat import seams
s.Scheduler.get_internal_state = lambda self, *a: None
try:
    seams.assert_in_place(seams.SEAMS)
except RuntimeError as error:
    print("RESULT", json.dumps(str(error)))
"""
    status, message, output = _run(code)
    assert status == 0, output[-3000:]
    assert "sglang.srt.managers.scheduler.Scheduler.get_internal_state" in message
    assert "start without --sparse-attn" in message


def test_the_scheduler_process_reaches_the_hooked_names_and_not_old_copies() -> None:
    """`from x import f` before the hooks would keep the unhooked function: everybody who calls f must see ours."""
    code = """
import json, sys
import sglang.srt.managers.scheduler
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang.srt.model_executor.model_runner
from sglang_ext.compat import seams
import pkgutil
stale = []
for seam in seams.SEAMS:
    name = seam.target.rsplit(".", 1)[1]
    hooked = pkgutil.resolve_name(seam.target)
    for module in list(sys.modules.values()):
        if not getattr(module, "__name__", "").startswith("sglang.srt"):
            continue
        found = module.__dict__.get(name)
        if found is not None and found is not hooked and name in ("attn_backend_wrapper", "create_tree_cache"):
            stale.append(f"{module.__name__}.{name}")
print("RESULT", json.dumps(stale))
"""
    status, stale, output = _run(code)
    assert (status, stale) == (0, []), output[-3000:]


def test_without_the_flag_the_hooks_only_delegate() -> None:
    """No settings: no runtime is made, and the backend and the tree cache come back as they were built."""
    code = """
import json
import sglang.srt.managers.scheduler
from sglang.srt.plugins import load_plugins
load_plugins()
from types import SimpleNamespace
from sglang_ext.compat import scheduler_hooks as hooks
class Backend: pass
class Cache:
    def match_prefix(self, params): return 7
backend, cache = Backend(), Cache()
runner = SimpleNamespace(server_args=SimpleNamespace(), is_draft_worker=False)
wrapped = hooks.around_attn_backend_wrapper(lambda r, b: b, runner, backend)
hooks.after_create_tree_cache(cache, None)
hooks.before_req_to_token_free(None, None)
hooks.after_scheduler_init(None, SimpleNamespace(server_args=SimpleNamespace()))
state = SimpleNamespace(internal_state={})
hooks.after_get_internal_state(state, None)
ran = hooks.around_model_runner_forward(lambda r, f: (r, f), runner, "fb")
print("RESULT", json.dumps([
    wrapped is backend and type(wrapped) is Backend, "match_prefix" not in vars(cache), hooks.runtime() is None,
    state.internal_state, ran == (runner, "fb"),
]))
"""
    status, facts, output = _run(code)
    assert (status, facts) == (0, [True, True, True, {}, True]), output[-3000:]


def test_a_slot_that_is_no_requests_may_be_freed() -> None:
    """A streaming session gives back its own record: neither hashable nor finished, and none of our business."""
    code = """
import json
import sglang.srt.managers.scheduler
from sglang_ext.compat import scheduler_hooks as hooks
class SessionSlot:
    __hash__ = None
hooks._runtime = SessionSlot()
hooks.before_req_to_token_free(None, SessionSlot())
print("RESULT", json.dumps(True))
"""
    status, fact, output = _run(code)
    assert (status, fact) == (0, True), output[-3000:]
