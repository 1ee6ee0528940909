"""Runs the fault campaigns: ``python -m tests.prefix_index.faults [--only NAME ...] [--quick] [--out FILE]``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from .runner import campaigns, markdown, provenance, row_of, run_one, table


def main() -> int:
    found = campaigns()
    parser = argparse.ArgumentParser(prog="python -m tests.prefix_index.faults", description="Store fault campaigns.")
    parser.add_argument("--only", nargs="+", choices=sorted(found), metavar="NAME", help="these campaigns only")
    parser.add_argument("--quick", action="store_true", help="the counts of the test suite")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds until a campaign counts as stuck")
    parser.add_argument("--out", type=Path, help="JSON lines, one a campaign; replaced")
    parser.add_argument("--table", type=Path, metavar="FILE", help="no run: rows of a former --out as Markdown")
    args = parser.parse_args()
    if args.table is not None:
        print(markdown([json.loads(line) for line in args.table.read_text().splitlines()]))
        return 0

    source, rows = provenance(args.seed), []
    for name in args.only or sorted(found):
        count = found[name].quick if args.quick else found[name].full
        print(f"{name}: {count:,} faults ...", file=sys.stderr, flush=True)
        began = time.monotonic()
        rows.append(row_of(run_one(name, count, args.seed, args.limit), time.monotonic() - began, source))
        if args.out is not None:
            args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
