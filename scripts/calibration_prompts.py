"""A development set for `sglang-ext calibrate`: documents of all tasks, each with a question, as JSON lines.

    python scripts/calibration_prompts.py --out prompts.jsonl --lengths 4096 8192 --documents 2

The shipped model's profile was made from such a set; its seeds are not those of tests.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.needle.tasks import TASKS, make_document

FIRST_SEED = 500


def main() -> None:
    """Write the file that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, metavar="JSONL")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS), metavar="TASK")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[4096, 8192], metavar="TOKENS", help="(default: 4096 8192)"
    )
    parser.add_argument("--documents", type=int, default=2, help="per task and length (default: 2)")
    parser.add_argument("--seed", type=int, default=FIRST_SEED, help="of the first document")
    args = parser.parse_args()
    try:
        write(args)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def write(args: argparse.Namespace) -> None:
    """Raises OSError, and ValueError of a length or number that makes no document."""
    with args.out.open("w") as file:
        for task in args.tasks:
            for length in args.lengths:
                for seed in range(args.seed, args.seed + args.documents):
                    document = make_document(task, seed=seed, num_tokens=length, num_questions=2)
                    question = document.questions[seed % 2].text
                    line = {"id": f"{task}-{length}-{seed}", "text": document.text, "question": question}
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
