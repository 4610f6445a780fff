# SPDX-License-Identifier: Apache-2.0
"""Set-up for all tests: the environment of an in-process engine is set before anything imports vLLM."""

from __future__ import annotations

import atexit
import gc
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.testbed.engine_env import apply_environment
from lmcache_ec import store_process
from tests import warm_store
from tests.examples import take_few

if TYPE_CHECKING:
    from benchmarks.testbed.servers.seaweed import Seaweed
    from lmcache_ec.store_process import Starter

apply_environment()
take_few()
gc.disable()  # importing vLLM, torch and the tests creates no garbage worth collecting


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-rows", type=Path, help="append what came of each fault to this file (make reliability)")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--fault-rows"):
        from tests.reliability import Recorder

        config.pluginmanager.register(Recorder(path))


def pytest_collection_finish() -> None:
    """Imported objects stay: the collector need not traverse them each time."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # objects still frozen at interpreter exit count as leaks


@pytest.fixture(scope="session", autouse=True)
def how_store_processes_begin() -> Iterator[Callable[..., Starter]]:
    """In tests store processes are forked. The value is the real starter."""
    begin, warm = store_process.begin, warm_store.WarmStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_process, "begin", warm.begin)
        yield begin
    warm.close()


@pytest.fixture
def new_interpreters(how_store_processes_begin: Callable[..., Starter], monkeypatch: pytest.MonkeyPatch) -> None:
    """Store processes start as they do for users."""
    monkeypatch.setattr(store_process, "begin", how_store_processes_begin)


@pytest.fixture(scope="session")
def seaweed_for_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    from benchmarks.testbed.servers.seaweed import seaweed

    with seaweed(tmp_path_factory.mktemp("s3") / "data") as server:
        yield server


@pytest.fixture(scope="module")
def s3(seaweed_for_all: Seaweed) -> Seaweed:
    """A server shared with other files, with a bucket for this file. Tests that disturb a server start their own."""
    return seaweed_for_all.with_bucket(f"tests-{uuid.uuid4().hex}")
