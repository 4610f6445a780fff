# SPDX-License-Identifier: Apache-2.0
"""Agreement of all ranks of the first pipeline stage: on which loads failed, and on having other weights."""

from __future__ import annotations

import torch


def agree(values: list[bool]) -> list[bool]:
    """Whether each value is true on any rank. A collective over host memory; all ranks call it in the same step."""
    from vllm.distributed import parallel_state

    votes = torch.tensor(values, dtype=torch.int32)
    for group in (parallel_state.get_tp_group(), parallel_state.get_pcp_group()):
        if group.world_size > 1:
            torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX, group.cpu_group)
    return [bool(vote) for vote in votes.tolist()]
