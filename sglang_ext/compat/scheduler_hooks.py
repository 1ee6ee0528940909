"""The hooks of the scheduler process: thin, and delegating when the server runs without `--sparse-attn`."""

from __future__ import annotations

import logging
import reprlib
import time
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import islice
from typing import Any

from prefix_index import printable, printable_values
from sglang_ext.administration import summary
from sglang_ext.compat import administration, flags, latent
from sglang_ext.compat.checkpoint import resolved, weight_sums
from sglang_ext.compat.host_pool import offloading
from sglang_ext.compat.offload_tree import OffloadedTree, row_of
from sglang_ext.compat.response import tell
from sglang_ext.compat.seam import assert_in_place
from sglang_ext.compat.server_args import settings_of
from sglang_ext.metrics import Counters
from sglang_ext.options import Build
from sglang_ext.ranks import ranks_of

logger = logging.getLogger(__name__)

OPT_OUT = "sparse_attn"
MAX_WARNED = 16
MAX_KEYS = 64
"""So many keys of a request's own parameters are searched for a misspelt one: all requests wait for the search."""
READS_ENDED = ("war_fastpath_read_done_event", "shared_read_done_event")
"""Of a ModelRunner of 0.5.16 and of 0.5.23: behind what the scheduler may write to a running batch; None: its end."""
_warned: set[str] = set()

_DECODE_LINES = "sglang.srt.managers.scheduler_components.metrics_reporter"
"""The logger of SGLang's lines about decode batches."""

_IDLE_S = 0.002
"""For so long the scheduler sleeps where all that it could do waits for a file."""

#: The runtime of this scheduler process, once SGLang has built its attention backend.
_runtime: Any = None
_cache_observed = False


def runtime() -> Any:
    """This process's runtime, or None."""
    return _runtime


def around_attn_backend_wrapper(original: Callable[..., Any], runner: Any, full_attn_backend: Any) -> Any:
    """Adopt what SGLang built for the target model."""
    global _runtime
    wrapped = original(runner, full_attn_backend)
    settings = settings_of(runner.server_args)
    if settings is None or runner.is_draft_worker:
        return wrapped
    from sglang_ext.compat.adoption import adopt, refusal
    from sglang_ext.compat.runner import RunnerView
    from sglang_ext.runtime import SparseRuntime

    assert_in_place()
    view = RunnerView(runner)
    for message in (
        flags.refusal(resolved(runner.server_args), settings.config),
        refusal(wrapped),
        view.refusal(settings.config.build),
        latent.refusal(runner.model_config, settings.config, [type(wrapped).__name__], view.kv_dtype, view.device.type),
        flags.graph_refusal(runner.device, settings.config),
    ):
        if message:
            raise RuntimeError(message)
    # One rank exports: all count the same requests.
    prometheus = bool(getattr(runner.server_args, "enable_metrics", False)) and view.tp_rank == 0
    ranks = ranks_of(view.tp_rank, view.tp_size)
    options = settings.config.offload
    make = None
    if options is not None and settings.config.build is not Build.PREFILL:
        make = partial(offloading, runner, view, options, ranks, waits_s=settings.config.waits_s)
    _runtime = SparseRuntime(settings, view, prometheus=prometheus, ranks=ranks, offloading=make)
    if settings.config.build is Build.CAPTURE:
        from sglang_ext.compat.residual_stream import observe_residual_stream

        observe_residual_stream(runner.model, _runtime.forwards.observe)
    logging.getLogger(_DECODE_LINES).addFilter(_Shares(_runtime.counters))
    logger.info("sparse attention: on %s; %s", type(wrapped).__name__, summary(_runtime))
    for message in flags.in_vain(resolved(runner.server_args), settings.config):
        logger.warning("sparse attention: %s", message)
    return adopt(wrapped, _runtime.forwards, view.layer_refusal)


class _Shares(logging.Filter):
    """Adds to SGLang's lines about decode batches which shares of the rows since the last one went our ways.

    A release that calls its logger or its line otherwise loses that, and nothing else.
    """

    def __init__(self, counters: Counters) -> None:
        super().__init__()
        self._counters, self._before = counters, (0, 0, 0)

    def filter(self, record: logging.LogRecord) -> bool:
        """Changes some records, and drops none."""
        if isinstance(record.msg, str) and record.msg.startswith("Decode batch") and not record.args:
            now = self._counters.sparse_rows, self._counters.cascade_rows, self._counters.dense_rows
            sparse, cascade, dense = (after - before for after, before in zip(now, self._before, strict=True))
            self._before, rows = now, max(1, sparse + dense)
            record.msg += f", sparse rows: {sparse / rows:.2f}, cascade rows: {cascade / rows:.2f}"
        return True


def around_capture_one_shape(
    original: Callable[..., Any],
    runner: Any,
    size: int,
    forward: Callable[..., Any],
    stream_idx: int | None = None,
    variant_label: str | None = None,
    *more: Any,
) -> Any:
    """SGLang captures a decode graph of a size: capture ours first, as a backend may keep what it made for the last
    capture of a size.
    """
    ours = _runtime is not None and _runtime.view.runner is runner.model_runner and runner.captured_req_width == 1
    paths = _runtime.planner.paths_of(size) if ours else ()
    for path in paths:
        with _runtime.forwards.capturing(size, path):
            original(runner, size, forward, stream_idx, _label_of(path.value, variant_label), *more)
    return original(runner, size, forward, stream_idx, variant_label, *more)


def after_resolve_lora_variant(label: str | None, runner: Any, _forward_batch: Any) -> str | None:
    """The label of the graph that a step replays: SGLang tells graphs of one size apart by it, for LoRA."""
    if _runtime is None or _runtime.view.runner is not runner.model_runner or _runtime.forwards.path is None:
        return label
    return _label_of(_runtime.forwards.path.value, label)


def _label_of(path: str, label: str | None) -> str:
    """Of a path's graph beside the one with SGLang's label."""
    return path if label is None else f"{label}+{path}"


def after_create_tree_cache(tree_cache: Any, _ctx: Any) -> None:
    """Observe prefix matches of the very cache that SGLang built; the cache itself is not changed."""
    global _cache_observed
    if _runtime is None:
        return
    match = tree_cache.match_prefix
    offloaded = None
    if _runtime.offload is not None:
        if message := flags.tree_refusal(tree_cache):
            raise RuntimeError(message)
        offloaded = OffloadedTree(tree_cache, _runtime.offload, _runtime.requests.of)
        offloaded.install()

    def observed_match_prefix(params: Any) -> Any:
        if params.req is not None:
            _admit(params.req, params.key)
            if offloaded is not None:
                return offloaded.match(match, params)
        return match(params)

    tree_cache.match_prefix = observed_match_prefix
    _cache_observed = True


def around_get_new_batch_prefill(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Requests whose prefix is being read from a file leave the queue while SGLang looks for some to prefill. Requests
    whose grammar has become ready enter the queue before: SGLang would add them behind our look.
    """
    if _runtime is None or _runtime.offload is None:
        return original(scheduler, *args, **kwargs)
    grammars = scheduler.grammar_manager
    for req in grammars.get_ready_grammar_requests() if grammars.has_waiting_grammars() else ():
        scheduler._add_request_to_queue(req)
    grammars.has_waiting_grammars = lambda: False  # each round waits for them once
    try:
        return _without_held(original, scheduler, *args, **kwargs)
    finally:
        del grammars.has_waiting_grammars


def _without_held(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    running = args[0] if args else kwargs["running_batch"]
    if running.is_empty():  # before 0.5.23 a prompt longer than the pool would leave it full for good
        running.batch_is_full = False
    waiting, most = scheduler.waiting_queue, scheduler.max_req_input_len
    held = {id(req) for req in _runtime.offload.before_batch([(req, _admitted(req)) for req in waiting], most)}
    held |= {id(req) for req in waiting if len(req.origin_input_ids) >= most and _waits_for_host(req)}
    if not held:
        return original(scheduler, *args, **kwargs)
    scheduler.waiting_queue = [req for req in waiting if id(req) not in held]
    batch = None
    try:
        batch = original(scheduler, *args, **kwargs)
        return batch
    finally:
        if getattr(batch, "batch_to_run", batch) is None and scheduler.running_batch.is_empty():
            time.sleep(_IDLE_S)  # else this loop keeps the interpreter from the threads that read
        left = scheduler.waiting_queue
        stays, known = held | {id(req) for req in left}, {id(req) for req in waiting}
        new = [req for req in left if id(req) not in known]
        scheduler.waiting_queue = [*(req for req in waiting if id(req) in stays), *new]


def _waits_for_host(req: Any) -> bool:
    """Whether a prompt that is longer than the KV pool waits for its prefix. One whose prefix does not come ends:
    SGLang would never find room for it, nor for those behind it.
    """
    limit = req.logprob_start_len if req.return_logprob and req.logprob_start_len >= 0 else len(req.origin_input_ids)
    tokens, ready = _front(req, limit)
    attachment = _admitted(req)
    nowhere = "it is in neither, its index does not serve now, or log-probabilities of its tokens were asked for"
    why = _runtime.offload.overdue(attachment) if tokens else nowhere
    if why is None:
        return not ready
    req.set_finish_with_abort(
        f"expected the prefix of a prompt of {len(req.origin_input_ids)} tokens, more than the KV pool has, in host "
        f"memory or a file; {why}. Ask again later, or raise --max-total-tokens or offload.host_bytes"
    )
    attachment.entry = None
    return False


def _front(req: Any, limit: int) -> tuple[int, bool]:
    """Of a waiting request, where prefixes lie in host memory; see `Offloading.front`."""
    front: tuple[int, bool] = _runtime.offload.front(_admitted(req), min(limit, len(req.origin_input_ids) - 1))
    return front


def _beyond(req: Any, most: int, truncates: bool) -> int:
    """Tokens that a prompt longer than the KV pool has in front. What SGLang truncates is looked up as a whole, so is
    not looked up here.
    """
    length = len(req.origin_input_ids)
    if length < most or truncates or _runtime is None or _runtime.offload is None:
        return 0
    return _front(req, length)[0]


class _Behind:
    """A request whose own prompt begins at a token."""

    def __init__(self, req: Any, tokens: int) -> None:
        self._req, self.origin_input_ids = req, req.origin_input_ids[tokens:]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


def around_init_req_max_new_tokens(original: Callable[..., None], scheduler: Any, req: Any) -> None:
    """A prefix in host memory takes no room in the KV pool: it does not bound the answer to a prompt that is longer."""
    if tokens := _beyond(req, scheduler.max_req_input_len, scheduler.server_args.allow_auto_truncate):
        params, most = req.sampling_params, scheduler.model_config.context_len - len(req.origin_input_ids) - 2
        params.max_new_tokens = most if params.max_new_tokens is None else min(params.max_new_tokens, most)
        req = _Behind(req, tokens)
    original(scheduler, req)


def around_validate_input_length(
    original: Callable[..., Any], req: Any, max_req_input_len: int, allow_auto_truncate: bool
) -> Any:
    """Nor does it bound the prompt."""
    most = max_req_input_len + _beyond(req, max_req_input_len, allow_auto_truncate)
    return original(req, most, allow_auto_truncate)


def _admitted(req: Any) -> Any:
    """What is known of a waiting request, which SGLang may not have looked up yet."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    if _runtime.requests.of(req) is None:
        salt = {"cache_salt": req.cache_salt} if "cache_salt" in RadixKey.__slots__ else {}
        _admit(req, RadixKey(token_ids=req.origin_input_ids, extra_key=req.extra_key, **salt))  # as SGLang will
    return _runtime.requests.of(req)


def namespace_of(key: Any) -> dict[str, str | None]:
    """Everything in a RadixKey that is not tokens, whatever fields this SGLang gives it."""
    fields = (name for name in type(key).__slots__ if name not in ("token_ids", "limit", "is_bigram"))
    values = {name: getattr(key, name) for name in fields}
    return {name: None if value is None else str(value) for name, value in values.items()}


def _admit(req: Any, key: Any) -> None:
    if _runtime.requests.of(req) is not None:
        return
    try:
        # Of several answers to one prompt, SGLang has the prompt prefilled first by a request that generates nothing.
        generates = req.sampling_params.max_new_tokens != 0
        repeats = generates and req.sampling_params.n > 1
        prompt, namespace = req.origin_input_ids, namespace_of(key)
        _runtime.admit(req, req.rid, prompt, namespace, _refusal(req, key), counted=generates, repeats=repeats)
    except Exception:  # one request must not end the server
        logger.exception("sparse attention: request %s could not be looked up and stays dense", req.rid)
        _runtime.refuse(req, req.rid)


def _refusal(req: Any, key: Any) -> tuple[str, str] | None:
    """(reason, detail) of a request that stays dense whatever is in the store."""
    embeds = getattr(req, "input_embeds", None) or getattr(req, "positional_embed_overrides", None)
    modes = (
        (getattr(req, "lora_id", None) is not None, "a LoRA request"),
        (getattr(req, "multimodal_inputs", None) is not None, "a multimodal request"),
        (embeds is not None, "a request with its own embeddings"),
        (getattr(req, "beam_group", None) is not None, "a beam search request"),  # its parameters no longer say so
        (bool(getattr(key, "is_bigram", False)), "a bigram prefix key (speculative decoding)"),
        (bool(getattr(getattr(req, "session", None), "streaming", False)), "a streaming session's request"),
    )
    for present, what in modes:
        if present:
            return "unsupported_mode", what
    custom = req.sampling_params.custom_params
    if not isinstance(custom, dict):
        return None
    if custom.get(OPT_OUT) is False:
        return "by_request", "custom_params.sparse_attn is false"
    for problem in _misunderstood(custom):
        if problem not in _warned and len(_warned) < MAX_WARNED:
            _warned.add(problem)
            logger.warning("sparse attention: custom_params: %s; the request is served as without it", problem)
    return None


def _misunderstood(custom: dict[Any, Any]) -> Iterator[str]:
    """What in a request's own parameters seems to be meant for us and says nothing that we know."""
    if custom.get(OPT_OUT, True) is not True:
        yield f"expected {OPT_OUT} to be true or false, got {reprlib.repr(custom[OPT_OUT])}"
    for key in islice(custom, MAX_KEYS):  # others' keys stand here, too
        if key != OPT_OUT and isinstance(key, str) and get_close_matches(key[:40].lower(), [OPT_OUT], cutoff=0.8):
            yield f"expected {OPT_OUT}, got {reprlib.repr(key)}"


def around_model_runner_forward(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Every real forward of the target model passes here; warm-up and graph capture do not. None: it was not run, see
    `DecodePlanner.drafting`.
    """
    if _runtime is None or _runtime.view.runner is not runner:
        return original(runner, forward_batch, *args, **kwargs)
    forwards = _runtime.forwards
    with forwards.step(forward_batch):
        if forwards.planner.ahead and forwards.path is None:
            return None
        forward = partial(original, runner, forward_batch, *args, **kwargs)
        output = forwards.run(forward, partial(next_tokens, runner))
        forwards.prefilled(in_graph=bool(getattr(output, "can_run_graph", False)))
        return output


def next_tokens(runner: Any, output: Any) -> Any:
    """[rows], the most probable next tokens by the output of a forward, which another one may follow; or None."""
    keep_waiting(runner)
    logits = getattr(output.logits_output, "next_token_logits", None)
    return None if logits is None else logits.argmax(dim=-1)


def keep_waiting(runner: Any) -> None:
    """A replay told the scheduler, before its end, that it may go on with the batch. But what stands behind the replay
    still reads it, or gives what the scheduler reads: so that it waits for all that was launched.
    """
    for name in READS_ENDED:
        if hasattr(runner, name):
            setattr(runner, name, None)


def after_can_run_graph(can: Any, runner: Any, _forward_batch: Any) -> Any:
    """No graph holds a step that is attended twice, or exactly behind host memory."""
    eager = _runtime is not None and _runtime.view.runner is runner.model_runner and _runtime.forwards.eager
    return False if eager else can


def around_update_finish_state(original: Callable[..., None], req: Any, new_accepted_len: int = 1) -> None:
    """A request may end. Of a streaming session's nothing else is said: its slot is the session's."""
    _update_finish_state(original, req, new_accepted_len)
    if _runtime is not None and req.finished() and getattr(getattr(req, "session", None), "streaming", False):
        _runtime.slot_freed(req, row_of(req), finished=True, tokens=len(req.output_ids))


def _update_finish_state(original: Callable[..., None], req: Any, new_accepted_len: int) -> None:
    """Whether a request ends is asked behind each token of a round of lossless decode, as dense decoding asks. Asked
    once for several, SGLang prefers a string to the stop token before it, and before 0.5.23 the length to both.
    """
    verifies = _runtime is not None and _runtime.planner.drafts is not None
    if not verifies or new_accepted_len < 2 or req.finished() or req.to_finish:
        original(req, new_accepted_len)
        return
    tokens = req.output_ids[-new_accepted_len:]
    del req.output_ids[-new_accepted_len:]
    for number, token in enumerate(tokens, 1):
        req.output_ids.append(token)
        original(req, 1)
        if req.finished():
            if req.finished_len is None:
                req.finished_len = len(req.output_ids)
            # What stands behind its end is no part of it: not in the prefix cache, nor in the next turn of a session.
            kept = req if hasattr(req, "kv_committed_len") else req.kv
            kept.kv_committed_len -= len(tokens) - number
            attachment = _runtime.requests.of(req)
            if attachment is not None and number < len(tokens):  # the last token of a round is no draft
                attachment.cut(len(tokens) - number - 1, _runtime.counters)
            # All of them were counted before this is asked.
            req.reasoning_tokens = min(req.reasoning_tokens, len(req.output_ids))
            return


def before_req_to_token_free(pool: Any, req: Any) -> None:
    """Finish, abort and retraction all give the slot back here."""
    from sglang.srt.managers.schedule_batch import Req

    if _runtime is None or not isinstance(req, Req):
        return  # a streaming session gives back a slot that is no request's
    row = row_of(req)
    assert row is not None
    _runtime.slot_freed(req, row, finished=req.finished(), tokens=len(req.output_ids))


def after_req_to_token_alloc(_rows: list[int] | None, _pool: Any, reqs: Sequence[Any]) -> None:
    """Requests get slots here, before each chunk of their prefill, those without any by now (`_rows` None) excepted."""
    from sglang.srt.managers.schedule_batch import Req

    for req in reqs if _runtime is not None and _rows is not None else ():
        if not isinstance(req, Req):
            continue
        offloaded = _runtime.offload is not None and _runtime.offload.slot_taken(req, row_of(req))
        try:
            known = _runtime.requests.of(req)
            if known is not None and len(req.origin_input_ids) < known.prompt_len:
                known.entry = known.admission = None  # SGLang refused it, and prefills one token in its place
            attachment = _runtime.slot_taken(req, offloaded=offloaded)
        except Exception:  # one request must not end the server
            logger.exception("sparse attention: request %s stays dense", req.rid)
            attachment = _runtime.requests.of(req)
            if attachment is not None:
                _runtime.ready.give_up(attachment, "unsupported_mode")
            if _runtime.builds is not None:
                _runtime.builds.discard(req.rid)
        if attachment is not None:
            tell(req, attachment, incremental=_runtime.view.runner.server_args.incremental_streaming_output)


def after_weights_update(_result: Any, _updater: Any, _recv_req: Any) -> None:
    """Weights may have been changed in place, also by an update that failed."""
    if _runtime is not None:
        _runtime.weights_updated()


def around_update_from_disk(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    """An update that left the weights as they were, as one from a mistyped path does, changes nothing for indexes."""
    runner, before = updater.tp_worker.model_runner, None
    # Of several ranks one may have failed alone; weights that were released cannot be read.
    if _runtime is not None and _runtime.ranks.size == 1 and not updater.offload_tags:
        before = weight_sums(runner.model)
    try:
        return original(updater, recv_req)
    finally:
        if _runtime is not None and (before is None or before != weight_sums(runner.model)):
            _runtime.weights_updated()


def after_scheduler_init(_result: None, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """With the flag given, serving does not begin unless every seam is ours."""
    if settings_of(scheduler.server_args) is None:
        return
    from sglang_ext.compat.adoption import is_adopted

    assert_in_place()
    adopted = _runtime is not None and is_adopted(scheduler.tp_worker.model_runner.attn_backend)
    if not adopted or not _cache_observed:
        what = "prefix cache to be observed" if adopted else "attention backend to be adopted"
        raise RuntimeError(
            f"--sparse-attn: expected SGLang's {what}, found it untouched; start without --sparse-attn and report the "
            "SGLang version and flags"
        )


def after_get_internal_state(result: Any, *_args: Any, **_kwargs: Any) -> None:
    """`/get_server_info` shows the counters under internal_states[i].sparse_attn. Asking must not end the server."""
    if _runtime is None:
        return
    try:
        state = printable_values(_runtime.snapshot())
    except Exception as error:
        if _runtime.ranks.size > 1:
            raise  # others wait for what this rank says
        logger.exception("sparse attention: the state could not be told")
        state = {"error": printable(f"{type(error).__name__}: {error}; see the log")}
    result.internal_state["sparse_attn"] = state


def around_dumper_control(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Commands of ours come by SGLang's control request for its dumper; what is not ours stays SGLang's."""
    answer = administration.answer(_runtime, recv_req)
    return original(scheduler, recv_req) if answer is None else answer
