# SPDX-License-Identifier: Apache-2.0
"""The model's outputs without the cache are computed once for all tests here."""

import msgspec
import pytest

from benchmarks.testbed.engine_env import Layout, Output
from benchmarks.testbed.engine_runner import Call, EngineProcess
from tests import warm_start
from tests.faults.harness import MAX_TOKENS, MODEL, Truth

PICTURES = 90


@pytest.fixture(scope="session")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    folder = tmp_path_factory.mktemp("truth")
    asked = {"first": 1, "last": PICTURES, "max_tokens": MAX_TOKENS, "folder": str(folder)}
    with EngineProcess(MODEL, Layout.ONE_PROCESS, folder=folder / "engine", begin=warm_start.begin) as engine:
        revealed = engine.do(Call("tests.faults.inside:reveal", asked)).value
    identifiers = {seed: identifier for seed, identifier, _ in revealed}
    return Truth(folder, identifiers, {seed: msgspec.convert(output, Output) for seed, _, output in revealed})
