"""Whether the day suite (`make test`) sees faults: mutants planted at random, and faults of the past put back.

    python scripts/mutants.py map                        which tests execute which lines: the day suite, once
    python scripts/mutants.py map -- tests/cli           measure these anew and keep the rest
    python scripts/mutants.py plant --seed 26 --count 20 plant random mutants (--list: only say which)
    python scripts/mutants.py reverts                    put back each fault of scripts/reverts
    python scripts/mutants.py report                     what was found, as a table

Each fault is planted in a copy of the committed tree, and `make test` is not run whole: a test that executes none of
the changed lines does what it did before, so those that execute one go red exactly if `make test` does. Code that runs
at import is executed for all: there, tests count that execute anything of the module or speak of what the line
defines. The text of kernels is read by compilers, too: there, all tests of kernels count that import the module.
Tests of the house and of documents read sources, so they always run; what only they find is called so, as they see
that a text changed and not what it does. `tests/test_mutants.py` is never run: it looks at the text of the faults.

A failure counts if the same test is green in a copy without the fault. Files go to `.mutants`: the map, one JSON line
for each fault (`rows.jsonl`; what has one for the same commit is not judged again, unless time was up), and logs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mutant_map import CONFIG, Change, LineMap, Places, Test, digest_of, files_importing, files_with, places_of
from mutant_plugin import SEEN
from mutant_runs import DAY, ROOT, WORKERS, Command, Copy, Outcome, copies, run_pytest
from mutant_sites import Site, sampled

FOLDER = ROOT / ".mutants"
MAP, ROWS, CLEAN = FOLDER / "map.json.gz", FOLDER / "rows.jsonl", FOLDER / "clean.json"
REVERTS = Path(__file__).with_name("reverts")
HOUSE = ("tests/test_house.py", "tests/test_docs.py")
NEVER = "tests/test_mutants.py"
MAP_SECONDS = 4 * 3600.0
#: Tests of at most so long run one after another before the rest is shared out: a fault is found in seconds mostly.
FIRST_SECONDS = 25.0
#: A test that takes so much longer than it did, and than a minute and a half, hangs.
TIMES_LONGER, AT_LEAST_SECONDS = 20, 90.0
LATE = "time was up"


@dataclass(frozen=True)
class Fault:
    """One fault: its diff against the committed tree."""

    id: str
    kind: str
    title: str
    changes: tuple[Change, ...]
    plant: Callable[[Path], None]
    text: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text).hexdigest()[:12]


@dataclass(frozen=True)
class Row:
    """What was found of one fault.

    Attributes:
        by: the part of the suite that went red: rest, triton, server, or house; empty for none.
        tests: that failed.
        executing: tests that execute what changed.
        why: of one that was not found.
    """

    id: str
    kind: str
    title: str
    commit: str
    digest: str
    found: bool
    by: str
    tests: list[str]
    executing: int
    seconds: float
    why: str


def committed() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


# -- faults --------------------------------------------------------------------------------------------------


def mutant(site: Site) -> Fault:
    def plant(root: Path) -> None:
        path = root / site.path
        path.write_bytes(site.plant(path.read_bytes()))

    old = (ROOT / site.path).read_bytes()[site.begin : site.end]
    last = site.line + old.count(b"\n")
    title = f"{' '.join(old.decode().split())[:60] or '(nothing)'} -> {site.new.decode().strip()[:60] or '(nothing)'}"
    change = Change(site.path, frozenset(range(site.line, last + 1)), whole_functions=False)
    return Fault(site.id, "mutant", title, (change,), plant, repr(site).encode())


def changed_lines(patch: str) -> dict[str, set[int]]:
    """Lines of the files before a patch that it removes, and those on both sides of what it adds."""
    found: dict[str, set[int]] = {}
    path, number = "", 0
    for line in patch[patch.index("diff --git") :].splitlines():
        if line.startswith("--- a/"):
            path = line[6:]
        elif head := re.match(r"@@ -(\d+)", line):
            number = int(head[1])
        elif line.startswith("-") and not line.startswith("---"):
            found.setdefault(path, set()).add(number)
            number += 1
        elif line.startswith("+") and not line.startswith("+++"):
            found.setdefault(path, set()).update({max(1, number - 1), number})
        elif line.startswith(" "):
            number += 1
    return found


def reverted(path: Path) -> Fault:
    text = path.read_text()
    title = text.split("diff --git")[0].strip().splitlines()[0]

    def plant(root: Path) -> None:
        subprocess.run(["git", "apply", path], cwd=root, check=True)

    changes = tuple(Change(name, frozenset(lines), True) for name, lines in changed_lines(text).items())
    return Fault(path.stem, "revert", title, changes, plant, text.encode())


# -- measuring -----------------------------------------------------------------------------------------------


def measure(paths: Sequence[str], seconds: float) -> int:
    """`map`: run the day suite, or what is named of it, and remember what each test executed."""
    lines = LineMap.load(MAP, digest_of(ROOT))
    with copies(1, committed()) as (copy,):
        if digest_of(copy.root) != lines.sources:
            raise SystemExit("expected the packages as committed; commit or stash the changes first")
        for command in DAY:
            wanted = [path for path in paths if command.takes(path)] if paths else list(command.paths)
            if paths and not wanted:
                continue
            folder = copy.root.parent / f"measured-{command.name}"
            folder.mkdir()
            (folder / "config").write_text(CONFIG.format(folder=folder, root=copy.root))
            environment = {"COVERAGE_PROCESS_START": str(folder / "config"), SEEN: str(folder)}
            log = FOLDER / f"map-{command.name}.log"
            FOLDER.mkdir(exist_ok=True)
            outcome = run_pytest(
                copy, command, paths=wanted, workers=WORKERS, environment=environment, seconds=seconds, log=log
            )
            count = lines.merge(folder, copy.root)
            lines.save(MAP)
            print(f"{command.name}: {count} tests in {outcome.seconds:.0f} s, {len(outcome.failed)} failed; log: {log}")
            for name in outcome.failed:
                print(f"  failed: {name}")
    return 0


# -- judging -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Tests to run in one go, the most telling first."""

    by: str
    command: Command
    tests: list[str]
    workers: int


class Judge:
    """Plants faults one at a time, and asks the tests that execute them."""

    def __init__(self, lines: LineMap, faulty: Copy, clean: Copy, commit: str, seconds: float) -> None:
        self._lines, self._faulty, self._clean = lines, faulty, clean
        self._commit, self._seconds = commit, seconds
        known = json.loads(CLEAN.read_text()) if CLEAN.exists() else {}
        self._green: dict[str, bool] = known.get(commit, {})

    def judge(self, fault: Fault) -> Row:
        """Whether the day suite sees it."""
        begun = time.monotonic()
        places = places_of(self._clean.root, fault.changes)
        tests = self._selected(places)
        fault.plant(self._faulty.root)
        try:
            red, late = self._ask(self._steps(tests or self._served(fault)))
            if red is None:
                of_house = [test.id for test in self._lines.tests.values() if test.file in HOUSE]
                red, _ = self._ask([Step("house", DAY[-1], of_house or list(HOUSE), 0)])
        finally:
            self._faulty.clean()
        executing = f"{len(tests)} tests execute it" if tests else "no test executes it"
        why = "" if red else LATE if late else f"{executing}, all green"
        by, failed = red or ("", [])
        return Row(
            fault.id, fault.kind, fault.title, self._commit, fault.digest, red is not None, by, failed[:5],
            len(tests), round(time.monotonic() - begun, 1), why,
        )  # fmt: skip

    def _served(self, fault: Fault) -> dict[str, float]:
        """All tests of servers, for what none was seen to execute: a process that is killed may not have told all."""
        if not any(change.path.startswith("sglang_ext/") for change in fault.changes):
            return {}
        return {test.id: 1.0 for test in self._lines.tests.values() if test.server}

    def _selected(self, places: Places) -> dict[str, float]:
        """Tests that may see a fault -> how near they are to it, at most 1."""
        found = self._lines.executing(places.lines)
        root, spoken, reading = self._clean.root, set[str](), set[str]()
        if places.names:
            spoken = files_with(root, places.names)
        if places.jitted:
            reading = {
                path for path in files_importing(root, places.jitted) if path.startswith("tests/prefix_kernels/")
            }
        for test in self._lines.tests.values():
            if test.file in spoken or test.file in reading:
                found.setdefault(test.id, 1e-4)
        # One server is started for all tests of a group, and what it executes then was asked by the first of them.
        groups = {self._lines.tests[name].group for name in found} - {""}
        for test in self._lines.tests.values():
            if test.group in groups:
                found.setdefault(test.id, 1e-4)
        return {name: share for name, share in found.items() if self._lines.tests[name].file not in (*HOUSE, NEVER)}

    def _steps(self, tests: dict[str, float]) -> list[Step]:
        """Tests without a server first; of those the cheap and near ones first; modules stay together."""
        steps = []
        known = [self._lines.tests[name] for name in tests]
        for command in DAY:
            mine = [test for test in known if command.takes(test.id) and not test.server]
            first, rest, spent = [], [], 0.0
            for cost, module in _modules(mine, tests):
                spent += cost
                (first if spent <= FIRST_SECONDS else rest).extend(test.id for test in module)
            steps += [Step(command.name, command, first, 0)] if first else []
            steps += [Step(command.name, command, rest, WORKERS)] if rest else []
        steps.sort(key=lambda step: step.workers)
        served = [test.id for _, module in _modules([test for test in known if test.server], tests) for test in module]
        return [*steps, *([Step("server", DAY[-1], served, WORKERS)] if served else [])]

    def _ask(self, steps: Sequence[Step]) -> tuple[tuple[str, list[str]] | None, bool]:
        """((part of the suite, what failed), or None where all is green; whether time was up)."""
        late = False
        for step in steps:
            left = [*step.tests]
            end = time.monotonic() + self._seconds
            while left and time.monotonic() < end:
                outcome = self._run(self._faulty, step, left, end - time.monotonic())
                late |= outcome.status is None and not outcome.failed
                if not outcome.red:
                    break
                failed = outcome.failed or [f"pytest ended with {outcome.status}"]
                if believed := [name for name in failed if self._is_green(name, step)]:
                    return (step.by, believed), late
                before = len(left)
                left = [name for name in left if name not in failed and name.split("::")[0] not in failed]
                if len(left) == before:
                    break
        return None, late

    def _run(
        self, copy: Copy, step: Step, tests: Sequence[str], seconds: float, flags: Sequence[str] = ("-x",)
    ) -> Outcome:
        known = self._lines.tests
        limits = {
            name: max(AT_LEAST_SECONDS, TIMES_LONGER * known[name].seconds)
            for name in tests
            if name in known and not known[name].server
        }
        whole = [name for name in tests if "::" not in name]
        return run_pytest(
            copy, step.command, tests=[] if whole else tests, paths=whole, limits=limits, workers=step.workers,
            flags=flags, seconds=seconds,
        )  # fmt: skip

    def _is_green(self, name: str, step: Step) -> bool:
        """Whether what failed does not without the fault; asked once for each commit."""
        if not name.startswith("tests/"):  # pytest itself, or a worker of it
            return not self._run(self._clean, step, step.tests, self._seconds).red
        if name not in self._green:
            alone = Step(step.by, step.command, [name], 0)
            flags = ["-x"] if "::" in name else ["--collect-only"]
            self._green[name] = self._run(self._clean, alone, [name], self._seconds, flags).status == 0
            CLEAN.write_text(json.dumps({self._commit: self._green}))
        return self._green[name]


def _modules(tests: Sequence[Test], near: dict[str, float]) -> list[tuple[float, list[Test]]]:
    """(seconds, tests in their order) of each module: least seconds for most nearness first."""
    modules: dict[str, list[Test]] = {}
    for test in tests:
        modules.setdefault(test.file, []).append(test)
    costs = [(sum(test.seconds for test in module), module) for module in modules.values()]
    return sorted(costs, key=lambda one: (one[0] + 1.0) / max(near[test.id] for test in one[1]) ** 0.5)


def judge_all(faults: Sequence[Fault], seconds: float) -> int:
    """Judge what has no row of this commit yet."""
    commit = committed()
    done = {(row.id, row.commit, row.digest) for row in rows() if row.why != LATE}
    wanted = [fault for fault in faults if (fault.id, commit, fault.digest) not in done]
    lines = LineMap.load(MAP, digest_of(ROOT))
    if not lines.tests:
        raise SystemExit(f"expected {MAP.name} of these sources; make it: scripts/mutants.py map")
    with copies(2, commit) as (faulty, clean):
        if digest_of(clean.root) != lines.sources:
            raise SystemExit("expected the packages as committed; commit or stash the changes first")
        judge = Judge(lines, faulty, clean, commit, seconds)
        for number, fault in enumerate(wanted, 1):
            row = judge.judge(fault)
            with ROWS.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            print(f"{number}/{len(wanted)} {row.id}: {said(row)} ({row.seconds:.0f} s)", flush=True)
    return report([fault.id for fault in faults])


# -- what was found ------------------------------------------------------------------------------------------


def rows() -> list[Row]:
    """The last row of each fault."""
    last = {}
    if ROWS.exists():
        for line in ROWS.open():
            row = Row(**json.loads(line))
            last[row.id] = row
    return list(last.values())


def said(row: Row) -> str:
    if not row.found:
        return f"NOT FOUND: {row.why}"
    return f"found by {row.by}: {row.tests[0]}"


def report(wanted: Sequence[str] | None = None) -> int:
    """A table of each kind, and totals."""
    chosen = [row for row in rows() if wanted is None or row.id in wanted]
    for kind in ("revert", "mutant"):
        mine = [row for row in chosen if row.kind == kind]
        if not mine:
            continue
        print(f"\n| {kind} | what | tests that execute it | found by |\n|---|---|---|---|")
        for row in mine:
            cells = [f"`{row.id}`", row.title, str(row.executing), said(row)]
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        found = [row for row in mine if row.found]
        house = sum(row.by == "house" for row in found)
        print(f"\n{len(found)} of {len(mine)} found ({house} of them by tests of the house or of documents only).")
    return 0


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("map", help="measure which tests execute which lines")
    one.add_argument("paths", nargs="*", help="of tests; none: the whole day suite")
    one.add_argument("--timeout", type=float, default=MAP_SECONDS, metavar="SECONDS")
    for name, about in (("plant", "random mutants"), ("reverts", "faults of the past")):
        one = commands.add_parser(name, help=about)
        one.add_argument("--only", metavar="ID", action="append", help="judge this one; may be given again")
        one.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="for each part of the suite")
        one.add_argument("--list", action="store_true", help="say which, and judge none")
    one = commands.choices["plant"]
    one.add_argument("--seed", type=int, default=26)
    one.add_argument("--count", type=int, default=20)
    commands.add_parser("report", help="print what was found")
    args = parser.parse_args(words)
    if args.command == "map":
        return measure(args.paths, args.timeout)
    if args.command == "report":
        return report()
    if args.command == "plant":
        faults = [mutant(site) for site in sampled(ROOT, args.seed, args.count)]
    else:
        faults = [reverted(path) for path in sorted(REVERTS.glob("*.patch"))]
    faults = [fault for fault in faults if not args.only or fault.id in args.only]
    if args.list:
        for fault in faults:
            print(f"{fault.id}: {fault.title}")
        return 0
    return judge_all(faults, args.timeout)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
