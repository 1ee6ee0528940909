"""The patches that put faults of the past back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from mutants import reverted  # noqa: E402

PATCHES = sorted((ROOT / "scripts" / "reverts").glob("*.patch"))


def test_each_of_twenty_patches_says_what_was_wrong_and_can_be_applied() -> None:
    assert len(PATCHES) == 20
    for path in PATCHES:
        assert len(reverted(path).title) > 20, path.name
    run = [
        subprocess.run(["git", "apply", "--check", path], cwd=ROOT, capture_output=True, text=True) for path in PATCHES
    ]
    assert not [one.stderr for one in run if one.returncode]
