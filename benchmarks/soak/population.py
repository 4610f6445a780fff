# SPDX-License-Identifier: Apache-2.0
"""What clients ask: which picture, under which name, with which salt. Some are honest, others lie."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.soak.judge import Ask, Way
from benchmarks.soak.reference import ARGUMENTS
from benchmarks.soak.truth import Truth

_SALTS = ("", "tenant-a", "tenant-b")
_SKEW = 2.2
"""The higher, the more requests are for a few pictures."""


@dataclass(frozen=True, slots=True)
class Kind:
    """`weight`: how often. An `honest` kind gives each name one picture forever, whatever the salt."""

    name: str
    weight: float
    honest: bool
    ask: Callable[[Population], Ask]


class Population:
    """For one thread. The same `chance` gives the same requests in the same order."""

    def __init__(self, truth: Truth, chance: Random, *, honest: bool) -> None:
        self._truth = truth
        self._chance = chance
        self._honest = honest
        self._kinds = [kind for kind in KINDS if kind.honest or not honest]
        self._weights = [kind.weight for kind in self._kinds]
        self._meanings: dict[tuple[str, str, str], int] = {}
        self._fixed = False
        self._asked = 0

    def begin(self, *, fixed: bool) -> None:
        """A server starts, and names get new meanings. `fixed`: they keep them for as long as it runs.

        (With prefix caching vLLM may take the beginning of a picture from one that its name meant before, and the rest
        from another: together they are a picture that no client sent.)
        """
        self._meanings.clear()
        self._fixed = fixed
        self._asked = 0

    def draw(self) -> Ask:
        self._asked += 1
        [kind] = self._chance.choices(self._kinds, self._weights)
        return kind.ask(self)

    # ---- honest

    def _plain(self) -> Ask:
        return Ask("plain", (self._skewed(self._truth.pictures),))

    def _pair(self) -> Ask:
        return Ask("pair", self._chance.choice(self._truth.pairs)) if self._truth.pairs else self._plain()

    def _argued(self) -> Ask:
        return Ask("argued", (self._chance.choice(self._truth.argued),), self._chance.choice(_ARGUED))

    def _text(self) -> Ask:
        return Ask("text")

    def _salted(self) -> Ask:
        return Ask("salted", (self._skewed(self._truth.pictures),), salt=self._chance.choice(_SALTS))

    def _named(self) -> Ask:
        number = self._skewed(self._truth.pictures[: len(self._truth.pictures) // 2])
        name = self._chance.choice([f"photo-{number}", f"sku-{number}-image-{number % 4}"])
        salt = _SALTS[number % len(_SALTS)] if self._honest else self._chance.choice(_SALTS)
        return Ask("named", (number,), name=name, salt=salt)

    def _named_and_argued(self) -> Ask:
        number = self._chance.choice(self._truth.argued)
        return Ask("named-argued", (number,), self._chance.choice(_ARGUED), name=f"photo-{number}")

    def _named_only(self) -> Ask:
        """A name that may have been used before, with the size of its picture, but no picture."""
        named = self._named()
        way = self._chance.choice([Way.NAME_ONLY, Way.PLACEHOLDER])
        return Ask("named-only", named.pictures, name=named.name, salt=named.salt, way=way)

    # ---- lying, or in a world where others lie

    def _tenant(self) -> Ask:
        """The same names in each salt, but each salt has its own picture for a name, forever."""
        salt, name = self._chance.choice(_SALTS), f"page-{self._chance.randrange(6)}"
        number = self._truth.small[
            int(hashlib.sha256(f"{salt} {name}".encode()).hexdigest(), 16) % len(self._truth.small)
        ]
        return Ask("tenant", (number,), name=name, salt=salt, way=self._mostly_pixels())

    def _url(self) -> Ask:
        """The sha256 of a URL, as vLLM's own proxy names pictures; the picture behind the URL changes."""
        name = hashlib.sha256(f"https://pictures.example/{self._chance.randrange(6)}.png".encode()).hexdigest()
        return self._meant("url", name, way=self._mostly_pixels())

    def _cat(self) -> Ask:
        name, arguments = self._chance.choice(list(self._truth.of_names))
        return self._meant("cat", name, arguments)

    def _reused(self) -> Ask:
        """Any picture of any size under one of a few names."""
        number = self._chance.choice(self._truth.pictures)
        if self._fixed:
            return self._meant("reused", f"upload-{self._chance.randrange(4)}")
        return Ask("reused", (number,), name=f"upload-{self._chance.randrange(4)}", salt=self._chance.choice(_SALTS))

    def _stolen(self) -> Ask:
        """The identifier that vLLM gives another picture."""
        victim = self._skewed(self._truth.small)
        return self._meant("stolen", self._truth.identifiers[victim, ""], way=self._mostly_pixels())

    def _stolen_with_arguments(self) -> Ask:
        """The identifier that vLLM gives another picture with arguments, or a client's name with arguments."""
        names = [self._truth.identifiers[number, name] for number in self._truth.argued for name in _ARGUED]
        return self._meant("stolen-argued", self._chance.choice([*names, *self._truth.of_names.values()]))

    def _counter(self) -> Ask:
        """The identifier that vLLM will soon give a picture where its identifiers are counters."""
        name = f"renderer0-mm-{self._asked + self._chance.randrange(-20, 20)}-image-0"
        return self._meant("counter", name)

    def _meant(self, kind: str, name: str, arguments: str = "", way: Way = Way.PIXELS) -> Ask:
        """A name that means one picture in its salt, until it means another."""
        salt = self._chance.choice(_SALTS)
        key = (salt, name, arguments)
        if key not in self._meanings or (not self._fixed and self._chance.random() < 0.1):
            self._meanings[key] = self._chance.choice(self._truth.argued if arguments else self._truth.small)
        return Ask(kind, (self._meanings[key],), arguments, name, salt, way)

    def _skewed(self, pictures: Sequence[int]) -> int:
        return pictures[int(len(pictures) * self._chance.random() ** _SKEW)]

    def _mostly_pixels(self) -> Way:
        return self._chance.choices(list(Way), [8, 1, 1])[0]


_ARGUED = [name for name in ARGUMENTS if name]

KINDS = (
    Kind("plain", 30, True, Population._plain),
    Kind("pair", 5, True, Population._pair),
    Kind("argued", 5, True, Population._argued),
    Kind("text", 2, True, Population._text),
    Kind("salted", 5, True, Population._salted),
    Kind("named", 10, True, Population._named),
    Kind("named-argued", 3, True, Population._named_and_argued),
    Kind("named-only", 3, True, Population._named_only),
    Kind("tenant", 6, False, Population._tenant),
    Kind("url", 6, False, Population._url),
    Kind("cat", 5, False, Population._cat),
    Kind("reused", 4, False, Population._reused),
    Kind("stolen", 6, False, Population._stolen),
    Kind("stolen-argued", 3, False, Population._stolen_with_arguments),
    Kind("counter", 4, False, Population._counter),
)
