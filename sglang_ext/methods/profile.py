"""A model's profile: what calibration found out, as one JSON file that is checked against the model when loaded.

The file is one JSON object with the fields of `Profile`; unknown keys are refused. Lists over layers have one entry
per layer of the whole model, lists over KV heads one per KV head before tensor parallelism. A profile that was imported
has the model and a layer plan alone: nothing was measured.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sglang_ext.files import write_whole
from sglang_ext.methods.ab_sparse import BLOCK_SIZES
from sglang_ext.methods.base import NO_PROFILE, IndexSpec, LayerProfile
from sglang_ext.methods.layer_plan import LayerPlan
from sglang_ext.methods.registry import parse_spec

T = TypeVar("T")
PROFILE_VERSION = 1


class ProfileError(ValueError):
    """A profile cannot be used; the message says what was expected, what came and what to do."""


class ProfiledModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model that the profile is of.

    Attributes:
        num_layers, num_kv_heads: of the whole model.
        head_dim: channels of a key.
        config_digest: digest of the model's configuration, as in the index store's fingerprint.
        rope_digest: of its RoPE settings, likewise; None: an earlier release did not write them down.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    config_digest: str
    rope_digest: str | None = None


class Recommendation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to serve the model with.

    Attributes:
        method: a name of `sglang_ext.methods.METHODS`.
        spec: parameters of that method, as `IndexSpec.to_dict` writes them or without the method's name.
        keep_ratio: budget as a fraction of the prefix, above 0 and at most 1.
    """

    method: str
    spec: dict[str, Any]
    keep_ratio: float

    def index_spec(self) -> IndexSpec:
        """The parsed spec. Raises what `parse_spec` does, and ValueError where it is another method's."""
        named = self.spec.get("method", self.method)
        if named != self.method:
            raise ValueError(
                f"expected a spec of the recommended method {self.method!r}, got one of {named!r}; name one method"
            )
        return parse_spec({**self.spec, "method": self.method})


class CalibrationData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the profile was measured on.

    Attributes:
        prompts: number of prompts; 0: nothing was measured, the layer plan was imported.
        tokens: tokens of all prompts.
        seed: of every random choice.
        versions: package name -> version of what took part.
        description: where the prompts, or an imported plan, come from, for people.
    """

    prompts: int = 0
    tokens: int = 0
    seed: int = 0
    versions: dict[str, str] = {}
    description: str = ""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A calibration result, or an imported layer plan. Plain values only; every instance is valid.

    What only a calibration finds out (block sizes, channels, dense heads, recommendation) is there where prompts were
    measured, and empty where a plan was imported.

    Attributes:
        version: of this format.
        model: the model that the profile is of.
        block_sizes: [num_layers][num_kv_heads] tokens per block, of `BLOCK_SIZES`.
        layer_plan: as `LayerPlan.to_dict` writes it.
        channels: [num_layers][num_kv_heads][num_channels] ascending channel numbers; as many for every head. Empty:
            none were measured.
        dense_heads: [num_layers] KV heads, ascending, whose attention is too flat to select from.
        recommended: what to serve with; None: the server's own defaults.
        calibration: what it was measured on.

    Raises:
        ProfileError: a value that breaks a rule; the message names it.
    """

    version: int = PROFILE_VERSION
    model: ProfiledModel
    block_sizes: tuple[tuple[int, ...], ...] = ()
    layer_plan: dict[str, Any]
    channels: tuple[tuple[tuple[int, ...], ...], ...] = ()
    dense_heads: tuple[tuple[int, ...], ...] = ()
    recommended: Recommendation | None = None
    calibration: CalibrationData

    def __post_init__(self) -> None:
        if self.version != PROFILE_VERSION:
            raise _version_error(self.version)
        _check(self)
        try:
            self.plan()
            if self.recommended is not None:
                self.recommended.index_spec()
        except (TypeError, ValueError) as error:
            raise ProfileError(f"profile: {error}") from error

    def plan(self) -> LayerPlan:
        """The parsed layer plan."""
        return LayerPlan.from_dict(
            self.layer_plan, num_layers=self.model.num_layers, num_kv_heads=self.model.num_kv_heads
        )

    def check_model(self, model: ProfiledModel) -> None:
        """Raise ProfileError, naming the first field that differs, unless the profile belongs to this whole model.

        RoPE settings that the profile does not know are not compared.
        """
        for name in ProfiledModel.__struct_fields__:
            value, profiled = getattr(model, name), getattr(self.model, name)
            if profiled is None or profiled == value:
                continue
            why = "it is of another model: calibrate this one, or name its profile"
            if name == "rope_digest":
                why = (
                    "it was calibrated with other RoPE settings (rope_scaling, rope_theta, max_position_embeddings, "
                    "...): calibrate with those of the server (its --json-model-override-args), or serve with those "
                    "of the calibration"
                )
            raise ProfileError(f"profile: expected {name}={value!r} (the model's), got {profiled!r}; {why}")

    def encode(self) -> bytes:
        """The JSON text, keys in the order of the fields, ended by a newline."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def digest(self) -> str:
        """SHA-256 (64 hex digits) of the content with sorted keys: equal profiles have equal digests."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the file: all of it or nothing, also when the machine stops meanwhile.

        Raises:
            OSError: the folder is missing or cannot be written to.
        """
        write_whole(path, self.encode())


def layer_profile(profile: Profile | None, layer: int, heads: range | None = None) -> LayerProfile:
    """What the builders of one layer may use, for the KV heads of a rank (`layer_plan.heads_of_rank`; None: all)."""
    if profile is None:
        return NO_PROFILE
    own = slice(None) if heads is None else slice(heads.start, heads.stop)
    sizes = profile.block_sizes[layer][own] if profile.block_sizes else ()
    channels = profile.channels[layer][own] if profile.channels else ()
    return LayerProfile(sizes, channels)


def stacked_profile(profile: Profile | None, layers: Iterable[int], heads: range | None = None) -> LayerProfile:
    """The same of several layers that are built at once: as if they were one layer with the KV heads of each."""
    parts = [layer_profile(profile, layer, heads) for layer in layers]
    return LayerProfile(
        tuple(size for part in parts for size in part.block_sizes),
        tuple(chosen for part in parts for chosen in part.channels),
    )


def used_by_builders(specs: Iterable[IndexSpec], profile: Profile | None) -> dict[str, Any]:
    """The part of a profile that builds by these specs depend on, see `IndexSpec.profile_part`.

    Raises:
        ProfileError: a spec needs a profile and there is none, or it does not fit.
    """
    layers = [] if profile is None else [layer_profile(profile, layer) for layer in range(profile.model.num_layers)]
    used: dict[str, Any] = {}
    try:
        for spec in specs:
            used |= spec.profile_part(layers)
    except ValueError as error:
        raise ProfileError(str(error)) from error
    return used


def load_profile(path: str | Path) -> Profile:
    """Read a profile file. Raises OSError, or ProfileError as `decode_profile` does."""
    return decode_profile(Path(path).read_bytes())


def decode_profile(text: bytes) -> Profile:
    """Parse the JSON text of a profile.

    Raises:
        ProfileError: it is no profile, is of another version, or breaks a rule.
    """
    try:
        raw = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProfileError(
            f"profile: expected a JSON object, got something else ({error}); the file is damaged, calibrate again"
        ) from error
    if not isinstance(raw, dict):
        raise ProfileError(
            f"profile: expected a JSON object, got {type(raw).__name__}; name a file that calibrate has written"
        )
    # Before the fields: a newer version may have others, and "unknown key" would mislead.
    version = raw.get("version")
    if type(version) is int and version != PROFILE_VERSION:
        raise _version_error(version)
    if version is None:
        raise ProfileError("profile: expected a version, got none; name a file that calibrate has written")
    try:
        return msgspec.convert(raw, Profile)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ProfileError):
            raise error.__cause__ from None
        raise ProfileError(
            f"profile: {error}; expected the keys {', '.join(Profile.__struct_fields__)}. Correct the file, or "
            "calibrate again"
        ) from error


def _version_error(version: int) -> ProfileError:
    newer = "it was made by a newer sglang-ext: update this one, or " if version > PROFILE_VERSION else ""
    return ProfileError(f"profile: expected version {PROFILE_VERSION}, got {version}; {newer}calibrate again")


def _check(profile: Profile) -> None:
    model, data = profile.model, profile.calibration
    counts = {f"model.{name}": getattr(model, name) for name in ("num_layers", "num_kv_heads", "head_dim")}
    measured = data.prompts != 0 or data.tokens != 0
    if measured:
        counts |= {"calibration.prompts": data.prompts, "calibration.tokens": data.tokens}
    for name, value in counts.items():
        _require(value >= 1, f"{name} >= 1", value, "calibrate again")
    if measured:
        _check_measured(profile)
        return
    for name in ("block_sizes", "channels", "dense_heads", "recommended"):
        expected, found = f"no {name} where nothing was measured (calibration.prompts is 0)", getattr(profile, name)
        _require(not found, expected, found, f"remove {name}, or calibrate")


def _require(holds: bool, expected: str, got: object, todo: str) -> None:
    if not holds:
        raise ProfileError(f"profile: expected {expected}, got {got}; {todo}")


def _check_measured(profile: Profile) -> None:
    """The parts that a calibration has."""
    model = profile.model
    if profile.recommended is None:
        raise ProfileError("profile: expected a recommendation from measured prompts, got none; calibrate again")
    ratio = profile.recommended.keep_ratio
    _require(0.0 < ratio <= 1.0, "keep_ratio above 0 and at most 1", ratio, "correct it")
    choices = ", ".join(map(str, BLOCK_SIZES))
    for layer, sizes in _layers("block_sizes", profile.block_sizes, model):
        _check_count(f"block_sizes[{layer}]", sizes, model.num_kv_heads, "KV heads")
        for size in sizes:
            _require(size in BLOCK_SIZES, f"block_sizes[{layer}] of {choices} tokens", size, "choose one of them")
    for layer, heads in _layers("channels", profile.channels, model) if profile.channels else ():
        _check_count(f"channels[{layer}]", heads, model.num_kv_heads, "KV heads")
        for head, chosen in enumerate(heads):
            name, first = f"channels[{layer}][{head}]", len(profile.channels[0][0])
            _check_count(name, chosen, first, "channels (as many as the first head has)")
            _check_ascending(name, chosen, model.head_dim, "head_dim")
            _require(first > 0, "at least one channel per head", "none", "leave channels empty instead")
    for layer, dense in _layers("dense_heads", profile.dense_heads, model):
        _check_ascending(f"dense_heads[{layer}]", dense, model.num_kv_heads, "num_kv_heads")


def _layers(name: str, values: Sequence[T], model: ProfiledModel) -> Iterable[tuple[int, T]]:
    """Number and value of each layer."""
    _check_count(name, values, model.num_layers, "layers")
    return enumerate(values)


def _check_count(name: str, values: Sequence[object], expected: int, what: str) -> None:
    todo = "the file is damaged or of another model, calibrate again"
    _require(len(values) == expected, f"{name} of {expected} {what}", len(values), todo)


def _check_ascending(name: str, values: Sequence[int], end: int, what: str) -> None:
    holds = all(left < right for left, right in itertools.pairwise([-1, *values, end]))
    expected = f"{name} ascending in 0..{end - 1} (below {what})"
    _require(holds, expected, list(values), "the file is damaged, calibrate again")
