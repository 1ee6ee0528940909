"""What each hook takes for granted, held against SGLang's real functions. `test_seam_types` calls it.

Results come of real calls where no model is needed for one; else they are of the class that the function returns, and
`tests/server` sees real ones.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import sglang.srt.managers.scheduler  # before the plugins: only then are the scheduler's functions hooked
from sglang.srt.managers import io_struct
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams


def original(target: str) -> Any:
    """The function without hooks."""
    function = pkgutil.resolve_name(target)
    function = getattr(function, "__func__", function)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def outputs(function: Callable[..., Any]) -> list[Any]:
    assert inspect.get_annotations(function)["return"] == "ModelRunnerOutput"
    assert "ModelRunnerOutput(" in inspect.getsource(ModelRunner)
    return [ModelRunnerOutput(None, can_run_graph=True)]


def labels(function: Callable[..., Any]) -> list[Any]:
    runners = (SimpleNamespace(record_nolora_graph=on) for on in (False, True, True))
    batches = (SimpleNamespace(lora_ids=ids) for ids in (None, None, ["a"]))
    return [function(*pair) for pair in zip(runners, batches, strict=True)]


def bytes_left(function: Callable[..., Any]) -> list[Any]:
    assert inspect.get_annotations(function)["return"] == "int"
    assert "return int(" in inspect.getsource(function) or "//" in inspect.getsource(function)
    return [1]


def caches(function: Callable[..., Any]) -> list[Any]:
    assert inspect.get_annotations(function)["return"] == "BasePrefixCache"
    assert list(inspect.signature(BasePrefixCache.match_prefix).parameters) == ["self", "params"]
    assert {"key", "req"} <= MatchPrefixParams.__dataclass_fields__.keys()
    return [BasePrefixCache]


def slots(function: Callable[..., Any]) -> list[Any]:
    pool = ReqToTokenPool(size=2, max_context_len=8, device="cpu", enable_memory_saver=False)
    return [function(pool, [request("a"), request("b")]), function(pool, [request("c")])]


#: By the last word of a path: real results, of a function without its hook.
RESULTS: dict[str, Callable[[Any], list[Any]]] = {
    "get_internal_state": lambda _: [io_struct.GetInternalStateReqOutput(internal_state={})],
    "generate_request": lambda function: [function(None, None)],
    "forward": outputs,
    "can_run_graph": lambda function: [function(None, SimpleNamespace(replace_embeds=[]))],
    "_resolve_lora_variant": labels,
    "_profile_available_bytes": bytes_left,
    "create_tree_cache": caches,
    "alloc": slots,
}


def request(rid: str) -> Any:
    """A real one, that waits."""
    return Req(rid, "", [1, 2, 3], SamplingParams())


class Heard:
    """Stands where the runtime does; requests are told apart by their ids."""

    offload = None

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def slot_taken(self, req: Any, *, offloaded: bool) -> None:
        assert not offloaded
        self.calls.append(["taken", req.rid])

    def slot_freed(self, req: Any, row: int, *, finished: bool, tokens: int) -> None:
        self.calls.append(["freed", req.rid, row, finished, tokens])


def life(hooks: Any) -> list[Any]:
    """What is heard of real requests that get slots of a real pool, and give them back."""
    hooks._runtime = heard = Heard()
    pool = ReqToTokenPool(size=2, max_context_len=8, device="cpu", enable_memory_saver=False)
    one, two, three = (request(rid) for rid in "abc")
    rows = pool.alloc([one, two])
    assert pool.alloc([three]) is None
    pool.free(two)
    pool.alloc([three])
    hooks._runtime = None
    return [*heard.calls, sorted(rows), rows[1]]


def seam_types() -> dict[str, Any]:
    """By target: the names of arguments, whether the hook takes them, results, and what of them is of a wrong type."""
    load_plugins()
    from sglang_ext.compat import scheduler_hooks as hooks
    from sglang_ext.compat.seam import here

    found: dict[str, Any] = {}
    for seam in here():
        function, name = original(seam.target), seam.target.rsplit(".", 1)[1]
        names = list(inspect.signature(function).parameters)
        own = 1 if names[0] in ("self", "cls") else 0
        ahead = 0 if seam.kind.value.lower() == "before" else 1  # the result, or the function itself
        called_with = [None] * (ahead + len(names))
        try:
            inspect.signature(seam.hook).bind(*called_with)
            fits = ""
        except TypeError as error:
            fits = str(error)
        results = RESULTS[name](function) if seam.reads else []
        wrong = [
            f"{what or 'result'}: {one!r}"
            for what, kind in seam.reads.items()
            for one in results
            if not isinstance(getattr(one, what, ...) if what else one, kind)
        ]
        found[seam.target] = {"takes": names[own:], "fits": fits, "results": len(results), "wrong": wrong}
    found["life"] = life(hooks)
    assert sglang.srt.managers.scheduler
    return found
