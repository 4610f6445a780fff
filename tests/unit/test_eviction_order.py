# SPDX-License-Identifier: Apache-2.0
"""The order in which entries leave memory, by last use and by the cost of a miss."""

import random

import pytest

from lmcache_ec.eviction_order import CostOrder, LruOrder


def test_the_least_recently_added_goes_first() -> None:
    order: LruOrder[str] = LruOrder()
    for key in "abc":
        order.add(key)
    order.remove("a")
    order.add("a")
    assert list(order) == ["b", "c", "a"]
    assert list(reversed(order)) == ["a", "c", "b"]


def test_the_entry_that_costs_least_to_restore_goes_first() -> None:
    values = {"cheap": 1.0, "dear": 100.0, "middling": 10.0}
    order: CostOrder[str] = CostOrder(values.__getitem__)
    for key in ("dear", "cheap", "middling"):
        order.add(key)
    assert list(order) == ["cheap", "middling", "dear"]
    assert list(reversed(order)) == ["dear", "middling", "cheap"]
    assert [order.evict_first() for _ in range(3)] == ["cheap", "middling", "dear"]
    assert len(order) == 0


def test_an_entry_that_is_no_longer_asked_for_goes_in_the_end_whatever_it_cost() -> None:
    values = {"dear": 64.0}
    order: CostOrder[object] = CostOrder(lambda key: values.get(str(key), 1.0))
    order.add("dear")
    evicted: list[object] = []
    for number in range(100):
        order.add(number)
        evicted.append(order.evict_first())
        if "dear" in evicted:
            break
    assert 60 < len(evicted) < 70


def test_candidates_are_no_larger_than_is_useful() -> None:
    sizes = {"small": 1000, "fitting": 1990, "long": 2100, "huge": 10**6}
    order: CostOrder[str] = CostOrder({"small": 8.0, "fitting": 4.0, "long": 2.0, "huge": 1.0}.__getitem__, sizes.get)  # type: ignore[arg-type]
    for key in sizes:
        order.add(key)
    assert list(order) == ["huge", "long", "fitting", "small"]
    assert list(order.candidates(2000)) in (["small"], ["fitting", "small"])
    assert "small" in list(order.candidates(2 * 1000))


def test_an_entry_that_is_not_there_cannot_be_removed() -> None:
    order: CostOrder[str] = CostOrder(lambda key: 1.0)
    order.discard("a")
    with pytest.raises(KeyError):
        order.remove("a")


def test_the_order_is_that_of_the_priorities_whatever_happens() -> None:
    dice, priorities = random.Random(1), dict[int, float]()
    order: CostOrder[int] = CostOrder(lambda key: dice.choice([1e-9, 3e-9, 1e-8, 1e-6]))
    for _ in range(2000):
        key = dice.randrange(60)
        if key in priorities:
            order.remove(key)
            del priorities[key]
        elif len(priorities) > 30:
            evicted = order.evict_first()
            assert priorities.pop(evicted) == min([*priorities.values(), order.floor])
        else:
            priorities[key] = order.add(key)
        assert [priorities[each] for each in order] == sorted(priorities.values())
        assert [priorities[each] for each in reversed(order)] == sorted(priorities.values(), reverse=True)
