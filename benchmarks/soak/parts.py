# SPDX-License-Identifier: Apache-2.0
"""What the soak borrows from the tests: real servers, tiny checkpoints, and a rank that is no engine's."""

from tests.engine_env import Engine, Layout, engine_environment, greedy
from tests.engine_runner import Call, EngineProcess, descendants
from tests.integration.harness import Bench, length, payload
from tests.media import picture
from tests.models import ROOT, model_path
from tests.seaweed import Seaweed
from tests.servers.redis import RedisServer, free_port

__all__ = [
    "ROOT",
    "Bench",
    "Call",
    "Engine",
    "EngineProcess",
    "Layout",
    "RedisServer",
    "Seaweed",
    "descendants",
    "engine_environment",
    "free_port",
    "greedy",
    "length",
    "model_path",
    "payload",
    "picture",
]
