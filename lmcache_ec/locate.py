# SPDX-License-Identifier: Apache-2.0
"""Which tiers hold an entry: asked of all of them side by side, and nothing is moved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_ec.channel import Locate, Located
from lmcache_ec.key import EncoderCacheKey
from lmcache_ec.tiers.stack import Stack


@dataclass(slots=True)
class _Question:
    """One `Locate` on its way: how many lanes have yet to answer, and those that have the entry, a bit each."""

    asked: Locate
    outstanding: int
    held: int = 0

    @property
    def key(self) -> EncoderCacheKey:
        return EncoderCacheKey(self.asked.namespace, self.asked.identifier)


class Locator:
    """Answers `Locate`. `ask` runs on the store process's main thread, the rest on the lanes' own threads.

    A lane that is left alone, or whose listing lacks the entry, answers at once. An entry counts if it has the length
    that was asked for: another's under the same name, or another version's, is none.
    """

    def __init__(self, stack: Stack, post: Callable[[Located], None]) -> None:
        self._stack = stack
        self._post = post
        self._lock = threading.Lock()  # of the questions' numbers; never held across I/O

    def ask(self, asked: Sequence[Locate]) -> None:
        """Ask for several entries together, as tiers that batch like it."""
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
            self._answer(one, 1 << number if length == one.asked.length else 0)

    def _answer(self, question: _Question, held: int) -> None:
        with self._lock:
            question.held |= held
            question.outstanding -= 1
            last = not question.outstanding
        if last:
            self._post(Located(question.asked.number, question.held))
