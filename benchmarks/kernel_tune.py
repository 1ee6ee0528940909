"""`kernel_bench.py attention --tune`: launch parameters of grouped attention, swept per height of the tile.

Every configuration runs the cases that a tile of its height serves (`TUNED`), each behind its correctness gate; the
best one has the least geometric mean of its times over the fastest ones. Rows go to --out, so an interrupted sweep goes
on.
`programs_per_sm` stands for the number of thread blocks as well: the work is cut for that many times the
multiprocessors, so values beyond what fits at a time are several waves; of a specialized kernel they are refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from kernel_bench import attempt, conditions, device_of, measure, shape_of, timer_of
from kernel_cases import ATTENTION
from kernel_problem import Sizes, make_problem
from kernel_rows import Row, Run

from prefix_kernels.grouped_attention import AttentionConfig, AttentionShape, TunedConfigs, block_m_for
from prefix_kernels.grouped_attention.config import has_specialized
from prefix_kernels.grouped_attention.tuned import TileKey, TunedEntry, own_config
from prefix_kernels.grouped_attention.tuning import Space, candidates, fastest, shared_memory_of

#: (case, context, requests) that share a height of tile with 4 query heads a KV head: 16, 32, 64 and 128 rows.
TUNED = [
    ("exact", 131072, 1),
    ("sparse", 131072, 1),
    ("plain", 8192, 8),
    ("plain", 32768, 32),
    ("suffix", 8192, 32),
    ("exact", 131072, 8),
    ("sparse", 131072, 8),
    ("exact", 131072, 16),
    ("sparse", 131072, 16),
    ("exact", 131072, 32),
    ("sparse", 131072, 32),
    ("exact", 131072, 64),
    ("sparse", 131072, 64),
]
SMOKE = [("exact", 192, 1), ("sparse", 192, 1), ("plain", 64, 2)]


class One:
    """A configuration for tiles of one height; the package's own for others."""

    def __init__(self, config: AttentionConfig, block_m: int) -> None:
        self._config = config
        self._block_m = block_m

    def __call__(self, shape: AttentionShape, rows: int) -> AttentionConfig:
        block_m = block_m_for(rows, shape.gqa)
        return self._config if block_m == self._block_m else own_config(shape, block_m)


def space(args: argparse.Namespace, block_m: int) -> list[AttentionConfig]:
    """Configurations of one height, the package's own first."""
    wide = Space(num_stages=(2, 3, 4, 5), programs_per_sm=(1, 2, 3, 4))
    narrow = Space(block_n=(16, 32), num_warps=(4,), num_stages=(2,), programs_per_sm=(1,))
    device = device_of(args)
    shared = shared_memory_of(device)
    return candidates(shape_of(args), block_m, narrow if args.smoke else wide, shared, has_specialized(device))


def tune(args: argparse.Namespace, run: Run) -> None:
    """Sweep what the result file does not hold yet, then write the best of all that it holds."""
    shape, timer = shape_of(args), timer_of(args)
    cases = SMOKE if args.smoke else [case for case in TUNED if case[2] in {*args.batches, 16}]
    heights: dict[int, list[tuple[str, int, int]]] = {}
    for case in cases:
        heights.setdefault(block_m_for(1 if case[0] in ("plain", "suffix") else case[2], shape.gqa), []).append(case)
    for block_m, own in heights.items():
        configs = space(args, block_m)
        for case in own:
            sweep(args, run, timer, case, block_m, configs)
    found = best(run.rows, shape, {"bench": "tune", **conditions(args)})
    gpu = "cpu" if args.smoke else torch.cuda.get_device_name()
    TunedConfigs(gpu, [entry for entry, _ in found]).write(args.tune)
    for entry, count in found:
        times = ", ".join(f"{name} {us:.1f} us" for name, us in entry.us_by_case.items())
        print(f"best of {count} for {entry.key.block_m} rows: {entry.config}: {times}")


def key_of(args: argparse.Namespace, case: tuple[str, int, int], block_m: int, config: AttentionConfig) -> Row:
    """What identifies a row of the sweep. `block_m` is the height asked for; a wide head's tile may be lower."""
    name, context, batch = case
    key = {"case": name, "context": context, "batch": batch}
    key |= {"groups": batch if name == "plain" else 1, "suffix": 0 if name == "plain" else args.suffix}
    return {"bench": "tune", **conditions(args), **key, "block_m": block_m, "launch": dataclasses.asdict(config)}


def sweep(
    args: argparse.Namespace,
    run: Run,
    timer: Any,
    case: tuple[str, int, int],
    block_m: int,
    configs: Sequence[AttentionConfig],
) -> None:
    """All configurations of one case. What cannot be compiled or fails its gate is a row, never a candidate."""
    held = [row for row in run.rows if row["bench"] == "tune"]
    keys = [(config, key_of(args, case, block_m, config)) for config in configs]
    keys = [(c, key) for c, key in keys if not any(all(row.get(k) == v for k, v in key.items()) for row in held)]
    if not keys:
        return
    first = keys[0][1]
    sizes = Sizes(case[1], case[2], first["groups"], first["suffix"], args.page)
    problem = make_problem(shape_of(args), sizes, args.keep, device_of(args), args.seed)
    for config, key in keys:
        row = attempt(
            timer, lambda config=config: measure(problem, ATTENTION[case[0]](problem, One(config, block_m)), timer)
        )
        run.add({**key, **row})
        run.failed -= row.get("error", "").startswith("OutOfResources")  # an answer, not a failure


def best(rows: Iterable[Row], shape: AttentionShape, common: Row) -> list[tuple[TunedEntry, int]]:
    """Per height the entry of the tuned file, and of how many configurations it is the best.

    Only configurations that are green in every case of their height count, measured with this in common.
    """
    heights: dict[int, dict[str, dict[str, float]]] = {}
    for row in rows:
        if row["green"] and all(row.get(name) == value for name, value in common.items()):
            case = f"{row['case']} {row['context']} x {row['batch']}"
            case += f" + {row['suffix']}" if row["suffix"] else ""
            heights.setdefault(row["block_m"], {}).setdefault(case, {})[json.dumps(row["launch"])] = row["us"]
    found = []
    for block_m, cases in sorted(heights.items()):
        complete = sorted(set.intersection(*(set(times) for times in cases.values())))
        if not complete:
            print(f"no configuration of {block_m} rows is green in all of {', '.join(cases)}", file=sys.stderr)
            continue
        times = {
            AttentionConfig(**json.loads(one)): {case: of_case[one] for case, of_case in cases.items()}
            for one in complete
        }
        config = fastest(times)
        found.append((TunedEntry(TileKey.of(shape, block_m), config, times[config]), len(complete)))
    return found
