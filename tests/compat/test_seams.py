"""Every place where the plugin enters SGLang: it resolves here, and is ours after SGLang loaded its plugins.

That those of every process are in place in a launcher, each server of `tests/server` finds out, or would not start.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.compat.sglang_process import GROUP, in_sglang

pytestmark = GROUP


def of_the_scheduler() -> dict[str, Any]:
    import pkgutil
    import sys
    from types import SimpleNamespace

    import sglang.srt.managers.scheduler as scheduler
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_ext.compat import scheduler_hooks as hooks
    from sglang_ext.compat.seam import assert_in_place, here, missing

    out = {"missing": missing(), "stale": []}

    for seam in here():
        name = seam.target.rsplit(".", 1)[1]
        hooked = pkgutil.resolve_name(seam.target)
        for module in list(sys.modules.values()):
            if not getattr(module, "__name__", "").startswith("sglang.srt"):
                continue
            found = module.__dict__.get(name)
            if found is not None and found is not hooked and name in ("attn_backend_wrapper", "create_tree_cache"):
                out["stale"].append(f"{module.__name__}.{name}")

    class Backend:
        pass

    class Cache:
        def match_prefix(self, params):
            return 7

    backend, cache = Backend(), Cache()
    runner = SimpleNamespace(server_args=SimpleNamespace(), is_draft_worker=False)
    wrapped = hooks.around_attn_backend_wrapper(lambda r, b: b, runner, backend)
    hooks.after_create_tree_cache(cache, None)
    hooks.before_req_to_token_free(None, None)
    hooks.after_scheduler_init(None, SimpleNamespace(server_args=SimpleNamespace()))
    state = SimpleNamespace(internal_state={})
    hooks.after_get_internal_state(state, None)
    ran = hooks.around_model_runner_forward(lambda r, f: (r, f), runner, "fb")
    out["delegated"] = [
        wrapped is backend and type(wrapped) is Backend,
        "match_prefix" not in vars(cache),
        hooks.runtime() is None,
        state.internal_state,
        ran == (runner, "fb"),
    ]

    class SessionSlot:
        """A streaming session gives back its own record: neither hashable nor finished, and none of our business."""

        __hash__ = None

    hooks._runtime = SessionSlot()
    hooks.before_req_to_token_free(None, SessionSlot())

    scheduler.Scheduler.get_internal_state = lambda self, *a: None
    try:
        assert_in_place()
    except RuntimeError as error:
        out["replaced"] = str(error)
    return out


@pytest.fixture(scope="module")
def scheduler() -> dict[str, Any]:
    """What was found in a process that imported the scheduler before the plugins were loaded."""
    return in_sglang("tests.compat.test_seams:of_the_scheduler")


def test_every_seam_is_applied_in_a_process_that_imported_the_scheduler_and_nobody_has_an_old_copy(
    scheduler: dict[str, Any],
) -> None:
    """`from x import f` before the hooks would keep the unhooked function: everybody who calls f must see ours."""
    assert (scheduler["missing"], scheduler["stale"]) == ([], [])


def test_without_the_flag_the_hooks_only_delegate(scheduler: dict[str, Any]) -> None:
    """No settings: no runtime is made, and the backend and the tree cache come back as they were built."""
    assert scheduler["delegated"] == [True, True, True, {}, True]


def test_a_seam_that_somebody_replaced_is_reported_by_name(scheduler: dict[str, Any]) -> None:
    assert "sglang.srt.managers.scheduler.Scheduler.get_internal_state" in scheduler["replaced"]
    assert "start without --sparse-attn" in scheduler["replaced"]
