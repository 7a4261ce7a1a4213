"""Prebuilt views of MLflow's charts page: what the page itself would store after somebody had arranged it by hand.

``mempo`` draws a line a run. ``ablation`` draws the runs that carry the tag ``variant``, a line a variant with the band
of its seeds from the smallest to the largest.

The format is MLflow's own and undocumented: it belongs to the pinned version, and a page that ignores it still works.
"""

from __future__ import annotations

import base64
import json
import time
import zlib
from typing import Any

VIEWS = ("mempo", "ablation")
GROUP = ("ablation", "variant")  # tags: runs that agree in them share a line

# Section -> (columns, charts); a chart is the metrics drawn in it, one line a run and metric.
SECTIONS: dict[str, tuple[int, list[list[str]]]] = {
    "Memory reward": (2, [["mem_reward/p05", "mem_reward/p50", "mem_reward/p95"], ["p_mem/p50", "p_full/p50"]]),
    "Outcome": (3, [["em"], ["dev/em_greedy"], ["format_rate"]]),
    "Signal": (3, [["pool/flat_share", "group/flat_share"], ["kept/full", "kept/mem"], ["mem_tokens/mean"]]),
    "Update": (3, [["approx_kl"], ["clip_fraction"], ["grad_norm"], ["entropy"], ["mismatch/kl"]]),
}
# What variants are compared by.
ABLATION: dict[str, tuple[int, list[list[str]]]] = {
    "Memory reward": (2, [["mem_reward/p05", "mem_reward/p50", "mem_reward/p95"], ["p_mem/p50", "p_full/p50"]]),
    "Outcome": (2, [["em"], ["dev/em_greedy"]]),
}
GROUPED: dict[str, Any] = {
    "searchFilter": "tags.variant != ''",
    "groupBy": {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": tag} for tag in GROUP]},
    "useGroupedValuesInCharts": True,
}


def tags() -> dict[str, str]:
    """The experiment tags that hold the views: their states as deflated JSON in base64."""
    return {f"mlflow.sharedViewState.{view}": _stored(view) for view in VIEWS}


def query(view: str) -> str:
    """What opens ``view`` in the address of the page with an experiment's runs."""
    return f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={view}"


def _stored(view: str) -> str:
    now = int(time.time() * 1000)
    state = base64.b64encode(zlib.compress(json.dumps(_state(view)).encode())).decode()
    return json.dumps({"name": view, "createdAt": now, "updatedAt": now, "state": f"deflate;{state}"})


def _state(view: str) -> dict[str, Any]:
    chosen = ABLATION if view == "ablation" else SECTIONS
    sections = [
        {"uuid": name, "name": name, "columns": columns, "display": True, "isReordered": True, "deleted": False}
        for name, (columns, _) in chosen.items()
    ]
    return (GROUPED if view == "ablation" else {}) | {
        "compareRunCharts": [_line_chart(name, chart) for name, (_, charts) in chosen.items() for chart in charts],
        "compareRunSections": sections,
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
        "runsHiddenMode": "FIRST_20_RUNS",
        "autoRefreshEnabled": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }


def _line_chart(section: str, metrics: list[str]) -> dict[str, Any]:
    return {
        "uuid": f"{section}/{metrics[0]}",
        "type": "LINE",
        "metricSectionId": section,
        "metricKey": metrics[0],
        "selectedMetricKeys": metrics,
        "xAxisKey": "step",
        "yAxisKey": "metric",
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "selectedXAxisMetricKey": "",
        "selectedYAxisMetricKey": "",
        "yAxisExpressions": [],
        "lineSmoothness": 0,
        "range": {},
        "runsCountToCompare": 20,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
        "displayPoints": False,
        "deleted": False,
        "isGenerated": False,
    }
