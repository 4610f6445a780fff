# SPDX-License-Identifier: Apache-2.0
"""A picture of the dashboard in configs/, drawn from Prometheus data: for the documentation, without a Grafana.

    python -m benchmarks.dashboard [--minutes 4] [--picture docs/dashboard.svg]

starts an engine with a small arena, a disk and a Redis, and sends it requests of four concurrent users, who draw from
200 pictures by Zipf's law. Half-way the engine is killed and started again; later Redis is unreachable for a while.
"""

import argparse
import itertools
import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, PercentFormatter

from benchmarks.testbed.models import ROOT
from benchmarks.testbed.servers.openai import OpenAIServer, image_part
from benchmarks.testbed.servers.prometheus import Prometheus
from benchmarks.testbed.servers.redis import redis_server

DASHBOARD: dict[str, Any] = json.loads((ROOT / "configs/grafana-dashboard.json").read_text())
ALERTS = ROOT / "configs/prometheus-alerts.yaml"
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
_UNITS = {"s": "s", "Bps": "B/s", "bytes": "B", "ops": "/s", "short": ""}
_COLUMNS = 4
_WINDOW = "15s"
_STEP_S = 2
_ROOM_FOR_LEGEND = 1.45
_PICTURES = 200
_USERS = 4
_FORGET_S = 5.0
"""Interval at which vLLM's own cache is emptied: it would hold everything that the small model's users ask for."""


def without_variables(query: str, window: str = "1m") -> str:
    """A panel's query as Grafana sends it: for all models and engines, rates over `window`."""
    return query.replace("$__rate_interval", window).replace("$model_name", ".*").replace("$engine", ".*")


def draw(prometheus: Prometheus, seconds: float, path: Path) -> None:
    """Draw every panel for the last `seconds`."""
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
        query = without_variables(target["expr"], _WINDOW)
        answer = prometheus.ask("query_range", query=query, start=end - seconds, end=end, step=_STEP_S)
        for series in answer["result"]:
            label = target["legendFormat"]
            for name, value in series["metric"].items():
                label = label.replace(f"{{{{{name}}}}}", value)
            points = [(float(when) - end, float(value)) for when, value in series["values"]]
            at.plot(*zip(*points, strict=True), linewidth=1, label=label)
    unit = panel["fieldConfig"]["defaults"]["unit"]
    formatter = PercentFormatter(1.0) if unit == "percentunit" else EngFormatter(_UNITS[unit], sep="")
    at.yaxis.set_major_formatter(formatter)
    at.set_ylim(0, at.get_ylim()[1] * _ROOM_FOR_LEGEND)
    at.set_xlim(-seconds, 0)
    at.set_title(panel["title"], loc="left", fontsize=8)
    at.legend(loc="upper left", fontsize=5, frameon=False, ncols=2)


@contextmanager
def users(server: OpenAIServer) -> Iterator[None]:
    """Ask for one picture after another, as `_USERS` concurrent users, until the end of the block."""
    ended = threading.Event()

    def user(number: int) -> None:
        chance = random.Random(number)
        weights = list(itertools.accumulate(1 / rank for rank in range(1, _PICTURES + 1)))
        while not ended.is_set():
            (picture,) = chance.choices(range(_PICTURES), cum_weights=weights)
            server.ask(image_part(picture), max_tokens=4)

    def forget() -> None:
        while not ended.wait(_FORGET_S):
            server.forget()

    with ThreadPoolExecutor(_USERS + 1) as pool:
        running = [pool.submit(user, number) for number in range(_USERS)] + [pool.submit(forget)]
        try:
            yield
        finally:
            ended.set()
    for each in running:
        each.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/dashboard.svg")
    options = parser.parse_args()
    quarter_s = options.minutes * 60 / 4
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-ec-dashboard-") as name,
        redis_server(Path(name) / "redis") as redis,
    ):
        folder = Path(name)
        keys = {"local_disk": str(folder / "disk"), "remote_url": redis.url, "max_local_cpu_size": 0.002}
        connector = {
            "ec_connector": "ECLMCacheConnector",
            "ec_role": "ec_both",
            "ec_connector_extra_config": keys,
        }
        with (
            OpenAIServer("qwen3vl", folder / "server", connector=connector) as server,
            Prometheus(folder / "prometheus", [server.url.removeprefix("http://")], ALERTS) as prometheus,
        ):
            began = time.monotonic()
            with users(server):
                time.sleep(2 * quarter_s)
            server.kill()
            server.start()
            with users(server):
                time.sleep(quarter_s)
                redis.kill()
                time.sleep(quarter_s / 2)
                redis.start()
                time.sleep(quarter_s / 2)
            draw(prometheus, time.monotonic() - began, options.picture)


if __name__ == "__main__":
    main()
