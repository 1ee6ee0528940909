"""One campaign in a process of its own: ``python -m tests.prefix_index.faults.one NAME COUNT SEED``.

The last line of its output is the outcome as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from .runner import campaigns


def main() -> None:
    name, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    outcome = campaigns()[name].run(count, seed)
    print(json.dumps(dataclasses.asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
