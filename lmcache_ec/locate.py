# SPDX-License-Identifier: Apache-2.0
"""Finds out which tiers hold an entry: all are asked in parallel, and nothing is moved."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_ec.channel import Locate, Located
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.recent import Recent
from lmcache_ec.tiers.stack import Found, Stack, Wanted

_PROVEN_S = 60.0


@dataclass(slots=True)
class _Question:
    """One `Locate` in progress: how many lanes have yet to answer, and those that have the entry, a bit each."""

    asked: Locate
    outstanding: int
    held: int = 0

    @property
    def key(self) -> EncoderCacheKey:
        return EncoderCacheKey(self.asked.namespace, self.asked.identifier)


class Locator:
    """Answers `Locate`. `ask` runs on the store process's main thread, the rest on the lanes' own threads.

    A lane that is left alone, or whose listing lacks the entry, answers at once. An entry counts if it has the length
    asked for: another item's under the same name, or another version's, does not. If entries are signed it must also be
    read and verified: otherwise entries announced to consumers could be anyone's. For a minute after that, the length
    alone is enough.
    """

    def __init__(self, stack: Stack, post: Callable[[Located], None]) -> None:
        self._stack = stack
        self._post = post
        self._proven: Recent[tuple[int, EncoderCacheKey]] = Recent(_PROVEN_S)
        self._lock = threading.Lock()  # guards the questions' counts and what is proven; never held across I/O

    def ask(self, asked: Sequence[Locate]) -> None:
        """Ask for several entries together, for tiers that batch."""
        questions = [_Question(one, one.tiers.bit_count()) for one in asked]
        for number, lane in enumerate(self._stack.lanes):
            here = [one for one in questions if one.asked.tiers >> number & 1]
            worth = [one for one in here if lane.asks(one.key.digest)]
            for share in lane.shares(worth):
                lane.reads.submit(self._look, number, share)
            for one in here:
                if one not in worth:
                    self._answer(one, 0)

    def _look(self, number: int, questions: Sequence[_Question]) -> None:
        lengths = self._stack.lengths(number, [one.key for one in questions])
        for one, length in zip(questions, lengths, strict=True):
            held = length == one.asked.length and self._proves(number, one.key, length)
            self._answer(one, 1 << number if held else 0)

    def _proves(self, number: int, key: EncoderCacheKey, length: int) -> bool:
        """Whether an entry that is there is validly signed, if it must be."""
        if self._stack.signing is None:
            return True
        with self._lock:
            if self._proven.holds((number, key), time.monotonic()):
                return True
        (answer,) = self._stack.read(number, [Wanted(key, memoryview(bytearray(length)))])
        if not isinstance(answer, Found):
            return False
        with self._lock:
            self._proven.add((number, key), time.monotonic())
        return True

    def _answer(self, question: _Question, held: int) -> None:
        with self._lock:
            question.held |= held
            question.outstanding -= 1
            last = not question.outstanding
        if last:
            self._post(Located(question.asked.number, question.held))
