# SPDX-License-Identifier: Apache-2.0
"""A load is waited for if it is faster than the encode, once both have been measured; decisions can be revised."""

import math
import random
from dataclasses import dataclass, field

import pytest

from lmcache_ec.load_policy import LoadPolicy, Seconds

ROWS, LENGTH = 256, 2 << 20
LEARNED = 60
"""Number of items that suffices for learning: tens of them."""


@dataclass
class World:
    """A model whose encoder takes `encode_s`, over tiers that all have everything. A tier that never answers takes
    `math.inf`."""

    tiers_s: list[float]
    encode_s: float
    policy: LoadPolicy = field(default_factory=LoadPolicy)
    deadline_s: float = 1.0
    now: float = 0.0
    steps: int = 0
    loaded: int = 0
    encoded: int = 0

    def serve(self, items: int, new: bool = False) -> float:
        """Average seconds until the model had an item. `new` items are in no tier."""
        self.loaded = self.encoded = 0
        return sum(self._encode() if new else self._serve() for _ in range(items)) / items

    def _serve(self) -> float:
        policy, tiers = self.policy, range(len(self.tiers_s))
        expected_s = policy.encode_s([("image", ROWS)])
        decision = policy.decide(tiers, LENGTH, expected_s, {})
        decision = policy.settle(decision, tiers, LENGTH, expected_s, self.now)
        if decision.measure is not None:
            self._deliver(decision.measure)
        if not decision.tiers:
            return self._encode()
        first = next(tier for tier in tiers if decision.tiers >> tier & 1)
        patience_s = min(self.deadline_s, expected_s)
        if self.tiers_s[first] <= patience_s:
            self.loaded += 1
            self._deliver(first)
            self.now += self.tiers_s[first]
            return self.tiers_s[first]
        policy.late(first, LENGTH, patience_s)
        self._deliver(first)
        self.now += patience_s
        return patience_s + self._encode()

    def _deliver(self, tier: int) -> None:
        if not math.isinf(self.tiers_s[tier]):
            self.policy.delivered(tier, LENGTH, self.tiers_s[tier], self.now)

    def _encode(self) -> float:
        self.encoded += 1
        self.steps += 1
        self.policy.begin_encodes(self.steps, [("image", ROWS)])
        self.policy.encoded(self.steps, self.encode_s)
        self.now += self.encode_s
        return self.encode_s


@pytest.mark.parametrize("encode_s", [0.002, 0.02, 0.2])
@pytest.mark.parametrize("tier_s", [0.005, 0.05, 0.5])
@pytest.mark.parametrize("first_new", [True, False], ids=["after new items", "all are stored"])
def test_the_quicker_of_the_two_is_chosen(tier_s: float, encode_s: float, first_new: bool) -> None:
    world = World([tier_s], encode_s)
    if first_new:
        world.serve(10, new=True)
    world.serve(LEARNED)
    mean_s = world.serve(100)
    assert mean_s <= 1.1 * min(tier_s, encode_s)
    assert (world.loaded, world.encoded) == ((100, 0) if tier_s < encode_s else (0, 100))


@pytest.mark.parametrize("tier_s", [0.0005, 0.05])
def test_at_first_loads_pay(tier_s: float) -> None:
    world = World([tier_s], encode_s=0.2)
    world.serve(5)
    assert (world.loaded, world.encoded) == (5, 0)


def test_a_quick_tier_is_never_passed_over_to_learn_what_an_encode_costs() -> None:
    world = World([0.0005], encode_s=0.2)
    world.serve(500)
    assert world.encoded == 0


def test_a_tier_that_turns_slow_is_left_within_tens_of_items_and_found_again_when_it_is_quick() -> None:
    world = World([0.005], encode_s=0.02)
    world.serve(10, new=True)
    world.serve(200)
    world.tiers_s[0] = 0.5
    world.serve(30)
    world.serve(100)
    assert world.loaded == 0
    assert 5 <= world.policy.counts["measurements"] <= 10, "one in sixteen, and nobody waits for these"
    world.tiers_s[0] = 0.005
    world.serve(300)
    world.serve(100)
    assert world.loaded == 100


def test_a_tier_that_is_seldom_needed_is_measured_by_time() -> None:
    world = World([0.5], encode_s=0.02)
    world.serve(10, new=True)
    world.serve(LEARNED)
    world.tiers_s[0] = 0.005
    for _ in range(20):
        world.now += 11.0
        world.serve(1)
    world.serve(10)
    assert world.loaded == 10


def test_an_encoder_that_turns_slow_makes_loads_pay() -> None:
    world = World([0.05], encode_s=0.02)
    world.serve(10, new=True)
    world.serve(LEARNED)
    assert world.loaded == 0
    world.encode_s = 0.2
    world.serve(30)
    world.serve(50)
    assert world.loaded == 50


def test_a_tier_that_never_answers_is_not_waited_for() -> None:
    world = World([math.inf], encode_s=0.02)
    world.serve(10, new=True)
    world.serve(LEARNED)
    assert world.serve(100) == pytest.approx(0.02)


def test_each_tier_is_judged_by_itself() -> None:
    world = World([0.001, 0.5], encode_s=0.02)
    world.serve(10, new=True)
    for _ in range(5):
        world.policy.delivered(0, LENGTH, 0.001, 0.0)
        world.policy.delivered(1, LENGTH, 0.5, 0.0)
    expected_s = world.policy.encode_s([("image", ROWS)])
    assert world.policy.decide([0, 1], LENGTH, expected_s, {}).tiers == 0b01
    both = world.policy.decide([1], LENGTH, expected_s, {})
    assert (both.tiers, both.refused) == (0, 1)


def test_a_load_far_back_in_a_queue_becomes_an_encode() -> None:
    world = World([0.005], encode_s=0.02)
    world.serve(10, new=True)
    world.serve(10)
    expected_s = world.policy.encode_s([("image", ROWS)])
    assert world.policy.decide([0], LENGTH, expected_s, {0: 7}).tiers
    assert not world.policy.decide([0], LENGTH, expected_s, {0: 200}).tiers


def test_all_that_a_request_lacks_is_weighed_against_one_load() -> None:
    world = World([0.05], encode_s=0.02)
    world.serve(10, new=True)
    for _ in range(5):
        world.policy.delivered(0, LENGTH, 0.05, 0.0)
    one, many = (world.policy.encode_s([("image", ROWS)] * number) for number in (1, 4))
    assert not world.policy.decide([0], LENGTH, one, {}).tiers
    assert world.policy.decide([0], LENGTH, many, {}).tiers


def test_a_step_s_time_is_shared_by_what_it_encodes() -> None:
    policy = LoadPolicy()
    for step in range(5):
        policy.begin_encodes(step, [("image", 100), ("image", 100), ("video", 800)])
        policy.encoded(step, 1.0)
    assert policy.encode_s([("image", 100)]) == pytest.approx(0.1)
    assert policy.encode_s([("video", 800)]) == pytest.approx(0.8)
    assert math.isinf(policy.encode_s([("audio", 100)]))


def test_a_step_that_nobody_timed_teaches_nothing() -> None:
    policy = LoadPolicy()
    for step in range(10):
        policy.begin_encodes(2 * step, [("image", 100)])
        policy.encoded(2 * step + 1, 5.0)  # the report of a later step covers it
        policy.begin_encodes(2 * step + 1, [("image", 100)])
        policy.encoded(2 * step + 1, 0.0)
    assert math.isinf(policy.encode_s([("image", 100)]))


def test_one_slow_start_does_not_outweigh_what_follows() -> None:
    seconds = Seconds()
    seconds.add(LENGTH, 2.0)
    for _ in range(10):
        seconds.add(LENGTH, 0.02)
    expected_s = seconds.expect(LENGTH)
    assert expected_s is not None
    assert expected_s < 0.035


def test_an_unseen_size_is_judged_by_the_nearest() -> None:
    seconds = Seconds()
    for _ in range(3):
        seconds.add(1 << 20, 0.01)
    assert seconds.expect(1 << 22) == pytest.approx(0.04)
    assert seconds.expect(1 << 10) == pytest.approx(0.01), "no less: what does not depend on size is in it"


def test_always_means_always() -> None:
    assert LoadPolicy(always=True).always
    assert not LoadPolicy().always


def test_memory_and_keys_are_bounded() -> None:
    policy, dice = LoadPolicy(), random.Random(1)
    for step in range(2000):
        policy.begin_encodes(step, [(f"modality {step}", dice.randrange(1 << 40))])
        policy.encoded(step, dice.random())
        policy.delivered(step % 3, dice.randrange(1 << 60), dice.random(), float(step))
    for step in range(2000, 4000):
        policy.begin_encodes(step, [("image", 1)])  # without a report
    assert len(policy.snapshot(["disk", "redis", "s3"])) <= 40
    assert len(policy._encoding) <= 256
    assert all(len(seconds._means) <= 48 for seconds in (*policy._encodes.values(), *policy._tiers.values()))
    assert all(isinstance(value, int) for value in policy.snapshot(["disk", "redis", "s3"]).values())
