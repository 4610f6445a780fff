# SPDX-License-Identifier: Apache-2.0
"""What every test can rely on: the environment of an in-process engine is set before anything imports vLLM."""

from tests.engine_env import apply_environment

apply_environment()
