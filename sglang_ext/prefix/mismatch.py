"""Why an index serves no request of a server: in few words for counters, and field by field for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from prefix_index import IndexIdentity, ModelFingerprint

Specs = Mapping[str, Any]
"""Parameters by method, as an index's file has them: `IndexSpec.to_dict` of each."""


def misfit(identity: IndexIdentity, model: ModelFingerprint, profile_digest: str) -> str | None:
    """Why an index can serve no request of a server of this model and profile, in few words; None where it can."""
    if msgspec.structs.replace(identity.model, kv_dtype=model.kv_dtype) != model:
        return "of another model"
    if identity.model != model:
        return "of another KV dtype"
    return "built with other settings" if identity.profile_digest != profile_digest else None


def differences(
    identity: IndexIdentity, built: Specs | None, model: ModelFingerprint, profile_digest: str, specs: Specs
) -> list[str]:
    """The fields that keep an index from serving, each as `name: expected A, found B`; none where it could.

    Args:
        identity, built: of the index; None where what it was built by is not known.
        model, profile_digest, specs: of the server.
    """
    found = []
    for name in ModelFingerprint.__struct_fields__:
        own, other = getattr(model, name), getattr(identity.model, name)
        if own != other:
            found.append(f"model.{name}: expected {own}, found {other}")
    if identity.profile_digest != profile_digest:
        named = list(_of_specs(specs, built)) if built is not None else []
        alike = " (methods are alike: version of the builders, query_samples, seed, or the profile's part differ)"
        whole = f"profile_digest: expected {profile_digest}, found {identity.profile_digest}"
        found += named or [whole + alike * (built is not None)]
    return found


def _of_specs(specs: Specs, built: Specs) -> Iterator[str]:
    if specs.keys() != built.keys():
        yield f"methods: expected {', '.join(sorted(specs))}, found {', '.join(sorted(built))}"
    for method in sorted(specs.keys() & built.keys()):
        yield from _of_values(f"methods.{method}", specs[method], built[method])


def _of_values(name: str, own: Any, other: Any) -> Iterator[str]:
    """Of two values, or of what two objects hold."""
    if isinstance(own, Mapping) and isinstance(other, Mapping):
        for key in sorted(own.keys() | other.keys()):
            yield from _of_values(f"{name}.{key}", own.get(key), other.get(key))
    elif own != other:
        yield f"{name}: expected {own}, found {other}"
