"""Result files of `build.py` as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from engines import Row
from engines import read as read_rows

Groups = dict[tuple[str, str, str], list[Row]]


def fastest_prefill(rows: Sequence[Row]) -> dict[int, float]:
    """Per prompt length, the fastest median of all servers, the unrecorded prompts of a building one included."""
    fastest: dict[int, float] = {}
    for row in rows:
        if row["bench"] != "layer":
            seconds = (row["seconds"] if row["bench"] == "prefill" else row["plain"])["median"]
            fastest[row["num_tokens"]] = min(seconds, fastest.get(row["num_tokens"], seconds))
    return fastest


def read(paths: Sequence[str]) -> Groups:
    """Rows of result files by shape, device and version of SGLang."""
    groups: Groups = {}
    for row in read_rows(paths):
        groups.setdefault((row["shape"], row["device"], row["sglang"]), []).append(row)
    return groups


def table(groups: Groups) -> str:
    """As Markdown, a section for each."""
    parts = []
    for (shape, device, sglang), rows in groups.items():
        fastest = fastest_prefill(rows)
        lines = [f"{shape}, {device}, SGLang {sglang}", "", *_server_lines(rows, fastest), ""]
        parts.append("\n".join([*lines, *_layer_lines(rows, fastest)]))
    return "\n\n".join(parts)


def _range(values: Row, digits: int) -> str:
    return f"{values['median']:.{digits}f} ({values['min']:.{digits}f}-{values['max']:.{digits}f})"


def _server_lines(rows: Sequence[Row], fastest: dict[int, float]) -> list[str]:
    lines = ["| tokens | chunks of | server | prefill s | recorded s | ratio | build s | of the fastest prefill |"]
    lines[0] += " until verified s | index of KV |"
    lines.append("|" + "---|" * 10)
    for row in sorted((r for r in rows if r["bench"] != "layer"), key=lambda r: (r["num_tokens"], r["bench"])):
        chunk = row["chunked_prefill_size"]
        if row["bench"] == "prefill":
            lines.append(f"| {row['num_tokens']} | {chunk} | stock | {_range(row['seconds'], 3)} | | | | | | |")
            continue
        methods = ", ".join(row["config"].get("methods") or [row["config"].get("method", "default")])
        lines.append(
            f"| {row['num_tokens']} | {chunk} | building {methods} | {_range(row['plain'], 3)} "
            f"| {_range(row['recorded'], 3)} | {_range(row['ratio'], 4)} | {_range(row['build'], 3)} "
            f"| {row['build']['median'] / fastest[row['num_tokens']]:.1%} | {_range(row['held'], 2)} "
            f"| {row['index_bytes'] / row['kv_bytes']:.1%} |"
        )
    return lines


def _layer_lines(rows: Sequence[Row], fastest: dict[int, float]) -> list[str]:
    lines = ["| method | tokens | ms a layer | all layers s | of the fastest prefill | index of KV |", "|" + "---|" * 6]
    for row in sorted((r for r in rows if r["bench"] == "layer"), key=lambda r: (r["num_tokens"], r["method"])):
        seconds = row["seconds"]["median"] * row["layers"]
        share = f"{seconds / fastest[row['num_tokens']]:.1%}" if row["num_tokens"] in fastest else ""
        changed = ", ".join(f"{name}={value}" for name, value in row["spec"].items() if name != "method")
        lines.append(
            f"| {row['method']}{f' ({changed})' if changed else ''} | {row['num_tokens']} "
            f"| {_range({name: row['seconds'][name] * 1e3 for name in ('median', 'min', 'max')}, 2)} "
            f"| {seconds:.2f} | {share} | {row['index_bytes'] / row['kv_bytes']:.1%} |"
        )
    return lines
