# SPDX-License-Identifier: Apache-2.0
"""Which weights the encoder runs with, as its ranks report it, and where outputs of these weights are kept.

What is known, and when:

1. A rank counts the calls that may have changed its weights. It reports "unknown" before such a call begins and the
   digest of its weights once it is over. All ranks get the same calls in the same order, between the same steps.
2. The weights are known while the last report of every rank has a digest and all are about the same number of calls.
   Otherwise they are in doubt: nothing is promised, nothing is reserved, and nothing is lost.
3. The scheduler side acts on reports between passes alone. Each step says which weights it was prepared for; a rank
   whose own differ copies nothing for it. So it does not matter how fast a report is: at worst a step encodes anew.
4. The first weights that are known are those of the start. The namespace of the engine is theirs and nobody else's.
5. A new epoch changes that namespace, and with it every other one, and nothing about the weights.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from lmcache_ec.key import MAX_NAMESPACE_CHARS
from lmcache_ec.positional import positional

Persist = Literal[False, True, "by_version"]
"""What becomes of weights other than those of the start: memory only, a namespace by digest, or one by version."""


@positional
@dataclass(frozen=True, slots=True)
class Held:
    """The weights that all ranks have, after so many calls: a digest a rank."""

    calls: int
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Home:
    """Where the outputs of some weights are kept: a namespace, in memory and, if it `persists`, in the tiers.

    The namespace is one of this epoch."""

    namespace: str
    persists: bool
    epoch: int = 0


class Weights:
    """The scheduler side's knowledge of the weights of one engine. Runs on its thread alone; no lock, no I/O."""

    def __init__(self, ranks: int, namespace: str, persist: Persist = False, epoch: int = 0) -> None:
        """`namespace` is that of the weights of the start, in this epoch. Of 0 `ranks` nothing is expected: weights
        never change."""
        self.moved = False
        """Whether a report, a version or an epoch has come that nobody has acted on."""
        self.epoch = epoch
        self._namespace = namespace
        self._persist = persist
        self._reports = [(0, "")] * ranks
        self._start: tuple[str, ...] | None = None if ranks else ()
        self._version = ""
        self._versions: dict[str, tuple[str, ...]] = {}  # which weights each one has named, the last of them last

    def report(self, rank: int, calls: int, digest: str) -> None:
        """A rank has reported, see `WeightsReport`."""
        self._reports[rank] = calls, digest
        self.moved = True
        held = self.held
        if self._start is None and held is not None:
            self._start = held.digests

    @property
    def started(self) -> bool:
        """Whether the weights of the start are known."""
        return self._start is not None

    @property
    def held(self) -> Held | None:
        """The weights as far as the ranks have reported; None while they are in doubt."""
        counts, digests = {calls for calls, _ in self._reports}, tuple(digest for _, digest in self._reports)
        return Held(max(counts, default=0), digests) if len(counts) < 2 and all(digests) else None

    def begin_epoch(self, epoch: int, namespace: str) -> None:
        """From now on this is the namespace of the weights of the start."""
        self.epoch, self._namespace = epoch, namespace
        self.moved = True

    @property
    def home_of_start(self) -> Home:
        """Where outputs of the weights of the start are kept, whether these are known yet or not."""
        return Home(self._namespace, True, self.epoch)

    def set_version(self, version: str) -> str:
        """The weights are of this version from now on, until they change. Returns what is wrong with that, or "".

        A version names the weights that are known when it is set: one that is set before an update is the old weights'.
        """
        held, self._version = self.held, ""
        self.moved = True
        if held is None:
            return f"weight version {version!r} was set while the weights are not known; set it after the update"
        if self._versions.setdefault(version, held.digests) != held.digests:
            return f"weight version {version!r} was used for other weights before"
        self._version = version
        while len(self._versions) > _VERSIONS_REMEMBERED:
            del self._versions[next(iter(self._versions))]
        return ""

    def home(self, held: Held) -> Home:
        """Where outputs of these weights are kept."""
        digests = held.digests
        if digests == self._start:
            return self.home_of_start
        if self._persist is True:
            return Home(self._derived("digest", *digests), True, self.epoch)
        if self._persist == "by_version" and self._versions.get(self._version) == digests:
            return Home(self._derived("version", self._version), True, self.epoch)
        return Home(self._derived("memory", *digests), False, self.epoch)

    def _derived(self, *what: str) -> str:
        """A namespace of its own beside the start's, and as readable."""
        digest = hashlib.sha256("\0".join((self._namespace, *what)).encode()).hexdigest()[:16]
        return f"{self._namespace[: MAX_NAMESPACE_CHARS - 1 - len(digest)]}-{digest}"


_VERSIONS_REMEMBERED = 1024
