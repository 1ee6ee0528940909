"""The report of a calibration: plots as PNG, every figure in report.json, and one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from sglang_ext.calibration.fit import Fit, FitSetting
from sglang_ext.calibration.judge import USED, Judged, Verdict, percent
from sglang_ext.calibration.layer_statistics import MeasureSetting
from sglang_ext.calibration.measurement import PromptInfo, PromptMeasurement
from sglang_ext.calibration.plans import layer_similarity
from sglang_ext.methods.ab_sparse import BLOCK_SIZES
from sglang_ext.methods.profile import Profile, Recommendation

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1f2937 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
img { max-width: 100%; display: block; margin: .8rem 0 }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .85rem; margin: .8rem 0 }
th, td { border-bottom: 1px solid #d1d5db; padding: .25rem .6rem; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums }
pre { overflow-x: auto; background: #f3f4f6; padding: .6rem; font-size: .8rem }
@media print { body { margin: 0; max-width: none } h2 { break-after: avoid } img, tr { break-inside: avoid } }
"""


@dataclass(frozen=True)
class Result:
    """All that a report shows.

    Attributes:
        reason: of the recommendation, one sentence.
        left_out: prompts that were not measured, and why.
        measure, settings: what was asked for.
        Others as their types tell.
    """

    profile: Profile
    averages: PromptMeasurement
    fit: Fit
    reason: str
    infos: list[PromptInfo]
    left_out: dict[str, str]
    measure: MeasureSetting
    settings: FitSetting
    verdict: Verdict | None

    @property
    def recommended(self) -> Recommendation:
        """Of the profile: a calibration's has one."""
        assert self.profile.recommended is not None
        return self.profile.recommended


def write_report(shown: Result, folder: str | Path) -> None:
    """Write report.html, report.json and the plots into an existing folder; files of these names are replaced.

    Raises:
        OSError: the folder cannot be written to.
        ImportError: no matplotlib.
    """
    folder = Path(folder)
    plots = _plots(shown)
    for name, png in plots.items():
        (folder / f"{name}.png").write_bytes(png)
    (folder / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report_values(shown)), indent=1))
    (folder / "report.html").write_text(report_page(shown, plots), encoding="utf-8")


def report_values(shown: Result) -> dict[str, Any]:
    """Every figure of the report, plain values."""
    means, recommended = shown.averages, shown.recommended
    return {
        "profile": shown.profile,
        "profile_digest": shown.profile.digest(),
        "measured": {
            "setting": {**asdict(shown.measure), "block_sizes": BLOCK_SIZES},
            "fit": shown.settings,
            "prompts": shown.infos,
            "left_out": shown.left_out,
        },
        "sparsity": means.sparsity.tolist(),
        "oracle_recall": means.oracle.tolist(),
        "block_recall": means.recall.tolist(),
        "recovery": layer_similarity(means.recovery).tolist(),
        "importance": means.importance.tolist(),
        "anchors": shown.fit.anchors,
        "recommended": {
            "name": recommended.method,
            "spec": recommended.spec,
            "keep_ratio": recommended.keep_ratio,
            "reason": shown.reason,
        },
        "judged": shown.verdict,
    }


def _plots(shown: Result) -> dict[str, bytes]:
    from sglang_ext.calibration import report_plots as plots

    means, setting = shown.averages, shown.measure
    first = shown.settings.first_layer(len(means.recall))
    return {
        "sparsity": plots.sparsity_plot(means.sparsity, means.oracle, setting.mass, setting.keep_ratio),
        "block_recall": plots.block_recall_plot(means.recall, means.oracle, first),
        "recovery": plots.recovery_plot(layer_similarity(means.recovery), shown.fit.anchors),
        "importance": plots.importance_plot(means.importance),
        **({"judged": plots.judged_plot(shown.verdict)} if shown.verdict else {}),
    }


def report_page(shown: Result, plots: Mapping[str, bytes]) -> str:
    """The HTML page, with the plots (PNG by name) inside."""
    keep = percent(shown.measure.keep_ratio)
    own = shown.profile.model
    parts = [
        "<h1>Calibration of sparse attention</h1>",
        _paragraph(
            f"{own.num_layers} layers, {own.num_kv_heads} KV heads, head dimension {own.head_dim}; model configuration "
            f"{own.config_digest[:16]}. Profile {shown.profile.digest()[:16]}."
        ),
        "<h2>Recommendation</h2>",
        _paragraph(
            f"{shown.recommended.method} at a keep ratio of {percent(shown.recommended.keep_ratio)}: {shown.reason}."
        ),
        *(_judged(shown.verdict, plots) if shown.verdict else ()),
        "<h2>What it was measured on</h2>",
        _data(shown),
        "<h2>Sparsity</h2>",
        _image(plots, "sparsity", "sparsity of every layer and KV head"),
        _paragraph(_dense_heads(shown)),
        "<h2>Recall by block size</h2>",
        _image(plots, "block_recall", "recall by block size"),
        _paragraph(f"Each head's attention in the blocks selected at {keep} of the prefix, sink and window included."),
        "<h2>Reuse between layers, and anchors</h2>",
        _image(plots, "recovery", "attention that layers keep by the selection of others, with the chosen anchors"),
        _image(plots, "importance", "importance of the layers"),
        "<h2>Profile</h2>",
        f"<pre>{html.escape(shown.profile.encode().decode())}</pre>",
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Calibration of sparse attention</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _judged(verdict: Verdict, plots: Mapping[str, bytes]) -> list[str]:
    first = verdict.judged[0]
    text = (
        f"Candidates served {len(first.kl)} held-out prompts of {first.least_tokens:,} to {first.most_tokens:,} tokens "
        f"through the server's own decode steps; dense's tokens were forced. The bound is a KL of {verdict.max_kl:.4f} "
        "nats. Milliseconds are of a step behind the longest prompt."
    )
    rows = [
        (
            one.candidate.name,
            one.steps,
            f"{one.mean_kl:.4f} [{one.interval[0]:.4f}, {one.interval[1]:.4f}]",
            f"{one.top1:.2%}",
            f"{one.step_ms:.2f} ({min(one.ms):.2f} to {max(one.ms):.2f})",
            f"{one.sparse_share:.1%}",
            _said(one, verdict),
        )
        for one in verdict.judged
    ]
    head = ("candidate", "positions", "KL from dense [95%], nats", "top-1", "ms a step", "sparse rows", "")
    return [_paragraph(text), _table(head, rows), _image(plots, "judged", "KL from dense against the time of a step")]


def _said(one: Judged, verdict: Verdict) -> str:
    if one.candidate == verdict.chosen:
        return "recommended"
    if one.candidate in verdict.within:
        return ""
    if one.sparse_share < USED:
        return "not served"
    return "not surely within" if one.mean_kl <= verdict.max_kl else "too far"


def _data(shown: Result) -> str:
    data = shown.profile.calibration
    tasks = Counter(info.task for info in shown.infos)
    lengths = sorted(info.prefix_tokens for info in shown.infos)
    tokens = sum(info.measured_tokens for info in shown.infos)
    versions = ", ".join(f"{name} {version}" for name, version in data.versions.items())
    text = (
        f"{data.description}: {data.prompts} prompts, {data.tokens:,} tokens, prefixes of {lengths[0]:,} to "
        f"{lengths[-1]:,} tokens, {tokens:,} measured queries behind them. Budget {percent(shown.measure.keep_ratio)}, "
        f"sink {shown.measure.num_sink}, recent window {shown.measure.num_recent} tokens. {versions}."
    )
    rows = [(task or "(none)", count) for task, count in sorted(tasks.items())]
    lost = [(name, reason) for name, reason in sorted(shown.left_out.items())]
    table = _table(("task", "prompts"), rows)
    return _paragraph(text) + table + (_table(("left out", "reason"), lost) if lost else "")


def _dense_heads(shown: Result) -> str:
    found = [f"layer {layer} head {head}" for layer, head in shown.fit.flat_heads.nonzero().tolist()]
    listed = f"{', '.join(found)}: their layers attend everything" if found else "none"
    return (
        "Near-uniform heads of layers that would select, whose best tokens at "
        f"{percent(shown.recommended.keep_ratio)} hold less than half of their attention: {listed}."
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _cell(value: object) -> str:
    if isinstance(value, int):
        return f'<td class="number">{value}</td>'
    return f"<td>{html.escape(str(value))}</td>"


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _image(plots: Mapping[str, bytes], name: str, text: str) -> str:
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{base64.b64encode(plots[name]).decode()}">'
