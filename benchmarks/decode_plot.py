"""A plot from the rows of `decode.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from statistics import median

from engines import STOCK, Row

#: Line and marker by engine and path; whatever else is measured comes after these.
LOOKS = {
    "plugin, shared": ("-", "o"),
    "flashinfer": ("--", "s"),
    "triton": ("-.", "^"),
    "plugin, stock": (":", "x"),
    "sparse, kascade": ("-", "D"),
    "sparse, anchors": ("-", "v"),
    "auto, kascade": ("-", "*"),
    "auto, anchors": ("-", "P"),
}
_OWN_BUDGET = {"keep_ratio": None, "group_growth": "none"}
"""The plugin's own, as rows say it of the time when `decode.py` had another one."""
_COLORS = 64
"""Of the PNG: less than a third of the bytes that all would take."""


def name_of(row: Row) -> str:
    """Engine and path, or layer plan, of a row, as the table and the plot call it, and the settings that were given."""
    engine, config = row["engine"], dict(row.get("config") or {})
    if _OWN_BUDGET.items() <= config.items():
        config = {key: value for key, value in config.items() if key not in _OWN_BUDGET}
    if engine in STOCK:
        return str(engine)
    name = f"{engine}, {row['path' if engine == 'plugin' else 'plan']}"
    return f"{name}, {json.dumps(config)}" if config else name


def place_of(name: str) -> tuple[bool, int, str]:
    """Stock engines first, then as in `LOOKS`."""
    order = list(LOOKS)
    return "," in name, order.index(name) if name in order else len(order), name


def lines(rows: Sequence[Row]) -> dict[tuple[int, str], list[tuple[int, float]]]:
    """Per batch and name the ascending (context, median over the starts in ms), where all share one prefix."""
    times: dict[tuple[int, str], dict[int, list[float]]] = {}
    for row in [row for row in rows if row.get("prefixes", 1) == 1]:
        times.setdefault((row["batch"], name_of(row)), {}).setdefault(row["context"], []).append(row["ms"])
    keys = sorted(times, key=lambda key: (key[0], place_of(key[1])))
    return {key: [(context, median(ms)) for context, ms in sorted(times[key].items())] for key in keys}


def plot(rows: Sequence[Row], path: str | Path) -> Path:
    """Time of a step against the context, one line per batch and engine or path, both axes logarithmic.

    Raises:
        RuntimeError: matplotlib is not installed.
        ValueError: nothing to draw, or rows of several devices or shapes.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("expected matplotlib for --plot, found none; pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator
    from PIL import Image

    titles = sorted({f"{row['device']}, {row['shape']}, pages of {row['page']}" for row in rows})
    if len(titles) != 1:
        raise ValueError(f"expected rows of one device, shape and page size, got {titles or 'no rows'}")
    drawn = lines(rows)
    batches = sorted({batch for batch, _ in drawn})
    names = list(dict.fromkeys(name for _, name in drawn))
    figure, panel = pyplot.subplots(figsize=(7.6, 4.4))
    for (batch, name), points in drawn.items():
        line, marker = LOOKS.get(name, ("-", f"${names.index(name)}$"))
        color = f"C{batches.index(batch)}"
        label = f"batch {batch}: {name}"
        panel.plot(*zip(*points, strict=True), line, color=color, marker=marker, markersize=5, lw=1.3, label=label)
    panel.set_xscale("log", base=2)
    panel.set(yscale="log", xlabel="tokens of shared prefix", ylabel="ms a decode step", title=titles[0])
    panel.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}K" if tokens >= 1024 else f"{tokens:g}")
    low, high = panel.get_ylim()
    panel.set_yticks([ms for ms in (1, 2, 5, 10, 20, 50, 100, 200, 500) if low <= ms <= high])
    panel.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
    panel.yaxis.set_minor_locator(NullLocator())
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.tight_layout()
    drawing = BytesIO()
    figure.savefig(drawing, dpi=100)
    pyplot.close(figure)
    Image.open(drawing).convert("RGB").quantize(_COLORS).save(path, optimize=True)
    return Path(path)
