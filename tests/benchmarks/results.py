"""What benchmarks write and the documents show."""

from __future__ import annotations

import itertools
import json
import lzma
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"


def document(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def prose(name: str) -> str:
    """A document with one space between its words; README and CHANGELOG are beside `docs`."""
    path = ROOT / f"{name}.md"
    return " ".join((path.read_text() if path.exists() else document(name)).split())


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Of a result file, packed ones (`.xz`) too."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
        return [json.loads(line) for line in file]


def cells(table: str) -> list[list[str]]:
    """Of a Markdown table's lines."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def documented_table(name: str, head: str) -> list[list[str]]:
    """Cells of the rows of the table in a document that begins so."""
    lines = document(name).splitlines()
    begun = lines.index(next(line for line in lines if line.startswith(head)))
    return cells("\n".join(itertools.takewhile(lambda line: line.startswith("|"), lines[begun + 2 :])))
