# SPDX-License-Identifier: Apache-2.0
"""A picture of the dashboard in configs/, of what a Prometheus has: for the documentation, where no Grafana runs."""

import json
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, PercentFormatter

from benchmarks.testbed.models import ROOT
from benchmarks.testbed.servers.prometheus import Prometheus

DASHBOARD: dict[str, Any] = json.loads((ROOT / "configs/grafana-dashboard.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
_UNITS = {"s": "s", "Bps": "B/s", "bytes": "B", "ops": "/s", "short": ""}
_COLUMNS = 4


def without_variables(query: str, window: str = "1m") -> str:
    """A panel's query as Grafana asks it: of all models and engines, rates over `window`."""
    return query.replace("$__rate_interval", window).replace("$model_name", ".*").replace("$engine", ".*")


def draw(prometheus: Prometheus, seconds: float, path: Path) -> None:
    """Every panel, of the last `seconds`."""
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "lmcache-ec", "font.size": 7})
    rows = -(-len(PANELS) // _COLUMNS)
    figure, axes = pyplot.subplots(rows, _COLUMNS, figsize=(4.0 * _COLUMNS, 2.0 * rows), layout="constrained")
    for panel, at in zip(PANELS, axes.flat, strict=False):
        _panel(prometheus, panel, seconds, at)
    for left in axes.flat[len(PANELS) :]:
        left.set_axis_off()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _panel(prometheus: Prometheus, panel: dict[str, Any], seconds: float, at: Axes) -> None:
    end = time.time()
    for target in panel["targets"]:
        query = without_variables(target["expr"], "10s")
        answer = prometheus.ask("query_range", query=query, start=end - seconds, end=end, step=1)
        for series in answer["result"]:
            label = target["legendFormat"]
            for name, value in series["metric"].items():
                label = label.replace(f"{{{{{name}}}}}", value)
            points = [(float(when) - end, float(value)) for when, value in series["values"]]
            at.plot(*zip(*points, strict=True), linewidth=1, label=label)
    unit = panel["fieldConfig"]["defaults"]["unit"]
    formatter = PercentFormatter(1.0) if unit == "percentunit" else EngFormatter(_UNITS[unit], sep="")
    at.yaxis.set_major_formatter(formatter)
    at.set_ylim(bottom=0)
    at.set_title(panel["title"], loc="left", fontsize=8)
    at.legend(loc="upper left", fontsize=5, frameon=False, ncols=2)
