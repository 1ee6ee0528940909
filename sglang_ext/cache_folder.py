"""Where this package keeps what it may make again: `$XDG_CACHE_HOME/sglang-ext`, or `~/.cache/sglang-ext`.

Imports nothing heavy: the commands start with it.
"""

from __future__ import annotations

import os


def cache_folder() -> str:
    """The folder, which need not exist yet: `store` in it is the default store."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "sglang-ext")
