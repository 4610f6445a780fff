# SPDX-License-Identifier: Apache-2.0
"""What every test can rely on: the environment of an in-process engine is set before anything imports vLLM."""

import atexit
import gc
from pathlib import Path

import pytest

from benchmarks.testbed.engine_env import apply_environment
from tests.examples import take_few

apply_environment()
take_few()
gc.disable()  # while vLLM, torch and the tests are imported, nothing becomes garbage that would be worth the search


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-rows", type=Path, help="append what came of each fault to this file (make reliability)")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--fault-rows"):
        from tests.reliability import Recorder

        config.pluginmanager.register(Recorder(path))


def pytest_collection_finish() -> None:
    """What has been imported stays: the collector need not look through it each time."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # what stays at the end of the interpreter counts as a leak
