# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side infers from the ranks' reports: when weights are known, and where their outputs are kept."""

from typing import Any

import pytest

from lmcache_ec.key import MAX_NAMESPACE_CHARS, check_namespace
from lmcache_ec.weights import Held, Home, Weights

START = ("a0", "b0")


def reported(*digests: str, calls: int = 0, weights: Weights | None = None, persist: Any = False) -> Weights:
    """Reports of all ranks: first the initial weights, then these."""
    if weights is None:
        weights = Weights(len(digests), "model-0123456789abcdef", persist)
        for rank, digest in enumerate(START[: len(digests)]):
            weights.report(rank, 0, digest)
    for rank, digest in enumerate(digests):
        weights.report(rank, calls, digest)
    return weights


def home(weights: Weights) -> Home:
    assert weights.held is not None
    return weights.home(weights.held)


def test_where_nobody_reports_weights_they_never_change() -> None:
    weights = Weights(0, "ns")
    assert weights.started
    assert home(weights) == Home("ns", True)


def test_weights_are_known_once_all_ranks_have_reported_them_after_the_same_call() -> None:
    weights = Weights(2, "ns")
    assert not weights.started
    weights.report(0, 0, "a0")
    assert weights.held is None
    weights.report(1, 0, "b0")
    assert weights.started
    assert weights.held == Held(0, START)
    weights.report(0, 1, "a1")
    assert weights.held is None, "the other rank has yet to carry out the call"
    weights.report(1, 1, "")
    assert weights.held is None
    weights.report(1, 1, "b0")
    assert weights.held == Held(1, ("a1", "b0"))


def test_one_rank_that_changed_is_a_change() -> None:
    assert home(reported("a0", "b1", calls=1)) != home(reported(*START))


def test_swapped_ranks_are_other_weights() -> None:
    assert home(reported("b0", "a0", persist=True)) != home(reported("a0", "b0", persist=True))


@pytest.mark.parametrize("persist", [False, True, "by_version"])
def test_the_starting_namespace_is_only_for_the_starting_weights(persist: Any) -> None:
    start = home(reported(*START, calls=7, persist=persist))
    assert start == Home("model-0123456789abcdef", True)
    changed = home(reported("a1", "b1", calls=8, persist=persist))
    assert changed.namespace != start.namespace
    assert changed.persists is (persist is True)
    assert check_namespace(changed.namespace).startswith("model-0123456789abcdef-")


@pytest.mark.parametrize("persist", [False, True])
def test_an_epoch_changes_the_namespace_of_all_weights_and_none_of_what_is_known_of_them(persist: Any) -> None:
    weights, before = reported("a1", "b1", calls=1, persist=persist), reported("a1", "b1", calls=1, persist=persist)
    weights.moved = False
    weights.begin_epoch(3, "model-0123456789abcdef-e3")
    assert weights.moved
    assert weights.held == before.held
    assert (home(weights).persists, home(weights).epoch) == (persist, 3)
    assert home(weights).namespace != home(before).namespace
    weights = reported(*START, calls=2, weights=weights)
    assert home(weights) == weights.home_of_start == Home("model-0123456789abcdef-e3", True, 3)


def test_replicas_of_one_layout_meet_in_the_namespace_of_a_digest() -> None:
    one, other = reported("a1", "b1", calls=1, persist=True), reported("a1", "b1", calls=20, persist=True)
    assert home(one) == home(other)


def test_replicas_of_any_layout_meet_in_the_namespace_of_a_version() -> None:
    two, one = reported("a1", "b1", persist="by_version"), reported("c1", persist="by_version")
    assert two.set_version("step-5") == one.set_version("step-5") == ""
    assert home(two) == home(one)
    assert home(two).persists
    assert two.set_version("step-6") == ""
    assert home(two) != home(one)


def test_a_version_is_that_of_the_weights_for_which_it_was_set() -> None:
    weights = reported("a1", "b1", persist="by_version")
    assert weights.set_version("step-5") == ""
    five = home(weights)
    reported("a2", "b2", calls=2, weights=weights)
    assert not home(weights).persists
    reported("a1", "b1", calls=3, weights=weights)
    assert home(weights) == five


def test_a_version_that_names_other_weights_than_before_is_refused() -> None:
    weights = reported("a1", "b1", persist="by_version")
    assert weights.set_version("step-5") == ""
    reported("a2", "b2", calls=2, weights=weights)
    assert "step-5" in weights.set_version("step-5")
    assert not home(weights).persists


def test_a_version_that_is_set_while_the_weights_are_in_doubt_names_nothing() -> None:
    weights = reported("a1", "", calls=1, persist="by_version")
    assert "after the update" in weights.set_version("step-5")
    reported("a1", "b1", calls=1, weights=weights)
    assert not home(weights).persists


def test_versions_of_any_text_and_namespaces_of_any_length_make_namespaces() -> None:
    weights = Weights(1, "n" * MAX_NAMESPACE_CHARS, "by_version")
    weights.report(0, 0, "a0")
    weights.report(0, 1, "a1")
    found = set()
    for version in ("", "v", "v\0", "../..", "Schritt für Schritt", "x" * 10_000):
        assert weights.set_version(version) == ""
        found.add(check_namespace(home(weights).namespace))
    assert len(found) == 6
