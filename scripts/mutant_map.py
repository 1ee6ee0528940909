"""Which tests execute which lines of the packages: measured by coverage.py, one context a test.

The file `map.json.gz` holds all that was measured since the packages' sources last changed.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import re
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mutant_plugin import CONTEXT
from mutant_sites import PACKAGES, modules

CONFIG = f"""[run]
data_file = {{folder}}/data
parallel = true
context = ${{{{{CONTEXT}-}}}}
plugins = mutant_plugin
patch = _exit
sigterm = true
disable_warnings = no-data-collected, module-not-measured, couldnt-parse
include =
  {{root}}/sglang_ext/*
  {{root}}/kernels/prefix_kernels/*
  {{root}}/index_store/prefix_index/*
"""

#: Lines executed in one context, by file.
Lines = dict[str, set[int]]


@dataclass(frozen=True)
class Test:
    """One test: `seconds` is of its first run, fixtures that it was the first to take included."""

    id: str
    group: str
    server: bool
    fixtures: list[str]
    seconds: float

    @property
    def file(self) -> str:
        return self.id.split("::")[0]


@dataclass
class LineMap:
    """What was measured.

    Attributes:
        sources: digest of the packages' modules; lines mean nothing beside others.
        tests: by id.
        contexts: what each test, or fixture of several tests, executed.
    """

    sources: str
    tests: dict[str, Test] = field(default_factory=dict)
    contexts: dict[str, Lines] = field(default_factory=dict)

    def executing(self, wanted: Lines) -> dict[str, float]:
        """Tests that execute one of these lines -> the share of all that they execute, which tells who is near."""
        shares = {}
        for name, lines in self.contexts.items():
            hit = sum(len(lines.get(path, set()) & numbers) for path, numbers in wanted.items())
            if hit:
                shares[name] = hit / sum(map(len, lines.values()))
        found = {}
        for test in self.tests.values():
            share = max(shares.get(name, 0.0) for name in (test.id, *test.fixtures))
            if share:
                found[test.id] = share
        return found

    def merge(self, folder: Path, root: Path) -> int:
        """Take over what a run left in a folder; tests measured before are replaced. Returns the number of tests."""
        tests = [Test(**json.loads(line)) for file in folder.glob("tests-*.jsonl") for line in file.open()]
        for test in tests:
            self.tests[test.id] = test
            self.contexts.pop(test.id, None)
        for data in folder.glob("data*"):
            for context, path, numbers in _executed(data):
                if context:
                    name = Path(path).relative_to(root).as_posix()
                    self.contexts.setdefault(context, {}).setdefault(name, set()).update(numbers)
        return len(tests)

    def save(self, path: Path) -> None:
        stored = {
            "sources": self.sources,
            "tests": [asdict(test) for test in self.tests.values()],
            "contexts": {
                name: {file: sorted(numbers) for file, numbers in lines.items()}
                for name, lines in self.contexts.items()
            },
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt", compresslevel=3) as file:
            json.dump(stored, file)

    @classmethod
    def load(cls, path: Path, sources: str) -> LineMap:
        """The map of these sources; an empty one where there is none."""
        if not path.exists():
            return cls(sources)
        with gzip.open(path, "rt") as file:
            stored = json.load(file)
        if stored["sources"] != sources:
            return cls(sources)
        contexts = {
            name: {file: set(numbers) for file, numbers in lines.items()} for name, lines in stored["contexts"].items()
        }
        return cls(sources, {one["id"]: Test(**one) for one in stored["tests"]}, contexts)


def digest_of(root: Path) -> str:
    """Of the packages' modules."""
    total = hashlib.sha256()
    for path in modules(root):
        total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def _executed(data: Path) -> Iterator[tuple[str, str, list[int]]]:
    """(context, file, lines) of one of coverage.py's data files; nothing from one that was not finished."""
    from coverage.numbits import numbits_to_nums

    try:
        with sqlite3.connect(f"file:{data}?mode=ro", uri=True) as base:
            rows = base.execute(
                "select context.context, file.path, line_bits.numbits from line_bits"
                " join context on context.id = line_bits.context_id join file on file.id = line_bits.file_id"
            ).fetchall()
    except sqlite3.DatabaseError:
        return
    for context, path, numbits in rows:
        yield context, path, numbits_to_nums(numbits)


# -- which lines a change is about ---------------------------------------------------------------------------

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Change:
    """Changed lines of one file, and whether the whole functions around them count (a hunk) or their statements only
    (a mutant)."""

    path: str
    lines: frozenset[int]
    whole_functions: bool


@dataclass
class Places:
    """What has to be executed for a change to be seen.

    Attributes:
        lines: to look for in the map.
        names: defined at module level by changed lines: tests that speak of them may see the change.
        jitted: modules of which a kernel changed, or what kernels may read: compilers read the text.
    """

    lines: Lines = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    jitted: set[str] = field(default_factory=set)


def places_of(root: Path, changes: Iterable[Change]) -> Places:
    """What has to be executed for any of the changes to be seen."""
    places = Places()
    for change in changes:
        tree = ast.parse((root / change.path).read_bytes())
        functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
        for line in change.lines:
            _place(places, change, tree, functions, line)
    if places.names:
        for path in modules(root):
            name = path.relative_to(root).as_posix()
            places.lines.setdefault(name, set()).update(_lines_with(path, places.names))
    return places


def _place(places: Places, change: Change, tree: ast.Module, functions: list[Any], line: int) -> None:
    lines = places.lines.setdefault(change.path, set())
    around = [node for node in functions if _first(node) <= line <= _end(node)]
    inner = max(around, key=_first, default=None)
    if any("jit" in ast.unparse(mark) for node in around for mark in node.decorator_list):
        places.jitted.add(change.path)
    if inner is not None and line >= _first(inner.body[0]):
        lines.update(_body(inner) if change.whole_functions else _statement(inner, line))
        return
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _first(node) <= line <= _end(node)]
    here: Any = max(statements, key=lambda node: (_first(node), -_end(node)), default=None)
    if here is None or isinstance(here, (ast.Import, ast.ImportFrom)):
        return  # between statements; an import alone changes nothing
    if isinstance(here, ast.ClassDef) and line >= _first(here.body[0]):
        return  # between methods
    # Executed at import. Kernels read constants, also by way of others.
    if change.path.startswith("kernels/"):
        places.jitted.add(change.path)
    if isinstance(here, _Function):
        places.names.add(here.name)
        lines.update(_body(here))
        return
    for node in functions:
        lines.update(_body(node))
    places.names |= {node.name for node in statements if isinstance(node, ast.ClassDef)}
    targets = here.targets if isinstance(here, ast.Assign) else [getattr(here, "target", None)]
    places.names |= {one.id for target in targets if target for one in ast.walk(target) if isinstance(one, ast.Name)}


def _body(function: Any) -> range:
    return range(_first(function.body[0]), _end(function) + 1)


def _first(node: Any) -> int:
    return int(min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", []))]))


def _end(node: Any) -> int:
    return int(node.end_lineno)


def _statement(function: ast.AST, line: int) -> range:
    """The lines of the innermost statement; of one with a body, those of its head."""
    around = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and _first(node) <= line <= _end(node)]
    inner = max(around, key=lambda node: (_first(node), -_end(node)))
    body = getattr(inner, "body", None)
    return range(_first(inner), max(line, _first(body[0]) - 1 if body else _end(inner)) + 1)


def _lines_with(path: Path, names: set[str]) -> set[int]:
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
        if name in names:
            found.add(node.lineno)  # type: ignore[attr-defined]
    return found


def files_with(root: Path, names: set[str]) -> set[str]:
    """Test modules in whose text one of the names stands."""
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, sorted(names))) + r")\b")
    paths = (path for path in (root / "tests").rglob("*.py") if pattern.search(path.read_text()))
    return {path.relative_to(root).as_posix() for path in paths}


def files_importing(root: Path, wanted: set[str]) -> set[str]:
    """Test modules that import one of these files, by way of others, too."""
    roots = [root, *(root / package for package in {Path(one).parent for one in PACKAGES})]
    imports: dict[str, set[str]] = {}
    for path in [*modules(root), *(root / "tests").rglob("*.py")]:
        imports[path.relative_to(root).as_posix()] = {
            found.relative_to(root).as_posix()
            for name in _imported(ast.parse(path.read_bytes()))
            for base in roots
            for found in (base / f"{name}.py", base / name / "__init__.py")
            if found.exists()
        }
    reaching = set(wanted)
    while grown := {path for path, names in imports.items() if path not in reaching and names & reaching}:
        reaching |= grown
    return {path for path in reaching if path.startswith("tests/")}


def _imported(tree: ast.Module) -> Iterator[str]:
    """Every module that may be meant, as a path; a package stands for its `__init__` as well."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            yield name.replace(".", "/")
