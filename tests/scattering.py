# SPDX-License-Identifier: Apache-2.0
"""What sockets that tests make up have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Scattering(ABC):
    """Receives into several views as a kernel may: fills some of the first, or all of it and some of the next. Used by
    the one thread of a test."""

    @abstractmethod
    def recv_into(self, view: memoryview) -> int: ...

    def recvmsg_into(self, views: Sequence[memoryview]) -> tuple[int, list[object], int, None]:
        count = 0
        for view in views:
            came = self.recv_into(view)
            count += came
            if came < len(view):
                break
        return count, [], 0, None
