"""The prebuilt view of MLflow's charts page: what the page itself would store after somebody had arranged it by hand.

The format is MLflow's own and undocumented: it belongs to the pinned version, and a page that ignores it still works.
"""

from __future__ import annotations

import base64
import json
import time
import zlib
from typing import Any

KEY = "mempo"
TAG = f"mlflow.sharedViewState.{KEY}"
QUERY = f"workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={KEY}"

# Section -> (columns, charts); a chart is the metrics drawn in it, one line a run and metric.
SECTIONS: dict[str, tuple[int, list[list[str]]]] = {
    "Memory reward": (2, [["mem_reward/p05", "mem_reward/p50", "mem_reward/p95"], ["p_mem/p50", "p_full/p50"]]),
    "Outcome": (3, [["em"], ["dev/em_greedy"], ["format_rate"]]),
    "Signal": (3, [["pool/flat_share", "group/flat_share"], ["kept/full", "kept/mem"], ["mem_tokens/mean"]]),
    "Update": (3, [["approx_kl"], ["clip_fraction"], ["grad_norm"], ["entropy"]]),
}


def shared_view() -> str:
    """The value of the experiment tag ``TAG``: the page's state as deflated JSON in base64."""
    now = int(time.time() * 1000)
    state = base64.b64encode(zlib.compress(json.dumps(_state()).encode())).decode()
    return json.dumps({"name": "mempo", "createdAt": now, "updatedAt": now, "state": f"deflate;{state}"})


def _state() -> dict[str, Any]:
    sections = [
        {"uuid": name, "name": name, "columns": columns, "display": True, "isReordered": True, "deleted": False}
        for name, (columns, _) in SECTIONS.items()
    ]
    return {
        "compareRunCharts": [_line_chart(name, chart) for name, (_, charts) in SECTIONS.items() for chart in charts],
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
