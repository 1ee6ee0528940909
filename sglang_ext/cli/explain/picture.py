"""What a request attended of its prefix, by layer, KV head and position: read from a server's trace, and drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_ext.decode.trace import Selected, SparseStep, read_trace

_COLUMNS = 512
"""Of the picture, at most: a column is as many tokens as that takes."""

Attended = Mapping[int, NDArray[np.float64]]
"""By selecting layer, [num_kv_heads, prefix_len]: the share of the steps in which a position was attended."""


def read_attended(folder: Path, rid: str) -> Attended:
    """What a request attended in its steps by an index, by the traces in a folder; empty where there were none.
    Raises OSError where the folder cannot be read.
    """
    sums: dict[int, NDArray[np.float64]] = {}
    steps = 0
    for path in folder.iterdir():
        for group in _groups(path) if path.suffix == ".trace" else ():
            if rid in group.rids:
                steps += 1
                for layer in group.bits:
                    mask = group.mask(layer)
                    if mask is not None:
                        sums[layer] = sums.get(layer, 0.0) + mask.astype(np.float64)
    return {layer: total / steps for layer, total in sorted(sums.items())}


def _groups(path: Path) -> Iterator[Selected]:
    """Of all sparse steps of a trace, as far as this version reads it."""
    with contextlib.suppress(msgspec.DecodeError):
        for record in read_trace(path):
            yield from record.groups if isinstance(record, SparseStep) else ()


def draw_attended(attended: Attended, path: Path) -> None:
    """Write a picture: a row for each KV head of each selecting layer, the positions of the prefix from left to right.

    Raises:
        ImportError: matplotlib is not there; `pip install 'sglang-ext[calibrate]'`.
        OSError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    length = next(iter(attended.values())).shape[1]
    width = -(-length // _COLUMNS)
    edges = np.arange(0, length, width)
    rows = [np.add.reduceat(head, edges) for of_layer in attended.values() for head in of_layer]
    counts = np.minimum(edges + width, length) - edges
    image = np.stack(rows) / counts
    names = [f"layer {layer}, head {head}" for layer, heads in attended.items() for head in range(len(heads))]
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.18 * len(rows)), layout="constrained")
    shown = axes.imshow(image, aspect="auto", interpolation="nearest", vmin=0, vmax=1, extent=(0, length, len(rows), 0))
    axes.set_yticks(np.arange(len(rows)) + 0.5, names, fontsize=6)
    axes.set_xlabel(f"position in the prefix, {width} tokens a column")
    figure.colorbar(shown, label="share of positions and steps attended")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
