"""A model's profile: what calibration found out, as one JSON file that is checked against the model when loaded.

The file is one JSON object with the fields of `Profile`; unknown keys are refused. Lists over layers have one entry
per layer of the whole model, lists over KV heads one per KV head before tensor parallelism.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import secrets
from pathlib import Path
from typing import Any

import msgspec

from sglang_ext.methods.ab_sparse import BLOCK_SIZES
from sglang_ext.methods.base import IndexSpec
from sglang_ext.methods.layer_plan import LayerPlan
from sglang_ext.methods.registry import parse_spec

PROFILE_VERSION = 1


class ProfileError(ValueError):
    """A profile cannot be used; the message says what was expected, what came and what to do."""


class ProfiledModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model that was calibrated.

    Attributes:
        num_layers, num_kv_heads: of the whole model.
        head_dim: channels of a key.
        config_digest: digest of the model's configuration, as in the index store's fingerprint.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    config_digest: str


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
        """The parsed spec.

        Raises:
            ValueError: an unknown method or parameter, or a value out of range.
            TypeError: a value of another type.
        """
        named = self.spec.get("method", self.method)
        if named != self.method:
            raise ValueError(
                f"expected a spec of the recommended method {self.method!r}, got one of {named!r}; name one method"
            )
        return parse_spec({**self.spec, "method": self.method})


class CalibrationData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the profile was measured on.

    Attributes:
        prompts: number of prompts.
        tokens: tokens of all prompts.
        seed: of every random choice.
        versions: package name -> version of what took part.
        description: where the prompts come from, for people.
    """

    prompts: int
    tokens: int
    seed: int
    versions: dict[str, str] = {}
    description: str = ""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A calibration result. Plain values only; every instance is valid, see `__post_init__`.

    Attributes:
        version: of this format.
        model: the model that was calibrated.
        block_sizes: [num_layers][num_kv_heads] tokens per block, of `BLOCK_SIZES`.
        layer_plan: as `LayerPlan.to_dict` writes it.
        channels: [num_layers][num_kv_heads][num_channels] ascending channel numbers; as many for every head. Empty:
            none were measured.
        dense_heads: [num_layers] KV heads, ascending, whose attention is too flat to select from.
        recommended: what to serve with.
        calibration: what it was measured on.

    Raises:
        ProfileError: a value that breaks a rule; the message names it.
    """

    version: int = PROFILE_VERSION
    model: ProfiledModel
    block_sizes: tuple[tuple[int, ...], ...]
    layer_plan: dict[str, Any]
    channels: tuple[tuple[tuple[int, ...], ...], ...] = ()
    dense_heads: tuple[tuple[int, ...], ...]
    recommended: Recommendation
    calibration: CalibrationData

    def __post_init__(self) -> None:
        if self.version != PROFILE_VERSION:
            raise _version_error(self.version)
        _check_sizes(self)
        _check_block_sizes(self)
        _check_channels(self)
        _check_dense_heads(self)
        try:
            self.plan()
            self.recommended.index_spec()
        except (TypeError, ValueError) as error:
            raise ProfileError(f"profile: {error}") from error

    def plan(self) -> LayerPlan:
        """The parsed layer plan."""
        return LayerPlan.from_dict(
            self.layer_plan, num_layers=self.model.num_layers, num_kv_heads=self.model.num_kv_heads
        )

    def check_model(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, config_digest: str | None = None
    ) -> None:
        """Raise unless the profile belongs to this model.

        Args:
            num_layers, num_kv_heads, head_dim: of the whole model, before tensor parallelism.
            config_digest: of the model's configuration; None skips that comparison.

        Raises:
            ProfileError: naming the first field that differs.
        """
        own = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        if config_digest is not None:
            own["config_digest"] = config_digest  # type: ignore[assignment]
        for name, value in own.items():
            profiled = getattr(self.model, name)
            if profiled != value:
                raise ProfileError(
                    f"profile: expected {name}={value!r} (the model's), got {profiled!r}; it is of another model: "
                    "calibrate this one, or name its profile"
                )

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
        path = Path(path)
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            with partial.open("xb") as file:
                file.write(self.encode())
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def load_profile(path: str | Path) -> Profile:
    """Read a profile file.

    Raises:
        OSError: the file cannot be read.
        ProfileError: it is no profile, is of another version, or breaks a rule.
    """
    return decode_profile(Path(path).read_bytes())


def decode_profile(text: bytes) -> Profile:
    """Parse the JSON text of a profile.

    Raises:
        ProfileError: see `load_profile`.
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
    except ProfileError:
        raise
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ProfileError):
            raise error.__cause__ from None
        raise ProfileError(
            f"profile: {error}; expected the keys {', '.join(Profile.__struct_fields__)}. Correct the file, or "
            "calibrate again"
        ) from error


def _version_error(version: int) -> ProfileError:
    if version > PROFILE_VERSION:
        todo = "it was made by a newer sglang-ext: update this one, or calibrate again"
    else:
        todo = "calibrate again"
    return ProfileError(f"profile: expected version {PROFILE_VERSION}, got {version}; {todo}")


def _check_sizes(profile: Profile) -> None:
    model, data = profile.model, profile.calibration
    for name, value, least in (
        ("model.num_layers", model.num_layers, 1),
        ("model.num_kv_heads", model.num_kv_heads, 1),
        ("model.head_dim", model.head_dim, 1),
        ("calibration.prompts", data.prompts, 1),
        ("calibration.tokens", data.tokens, 1),
    ):
        if value < least:
            raise ProfileError(f"profile: expected {name} >= {least}, got {value}; calibrate again")
    ratio = profile.recommended.keep_ratio
    if not 0.0 < ratio <= 1.0:
        raise ProfileError(f"profile: expected keep_ratio above 0 and at most 1, got {ratio}; correct it")


def _check_count(name: str, came: int, expected: int, what: str) -> None:
    if came != expected:
        raise ProfileError(
            f"profile: expected {name} of {expected} {what}, got {came}; the file is damaged or of another model, "
            "calibrate again"
        )


def _check_block_sizes(profile: Profile) -> None:
    _check_count("block_sizes", len(profile.block_sizes), profile.model.num_layers, "layers")
    for layer, row in enumerate(profile.block_sizes):
        _check_count(f"block_sizes[{layer}]", len(row), profile.model.num_kv_heads, "KV heads")
        for size in row:
            if size not in BLOCK_SIZES:
                raise ProfileError(
                    f"profile: expected block_sizes[{layer}] of {', '.join(map(str, BLOCK_SIZES))} tokens, got "
                    f"{size}; choose one of them"
                )


def _check_channels(profile: Profile) -> None:
    if not profile.channels:
        return
    _check_count("channels", len(profile.channels), profile.model.num_layers, "layers")
    num_channels = len(profile.channels[0][0]) if profile.channels[0] else 0
    for layer, heads in enumerate(profile.channels):
        _check_count(f"channels[{layer}]", len(heads), profile.model.num_kv_heads, "KV heads")
        for head, chosen in enumerate(heads):
            name = f"channels[{layer}][{head}]"
            _check_count(name, len(chosen), num_channels, "channels (as many as the first head has)")
            _check_ascending(name, chosen, profile.model.head_dim, "head_dim")
    if num_channels == 0:
        raise ProfileError("profile: expected at least one channel per head, got none; leave channels empty instead")


def _check_dense_heads(profile: Profile) -> None:
    _check_count("dense_heads", len(profile.dense_heads), profile.model.num_layers, "layers")
    for layer, heads in enumerate(profile.dense_heads):
        _check_ascending(f"dense_heads[{layer}]", heads, profile.model.num_kv_heads, "num_kv_heads")


def _check_ascending(name: str, values: tuple[int, ...], end: int, what: str) -> None:
    inside = all(0 <= value < end for value in values)
    if not inside or any(left >= right for left, right in itertools.pairwise(values)):
        raise ProfileError(
            f"profile: expected {name} ascending in 0..{end - 1} (below {what}), got {list(values)}; the file is "
            "damaged, calibrate again"
        )
