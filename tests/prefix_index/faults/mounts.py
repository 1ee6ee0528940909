"""Small real file systems for one campaign: mounted in a mount namespace of its own, gone with its process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

CLONE_NEWNS = 0x0002_0000


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=300)


def can_mount() -> bool:
    """Enters a mount namespace of this process's own, for ever. False without the right to."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.unshare(CLONE_NEWNS) != 0:
        return False
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        run("mount", "--make-rprivate", "/")
        return True
    return False


@contextlib.contextmanager
def tmpfs(at: Path, nbytes: int) -> Iterator[Path]:
    at.mkdir()
    run("mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(at))
    with unmounted(at):
        yield at


@contextlib.contextmanager
def ext4(at: Path, nbytes: int, *options: str) -> Iterator[Path]:
    """An ext4 in a file on a loop device; ``options`` are of mkfs. Raises OSError or SubprocessError where there
    is no mkfs or no loop device.
    """
    at.mkdir()
    image = at.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(nbytes)
    run(shutil.which("mkfs.ext4") or "mkfs.ext4", "-q", "-m", "0", *options, str(image))
    run("mount", "-o", "loop", str(image), str(at))
    with unmounted(at):
        yield at


@contextlib.contextmanager
def unmounted(at: Path) -> Iterator[None]:
    try:
        yield
    finally:
        run("umount", "--lazy", str(at))


def remount(at: Path, option: str) -> None:
    """``ro`` or ``rw``."""
    run("mount", "-o", f"remount,{option}", str(at))
