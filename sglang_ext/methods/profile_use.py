"""What index builders take from a model's profile, and which part of it makes two builds differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from sglang_ext.methods.ab_sparse import ABSparseSpec
from sglang_ext.methods.base import NO_PROFILE, IndexSpec, LayerProfile
from sglang_ext.methods.profile import Profile, ProfileError
from sglang_ext.methods.token_index import TokenIndexSpec


def spec_parts(spec: IndexSpec) -> Iterator[IndexSpec]:
    """A spec and, for methods made of others, the specs inside it, at any depth."""
    yield spec
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, IndexSpec):
            yield from spec_parts(value)


def layer_profile(profile: Profile | None, layer: int, heads: range | None = None) -> LayerProfile:
    """What the builders of one layer may use.

    Args:
        profile: of the model; None where there is none.
        layer: layer number.
        heads: KV heads of this tensor-parallel rank (`layer_plan.heads_of_rank`); None for all.
    """
    if profile is None:
        return NO_PROFILE
    own = slice(None) if heads is None else slice(heads.start, heads.stop)
    channels = profile.channels[layer][own] if profile.channels else ()
    return LayerProfile(profile.block_sizes[layer][own], channels)


def stacked_profile(profile: Profile | None, layers: Iterable[int], heads: range | None = None) -> LayerProfile:
    """What the builders of several layers at once may use: as if these were one layer with all their KV heads, or with
    the given ones of each.
    """
    parts = [layer_profile(profile, layer, heads) for layer in layers]
    return LayerProfile(
        tuple(size for part in parts for size in part.block_sizes),
        tuple(chosen for part in parts for chosen in part.channels),
    )


def used_by_builders(specs: Iterable[IndexSpec], profile: Profile | None) -> dict[str, Any]:
    """The part of a profile that builds by these specs depend on; empty where they depend on none of it.

    Returns:
        `block_sizes` where a part has the profile's sizes, `channels` where a part keeps some channels only and the
        profile says which. Plain values.

    Raises:
        ProfileError: a part has the profile's sizes and there is no profile, or it keeps another number of channels
            than the profile has.
    """
    used: dict[str, Any] = {}
    for part in (part for spec in specs for part in spec_parts(spec)):
        if isinstance(part, ABSparseSpec) and part.sizes == "profile":
            if profile is None:
                raise ProfileError(
                    "expected a profile for ab_sparse.sizes=profile, got none; name one ('profile'), make one "
                    "(sglang-ext calibrate), or set sizes to uniform"
                )
            used["block_sizes"] = [list(row) for row in profile.block_sizes]
        if isinstance(part, TokenIndexSpec) and part.num_channels and profile is not None and profile.channels:
            calibrated = len(profile.channels[0][0])
            if part.num_channels != calibrated:
                raise ProfileError(
                    f"expected token_index.num_channels of {calibrated}, as many as the profile has, got "
                    f"{part.num_channels}; set it to that, calibrate with this number, or use no profile"
                )
            used["channels"] = [[list(head) for head in heads] for heads in profile.channels]
    return used
