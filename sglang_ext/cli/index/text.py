"""How sizes, times and tables look in a terminal, and how JSON leaves."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from prefix_index import printable, printable_values

#: Hex digits of an index that people are shown; what is unique suffices as an argument.
SHORT = 12
#: Hex digits of a model or a profile in a table.
TAG = 8


def width() -> int:
    """Columns to fill: COLUMNS or the terminal's, within reason."""
    return min(max(shutil.get_terminal_size((80, 24)).columns, 40), 160)


def size(nbytes: float) -> str:
    """`512 B`, `12.0 KiB`, `3.4 GiB`: at most 10 characters."""
    if nbytes < 1024:
        return f"{int(nbytes)} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        nbytes /= 1024
        if nbytes < 1023.95 or unit == "PiB":
            break
    return f"{nbytes:.1f} {unit}"


def count(number: int) -> str:
    """`1 index`, `2 indexes`."""
    return f"{number} index" if number == 1 else f"{number} indexes"


def span(seconds: float) -> str:
    """`0s`, `59s`, `12m`, `3h`, `45d`, `3y`: at most 4 characters for a century. A time to come is `0s`."""
    for unit, length in (("y", 365.25 * 86400), ("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"


def retention(pinned: bool, expires: float | None, now: float) -> str:
    """`pin`, `3d left`, `pin 3d`, or `-`."""
    if expires is None:
        return "pin" if pinned else "-"
    left = span(expires - now + 1.0)  # 30d is 30d for a second
    return f"pin {left}" if pinned else f"{left} left"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Lines of a table, columns as wide as they must be; those numbered in `right` are right-aligned."""
    cells = [list(map(printable, row)) for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        parts = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(parts).rstrip()


def wrapped(text: str, indent: str = "", hanging: str | None = None) -> str:
    """Text in lines that fit the terminal, long words broken."""
    text = printable(" ".join(text.split("\n")))
    hanging = indent if hanging is None else hanging
    return textwrap.fill(text, width(), initial_indent=indent, subsequent_indent=hanging, break_on_hyphens=False)


def emit(value: Any) -> None:
    """One JSON document on one line, in ASCII: what an output cannot encode would be written in no JSON's way."""
    plain = msgspec.json.decode(msgspec.json.encode(printable_values(value)))
    print(json.dumps(plain, separators=(",", ":")))


def complain(command: str, message: str) -> None:
    """One message on standard error, for people."""
    print(wrapped(f"sglang-ext index {command}: {message}", hanging="  "), file=sys.stderr)


def progress(total_bytes: int, label: str) -> Any:
    """A bar of bytes on standard error, where that is a terminal: tqdm's, to be closed."""
    from tqdm import tqdm

    scale: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    # A container's terminal may say that it has 0 rows and columns; tqdm would then draw nothing.
    screen: dict[str, Any] = {"ncols": width() - 1, "nrows": 24, "disable": None}
    return tqdm(total=total_bytes, desc=label, file=sys.stderr, leave=False, **screen, **scale)
