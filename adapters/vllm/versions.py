# SPDX-License-Identifier: Apache-2.0
"""What differs between the versions of vLLM that are supported, and how each difference is met.

What one version has and another lacks has one function here, which says since when it is there. Importing this module
does not import vLLM.
`tests/unit/test_vllm_interface.py` compares all else that the adapter uses with vLLM's sources.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

OLDEST, NEWEST = "0.30", "0.33"
"""Of the versions that are supported; `docs/support.md` says which of them have run."""


def supported(version: str) -> bool:
    """Whether a version of vLLM, such as "0.33.2+cu129", is one of those."""
    return minor(OLDEST) <= minor(version) <= minor(NEWEST)


def minor(version: str) -> tuple[int, int]:
    """ "0.33.2+cu129" is (0, 33); what is no version comes before all."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def shows_metrics(version: str) -> bool:
    """Whether vLLM asks a connector for what it has counted, and shows it in /metrics and its log: since 0.31. Before
    that nothing imports `metrics`, which stands on classes of vLLM's that are not there."""
    return minor(version) >= (0, 31)


def output_widths(vllm_config: VllmConfig) -> dict[str, int]:
    """Modality to the width of an encoder output, which producers measure at their start since 0.32; before that, as
    with consumers, nothing: widths are learned from what is encoded."""
    return dict(getattr(vllm_config.ec_transfer_config, "mm_encoder_output_widths", {}))


def payload_updates(scheduler_output: SchedulerOutput) -> Mapping[str, Mapping[int, object]] | None:
    """Request to item to what it is encoded from, None where vLLM's V2 runner lets go of that: since 0.33. Before that
    None: a worker keeps it until the request ends."""
    updates: Mapping[str, Mapping[int, object]] | None = getattr(scheduler_output, "encoder_input_updates", None)
    return updates
