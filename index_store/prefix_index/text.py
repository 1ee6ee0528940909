"""Text from outside, made printable at the border where it leaves: a log, a reply, a terminal, a file.

File names, request ids and what other programs say may hold anything: bytes that are no UTF-8, which a codec refuses to
write; line ends and escape sequences, which forge lines of a log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def printable(text: str) -> str:
    r"""The same on one line, with every character that does not print, a space excepted, as Python would write it.

    ``\n``, ``\x1b``, ``\u2028``; lone surrogates as ``\ud800``, those that stand for a byte of a file name as ``\xe9``.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(char: str) -> str:
    if char.isprintable():
        return char
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # os.fsdecode
        return f"\\x{code - 0xDC00:02x}"
    return char.encode("unicode_escape").decode()


def printable_values(value: Any) -> Any:
    """Plain values with every text in them printable; whatever else is there, keys too, as it is."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable_values(key): printable_values(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [printable_values(part) for part in value]
    return value
