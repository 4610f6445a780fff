# SPDX-License-Identifier: Apache-2.0
"""What every test can rely on: the environment of an in-process engine is set before anything imports vLLM."""

import gc
from pathlib import Path

import pytest

from benchmarks.testbed.engine_env import apply_environment

apply_environment()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-rows", type=Path, help="append what came of each fault to this file (make reliability)")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--fault-rows"):
        from tests.reliability import Recorder

        config.pluginmanager.register(Recorder(path))


def pytest_collection_finish() -> None:
    """vLLM and torch are imported by now and stay: the collector need not look through them each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end of the interpreter what stays counts as a leak."""
    gc.unfreeze()
