"""The dashboard and the alerts speak of what is exported. `scripts/check_dashboards.py` asks a real Prometheus."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from sglang_ext.metrics import METRICS, PREFIX

ROOT = Path(__file__).resolve().parents[1] / "dashboards"
#: By the name that Prometheus has it under, what an expression may sort it by.
LABELS = {PREFIX + one.name + ("" if one.gauge else "_total"): {one.label, "instance"} - {""} for one in METRICS}


def metrics_in(expressions: list[str]) -> set[str]:
    """Those named; that each label fits its metric is checked."""
    found = set()
    for expression in expressions:
        # sum by (a, b) (rate(NAME{label="value", ...}[...])): the labels on both sides of a name.
        for by, name, selected in re.findall(rf"(?:by \(([\w, ]*)\) )?[(\w]*({PREFIX}\w+)(\{{[^}}]*\}})?", expression):
            labels = {*re.findall(r"\w+", by), *re.findall(r"(\w+)[=!]~?\"", selected)}
            assert name in LABELS, f"{name} is not exported"
            assert labels <= LABELS[name], expression
            found.add(name)
    return found


def test_the_dashboard_shows_every_exported_metric_and_no_other() -> None:
    panels = json.loads((ROOT / "sglang-sparse-attn.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert metrics_in(expressions) == set(LABELS)
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in panels]
    cells = [(x + i, y + j) for x, y, w, h in places for i in range(w) for j in range(h)]
    assert len(set(cells)) == len(cells), "panels lie beside each other"


def test_alerts_rest_on_exported_metrics() -> None:
    rules = yaml.safe_load((ROOT / "alerts.yml").read_text())["groups"][0]["rules"]
    assert all(metrics_in([rule["expr"]]) for rule in rules)
    assert all(set(rule["annotations"]) == {"summary", "description"} for rule in rules)
    assert yaml.safe_load((ROOT / "prometheus.yml").read_text())["rule_files"] == ["alerts.yml"]
