"""Where a mutant can be planted in the packages' sources, and planting it: text in place, no line moved.

A site is one operator at one expression or statement of executable code. Docstrings, annotations, what is only logged
or raised, f-strings, `if TYPE_CHECKING`, `__all__` and assertions about types hold none. The list depends on the
sources alone, and a sample of it on the seed.
"""

from __future__ import annotations

import ast
import random
import re
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("sglang_ext", "kernels/prefix_kernels", "index_store/prefix_index")

_COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: (r"<(?!=)", "<="),
    ast.LtE: (r"<=", "<"),
    ast.Gt: (r">(?!=)", ">="),
    ast.GtE: (r">=", ">"),
    ast.Eq: (r"==", "!="),
    ast.NotEq: (r"!=", "=="),
    ast.Is: (r"\bis\b", "is not"),
    ast.IsNot: (r"\bis\s+not\b", "is"),
    ast.In: (r"\bin\b", "not in"),
    ast.NotIn: (r"\bnot\s+in\b", "in"),
}
_REACHED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: (r"-", "+"),
    ast.Mult: (r"\*", "//"),
    ast.FloorDiv: (r"//", "*"),
    ast.Div: (r"/", "*"),
}
_LOGGERS = ("logger", "logging", "log")


@dataclass(frozen=True)
class Site:
    """One possible mutant: bytes [begin, end) of a file become `new`.

    Attributes:
        path: below the repository, with slashes.
        line: of the first changed byte, from 1.
        operator: compare, arithmetic, integer, boolean, not, condition, return, jump, delete.
        number: from 1, among those of one operator on one line.
        new: as many line ends as the text it replaces.
    """

    path: str
    line: int
    operator: str
    number: int
    begin: int
    end: int
    new: bytes

    @property
    def id(self) -> str:
        """Stable while the file is: path:line:operator, and .2, .3 for further ones of the line."""
        return f"{self.path}:{self.line}:{self.operator}" + (f".{self.number}" if self.number > 1 else "")

    def plant(self, source: bytes) -> bytes:
        """The file's text with the mutant."""
        return source[: self.begin] + self.new + source[self.end :]


class _Finder(ast.NodeVisitor):
    """Collects (begin, end, new, operator) of a module, in the order of its text."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.found: list[tuple[int, int, bytes, str]] = []

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, (ast.expr, ast.stmt))
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _add(self, begin: int, end: int, new: str, operator: str) -> None:
        lost = self._source[begin:end].count(b"\n") - new.count("\n")
        self.found.append((begin, end, new.encode() + b"\n" * lost, operator))

    def _between(self, left: ast.AST, right: ast.AST, pattern: str, new: str, operator: str) -> None:
        """The operator's own text, between two operands; nothing where a comment makes it uncertain."""
        begin, end = self._span(left)[1], self._span(right)[0]
        text = self._source[begin:end].decode()
        spots = list(re.finditer(pattern, text))
        if len(spots) == 1 and "#" not in text:
            self._add(begin + spots[0].start(), begin + spots[0].end(), new, operator)

    # -- what holds no site ----------------------------------------------------------------------------------

    def visit_Raise(self, node: ast.Raise) -> None:
        """Messages of errors."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Places within an f-string are not those of its text before Python 3.12."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """For the type checker, where it says that something is of a type or is there."""
        told = ast.unparse(node.test)
        if "isinstance(" not in told and "is not None" not in told:
            self.visit(node.test)

    def visit_arg(self, node: ast.arg) -> None:
        """An annotation at most."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            self.generic_visit(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults, *node.body):
            if part is not None:
                self.visit(part)

    visit_FunctionDef = _function  # noqa: N815
    visit_AsyncFunctionDef = _function  # noqa: N815

    # -- sites -----------------------------------------------------------------------------------------------

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            self._between(left, right, *_COMPARED[type(operator)], "compare")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = any(
            isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, (str, bytes)))
            for side in (node.left, node.right)
        )
        if type(node.op) in _REACHED and not texts:
            self._between(node.left, node.right, *_REACHED[type(node.op)], "arithmetic")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, rf"\b{old}\b", new, "boolean")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            begin, _ = self._span(node)
            removed = re.match(rb"not\b[ ]*", self._source[begin:])
            if removed is not None:
                self._add(begin, begin + removed.end(), "", "not")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self._add(*self._span(node), str(node.value + 1), "integer")

    def _condition(self, test: ast.expr) -> None:
        if not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            begin, end = self._span(test)
            text = self._source[begin:end].decode()
            self._add(begin, end, f"(not ({text}))", "condition")

    def _conditional(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'"):
            return
        self._condition(node.test)
        self.generic_visit(node)

    visit_If = _conditional  # noqa: N815
    visit_While = _conditional  # noqa: N815
    visit_IfExp = _conditional  # noqa: N815

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._condition(test)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None):
            return
        begin, end = self._span(node.value)
        lost = self._source[begin:end].count(b"\n")
        self._add(begin, end, f"(None{chr(10) * lost})" if lost else "None", "return")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._add(*self._span(node), "continue", "jump")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add(*self._span(node), "break", "jump")

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(*self._span(node), "pass", "delete")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value
        if isinstance(value, ast.Constant):
            return
        if isinstance(value, ast.Call):
            called = value.func.value if isinstance(value.func, ast.Attribute) else None
            if isinstance(called, ast.Name) and called.id in _LOGGERS:
                return
        if isinstance(value, (ast.Call, ast.Await)):
            self._add(*self._span(node), "pass", "delete")
        self.generic_visit(node)


def _candidates(path: str, source: bytes) -> list[Site]:
    """All sites of one module by place, and some that are none: see `_is_one`."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    numbers: dict[tuple[int, str], int] = {}
    found = []
    for begin, end, new, operator in sorted(finder.found, key=lambda one: (one[0], one[1], one[3])):
        line = source.count(b"\n", 0, begin) + 1
        number = numbers[line, operator] = numbers.get((line, operator), 0) + 1
        found.append(Site(path, line, operator, number, begin, end, new))
    return found


def _is_one(site: Site, source: bytes, same: str) -> bool:
    """Whether the mutant compiles, to other code than the source's (`same`, as `ast.dump` writes it)."""
    text = site.plant(source)
    try:
        tree = ast.parse(text)
        compile(tree, "<mutant>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return ast.dump(tree) != same


def sites_of(path: str, source: bytes) -> list[Site]:
    """The sites of one module, by place.

    Args:
        path: as ids say it.
    """
    same = ast.dump(ast.parse(source))
    return [site for site in _candidates(path, source) if _is_one(site, source, same)]


def modules(root: Path) -> list[Path]:
    """The packages' modules, sorted."""
    return sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))


def sampled(root: Path, seed: int, count: int) -> list[Site]:
    """`count` sites of all modules, each as likely as any other; the same for the same sources and seed."""
    sources = {path.relative_to(root).as_posix(): path.read_bytes() for path in modules(root)}
    candidates = [site for path, source in sources.items() for site in _candidates(path, source)]
    chosen: list[Site] = []
    for site in random.Random(seed).sample(candidates, len(candidates)):
        if len(chosen) == count:
            break
        source = sources[site.path]
        if _is_one(site, source, ast.dump(ast.parse(source))):
            chosen.append(site)
    return chosen
