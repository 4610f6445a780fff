# SPDX-License-Identifier: Apache-2.0
"""Where an item of a request stands."""

import enum


class Standing(enum.Enum):
    """Where an item of a request stands before the request is scheduled."""

    SETTLED = enum.auto()
    """Leased to the request, or in vLLM's own cache, or to be promised when it is asked for."""
    PENDING = enum.auto()
    """It can still arrive."""
    MISSED = enum.auto()
    """Nothing will come: vLLM encodes it, if it carries anything to encode."""
