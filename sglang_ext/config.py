"""The one configuration of the plugin: parsed and checked once at the edge, frozen afterwards."""

from __future__ import annotations

import json
import os
import re
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

import prefix_index
from prefix_index.connect import locate
from prefix_index.folder import Access
from prefix_kernels.pooling import MOST_APART
from sglang_ext.methods.base import did_you_mean, names_that_sample
from sglang_ext.methods.profile import Profile, ProfileError, used_by_builders
from sglang_ext.options import Build, DecodePath, Exactness, Offload, SparseAttnConfig
from sglang_ext.profiles import NO_PROFILE, find_profile, read_profile, with_profile
from sglang_ext.storage import ENV_STORE, default_store, holds_indexes, make_folder, remote_addresses

ENV_ENABLE = "SGLANG_SPARSE_ATTN"
ENV_CONFIG = "SGLANG_SPARSE_ATTN_CONFIG"

#: Tokens of one page: the finest block, and the unit that prompts are hashed by.
PAGE_TOKENS = prefix_index.PAGE_TOKENS


SELECTING_TOKENS = 512
"""Of a request's prefill that selects, at most: a longer one pays for the link."""
MOST_DRAFTED = PAGE_TOKENS - 1
"""Tokens of a round; fewer than `suffix_dense_tokens` leaves uncovered, so no index of a suffix holds a draft."""


class ConfigError(ValueError):
    """The user's configuration cannot be used; the message says what was expected, what came, what to do."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the flags say: the configuration, the index store (a folder, or a service's ipc:// URL), and the model's
    profile, read once so that every process has the same.
    """

    config: SparseAttnConfig
    store: str
    profile: Profile | None = None

    def dump(self) -> str:
        """As JSON text, for the record that SGLang sends to its processes."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def load(text: str) -> Settings:
        """Inverse of `dump`. The text is our own, so only a version mix can make it unreadable."""
        return msgspec.json.decode(text.encode(), type=Settings)


def _fail(expected: str, came: object, todo: str) -> ConfigError:
    return ConfigError(f"--sparse-attn-config: expected {expected}; got {came!r}. {todo}")


_FRACTION = "a fraction above 0 and at most 1"
_BEYOND = 1 << 63
"""More than arrays, files and other processes can be told."""

#: The least values of options that count something, and of what.
_LEAST = {
    "top_k": (1, "tokens"),
    "min_top_k": (0, "tokens"),
    "min_shared_tokens": (1, "tokens"),
    "search_period": (1, "decode steps"),
    "suffix_index_bytes": (1, "bytes"),
    "suffix_dense_tokens": (2 * PAGE_TOKENS, "tokens"),
    "num_sink_tokens": (0, "tokens"),
    "num_recent_pages": (0, "pages"),
    "min_sparse_prompt_len": (1, "tokens"),
    "query_samples": (1, "query rows"),
    "build_align": (PAGE_TOKENS, "tokens"),
    "build_after_hits": (1, "requests"),
    "sample_host_bytes": (1, "bytes"),
    "capture_tail": (0, "tokens"),
    "capture_steps": (0, "steps"),
    "guard_every": (0, "decode steps"),
    "index_gpu_bytes": (1, "bytes"),
    "store_max_bytes": (1, "bytes"),
    "store_min_free_bytes": (0, "bytes"),
}


def check_ranges(config: SparseAttnConfig) -> None:
    for name, (least, what) in _LEAST.items():
        value = getattr(config, name)
        if value is not None and not least <= value < _BEYOND:
            null = "" if getattr(SparseAttnConfig(), name) is not None else ", or null"
            most = "" if value < least else ", below 2 to the 63rd"
            raise _fail(f"{name} to be {least} or more {what}{most}{null}", value, f"Change {name!r}.")
    rules: tuple[tuple[str, bool, str], ...] = (
        ("keep_ratio", config.keep_ratio is None or 0.0 < config.keep_ratio <= 1.0, f"{_FRACTION}, or null"),
        ("max_keep_ratio", 0.0 < config.max_keep_ratio <= 1.0, _FRACTION),
        ("build_share", 0.0 < config.build_share <= 1.0, _FRACTION),
        ("guard_share", 0.0 < config.guard_share <= 1.0, _FRACTION),
        (
            "quality_slo",
            config.quality_slo is None or 0.0 < config.quality_slo < float("inf"),
            "a finite error above 0, or null",
        ),
        ("quality_recovery_s", 1.0 <= config.quality_recovery_s < float("inf"), "a finite time of at least 1 second"),
        (
            "sum_every",
            config.sum_every is None or 1 <= config.sum_every <= MOST_APART,
            f"1 to {MOST_APART} tokens, or null",
        ),
        ("profile", config.profile != "", 'a path, "none" or null'),
        ("build_align", config.build_align % PAGE_TOKENS == 0, f"a multiple of {PAGE_TOKENS} tokens"),
        (
            "capture_folder",
            config.build is not Build.CAPTURE or bool(config.capture_folder),
            "a folder when build is 'capture'",
        ),
        ("draft_tokens", 1 <= config.draft_tokens <= MOST_DRAFTED, f"1 to {MOST_DRAFTED} tokens"),
        ("prefetch_timeout_s", 0.0 < config.prefetch_timeout_s < float("inf"), "a finite time above 0 seconds"),
        ("store_timeout_s", 0.0 < config.store_timeout_s <= 1e9, "a time above 0 seconds, 1e9 at most"),
        ("seed", 0 <= config.seed < _BEYOND, "0 or more, below 2 to the 63rd"),
    )
    for name, good, expected in rules:
        if not good:
            raise _fail(f"{name} to be {expected}", getattr(config, name), f"Change {name!r}.")


def _check_methods(config: SparseAttnConfig) -> None:
    from sglang_ext.methods import METHODS

    for name, spec in config.methods.items():
        if name not in METHODS:
            todo = f"Remove it or correct its spelling{did_you_mean(name, METHODS)}"
            raise _fail(f"'methods' to name some of {sorted(METHODS)}", name, todo)
        try:
            METHODS[name].spec.from_dict(spec)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"--sparse-attn-config: methods.{name}: {error}") from error
    if config.method not in (config.methods or METHODS):
        raise _fail(
            f"'method' to be one of {sorted(config.methods or METHODS)}",
            config.method,
            f"Name one of them; with 'methods' given, add its spec there{did_you_mean(config.method, METHODS)}",
        )
    if config.sum_every not in (None, 1) and not METHODS[config.method].samples_sums:
        todo = f"Remove it; the method is {config.method!r}."
        raise _fail(f"sum_every 1 with a method other than {names_that_sample()}", config.sum_every, todo)


def _check_together(config: SparseAttnConfig) -> None:
    """What cannot be asked for beside something else."""
    suffix, offload, build, verify = config.suffix_dense_tokens, config.offload, config.build, config.exactness
    of_method, one = f"Remove it; the method is {config.method!r}.", "Remove one of them."
    if suffix is not None and config.method != "token_index":  # made of the keys of suffix tokens alone
        raise _fail("suffix_dense_tokens null with a method other than token_index", suffix, of_method)
    if suffix is not None and config.trace_folder is not None:
        todo = "Remove one of them: a trace has selections from prefixes only."
        raise _fail("suffix_dense_tokens null with a trace_folder", suffix, todo)
    if config.select_ahead and config.method != "two_level":
        todo = f"Remove it, or name two_level; the method is {config.method!r}."
        raise _fail("select_ahead false with a method other than two_level", True, todo)
    if config.select_ahead and config.steps_per_search > 1:  # each step needs its own candidates
        raise _fail("search_period 1 with select_ahead", config.search_period, one)
    if config.quality_slo is not None and not config.guard_every:  # nothing would measure what it bounds
        raise _fail("quality_slo null with guard_every 0", config.quality_slo, one)
    if config.cache_device is not None:
        _check_cache_device(config, config.cache_device)
    if verify is Exactness.VERIFY:  # what reads the steps of a request one by one knows nothing of drafts
        if offload is not None:
            raise _fail("exactness selected with offload", verify.value, one)
        if build is Build.CAPTURE:
            raise _fail("build off, shared or prefill with exactness verify", build.value, one)
        for name in ("trace_folder", "quality_slo"):
            if getattr(config, name) is not None:
                todo = f"Remove {name!r}: every draft is compared with the exact step, and wrong ones are dropped."
                raise _fail(f"{name} null with exactness verify", getattr(config, name), todo)
    if offload is not None:
        _check_offload(config, offload)
    if build is not Build.PREFILL and config.decode_path in (DecodePath.STOCK, DecodePath.CASCADE):
        for name in needing_indexes(config):
            todo = "Remove one of them: it does nothing where no step goes by an index."
            raise _fail(f"decode_path auto or sparse with {name}", config.decode_path.value, todo)


def needing_indexes(config: SparseAttnConfig) -> list[str]:
    """What takes memory, a process or another worker, and does nothing where no step goes by an index."""
    verifies = config.exactness is Exactness.VERIFY
    asked = {"offload": config.offload, "exactness verify": verifies, "cache_device": config.cache_device}
    return [name for name, given in asked.items() if given]


def _check_cache_device(config: SparseAttnConfig, device: str) -> None:
    if not re.fullmatch(r"cuda:\d+|cpu", device):
        raise _fail("cache_device as cuda:1, cuda:2, ...", device, "Name another GPU of this machine.")
    if not config.select_ahead:
        raise _fail("cache_device null without select_ahead", device, "Remove it, or set select_ahead to true.")
    for name, beside in (("offload", config.offload), ("exactness verify", config.exactness is Exactness.VERIFY)):
        if beside:
            raise _fail(f"cache_device null with {name}", device, "Remove one of them.")


def _check_offload(config: SparseAttnConfig, offload: Offload) -> None:
    """A positive size of each, and nothing beside it that reads a prefix's slots on the device."""
    for name, value in msgspec.structs.asdict(offload).items():
        if isinstance(value, int) and not PAGE_TOKENS <= value < _BEYOND and name != "select_prefill_tokens":
            most = "" if value < PAGE_TOKENS else ", below 2 to the 63rd"
            raise _fail(f"offload.{name} to be {PAGE_TOKENS} or more{most}", value, f"Change {name!r}.")
    tokens = offload.select_prefill_tokens
    if tokens is not None and not 1 <= tokens <= SELECTING_TOKENS:
        todo = "Change 'select_prefill_tokens'."
        raise _fail(f"offload.select_prefill_tokens from 1 to {SELECTING_TOKENS}, or null", tokens, todo)
    if offload.folder is None and offload.folder_bytes is not None:
        raise _fail("offload.folder with offload.folder_bytes", None, "Name a folder, or remove 'folder_bytes'.")
    if config.build is Build.CAPTURE:
        raise _fail("build off, shared or prefill with offload", config.build.value, "Remove one of them.")
    if config.build is Build.PREFILL:
        return  # which only writes files
    if config.trace_folder is not None:
        raise _fail("trace_folder null with offload", config.trace_folder, "Remove one of them.")


def _check_store(config: SparseAttnConfig) -> None:
    try:
        Access.of(config.store_mode, config.store_group)
    except prefix_index.InvalidPayload as error:
        raise ConfigError(f"--sparse-attn-config: store_mode and store_group: {error}") from error
    for address in remote_addresses(config):
        try:
            good = locate(address).kind in ("objects", "mooncake") or address.startswith("file://")
        except prefix_index.InvalidPayload:
            good = False
        if not good:
            raise _fail(
                "store_remote to be s3://BUCKET/PREFIX, gs://..., az://..., file:///SHARED/FOLDER, memory:///, "
                "mooncake://HOST:PORT or a list of these",
                address,
                "Correct it; this machine's folder or service is named by --sparse-attn-store.",
            )


def decode_config(text: str | None) -> Any:
    """The JSON value behind the flag: only here it is known which keys were given."""
    if not text:
        return {}
    source = text
    if text.startswith("@"):
        path = Path(text[1:])
        try:
            source = path.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise _fail("a readable file after '@'", str(path), f"{error}: check the path.") from error
    try:
        raw = json.loads(source, object_pairs_hook=distinct)
        json.dumps(raw, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        todo = f"{error.object[error.start]!a} is half a character: save or type it as UTF-8."
        raise _fail("text in Unicode", source[:200], todo) from error
    except (ValueError, RecursionError) as error:  # ValueError: a number of too many digits, too
        raise _fail("a JSON object", source[:200], f"JSON error: {error}.") from error
    return raw


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which each key counts. Raises ValueError where one stands there twice."""
    out: dict[str, Any] = {}
    for name, value in pairs:
        if name in out:
            raise ValueError(f"key {name!r} stands there twice, remove one")
        out[name] = value
    return out


def config_from_dict(raw: Mapping[str, Any]) -> SparseAttnConfig:
    """Check a decoded configuration, without a profile; a layer plan is checked with the model.

    Raises:
        ConfigError: an unknown key, a wrong type or value.
    """
    config = _converted(raw)
    check_ranges(config)
    _check_methods(config)
    _check_together(config)
    _check_store(config)
    return config


def _converted(raw: Any) -> SparseAttnConfig:
    """Known keys, each of its type."""
    if isinstance(raw, Mapping):
        _check_words(raw)
    try:
        return msgspec.convert(raw, SparseAttnConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--sparse-attn-config: {error}. Correct or remove the key named.") from error


def _check_words(raw: Mapping[str, Any]) -> None:
    """Known keys, and of keys that take one of some words, one of these."""
    hints = typing.get_type_hints(SparseAttnConfig)
    for key, value in raw.items():
        if key not in hints:
            raise ConfigError(
                f"--sparse-attn-config: unknown key {key!r}{did_you_mean(key, hints)} Correct or remove it. "
                f"Known keys: {', '.join(sorted(hints))}."
            )
        if isinstance(value, str) and isinstance(hints[key], type) and issubclass(hints[key], Enum):
            words = [str(choice.value) for choice in hints[key]]
            if value not in words:
                todo = f"Choose one of them{did_you_mean(value, words)}"
                raise _fail(f"{key} to be one of {', '.join(words)}", value, todo)


def make_settings(config_text: str | None, store: str | None, model_folder: str | None = None) -> Settings:
    """Settings from the flags' values; a store folder that was named must exist (a service is asked later).

    Where no store is named, the default one is empty, nothing builds, and no setting needs indexes, the decode path is
    `cascade`: no memory is kept for indexes that cannot come.

    Args:
        config_text, store: the flags' values, None where they were not given.
        model_folder: where a profile may be shipped with the model; None where it is not known.

    Raises:
        ConfigError: see `parse_profiled`; the profile cannot be used; or the store is no folder that exists and no
            ipc:// URL.
    """
    config, profile = parse_profiled(config_text, model_folder)
    if store is None:
        store = default_store()
        try:
            make_folder(store, config)
        except (OSError, prefix_index.IndexStoreError) as error:
            raise ConfigError(
                f"--sparse-attn-store: expected to be able to make the default folder {store!r}; got: {error}. "
                "Name a folder that exists."
            ) from error
        asked_for = config.decode_path is not DecodePath.AUTO or config.build is not Build.OFF or config.store_remote
        if not asked_for and not needing_indexes(config) and not holds_indexes(store):
            config = msgspec.structs.replace(config, decode_path=DecodePath.CASCADE)
    return Settings(config=config, store=_checked_store(store, config), profile=profile)


def parse_profiled(config_text: str | None, model_folder: str | None) -> tuple[SparseAttnConfig, Profile | None]:
    """The configuration, completed by the profile that it names or that lies in the model's folder, and that profile.

    Its `profile` then says which one it was, so that parsing it again gives the same.

    Args:
        config_text: a JSON object, `@file` that holds one, or None or empty for the defaults.
        model_folder: see `make_settings`.

    Raises:
        ConfigError: see `config_from_dict`; unreadable file, no JSON; or the profile cannot be used.
    """
    raw = decode_config(config_text)
    from sglang_ext.methods.registry import method_specs

    given = _converted(raw)
    calibrating = given.build is Build.CAPTURE  # what is measured must not depend on what was measured before
    path = None if calibrating or given.profile == "" else find_profile(given.profile, model_folder)
    try:
        profile = None if path is None else read_profile(path)
        config = config_from_dict(raw if profile is None else with_profile(raw, profile))
        used_by_builders(method_specs(config).values(), profile)
    except ProfileError as error:
        raise ConfigError(f"--sparse-attn-config: profile: {error}") from error
    return msgspec.structs.replace(config, profile=path or NO_PROFILE), profile


def _checked_store(store: str, config: SparseAttnConfig) -> str:
    """The folder as an absolute path, or the service's URL."""
    try:
        kind, value, _ = locate(store)
    except prefix_index.InvalidPayload:
        kind, value = None, store
    if kind == "service":
        own = SparseAttnConfig()
        keys = ("store_max_bytes", "store_min_free_bytes", "store_mode", "store_group", "store_remote")
        for key in keys:
            if getattr(config, key) != getattr(own, key):
                raise _fail(
                    f"no {key!r} together with a store service",
                    getattr(config, key),
                    "Remove it: the service has its own limits and tiers (sglang-ext store serve).",
                )
        return value
    if kind != "file":
        raise ConfigError(
            f"--sparse-attn-store: expected a folder or a service's ipc://SOCKET; got {store!r}. "
            "A remote store goes into 'store_remote' of --sparse-attn-config, below a folder."
        )
    if not os.path.isdir(value):
        raise ConfigError(
            f"--sparse-attn-store: expected an existing folder; got {store!r}. "
            "Create it (mkdir -p) or correct the path."
        )
    return os.path.abspath(value)


def enabled_by_env(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for sparse attention."""
    return environ.get(ENV_ENABLE, "").strip().lower() in ("1", "true", "yes", "on")


def settings_from_env(environ: Mapping[str, str], model_folder: str | None = None) -> Settings | None:
    """Settings of `sglang.Engine(...)` users, who have no command line; None when not enabled."""
    if not enabled_by_env(environ):
        return None
    return make_settings(environ.get(ENV_CONFIG), environ.get(ENV_STORE), model_folder)
