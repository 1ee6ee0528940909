"""Which SGLang is installed, and whether this plugin supports it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

#: Oldest first; docs/releases.md tells what runs against each. A release that is not listed is refused by name.
SUPPORTED = tuple(f"0.5.{patch}" for patch in range(16, 24))


def installed(name: str = "sglang") -> str | None:
    """A package's version as its distribution says it; None when it is not installed from a distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def older_than(release: str) -> bool:
    """Whether the installed SGLang is a supported release before this supported one."""
    return installed() in SUPPORTED[: SUPPORTED.index(release)]


def unsupported_message(found: str | None) -> str | None:
    """None when `found` is supported, else what to tell the user."""
    if found in SUPPORTED:
        return None
    return (
        f"sglang-ext: expected SGLang {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]}; found "
        f"{found or 'no SGLang distribution'}. Install a supported release (pip install sglang=={SUPPORTED[-1]}), "
        "or start without --sparse-attn: the server then runs as if the plugin were absent."
    )
