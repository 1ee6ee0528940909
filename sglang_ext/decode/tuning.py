"""Launch parameters on a GPU that nothing is known of: measured once, before the first decode graph, and kept.

Whatever goes wrong here, the server starts: with what was found until then, else with the kernels' own defaults.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from prefix_kernels.grouped_attention import TunedConfigs
from prefix_kernels.grouped_attention.tuned import TileKey
from prefix_kernels.grouped_attention.tuning import Space, Timer, memory_needed, tune_missing
from sglang_ext.storage import cache_folder

if TYPE_CHECKING:
    from prefix_kernels.grouped_attention import AttentionShape

logger = logging.getLogger(__name__)

ENV_TUNE = "SGLANG_EXT_TUNE"
LIMIT_S = 120.0
"""Seconds of one start; what they do not suffice for is measured at the next ones."""
SPACE = Space(num_stages=(2, 3), programs_per_sm=(1, 2), max_registers=(None,))
"""Fewer values than an unhurried search has: 12 kernels for each height of tile, apart from the package's own."""
_PROGRESS_S = 5.0


def tuned_folder() -> Path:
    """Where found launch parameters are kept, below the user's cache folder."""
    return Path(cache_folder()) / "tuned"


def tuning_wanted() -> bool:
    """Whether the environment lets a start measure: `SGLANG_EXT_TUNE=0` does not."""
    value = os.environ.get(ENV_TUNE, "1").strip()
    if value not in ("", "0", "1"):
        logger.warning("sparse attention: expected %s as 0 or 1, got %r; taken as 1", ENV_TUNE, value)
    return value != "0"


def tune_at_start(
    configs: TunedConfigs,
    shape: AttentionShape,
    rows: Iterable[int],
    device: torch.device,
    cache: Path,
    *,
    limit_s: float = LIMIT_S,
    space: Space = SPACE,
    timer: Timer | None = None,
) -> None:
    """Measure what these batches need and `configs` does not know, and keep it in a file. Never raises an `Exception`.

    Waits for the device; not in a capture. Afterwards the memory that it took is free again, for other processes, too.

    Args:
        configs: gets what was found.
        shape: of a layer.
        rows: numbers of requests on one prefix that will be met.
        device: a CUDA device, unless `timer` is given.
        cache: the folder to keep it in; need not exist.
        limit_s: seconds after which no other candidate is begun.
        space: values to combine.
        timer: as in `tune_missing`.
    """
    try:
        rows = list(rows)
        missing = configs.missing(shape, rows)
        if not missing or not _possible(configs, shape, missing, device):
            return
        path = configs.path_in(cache)
        logger.info(
            "sparse attention: no launch parameters are known for %s and tiles of %s: they are measured now, once, for "
            "at most about %.0f s, and kept in %s; %s=0 in the environment turns this off",
            configs.gpu, _tiles(missing), limit_s, path, ENV_TUNE,
        )  # fmt: skip
    except Exception as error:
        _failed(error)
        return
    begun, known = time.monotonic(), configs.entries
    try:
        tune_missing(configs, shape, rows, device, space=space, timer=timer, progress=_Progress(begun), limit_s=limit_s)
    except Exception as error:
        _failed(error)
    _give_back(device)
    found = [one for one in configs.entries if one not in known]
    saved = bool(found) and _saved(configs, cache)
    logger.info(
        "sparse attention: launch parameters of tiles of %s measured in %.0f s%s",
        _tiles(one.key.block_m for one in found), time.monotonic() - begun, f", kept in {path}" if saved else "",
    )  # fmt: skip
    finished = {one.key for one in found}
    rest = [height for height in missing if TileKey.of(shape, height) not in finished]
    if rest:
        logger.info(
            "sparse attention: tiles of %s were not finished: they run with the best so far, else with the defaults, "
            "and the next start measures them", _tiles(rest),
        )  # fmt: skip


class _Progress:
    """A line every few seconds."""

    def __init__(self, begun: float) -> None:
        self._begun = self._latest = begun

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if now - self._latest >= _PROGRESS_S:
            self._latest = now
            took = now - self._begun
            logger.info("sparse attention: measuring: %d of %d candidates (%s), %.0f s", done, total, what, took)


def _possible(configs: TunedConfigs, shape: AttentionShape, missing: list[int], device: torch.device) -> bool:
    if not tuning_wanted():
        logger.info(
            "sparse attention: no launch parameters are known for %s and tiles of %s, and %s=0: defaults serve",
            configs.gpu, _tiles(missing), ENV_TUNE,
        )  # fmt: skip
        return False
    needed, free = memory_needed(shape, max(missing)), _free_bytes(device)
    if free is not None and free < needed:
        logger.warning(
            "sparse attention: launch parameters are not measured: expected %d MiB of free device memory, got %d MiB; "
            "defaults serve; for one start, lower --mem-fraction-static", needed >> 20, free >> 20,
        )  # fmt: skip
        return False
    return True


def _free_bytes(device: torch.device) -> int | None:
    """Of device memory; None where it is no GPU. What this process's allocator holds unused does not count."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        with suppress(RuntimeError):  # a device that failed says so at the next launch
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()


def _saved(configs: TunedConfigs, cache: Path) -> bool:
    try:
        configs.save(cache)
    except Exception as error:
        logger.warning(
            "sparse attention: expected a folder that can be written for launch parameters, got %s: %s; they serve "
            "this process, and the next start measures again: make %s writable, or name another with XDG_CACHE_HOME",
            type(error).__name__, error, cache,
        )  # fmt: skip
        return False
    return True


def _failed(error: Exception) -> None:
    logger.warning(
        "sparse attention: expected to measure launch parameters, got %s: %s; defaults serve what was not found, and "
        "the next start tries again; %s=0 in the environment turns this off", type(error).__name__, error, ENV_TUNE,
    )  # fmt: skip


def _tiles(heights: Iterable[int]) -> str:
    """`16, 32 rows`."""
    return (", ".join(map(str, sorted(heights))) or "no") + " rows"
