"""Which SGLang is installed, and whether this plugin supports it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

#: The releases that the whole suite runs against. A patch release that is not listed is refused by name.
SUPPORTED = ("0.5.16", "0.5.23")


def installed() -> str | None:
    """SGLang's version as its distribution says it; None when it is not installed from a distribution."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def unsupported_message(found: str | None) -> str | None:
    """None when `found` is supported, else what to tell the user."""
    if found in SUPPORTED:
        return None
    return (
        f"sglang-ext: expected SGLang {' or '.join(SUPPORTED)}; found {found or 'no SGLang distribution'}. "
        f"Install a supported release (pip install sglang=={SUPPORTED[-1]}), "
        "or start without --sparse-attn: the server then runs as if the plugin were absent."
    )
