# SPDX-License-Identifier: Apache-2.0
"""The soak's imports from the testbed: real servers, tiny checkpoints, and a rank without an engine."""

from benchmarks.testbed.core import Bench, length, payload
from benchmarks.testbed.engine_env import Engine, Layout, engine_environment, greedy, vllm_version
from benchmarks.testbed.engine_runner import Call, EngineProcess, descendants
from benchmarks.testbed.media import picture
from benchmarks.testbed.models import ROOT, model_path
from benchmarks.testbed.servers.openai import server_flags
from benchmarks.testbed.servers.redis import RedisServer, free_port
from benchmarks.testbed.servers.seaweed import Seaweed

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
    "server_flags",
    "vllm_version",
]
