# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts in configs/ query metrics that exist, in valid PromQL."""

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.dashboard import DASHBOARD, PANELS, without_variables
from benchmarks.testbed.models import ROOT
from lmcache_ec.adapters.vllm.metric_table import METRICS, PREFIX, Kind

ALERTS = ROOT / "configs/prometheus-alerts.yaml"
RULES = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]

BROKEN = {
    "unavailable_requests_total{}": "0+1x60",
    'tier_forged_total{tier="redis"}': "0+1x60",
    'tier_corrupt_total{tier="redis"}': "0+1x60",
    'tier_state{tier="redis",state="unreachable"}': "1x60",
    'tier_state{tier="s3",state="resting"}': "1x60",
    'tier_state{tier="disk",state="read_only"}': "1x60",
    "store_restarts_total{}": "0+1x60",
    "deadlines_total{}": "0+10x60",
    "deferred_seconds_count{}": "0+20x60",
    'saves_dropped_total{reason="no_room"}': "0+10x60",
    "saves_total{}": "0+10x60",
    'tier_writes_dropped_total{tier="redis"}': "0+1x60",
    "load_failures_total{}": "0+1x60",
    'misses_total{reason="off"}': "0+1x60",
    "memory_only{}": "1x60",
}
WELL = {
    **dict.fromkeys(BROKEN, "0x60"),
    "deadlines_total{}": "0+1x60",
    "deferred_seconds_count{}": "0+100x60",
    'saves_dropped_total{reason="no_room"}': "0+1x60",
    "saves_total{}": "0+100x60",
    'tier_state{tier="redis",state="serving"}': "1x60",
    'misses_total{reason="new"}': "0+9x60",
    'tier_writes_total{tier="redis"}': "0+9x60",
}


def promtool(*arguments: object, cwd: Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed: Debian's package is prometheus; .ci/run installs it")
    done = subprocess.run([program, *map(str, arguments)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def exposed() -> Iterator[str]:
    """Every scraped name."""
    for metric in METRICS:
        if metric.kind is Kind.HISTOGRAM:
            yield from (f"{PREFIX}{metric.name}_{part}" for part in ("bucket", "sum", "count"))
        else:
            yield PREFIX + metric.name


def test_dashboard_and_alerts_use_only_metrics_and_labels_that_exist() -> None:
    known = set(exposed())
    labels = {label for metric in METRICS for label in metric.labels} | {"engine", "model_name", "le"}
    for query in (*QUERIES, *(rule["expr"] for rule in RULES)):
        assert set(re.findall(rf"{PREFIX}\w+", query)) <= known, query
        named = re.findall(r"(\w+)=~?\"", query)
        grouped = [label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")]
        assert {*named, *grouped} <= labels, query


def test_the_dashboard_shows_every_metric_except_those_left_out_on_purpose() -> None:
    beside = {
        *(
            "rewrites",
            "early_lookups",
            "fetches",
            "fetch_misses",
            "filtered",
            "misfits",
            "unsigned_items",
            "weight_changes",
        ),
        *("tier_writes", "tier_writes_skipped", "tier_replaced", "evicted_bytes", "encodes_skipped", "encodes_again"),
        *("saves", "writes", "memory_entries", "memory_only", "epoch", "tier_queued_bytes"),
    }
    shown = "".join(QUERIES)
    for metric in METRICS:
        name = metric.name.removesuffix("_total")
        assert (re.search(rf"\b{PREFIX}{metric.name}(_bucket|_count)?\b", shown) is None) == (name in beside), name


def test_promtool_accepts_the_alerts_and_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": without_variables(q)} for number, q in enumerate(QUERIES)]
    (tmp_path / "panels.yaml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", ALERTS, "panels.yaml", cwd=tmp_path)


def test_each_alert_fires_when_its_fault_is_present_and_none_when_all_is_well(tmp_path: Path) -> None:
    def case(faults: dict[str, str], firing: list[str]) -> dict[str, Any]:
        series = [
            {"series": PREFIX + name.replace("{", '{model_name="m",engine="0",'), "values": values}
            for name, values in faults.items()
        ]
        samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing]
        query = 'count by (alertname) (ALERTS{alertstate="firing"})'
        return {
            "interval": "1m",
            "input_series": series,
            "promql_expr_test": [{"expr": query, "eval_time": "60m", "exp_samples": samples}],
        }

    cases = [case(BROKEN, [rule["alert"] for rule in RULES]), case(WELL, [])]
    (tmp_path / "test.yaml").write_text(
        json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": cases})
    )
    promtool("test", "rules", "test.yaml", cwd=tmp_path)


def test_the_documentation_names_each_alert() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    for rule in RULES:
        assert f"| `{rule['alert']}` | {rule['labels']['severity']} |" in page


def test_grafana_can_lay_the_dashboard_out() -> None:
    """As its dashboard schema requires: ids are unique, panels lie on 24 columns and do not overlap, and each has a
    data source and unique names for its queries."""
    assert Counter(panel["id"] for panel in DASHBOARD["panels"]).most_common(1)[0][1] == 1
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "model_name", "engine"}
    for panel in PANELS:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names) > 0
    for one, other in combinations(DASHBOARD["panels"], 2):
        a, b = one["gridPos"], other["gridPos"]
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert beside or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
