"""What the hooks take for granted of arguments and results is what SGLang's functions have, on this release.

A hook once looked for a tuple, as the function's annotation says, where an object comes; its test gave it a tuple.
Results come of real calls where no model is needed for one; else they are of the class that the function returns, and
`tests/server` sees real ones.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections.abc import Callable
from types import AsyncGeneratorType, FunctionType, NoneType, SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import io_struct
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.compat import scheduler_hooks as hooks
from sglang_ext.compat.seams import SEAMS
from sglang_ext.compat.versions import older_than
from tests.compat.sglang_process import GROUP, in_sglang

pytestmark = GROUP

HERE = [seam for seam in SEAMS if not older_than(seam.since)]


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


#: By the last word of a path: what makes real results, of a function without its hook, and what the hook reads of them:
#: an attribute, or "" for the result itself, and its type.
RESULTS: dict[str, tuple[Callable[[Any], list[Any]], str, Any]] = {
    "get_internal_state": (
        lambda _: [io_struct.GetInternalStateReqOutput(internal_state={})],
        "internal_state",
        dict,
    ),
    "generate_request": (lambda function: [function(None, None)], "", AsyncGeneratorType),
    "forward": (outputs, "can_run_graph", bool),
    "can_run_graph": (lambda function: [function(None, SimpleNamespace(replace_embeds=[]))], "", bool),
    "_resolve_lora_variant": (labels, "", (str, NoneType)),
    "_profile_available_bytes": (bytes_left, "", int),
    "create_tree_cache": (caches, "match_prefix", FunctionType),
    "alloc": (slots, "", (list, NoneType)),
}


def request(rid: str) -> Any:
    """A real one, that waits."""
    return Req(rid, "", [1, 2, 3], SamplingParams())


class Heard:
    """Stands where the runtime does; requests are told apart by their ids, and each has an index of its prompt."""

    offload = None

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.known = {rid: SimpleNamespace(prompt_len=3, entry="index", admission="build") for rid in "abc"}
        self.requests = SimpleNamespace(of=lambda req: self.known[req.rid])

    def slot_taken(self, req: Any, *, offloaded: bool) -> None:
        assert not offloaded
        known = self.known[req.rid]
        self.calls.append(["taken", req.rid, known.entry, known.admission])

    def slot_freed(self, req: Any, row: int, *, finished: bool, tokens: int) -> None:
        self.calls.append(["freed", req.rid, row, finished, tokens])


def life() -> list[Any]:
    """What is heard of real requests that get slots of a real pool, and give them back."""
    hooks._runtime = heard = Heard()
    pool = ReqToTokenPool(size=2, max_context_len=8, device="cpu", enable_memory_saver=False)
    one, two, three = (request(rid) for rid in "abc")
    rows = pool.alloc([one, two])
    assert pool.alloc([three]) is None
    pool.free(two)
    three.origin_input_ids = three.origin_input_ids[:1]  # as SGLang leaves a request that it refuses
    pool.alloc([three])
    hooks._runtime = None
    return [*heard.calls, sorted(rows), rows[1]]


def reads(hook: Callable[..., Any], kind: str) -> set[str]:
    """What a hook reads: attributes and strings, and "" where it runs behind the function and names the result."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(hook))))
    words = {str(getattr(node, "attr", getattr(node, "value", None))) for node in nodes}
    result = next(iter(inspect.signature(hook).parameters))
    named = any(isinstance(node, ast.Name) and node.id == result for node in nodes)
    return words | {""} if kind == "after" and named else words


def seam_types() -> dict[str, Any]:
    """By target: names of arguments, whether the hook takes them, results of a wrong type, whether the hook reads what
    `RESULTS` says.
    """
    load_plugins()
    found: dict[str, Any] = {}
    for seam in HERE:
        function, kind = original(seam.target), seam.kind.value.lower()
        parameters = inspect.signature(function).parameters
        names = list(parameters)
        ahead = 0 if kind == "before" else 1  # the result, or the function itself
        own = 1 if names[0] in ("self", "cls") else 0
        ours = list(inspect.signature(seam.hook).parameters.values())[ahead + own :]
        counted = [one.name for one in ours if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        by_name = [name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY]
        try:
            in_order = [None] * (ahead + len(names) - len(by_name))
            inspect.signature(seam.hook).bind(*in_order, **dict.fromkeys(by_name))
            fits = ""
        except TypeError as error:
            fits = str(error)
        make, attribute, of = RESULTS.get(seam.target.rsplit(".", 1)[1], (lambda _: [], None, None))
        results, read = make(function), reads(seam.hook, kind)
        values = [getattr(one, attribute, ...) if attribute else one for one in results]
        found[seam.target] = {
            "theirs": names[own:],
            "ours": [name.removeprefix("_") for name in counted],
            "fits": fits,
            "wrong": [repr(one) for one in values if not isinstance(one, of)],
            "read": attribute in read if results else "" not in read,
        }
    found["life"] = life()
    return found


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    """What `seam_types` found, by target."""
    return in_sglang("tests.compat.test_seam_types:seam_types")


@pytest.mark.parametrize("target", [seam.target for seam in HERE], ids=lambda target: target.rsplit(".", 1)[1])
def test_a_hook_gets_the_arguments_and_reads_of_the_result_what_is_there(real: dict[str, Any], target: str) -> None:
    found = real[target]
    assert found["ours"] == found["theirs"][: len(found["ours"])]
    assert found["fits"] == "", "the hook takes every argument that the function does"
    assert found["wrong"] == []
    assert found["read"], "what the hook reads of a result, and nothing else, is in `RESULTS`"


def test_slots_are_heard_of_from_their_beginning_to_their_end(real: dict[str, Any]) -> None:
    *calls, rows, freed = real["life"]
    taken = [["taken", rid, "index", "build"] for rid in "ab"]
    assert calls == [*taken, ["freed", "b", freed, False, 0], ["taken", "c", None, None]]
    assert len(set(rows)) == 2
