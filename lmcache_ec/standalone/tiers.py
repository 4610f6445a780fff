# SPDX-License-Identifier: Apache-2.0
"""The tiers of a process without a store process: opened here, surveyed on one thread, asked on the caller's."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from logging import Logger
from typing import TypeVar

from lmcache_ec.complaints import Complaints
from lmcache_ec.entry import TensorSpec
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.signing import SigningKey
from lmcache_ec.tiers.journal import Journal
from lmcache_ec.tiers.opening import Opening, opened
from lmcache_ec.tiers.stack import Elsewhere, Found, Stack, Wanted

_KNOWN_LENGTHS = 8192
DISK_RESCAN_S = 600.0
"""No caller waits for the listing of a disk here: it only shows how much there is."""

_TICK_S = 1.0


_T = TypeVar("_T")
Lend = Callable[[int], AbstractContextManager[memoryview]]
"""Provides a buffer of exactly the given length for the duration of its block."""


class NoRoomError(Exception):
    """The caller has no memory for what was found."""


class Tiers:
    """The stack of tiers, its log, and a thread that has it surveyed. ValueError for a tier that cannot be used.

    Any thread may call it. `_lock` guards the lengths, and `_complaining` the log; neither is held across other I/O.
    """

    def __init__(
        self,
        openings: Sequence[Opening],
        namespace: str,
        copied_bytes: int,
        logger: Logger,
        signing: SigningKey | None = None,
    ) -> None:
        self.journal = Journal(self._report)
        self._lock, self._complaining = threading.Lock(), threading.Lock()
        self._complaints = Complaints(logger)
        self._lengths: OrderedDict[EncoderCacheKey, int] = OrderedDict()  # of entries found recently
        self._closing, self._due = threading.Event(), threading.Event()
        tiers = opened(openings, self._report, _refuse)
        self.stack = Stack(
            tiers, self.journal, namespace, wake=self._due.set, copied_bytes=copied_bytes, signing=signing
        )
        os.close(self.stack.presence.fd)  # no other process maps it
        self._keeper = threading.Thread(target=self._keep_house, name="entry-tiers", daemon=True)
        self._keeper.start()

    def hold(self, key: EncoderCacheKey, insist: bool = False) -> bool:
        """Whether one of them has the entry, as far as they can be asked; `insist`: even if a listing lacks it. One
        that recently did not verify counts as absent, so that a caller who checks before writing replaces it."""
        number = self.stack.worth_asking(key, 0, insist)
        while number is not None:
            (length,) = self.stack.lengths(number, [key])
            if length is not None and not self.stack.lanes[number].doubts(key.digest):
                with self._lock:
                    self._lengths[key] = length
                    if len(self._lengths) > _KNOWN_LENGTHS:
                        self._lengths.popitem(last=False)
                return True
            number = self.stack.worth_asking(key, number + 1, insist)
        return False

    def get(
        self,
        key: EncoderCacheKey,
        lend: Lend,
        use: Callable[[int, memoryview, TensorSpec], _T | None],
        insist: bool = False,
    ) -> _T | None:
        """What `use` returns for a verified entry, given the tier's number and the entry's bytes; None if there is no
        entry for which it returns something. Raises `NoRoomError` if `lend` or `use` does; all else is reported."""
        number = self.stack.worth_asking(key, 0, insist)
        while number is not None and not self._closing.is_set():
            try:
                used = self._read(number, key, lend, use)
                if used is not None:
                    return used
            except NoRoomError as error:
                self.complain("no_room", str(error))
                self.journal.count("misses")
                raise
            except Exception as error:  # the caller's; it does not count against the tier
                name = self.stack.lanes[number].name
                self.complain(f"{name}_read_errors", f"{name}: {type(error).__name__}: {error}")
            number = self.stack.worth_asking(key, number + 1, insist)
        self.journal.count("misses")
        return None

    def _read(
        self, number: int, key: EncoderCacheKey, lend: Lend, use: Callable[[int, memoryview, TensorSpec], _T | None]
    ) -> _T | None:
        """What `use` returns for one tier's entry."""
        length = self._length(number, key)
        while length is not None:
            with lend(length) as data:
                (answer,) = self.stack.read(number, [Wanted(key, data)])
                if isinstance(answer, Found):
                    return use(number, data, answer.spec)
            length = answer.length if isinstance(answer, Elsewhere) else None  # it has been replaced
        return None

    def remove(self, key: EncoderCacheKey) -> None:
        """Remove it from each tier."""
        for lane in self.stack.lanes:
            self.stack.delete(lane, key)

    def _length(self, number: int, key: EncoderCacheKey) -> int | None:
        """The length of an entry, in bytes: for one just found by `hold`, its length then; for others, as
        the tier reports it; None if the tier has none, or cannot tell."""
        with self._lock:
            known = self._lengths.pop(key, None)
        return known or self.stack.lengths(number, [key])[0]

    def complain(self, kind: str, text: str) -> None:
        """Count it, and log a line of this kind from time to time."""
        self.journal.count(kind)
        self._report(kind, text)

    def close(self) -> None:
        """Release the tiers. What is still in progress fails, or ends with the process."""
        self._closing.set()
        self._due.set()
        self._keeper.join()
        self.stack.announce()
        self.stack.close()

    def _report(self, kind: str, text: str) -> None:
        if not self._closing.is_set():
            with self._complaining:
                self._complaints.warn(kind, text)

    def _keep_house(self) -> None:
        """Survey and probe the tiers that are due; one that failed, at once."""
        while not self._closing.is_set():
            self._due.clear()
            self.stack.survey_due()
            self._due.wait(_TICK_S)


def _refuse(problem: str) -> None:
    raise ValueError(problem)
