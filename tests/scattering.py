# SPDX-License-Identifier: Apache-2.0
"""Common base of the fake sockets in tests."""

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Scattering(ABC):
    """Receives into several views as a kernel may: fills part of the first, or all of it and part of the next. Used by
    the test's single thread."""

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
