# SPDX-License-Identifier: Apache-2.0
"""The judge of `make soak`: it finds every kind of wrong answer, and allows only what vLLM's own caches do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.soak.judge import Answer, Ask, Judge, Life, Question, Ticket, Verdict, Way
from tests.examples import examples

PICTURES = range(5)
LARGE = 4
"""The only one of these pictures with more rows than the others."""

ARGUMENTS = ("", "fewer")
WEIGHTS = range(3)
NAME_ONLY, PLACEHOLDER = Way.NAME_ONLY, Way.PLACEHOLDER


def answer(picture: int, arguments: str = "", weights: int = 0) -> Answer:
    tokens = (picture, ARGUMENTS.index(arguments), weights)
    return Answer(tokens, (-1.0, -2.0, -3.0))


RIGHT = {Question((p,), a, w): answer(p, a, w) for p in PICTURES for a in ARGUMENTS for w in WEIGHTS}
RIGHT |= {Question((0, 1), "", weights): Answer((0, 1, weights), (-1.5, -1.5, -1.5)) for weights in WEIGHTS}
RIGHT |= {Question((), "", weights): Answer((9,), (-9.0,)) for weights in WEIGHTS}
ROWS = {(picture, arguments): 64 if picture == LARGE else 16 for picture in PICTURES for arguments in ARGUMENTS}


@pytest.fixture
def judge() -> Judge:
    return Judge(RIGHT, ROWS)


@pytest.fixture
def life(judge: Judge) -> Life:
    return judge.begin(0)


def named(picture: int, name: str = "cat", arguments: str = "", salt: str = "", way: Way = Way.PIXELS) -> Ask:
    return Ask("named", (picture,), arguments, name, salt, way)


def verdict(judge: Judge, life: Life, ask: Ask, given: Answer) -> Verdict:
    return judge.answered(judge.asked(life, ask), given).verdict


# ---- requests without a name


def test_another_pictures_answer_is_wrong(judge: Judge, life: Life) -> None:
    assert verdict(judge, life, Ask("plain", (1,)), answer(1)) is Verdict.RIGHT
    judged = judge.answered(judge.asked(life, Ask("plain", (1,))), answer(2))
    assert (judged.verdict, judged.how) == (Verdict.WRONG, "another picture")


def test_a_picture_under_a_name_never_answers_a_request_without_one(judge: Judge, life: Life) -> None:
    verdict(judge, life, named(2, "what vLLM calls picture 1"), answer(2))
    assert verdict(judge, life, Ask("plain", (1,)), answer(2)) is Verdict.WRONG


def test_an_answer_by_other_arguments_is_wrong(judge: Judge, life: Life) -> None:
    assert verdict(judge, life, Ask("argued", (1,), "fewer"), answer(1, "fewer")) is Verdict.RIGHT
    assert verdict(judge, life, Ask("argued", (1,), "fewer"), answer(1)) is Verdict.WRONG


def test_pairs_and_texts_are_judged_as_a_whole(judge: Judge, life: Life) -> None:
    assert verdict(judge, life, Ask("pair", (0, 1)), RIGHT[Question((0, 1), "", 0)]) is Verdict.RIGHT
    assert verdict(judge, life, Ask("pair", (0, 1)), answer(0)) is Verdict.WRONG
    assert verdict(judge, life, Ask("text"), RIGHT[Question((), "", 0)]) is Verdict.RIGHT


@pytest.mark.parametrize(
    "given",
    [
        Answer((1, 0, 1), (-1.0, -2.0, -3.0)),
        Answer((1, 0, 0), (-1.0, -2.0, -3.001)),
        Answer((1, 0, 0), (-1.0, -2.0)),
        Answer((1, 0), (-1.0, -2.0)),
        Answer((), ()),
    ],
    ids=["a token", "a logprob", "a logprob less", "too short", "nothing"],
)
def test_an_answer_that_belongs_to_no_picture_is_wrong(judge: Judge, life: Life, given: Answer) -> None:
    judged = judge.answered(judge.asked(life, Ask("plain", (1,))), given)
    assert judged.verdict is Verdict.WRONG


def test_a_difference_that_batching_makes_is_not_wrong(judge: Judge, life: Life) -> None:
    assert verdict(judge, life, Ask("plain", (1,)), Answer((1, 0, 0), (-1.000003, -2.0, -3.0))) is Verdict.RIGHT


# ---- weights


def test_the_old_weights_are_wrong_after_a_change(judge: Judge, life: Life) -> None:
    judge.changing(life, 1)
    judge.changed(life, 1)
    assert verdict(judge, life, Ask("plain", (1,)), answer(1, weights=1)) is Verdict.RIGHT
    judged = judge.answered(judge.asked(life, Ask("plain", (1,))), answer(1, weights=0))
    assert (judged.verdict, judged.how) == (Verdict.WRONG, "other weights")


@pytest.mark.parametrize("weights", [0, 1])
def test_a_request_during_a_change_may_have_either_weights(judge: Judge, life: Life, weights: int) -> None:
    before = judge.asked(life, Ask("plain", (1,)))
    judge.changing(life, 1)
    amid = judge.asked(life, Ask("plain", (1,)))
    judge.changed(life, 1)
    for ticket in (before, amid):
        assert judge.answered(ticket, answer(1, weights=weights)).verdict is Verdict.RIGHT
    assert verdict(judge, life, Ask("plain", (1,)), answer(1, weights=0)) is Verdict.WRONG


def test_weights_that_ran_before_or_on_another_server_are_wrong(judge: Judge, life: Life) -> None:
    other = judge.begin(2)
    for weights in (1, 0):
        judge.changing(life, weights)
        judge.changed(life, weights)
    ticket = judge.asked(life, Ask("plain", (1,)))
    assert judge.answered(ticket, answer(1, weights=1)).verdict is Verdict.WRONG
    assert verdict(judge, life, Ask("plain", (1,)), answer(1, weights=2)) is Verdict.WRONG
    assert verdict(judge, other, Ask("plain", (1,)), answer(1, weights=0)) is Verdict.WRONG


def test_a_reused_name_is_no_excuse_for_old_weights(judge: Judge, life: Life) -> None:
    for picture in (1, 2):
        verdict(judge, life, named(picture), answer(picture))
    judge.changing(life, 1)
    judge.changed(life, 1)
    assert verdict(judge, life, named(1), answer(2, weights=1)) is Verdict.RIGHT
    assert verdict(judge, life, named(1), answer(2, weights=0)) is Verdict.WRONG


# ---- names


def test_a_name_that_always_meant_one_picture_has_to_get_it(judge: Judge, life: Life) -> None:
    verdict(judge, life, named(2, "dog"), answer(2))
    assert verdict(judge, life, named(1), answer(1)) is Verdict.RIGHT
    assert verdict(judge, life, named(1), answer(2)) is Verdict.WRONG


def test_a_reused_name_may_get_what_it_meant_and_nothing_else(judge: Judge, life: Life) -> None:
    verdict(judge, life, named(1), answer(1))
    assert verdict(judge, life, named(2), answer(1)) is Verdict.RIGHT
    assert verdict(judge, life, named(2), answer(3)) is Verdict.WRONG


def test_a_name_means_what_another_request_under_way_sends_under_it(judge: Judge, life: Life) -> None:
    first, second = judge.asked(life, named(1)), judge.asked(life, named(2))
    assert judge.answered(first, answer(2)).verdict is Verdict.RIGHT
    assert judge.answered(second, answer(1)).verdict is Verdict.RIGHT


def test_a_name_that_is_given_later_is_no_excuse(judge: Judge, life: Life) -> None:
    judged = judge.answered(judge.asked(life, named(1)), answer(2))
    judge.asked(life, named(2))
    assert judged.verdict is Verdict.WRONG


@pytest.mark.parametrize("other", [{"salt": "tenant"}, {"arguments": "fewer"}], ids=["salt", "arguments"])
def test_names_of_other_salts_and_arguments_are_other_names(judge: Judge, life: Life, other: dict[str, Any]) -> None:
    verdict(judge, life, named(1), answer(1))
    arguments = other.get("arguments", "")
    assert verdict(judge, life, named(2, **other), answer(1, arguments)) is Verdict.WRONG
    assert verdict(judge, life, named(2, **other), answer(2, arguments)) is Verdict.RIGHT


def test_a_name_dies_with_its_server(judge: Judge, life: Life) -> None:
    verdict(judge, life, named(1), answer(1))
    assert verdict(judge, judge.begin(0), named(2), answer(1)) is Verdict.WRONG


def test_a_vouched_name_lives_on_with_the_servers_that_vouch(judge: Judge, life: Life) -> None:
    verdict(judge, life, named(1), answer(1))
    verdict(judge, judge.begin(0, vouched=True), named(2), answer(2))
    assert verdict(judge, judge.begin(0, vouched=True), named(3), answer(2)) is Verdict.RIGHT
    assert verdict(judge, judge.begin(0, vouched=True), named(3), answer(1)) is Verdict.WRONG
    assert verdict(judge, judge.begin(0), named(3), answer(2)) is Verdict.WRONG


# ---- names without a picture


@pytest.mark.parametrize("way", [NAME_ONLY, PLACEHOLDER])
def test_a_name_without_a_picture_gets_what_it_meant_or_is_refused(judge: Judge, life: Life, way: Way) -> None:
    assert verdict(judge, life, named(1, way=way), answer(1)) is Verdict.WRONG
    verdict(judge, life, named(1), answer(1))
    assert verdict(judge, life, named(1, way=way), answer(1)) is Verdict.RIGHT
    assert verdict(judge, life, named(2, way=way), answer(2)) is Verdict.WRONG
    assert verdict(judge, life, named(1, salt="tenant", way=way), answer(1)) is Verdict.WRONG
    assert judge.refused(judge.asked(life, named(1, way=way)), "500").verdict is Verdict.REFUSED


# ---- no answer

NO_ANSWER: list[Callable[[Judge, Ticket], Any]] = [
    lambda judge, ticket: judge.refused(ticket, "500"),
    lambda judge, ticket: judge.lost(ticket, "reset"),
    lambda judge, ticket: judge.aborted(ticket),
]


@pytest.mark.parametrize("ends", NO_ANSWER, ids=["refused", "lost", "aborted"])
@pytest.mark.parametrize("ask", [Ask("text"), Ask("plain", (1,)), Ask("pair", (0, 1)), named(1)], ids=lambda a: a.kind)
def test_no_answer_is_a_failure_unless_it_was_meant(judge: Judge, ask: Ask, ends: Callable[..., Any]) -> None:
    life = judge.begin(0)
    assert ends(judge, judge.asked(life, ask)).verdict is Verdict.FAILED
    cut = judge.asked(life, ask)
    judge.cutting(life)
    later = judge.asked(life, ask)
    assert ends(judge, cut).verdict is Verdict.INTERRUPTED
    assert ends(judge, later).verdict is Verdict.FAILED
    under_way = judge.asked(life, ask)
    judge.killed(life)
    assert ends(judge, under_way).verdict is Verdict.INTERRUPTED


def test_a_wrong_answer_of_a_server_that_is_being_killed_is_wrong(judge: Judge, life: Life) -> None:
    ticket = judge.asked(life, Ask("plain", (1,)))
    judge.cutting(life)
    judge.killed(life)
    assert judge.answered(ticket, answer(2)).verdict is Verdict.WRONG


def test_a_name_may_be_refused_once_its_pictures_differ_in_size(judge: Judge, life: Life) -> None:
    for picture in (1, 2):
        verdict(judge, life, named(picture), answer(picture))
    assert judge.refused(judge.asked(life, named(1)), "500").verdict is Verdict.FAILED
    verdict(judge, life, named(LARGE), answer(LARGE))
    assert judge.refused(judge.asked(life, named(1)), "500").verdict is Verdict.REFUSED
    assert judge.refused(judge.asked(life, named(1, salt="tenant")), "500").verdict is Verdict.FAILED


def test_a_name_may_be_refused_once_it_was_a_placeholder(judge: Judge, life: Life) -> None:
    judge.refused(judge.asked(life, named(1, way=PLACEHOLDER)), "500")
    assert judge.refused(judge.asked(life, named(1)), "500").verdict is Verdict.REFUSED
    assert judge.refused(judge.asked(life, named(1, salt="tenant")), "500").verdict is Verdict.FAILED
    assert judge.refused(judge.asked(life, named(1, "dog")), "500").verdict is Verdict.FAILED


# ---- any history, compared with one that is replayed from its beginning for each answer


@dataclass
class History:
    """Events in order: ("asked", life, ask), ("weights", life, old and new), ("changed", life, new)."""

    judge: Judge = field(default_factory=lambda: Judge(RIGHT, ROWS))
    lives: list[tuple[Life, bool, int]] = field(default_factory=list)
    events: list[tuple[str, int, Any]] = field(default_factory=list)
    tickets: list[tuple[int, int, Ask, Ticket]] = field(default_factory=list)

    def begin(self, weights: int, vouched: bool) -> None:
        self.lives.append((self.judge.begin(weights, vouched), vouched, weights))

    def change(self, number: int, weights: int, finished: bool) -> None:
        life = self.lives[number][0]
        self.judge.changing(life, weights)
        self.events.append(("changing", number, weights))
        if finished:
            self.judge.changed(life, weights)
            self.events.append(("changed", number, weights))

    def ask(self, number: int, ask: Ask) -> None:
        ticket = self.judge.asked(self.lives[number][0], ask)
        self.tickets.append((len(self.events), number, ask, ticket))
        self.events.append(("asked", number, ask))

    def answer(self, index: int, given: Answer) -> None:
        at, number, ask, ticket = self.tickets.pop(index % len(self.tickets))
        right = any(given.equals(RIGHT[question]) for question in self.allowed(at, number, ask))
        assert self.judge.answered(ticket, given).verdict is (Verdict.RIGHT if right else Verdict.WRONG)

    def allowed(self, at: int, number: int, ask: Ask) -> list[Question]:
        ran = {weights for time, weights in self.weights_of(number) if time >= at} | self.running_at(at, number)
        meanings = {ask.pictures} if ask.name is None else self.meanings_of(number, ask)
        return [Question(pictures, ask.arguments, weights) for pictures in meanings for weights in ran]

    def weights_of(self, number: int) -> list[tuple[int, int]]:
        events = enumerate(self.events)
        return [(time, weights) for time, (what, life, weights) in events if life == number and what == "changing"]

    def running_at(self, at: int, number: int) -> set[int]:
        running = {self.lives[number][2]}
        for what, life, weights in self.events[:at]:
            if life == number and what == "changing":
                running.add(weights)
            if life == number and what == "changed":
                running = {weights}
        return running

    def meanings_of(self, number: int, ask: Ask) -> set[tuple[int, ...]]:
        def same(life: int, other: Ask) -> bool:
            shared = life == number or (self.lives[life][1] and self.lives[number][1])
            alike = (ask.name, ask.salt, ask.arguments) == (other.name, other.salt, other.arguments)
            return shared and alike and other.way is Way.PIXELS

        asked = [(life, other) for what, life, other in self.events if what == "asked"]
        return {other.pictures for life, other in asked if same(life, other)}


ASKS = st.builds(
    Ask,
    st.just("any"),
    st.integers(0, 2).map(lambda picture: (picture,)),
    st.sampled_from(ARGUMENTS),
    st.sampled_from([None, "cat", "dog"]),
    st.sampled_from(["", "tenant"]),
    st.sampled_from(Way),
).filter(lambda ask: ask.name is not None or ask.way is Way.PIXELS)
ANSWERS = st.builds(answer, st.integers(0, 2), st.sampled_from(ARGUMENTS), st.sampled_from(WEIGHTS))
EVENTS = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from(WEIGHTS), st.booleans()),
    st.tuples(st.just("change"), st.integers(0, 9), st.sampled_from(WEIGHTS), st.booleans()),
    st.tuples(st.just("ask"), st.integers(0, 9), ASKS),
    st.tuples(st.just("answer"), st.integers(0, 99), ANSWERS),
)


@given(st.lists(EVENTS, max_size=40))
@settings(max_examples=examples(400), deadline=None)
def test_every_verdict_is_that_of_the_whole_history(events: list[Any]) -> None:
    history = History()
    history.begin(0, False)
    for what, *details in events:
        if what in ("change", "ask"):
            details[0] %= len(history.lives)
        if what != "answer" or history.tickets:
            getattr(history, what)(*details)
