# SPDX-License-Identifier: Apache-2.0
"""Tests of a fresh interpreter: its imports, and that no hash seed affects a namespace. One interpreter serves both."""

import os
import subprocess
import sys

import pytest

from benchmarks.testbed.models import ROOT, model_path
from tests.unit.test_namespace import MODEL, namespace

PROBE = f"""
import sys
import vllm.distributed.ec_transfer.ec_connector.factory
before = set(sys.modules)
from lmcache_ec.adapters.vllm.connector import ECLMCacheConnector as connector
from lmcache_ec.adapters.vllm.plugin import register
register(), register()
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
assert ECConnectorFactory._registry["ECLMCacheConnector"]() is connector
assert connector.build_ec_connector_stats(dict()).is_empty()
print("imported", *sorted(set(sys.modules) - before))
from tests.unit.test_namespace import namespace
print("namespace", namespace({str(model_path(MODEL))!r}))
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    """The probe's output: each line's words, by its first word."""
    environment = {**os.environ, "PYTHONHASHSEED": "1234"}
    run = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    return {words[0]: words[1:] for words in map(str.split, run.stdout.splitlines()) if words}


def test_the_front_end_imports_the_class_without_the_cache(printed: dict[str, list[str]]) -> None:
    """It needs only class methods, and would pay for the import at every start."""
    imported = printed["imported"]
    ours = {name for name in imported if name.startswith("lmcache_ec")}
    assert ours <= {
        "lmcache_ec",
        "lmcache_ec.adapters",
        "lmcache_ec.adapters.vllm",
        "lmcache_ec.adapters.vllm.connector",
        "lmcache_ec.adapters.vllm.decisions",
        "lmcache_ec.adapters.vllm.front_end",
        "lmcache_ec.adapters.vllm.identifiers",
        "lmcache_ec.adapters.vllm.metric_table",
        "lmcache_ec.adapters.vllm.metrics",
        "lmcache_ec.adapters.vllm.topology",
        "lmcache_ec.adapters.vllm.ours",
        "lmcache_ec.adapters.vllm.plugin",
        "lmcache_ec.adapters.vllm.versions",
        "lmcache_ec.adapters.vllm.start",
        "lmcache_ec.adapters.vllm.worker_calls",
        "lmcache_ec.histogram",
        "lmcache_ec.key",
        "lmcache_ec.tally",
        "lmcache_ec.version",
    }
    assert not any(name.split(".")[0] in ("lmcache", "numba") for name in imported)


def test_another_process_finds_the_same_namespace(printed: dict[str, list[str]]) -> None:
    assert printed["namespace"] == [namespace(model_path(MODEL))]
