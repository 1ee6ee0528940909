"""A model's profile at the edge: where it lies, what of it a configuration takes over, and whether it is this model's.

Precedence: keys that the user gave, then what the profile recommends, then the defaults.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from prefix_index import ModelFingerprint
from sglang_ext.fingerprint import resolve_folder
from sglang_ext.methods.layer_plan import LayerPlan
from sglang_ext.methods.profile import Profile, ProfiledModel, ProfileError, load_profile

logger = logging.getLogger(__name__)

#: A profile that is shipped with its model: this file in the model's folder.
PROFILE_FILE = "sparse_attn_profile.json"

#: Value of the key `profile` that turns profiles off.
NO_PROFILE = "none"

_TURN_OFF = f"""; or set 'profile' to "{NO_PROFILE}\""""


def local_folder(model_path: str | None, revision: str | None = None, cache_dir: str | None = None) -> str | None:
    """The folder of a model, or None where it is not on this machine (yet)."""
    if not model_path:
        return None
    with suppress(FileNotFoundError):
        return resolve_folder(model_path, revision, cache_dir)
    return None


def find_profile(named: str | None, model_folder: str | None) -> str | None:
    """Path of the profile to use; None for none.

    Args:
        named: the configuration's `profile`.
        model_folder: the model's folder, where it is known.
    """
    if named == NO_PROFILE:
        return None
    if named is not None:
        return os.path.abspath(named)
    shipped = os.path.join(os.path.abspath(model_folder), PROFILE_FILE) if model_folder else None
    return shipped if shipped and os.path.isfile(shipped) else None


def read_profile(path: str) -> Profile:
    """Load a profile.

    Raises:
        ProfileError: it cannot be read, is damaged or of another version; names the path and what to do.
    """
    try:
        return load_profile(path)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}{_TURN_OFF}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL, so no path
        raise ProfileError(f"expected a readable profile, got: {error}; correct the path{_TURN_OFF}") from error


def with_profile(raw: Mapping[str, Any], profile: Profile) -> dict[str, Any]:
    """A decoded configuration, completed by what the profile recommends. Keys that are there stay as they are.

    `method` and `methods` go together: the recommended spec is taken where the method in force is the recommended
    one, and the recommended method where the user's `methods` have it.

    Args:
        raw: the keys that the user gave.
        profile: of the model.
    """
    merged = dict(raw)
    recommended = profile.recommended
    merged.setdefault("layer_plan", profile.plan().to_dict()["layers"])
    if recommended is None:  # an imported plan
        return merged
    if "method" not in raw and recommended.method in (raw.get("methods") or {recommended.method: {}}):
        merged["method"] = recommended.method
    if "methods" not in raw and merged.get("method") == recommended.method:
        merged["methods"] = {recommended.method: recommended.index_spec().to_dict()}
    if raw.get("top_k") is None:
        merged.setdefault("keep_ratio", recommended.keep_ratio)
    return merged


def check_profile(profile: Profile, model: ModelFingerprint) -> None:
    """Raise ProfileError, which says what differs and what to do, unless the profile is of this model.

    One that does not know its RoPE settings is a warning in the log.
    """
    try:
        profile.check_model(msgspec.convert(model, ProfiledModel, from_attributes=True))
    except ProfileError as error:
        raise ProfileError(f"--sparse-attn: {error}{_TURN_OFF}") from error
    if profile.model.rope_digest is None:
        logger.warning(
            "sparse attention: expected the profile to say which RoPE settings it is of, got none (an earlier release "
            "wrote it); they are taken for this model's. Run its calibration or import again"
        )


def layer_plan_of_rank(
    layers: Sequence[Any], profile: Profile | None, model: ModelFingerprint, rank: int = 0, size: int = 1
) -> LayerPlan:
    """Layer plan of one tensor-parallel rank, KV heads numbered within it.

    The plan is cut for all ranks, so that one that cannot be cut for some of them fails on each. A profile may name
    heads whose attention is too flat to select from. They belong to the plan that they were calibrated with: under it
    their layers attend everything.

    Args:
        layers: the configuration's `layer_plan`; empty for the default.
        profile: checked against the model; None for none.
        model: fingerprint of the whole model.
        rank, size: of the tensor-parallel group.

    Raises:
        ValueError: the plan does not fit the model, or cannot be cut for some rank.
    """
    data = {"layers": list(layers)} if layers else {}
    plan = LayerPlan.from_dict(data, num_layers=model.num_layers, num_kv_heads=model.num_kv_heads)
    if profile is not None and plan == profile.plan():
        plan = plan.with_dense([layer for layer, heads in enumerate(profile.dense_heads) if heads])
    return [plan.for_rank(number, size) for number in range(size)][rank]
