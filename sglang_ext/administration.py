"""What operators ask a running server, and what they tell it: each command by name, with a JSON body and answer.

Knows no SGLang: `compat.administration` brings commands from HTTP routes to every scheduler process, where `answered`
runs between two steps. With tensor parallelism all ranks run a command in the same scheduler step, with the same body.
So what a command changes of the choice of paths must come of its body and of the configuration alone.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from prefix_index import (
    IndexEntry,
    IndexStore,
    IndexStoreError,
    InvalidPayload,
    canonical_digest,
    namespace_digest,
    printable,
    printable_values,
)
from sglang_ext import __version__
from sglang_ext.compat import versions
from sglang_ext.config import ConfigError, check_ranges
from sglang_ext.decode.costs import MARGIN
from sglang_ext.decode.quality import Standing
from sglang_ext.methods.profile import Profile, ProfileError, decode_profile
from sglang_ext.options import DecodePath
from sglang_ext.prefill.builder import covered_tokens
from sglang_ext.prefill.shared_builds import SharedBuilds
from sglang_ext.prefix.explanation import MOST_PROBLEMS
from sglang_ext.prefix.residency import State
from sglang_ext.profiles import check_profile
from sglang_ext.storage import LEAST_DIGITS, is_meant

if TYPE_CHECKING:
    from sglang_ext.prefix.directory import Lookup
    from sglang_ext.prefix.residency import ResidentIndex
    from sglang_ext.runtime import SparseRuntime

logger = logging.getLogger(__name__)

GOOD, BAD, UNKNOWN, CONFLICT, FAILED = 200, 400, 404, 409, 500
"""Statuses of answers, as HTTP has them: done, a bad body, nothing by that name, not possible now, our own fault."""

MOST_SHOWN = 500
"""Indexes that one answer tells of: it is made between two decode steps."""

_OFF = "turned off by an operator"


class CommandError(Exception):
    """A command that is refused: what was expected, what came, what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """Of one command.

    Attributes:
        status: GOOD, or why not.
        body: JSON values; of a refusal {"error": message}.
    """

    status: int
    body: dict[str, Any]


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a command that needs none."""


@dataclass(frozen=True)
class Command:
    """One thing that can be asked or told.

    Attributes:
        body: what its JSON body must be.
        run: gives the answer, on the scheduler's thread, on every rank. Never waits for a disk or a network. A
            collective in it must be reached on all ranks.
        asks: changes nothing and needs no body, so its route is GET; of all others POST.
    """

    body: type[msgspec.Struct]
    run: Callable[[SparseRuntime, Any], dict[str, Any]]
    asks: bool = False


def answered(runtime: SparseRuntime, name: str, body: Mapping[str, Any]) -> Answer:
    """Run a command. With several ranks a collective; never raises an `Exception`.

    Returns:
        This process's answer; where a rank refused or failed, that of the first one that did.
    """
    mine = _answer(runtime, name, body)
    of_ranks: list[Answer | None] = runtime.ranks.gathered(None if mine.status == GOOD else mine)
    return next((one for one in of_ranks if one is not None), mine)


def _answer(runtime: SparseRuntime, name: str, body: Mapping[str, Any]) -> Answer:
    try:
        command = COMMANDS.get(name)
        if command is None:
            raise CommandError(UNKNOWN, f"expected a command of {', '.join(COMMANDS)}; got {name[:80]!r}")
        try:
            given = msgspec.convert(body, command.body)
        except msgspec.ValidationError as error:
            raise CommandError(BAD, f"{name}: {error}; correct the body") from error
        return Answer(GOOD, printable_values(command.run(runtime, given)))
    except Exception as error:  # the server lives on, and other ranks wait
        return _refusal(name, error)


def _refusal(name: str, error: Exception) -> Answer:
    """The answer to a command that an exception ended; the log has one that is not a refusal."""
    if isinstance(error, CommandError):
        return Answer(error.status, {"error": printable(str(error))})
    logger.error("sparse attention: command %s failed", name[:80], exc_info=error)
    return Answer(FAILED, {"error": printable(f"{name} failed: {type(error).__name__}: {error}; see the log")})


# -- what is asked -------------------------------------------------------------------------------------------


def summary(runtime: SparseRuntime) -> str:
    """One line for people, at the start: what is on, and what is not and why."""
    config, planner, shared = runtime.config, runtime.planner, "read once, exactly"
    if planner.refusal is not None:
        shared = f"left to SGLang ({planner.refusal})"
    elif planner.cascade is None:
        shared = "each request's own (share_prefixes is off, on a CPU unless it is set)"
    if planner.uses_indexes:
        store = f"store {runtime.directory.address}: {runtime.directory.summary()}"
        given = "5% of the KV pool" if config.index_gpu_bytes is None else "index_gpu_bytes"
        most = f"at most {runtime.index_bytes:,} bytes in memory ({given})"
        model = canonical_digest(runtime.model)[:8]  # as `sglang-ext index ls` and `du` begin it
        indexes = f"{config.method}, build {config.build.value}, {most}, model {model}, {store}"
    elif config.decode_path is DecodePath.CASCADE:
        indexes = (
            "off (decode_path is cascade, as it also is where no store is named, the default one is empty and "
            'nothing builds: name one with --sparse-attn-store, or set "build": "shared")'
        )
    else:
        indexes = "off (decode_path is stock)" if config.decode_path is DecodePath.STOCK else "off (see above)"
    return f"shared prefixes: {shared}; indexes: {indexes}; {_guard_summary(runtime)}"


def _guard_summary(runtime: SparseRuntime) -> str:
    config = runtime.config
    if runtime.planner.guard is None:
        return "quality guard: off"
    trial = ", indexes begin on trial (no profile)" if runtime.trial else ""
    bound = "only measures" if config.quality_slo is None else f"bound {config.quality_slo:g}"
    return f"quality guard: one step in {config.guard_every}, {bound}{trial}"


def _status(runtime: SparseRuntime, _: Nothing) -> dict[str, Any]:
    """What is on, and what it did. Waits for all ranks."""
    state = runtime.snapshot()  # a collective: before anything that may fail on one rank
    counters, planner = runtime.counters, runtime.planner
    rows = {"sparse": counters.sparse_rows, "cascade": counters.cascade_rows}
    rows["dense"] = counters.dense_rows - counters.cascade_rows
    total = sum(rows.values())
    of_packages = {name: versions.installed(name) for name in ("sglang", "torch")}
    exact = planner.refusal or (_OFF if planner.paused else None if planner.cascade else "share_prefixes is off")
    selects = _why_no_index(runtime)
    return {
        "summary": summary(runtime),
        "shared_prefixes": {"on": exact is None, "why_not": exact},
        "indexes": {"on": selects is None, "why_not": selects},
        "budget": _budget_of(runtime),
        "path_shares": {path: count / total if total else 0.0 for path, count in rows.items()},
        "index_bytes": runtime.index_bytes,
        "versions": {"sglang-ext": __version__, "python": sys.version.split()[0], **of_packages},
        "state": state,
    }


def _why_no_index(runtime: SparseRuntime) -> str | None:
    """Why no step goes by an index, whatever its requests; None where some may."""
    if why := runtime.planner.refusal or runtime.ready.stale or (_OFF if runtime.ready.off else None):
        return why
    return None if runtime.planner.uses_indexes else "indexes are not configured: see the log"


def _budget_of(runtime: SparseRuntime) -> dict[str, Any]:
    sparse = runtime.planner.sparse
    budget = {"keep_ratio": runtime.config.keep_ratio, "top_k": runtime.config.top_k}
    return {**budget, "most_tokens": None if sparse is None else sparse.width}


def _indexes(runtime: SparseRuntime, _: Nothing) -> dict[str, Any]:
    """Indexes on the device, those that were hit, and of the others in the store as many as there is room for.

    `saved_s` are seconds saved by measured costs, None without any. `recall` is the quality guard's share of attention
    mass, None before it has compared a step.
    """
    directory, (entries, late) = runtime.directory, runtime.directory.known()
    runtime.residency.forget_gone()
    resident = runtime.residency.resident()
    by_digest = {one.entry.digest: one.entry for one in resident.values()}
    by_digest |= {entry.digest: entry for entry in entries}
    stored = {entry.digest for entry in entries}
    hit = (digest for digest, _ in runtime.index_hits.most_common() if digest in by_digest)
    shown = list(dict.fromkeys([*resident, *hit, *by_digest]))[:MOST_SHOWN]
    guard, saved_us = runtime.planner.guard, runtime.planner.account.saved_us
    judged = {} if guard is None else guard.snapshot()["indexes"]
    rows = []
    for digest in shown:
        entry = by_digest[digest]
        on_device = resident.get(digest)
        ready = on_device is not None and on_device.state is State.READY
        tiers = [tier for tier, there in (("device", ready), ("store", digest in stored)) if there]
        rows.append(
            {
                "digest": digest,
                "name": entry.retention.name,
                "tokens": entry.identity.num_tokens,
                "method": runtime.config.method,
                "tiers": tiers,
                "state": None if on_device is None else on_device.state.value,
                "why_not": directory.misfit(entry.identity) or (on_device.detail or None if on_device else None),
                "store_bytes": entry.nbytes,
                "device_bytes": on_device.nbytes if on_device else 0,
                "users": on_device.users if on_device else 0,
                "hits": runtime.index_hits[digest],
                "saved_s": saved_us[digest] / 1e6 if digest in saved_us else None,
                "recall": judged[digest].get("mean_recall") if digest in judged else None,
                "pinned": digest in runtime.residency.pinned,
                "pinned_in_store": entry.retention.pinned,
                "created": entry.created,
            }
        )
    return {"indexes": sorted(rows, key=_place), "not_shown": len(by_digest) - len(shown), "as_last_known": late}


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return -row["hits"], row["name"] or "", row["digest"]


class Wanted(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt: `input_ids`, and what of its requests is not tokens. Routes take text and messages in their place."""

    input_ids: list[int]
    extra_key: str | None = None
    cache_salt: str | None = None

    @property
    def namespace(self) -> dict[str, str | None]:
        """What of its requests is not tokens."""
        return {"extra_key": self.extra_key, "cache_salt": self.cache_salt}


def _explain(runtime: SparseRuntime, given: Wanted) -> dict[str, Any]:
    """Which index a request of this prompt would have, and which way its steps would go, were it alone."""
    ids, planner = given.input_ids, runtime.planner
    try:
        found = runtime.directory.lookup(given.namespace, ids)
    except (InvalidPayload, OverflowError) as error:
        raise CommandError(BAD, f"expected token ids; got: {error}") from error
    runtime.directory.known()
    entry, on_device, prefix_len, budget, standing = found.entry, None, 0, None, Standing.SERVING
    if entry is not None:
        on_device, prefix_len = runtime.residency.resident().get(entry.digest), entry.identity.num_tokens
        records, factor = None if planner.guard is None else planner.guard.records, 1
        if records is not None:
            standing, factor = records.standing(entry.digest, entry.created), records.factor(entry.digest)
        sparse = planner.sparse
        budget = runtime.config.budget(prefix_len) if sparse is None else sparse.budget(prefix_len, factor)
    costs = planner.costs_alone(len(ids) + 1, prefix_len, budget or 0)
    path, why = _way(_why_no_index(runtime), found, on_device, standing, costs, forced=planner.forced)
    return {
        "index": None if entry is None else entry.digest,
        "name": None if entry is None else entry.retention.name,
        "prefix_tokens": prefix_len,
        "reason": found.reason,
        "detail": found.detail,
        "resident": None if on_device is None else on_device.state.value,
        "budget": budget,
        "costs_us": costs,
        "path": path,
        "why": why,
        "problems": list(runtime.directory.problems[:MOST_PROBLEMS]),
        "trace_folder": runtime.config.trace_folder,
        "model": msgspec.to_builtins(runtime.model),
    }


def _way(
    off: str | None,
    found: Lookup,
    on_device: ResidentIndex | None,
    standing: Standing,
    costs: Mapping[str, float | None],
    *,
    forced: bool,
) -> tuple[str, str]:
    """(path, why) of the steps of one request alone."""
    if found.entry is None:
        return "stock", f"it has no index ({found.reason or 'less than a page'})"
    if off is not None:
        return "stock", off
    if on_device is not None and on_device.state is State.FAILED:
        return "stock", f"its index could not be loaded ({on_device.reason}): {on_device.detail}"
    if standing is Standing.DENSE:
        return "stock", "quality_guard: its output error is above the bound; it is tried again later"
    if standing is Standing.TRIAL:
        return "stock", "quality_guard: its index is on trial, attended exactly until enough steps were compared"
    if forced:
        return "sparse", "a ready index is always used: decode_path is sparse, or there are no decode graphs"
    exact, sparse = costs["exact"], costs["sparse"]
    if exact is None or sparse is None:
        return "stock", "costs of a batch of one were not measured"
    if sparse < MARGIN * exact:
        return "sparse", f"selecting takes {sparse / exact:.2f} of attending all"
    return "stock", f"cost_model: selecting takes {sparse / exact:.2f} of attending all, less than {MARGIN:g} is wanted"


# -- indexes that are named ------------------------------------------------------------------------------------


class Named(msgspec.Struct, forbid_unknown_fields=True):
    """A command about one index: `index` is its name, its digest, or the digest's first digits."""

    index: str


class Evicted(Named, forbid_unknown_fields=True):
    """`store`: remove it from the store, too."""

    store: bool = False


def _named(runtime: SparseRuntime, word: str) -> IndexEntry:
    """The index that rank 0 knows by this word, on all ranks. A collective, which every rank reaches whatever its own
    search met.

    Raises:
        CommandError: rank 0 knows none, or several, or its search failed; on all ranks.
    """
    mine: IndexEntry | Answer
    try:
        mine = _search(runtime, word)
    except Exception as error:
        mine = _refusal("the search of an index", error)
    found: IndexEntry | Answer = runtime.ranks.gathered(mine)[0]
    if isinstance(found, Answer):
        raise CommandError(found.status, found.body["error"])
    return found


def _search(runtime: SparseRuntime, word: str) -> IndexEntry:
    entries = {entry.digest: entry for entry in runtime.directory.known()[0]}
    runtime.residency.forget_gone()
    entries |= {digest: one.entry for digest, one in runtime.residency.resident().items() if digest not in entries}
    found = [entry for entry in entries.values() if is_meant(word, entry.digest, entry.retention.name)]
    if len(found) == 1:
        return found[0]
    some = f"{len(found)} indexes" if found else "none"
    raise CommandError(
        UNKNOWN,
        f"expected the name of one index, its digest, or {LEAST_DIGITS} or more of its first digits; got "
        f"{word[:80]!r}, which means {some}: `sglang-ext server indexes` lists them",
    )


def _prefetch(runtime: SparseRuntime, given: Named) -> dict[str, Any]:
    """Begin to load it; `indexes` says when it is there."""
    entry = _named(runtime, given.index)
    why = runtime.directory.misfit(entry.identity)
    if why is not None:
        raise CommandError(CONFLICT, f"expected an index of what is served; got {entry.digest[:12]}, {why}")
    why = _why_no_index(runtime)
    if why not in (None, _OFF):  # it may be turned on again
        raise CommandError(CONFLICT, f"expected a server that uses indexes; this one does not: {why}")
    return {"digest": entry.digest, "state": runtime.residency.load(entry).state.value}


def _pinned(runtime: SparseRuntime, given: Named, *, pinned: bool) -> dict[str, Any]:
    """What is pinned stays on the device when bytes are wanted; in the store it leaves last."""
    entry = _named(runtime, given.index)
    (runtime.residency.pinned.add if pinned else runtime.residency.pinned.discard)(entry.digest)
    retention = msgspec.structs.replace(entry.retention, pinned=pinned)
    store = _in_store(runtime, lambda s: s.retain(entry.digest, retention))
    return {"digest": entry.digest, "device": "done", "store": store}


def _evict(runtime: SparseRuntime, given: Evicted) -> dict[str, Any]:
    """Off the device, and with `store` out of the store. A later request loads it again from where it still is."""
    entry = _named(runtime, given.index)
    digest = entry.digest
    if digest in runtime.residency.pinned:
        raise CommandError(CONFLICT, f"expected an index that is not pinned; {digest[:12]} is: unpin it first")
    mine = runtime.residency.resident().get(digest)
    [users] = runtime.ranks.most([0 if mine is None else mine.users])
    gone = users == 0 and runtime.residency.evict(digest)
    if not all(runtime.ranks.gathered(gone)):
        raise CommandError(
            CONFLICT,
            f"expected an index that nobody uses; {digest[:12]} is being loaded, or in use by {users:.0f} requests: "
            "evict it when they have ended",
        )
    store = _in_store(runtime, lambda s: s.delete(digest)) if given.store else "kept"
    return {"digest": digest, "device": "done", "store": store}


def _in_store(runtime: SparseRuntime, how: Callable[[IndexStore], object]) -> str:
    """What became of a change in the store, which rank 0 makes."""
    if runtime.ranks.rank > 0:
        return "by rank 0"
    try:
        return runtime.directory.change(how)
    except IndexStoreError as error:
        return f"refused: {error}"


# -- what is built and how much is attended ----------------------------------------------------------------------


def _build(runtime: SparseRuntime, given: Wanted) -> dict[str, Any]:
    """Have an index built from the next requests that begin with the prompt, whatever was counted."""
    if why := runtime.planner.refusal or runtime.ready.stale or (_OFF if runtime.ready.off else None):
        raise CommandError(CONFLICT, f"expected a server that builds beside serving; this one does not: {why}")
    if not isinstance(runtime.builds, SharedBuilds):
        raise CommandError(
            CONFLICT,
            f"expected a server that builds beside serving; this one has build {runtime.config.build.value!r}, or uses "
            'no index: start it with "build": "shared", or use sglang-ext prebuild',
        )
    try:
        why_not = runtime.builds.ask_for(namespace_digest(given.namespace), given.input_ids)
    except (InvalidPayload, OverflowError) as error:
        raise CommandError(BAD, f"expected token ids; got: {error}") from error
    if why_not is not None:
        raise CommandError(CONFLICT, f"build: {why_not}")
    tokens = covered_tokens(len(given.input_ids), runtime.config.build_align)
    return {"tokens": tokens, "state": "waits for requests that begin with these tokens"}


class Budget(msgspec.Struct, forbid_unknown_fields=True):
    """Keys of the configuration; one that is left out stays as it is."""

    keep_ratio: float | msgspec.UnsetType | None = msgspec.UNSET
    top_k: int | msgspec.UnsetType | None = msgspec.UNSET


def _budget(runtime: SparseRuntime, given: Budget) -> dict[str, Any]:
    """From the next step on, for running requests, too."""
    changes = {name: value for name, value in msgspec.structs.asdict(given).items() if value is not msgspec.UNSET}
    if not changes:
        raise CommandError(BAD, "budget: expected keep_ratio, top_k or both; got neither: name one")
    _set_budget(runtime, changes)
    return _budget_of(runtime)


def _set_budget(runtime: SparseRuntime, changes: Mapping[str, Any]) -> None:
    if runtime.planner.sparse is None:
        raise CommandError(CONFLICT, "expected a server that uses indexes; `status` says why this one does not")
    config = msgspec.structs.replace(runtime.config, **changes)
    try:
        check_ranges(config)
        runtime.planner.set_budget(config)
    except ConfigError as error:
        raise CommandError(BAD, str(error).replace("--sparse-attn-config", "budget", 1)) from error
    except ValueError as error:
        raise CommandError(CONFLICT, f"budget: {error}") from error
    runtime.config = config


class Reloaded(msgspec.Struct, forbid_unknown_fields=True):
    """The text of the profile's file, which the route reads once for all ranks."""

    profile: str


def _reload_profile(runtime: SparseRuntime, given: Reloaded) -> dict[str, Any]:
    """Take over what of a profile can change while a server runs: the recommended keep ratio."""
    old = runtime.loaded_profile
    if old is None:
        raise CommandError(CONFLICT, "expected a server with a profile; this one has none: restart it with 'profile'")
    try:
        new = decode_profile(given.profile.encode("utf-8", "surrogatepass"))
        check_profile(new, runtime.model)
    except ProfileError as error:
        raise CommandError(BAD, f"reload_profile: {error}") from error
    fixed = [name for name in _FIXED if _part(old, name) != _part(new, name)]
    if fixed:
        raise CommandError(
            CONFLICT,
            "expected a profile that differs in recommended.keep_ratio alone, as decode graphs and indexes are made of "
            f"all else; {', '.join(fixed)} differ: restart the server to use it",
        )
    if new.recommended is None or old.recommended is None or runtime.started.keep_ratio != old.recommended.keep_ratio:
        raise CommandError(
            CONFLICT, "expected the profile's keep_ratio in force; the configuration gives a budget, which counts first"
        )
    _set_budget(runtime, {"keep_ratio": new.recommended.keep_ratio})
    runtime.loaded_profile = new
    runtime.started = msgspec.structs.replace(runtime.started, keep_ratio=new.recommended.keep_ratio)
    return _budget_of(runtime)


_FIXED = ("layer_plan", "block_sizes", "channels", "dense_heads", "recommended.method", "recommended.spec")


def _part(profile: Profile, name: str) -> Any:
    own, _, of_recommended = name.partition(".")
    part = msgspec.to_builtins(getattr(profile, own))
    return part if not of_recommended else None if part is None else part[of_recommended]


class Off(msgspec.Struct, forbid_unknown_fields=True):
    """`shared_prefixes`: leave all decode steps to SGLang, also those of requests that share slots."""

    shared_prefixes: bool = False


def _off(runtime: SparseRuntime, given: Off) -> dict[str, Any]:
    """No index is looked up or used from the next step on. Running requests decode on, exactly."""
    runtime.ready.off, runtime.planner.paused = True, given.shared_prefixes
    logger.warning("sparse attention: turned off by an operator%s", ", with shared prefixes" * given.shared_prefixes)
    return {"indexes": False, "shared_prefixes": not given.shared_prefixes}


def _on(runtime: SparseRuntime, _: Nothing) -> dict[str, Any]:
    """As configured. Requests that came meanwhile have no index; those before use theirs again."""
    runtime.ready.off = runtime.planner.paused = False
    logger.warning("sparse attention: turned on by an operator")
    return {"indexes": _why_no_index(runtime) is None, "shared_prefixes": True}


COMMANDS: dict[str, Command] = {
    "status": Command(Nothing, _status, asks=True),
    "indexes": Command(Nothing, _indexes, asks=True),
    "prefetch": Command(Named, _prefetch),
    "pin": Command(Named, partial(_pinned, pinned=True)),
    "unpin": Command(Named, partial(_pinned, pinned=False)),
    "evict": Command(Evicted, _evict),
    "build": Command(Wanted, _build),
    "explain": Command(Wanted, _explain),
    "budget": Command(Budget, _budget),
    "off": Command(Off, _off),
    "on": Command(Nothing, _on),
    "reload_profile": Command(Reloaded, _reload_profile),
}
"""By name: the last word of its route."""
