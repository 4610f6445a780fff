# SPDX-License-Identifier: Apache-2.0
"""Decides whether an answer is right. Pure logic: it is given what was asked, changed and answered, in this order.

The right answers come from an engine without the cache: one for each (pictures, arguments, weights). The rules:

- A request without a name has to get the answer for its own pictures, with weights that ran while it was under way.
- A name is chosen by a client. It belongs to its salt and to the request's arguments, and it lives as long as the
  engine, since entries named by clients never leave memory; where the user vouches for names, it lives in the store,
  for all engines that vouch. A request under a name may get any picture that was sent under that name, as with vLLM's
  own caches, and nothing else. So a name that always meant one picture has to get that one.
- A request that has only a name and no picture may be refused. So may one under a name whose pictures differ in size,
  since vLLM refuses if the cached item does not fit the prompt; and one under a name that was a placeholder before,
  since vLLM's processor cache then takes the placeholder for the picture.
- Every other error is a failure, except for a request that was under way when its server was killed on purpose.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

EXACT = 1e-4
"""Tolerance for a logprob: batching alone changes it by 3e-6, another picture by far more."""


class Answer(msgspec.Struct, frozen=True):
    """Output of greedy decoding: the tokens, and the logprob of each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    def equals(self, other: Answer) -> bool:
        near = (abs(one - two) <= EXACT for one, two in zip(self.logprobs, other.logprobs, strict=False))
        return self.tokens == other.tokens and len(self.logprobs) == len(other.logprobs) and all(near)


class Question(msgspec.Struct, frozen=True):
    """Everything that determines an answer: numbers of pictures, names of the processor's arguments and the weights."""

    pictures: tuple[int, ...]
    arguments: str
    weights: int


class Way(enum.StrEnum):
    """How a request presents its picture."""

    PIXELS = "pixels"
    NAME_ONLY = "name only"
    """A uuid and no picture: vLLM's processor cache has the picture, or the request is refused."""
    PLACEHOLDER = "placeholder"
    """A uuid and the picture's size in the prompt: the encoder output comes from a cache, or not at all."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Only a request with a single picture has a name; `pictures` of one without pixels give its size."""

    kind: str
    pictures: tuple[int, ...] = ()
    arguments: str = ""
    name: str | None = None
    salt: str = ""
    way: Way = Way.PIXELS


class Verdict(enum.StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    REFUSED = "refused"
    """Refused, as the rules allow."""
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """Its server was killed on purpose, or ordered to abort it."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """`how` is one of a few words for kinds of wrong answers, `why` describes this one."""

    verdict: Verdict
    how: str = ""
    why: str = ""


@dataclass(eq=False, slots=True)
class Ticket:
    """A request under way. `weights` are all that have run since it was sent."""

    ask: Ask
    life: Life
    weights: set[int]
    cut: bool = False


@dataclass(eq=False, slots=True)
class Life:
    """A server from start to death, as far as the judge needs to know."""

    weights: set[int]
    vouched: bool
    killed: bool = False
    under_way: set[Ticket] = field(default_factory=set)
    given: dict[_Name, set[int]] = field(default_factory=dict)
    placeholders: set[_Name] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Name:
    salt: str
    name: str
    arguments: str


class Judge:
    """For one thread. `rows[picture, arguments]` is the length of the picture's encoder output with those arguments."""

    def __init__(self, right: Mapping[Question, Answer], rows: Mapping[tuple[int, str], int]) -> None:
        self._right = right
        self._rows = rows
        self._vouched: dict[_Name, set[int]] = {}

    # ---- what happens to the server

    def begin(self, weights: int, vouched: bool = False) -> Life:
        """A server starts with these weights; `vouched`: entries named by clients may leave its memory."""
        return Life({weights}, vouched, given=self._vouched if vouched else {})

    def changing(self, life: Life, weights: int) -> None:
        """Its weights are about to change: until `changed`, both may run."""
        life.weights.add(weights)
        for ticket in life.under_way:
            ticket.weights.add(weights)

    def changed(self, life: Life, weights: int) -> None:
        life.weights = {weights}

    def cutting(self, life: Life) -> None:
        """The server is ordered to abort the requests under way."""
        for ticket in life.under_way:
            ticket.cut = True

    def killed(self, life: Life) -> None:
        """The server was killed on purpose."""
        life.killed = True

    # ---- what happens to a request

    def asked(self, life: Life, ask: Ask) -> Ticket:
        """A request is about to be sent: from now on its name may mean its picture, to other requests too."""
        ticket = Ticket(ask, life, set(life.weights))
        life.under_way.add(ticket)
        if ask.name is not None and ask.way is Way.PIXELS:
            life.given.setdefault(_name(ask), set()).update(ask.pictures)
        if ask.way is Way.PLACEHOLDER:
            life.placeholders.add(_name(ask))
        return ticket

    def answered(self, ticket: Ticket, answer: Answer) -> Judgement:
        self.forgotten(ticket)
        if any(self._right[question].equals(answer) for question in self._allowed(ticket)):
            return Judgement(Verdict.RIGHT)
        return self._wrong(ticket.ask, answer)

    def aborted(self, ticket: Ticket) -> Judgement:
        """The server ended the request before its last token, without an error."""
        return self._without_an_answer(ticket, "aborted")

    def lost(self, ticket: Ticket, problem: str) -> Judgement:
        """The connection broke, or no answer came in time."""
        return self._without_an_answer(ticket, problem)

    def refused(self, ticket: Ticket, problem: str) -> Judgement:
        """The server answered with an error."""
        if self.may_be_refused(ticket):
            self.forgotten(ticket)
            return Judgement(Verdict.REFUSED)
        return self._without_an_answer(ticket, problem)

    def forgotten(self, ticket: Ticket) -> None:
        """The client has disconnected, or the request is judged."""
        ticket.life.under_way.discard(ticket)

    def may_be_refused(self, ticket: Ticket) -> bool:
        """Whether an error from the server is an acceptable answer."""
        ask, name = ticket.ask, _name(ticket.ask)
        if ask.name is None:
            return False
        if ask.way is not Way.PIXELS or name in ticket.life.placeholders:
            return True
        return len({self._rows[picture, ask.arguments] for picture in ticket.life.given.get(name, ())}) > 1

    # ---- within

    def _allowed(self, ticket: Ticket) -> Iterator[Question]:
        ask = ticket.ask
        meanings: Iterable[tuple[int, ...]] = [ask.pictures]
        if ask.name is not None:
            meanings = [(picture,) for picture in ticket.life.given.get(_name(ask), ())]
        for pictures in meanings:
            for weights in ticket.weights:
                yield Question(pictures, ask.arguments, weights)

    def _without_an_answer(self, ticket: Ticket, problem: str) -> Judgement:
        self.forgotten(ticket)
        deliberate = ticket.life.killed or ticket.cut
        return Judgement(Verdict.INTERRUPTED if deliberate else Verdict.FAILED, why=problem)

    def _wrong(self, ask: Ask, answer: Answer) -> Judgement:
        for question, right in self._right.items():
            if right.equals(answer):
                arguments = f" with {question.arguments}" if question.arguments else ""
                pictures = ", ".join(map(str, question.pictures)) or "none"
                how = "other weights" if question.pictures == ask.pictures else "another picture"
                return Judgement(Verdict.WRONG, how, f"picture {pictures}{arguments}, weights {question.weights}")
        return Judgement(Verdict.WRONG, "nothing known", f"the answer to nothing that was asked: {answer.tokens}")


def _name(ask: Ask) -> _Name:
    return _Name(ask.salt, ask.name or "", ask.arguments)
