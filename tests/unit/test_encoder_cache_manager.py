# SPDX-License-Identifier: Apache-2.0
"""The encoder-cache manager that knows the lower tiers, compared with vLLM's own: accounts, references, order."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager

from lmcache_ec.adapters.vllm.encoder_cache_manager import TierAwareEncoderCacheManager
from lmcache_ec.adapters.vllm.lower_tiers import LowerTiers
from lmcache_ec.eviction import Below, Uses, restore_s, worth
from tests.unit.test_imports import graph

PLENTY = 10**9
LOAD_S, ENCODE_S = 0.0005, 0.05


class Tiers:
    """The tiers below: for each name the cost of getting it back."""

    def __init__(self, **costs_s: float) -> None:
        self.costs_s = costs_s
        self.asked: list[str] = []

    def restore_s(self, identifier: str, modality: str, rows: int) -> float:
        self.asked.append(identifier)
        return self.costs_s.get(identifier, ENCODE_S)


def request(name: str, *items: str, rows: int | tuple[int, ...] = 4) -> Any:
    each = rows if isinstance(rows, tuple) else (rows,) * len(items)
    features = [SimpleNamespace(identifier=item, modality="image") for item in items]
    return SimpleNamespace(request_id=name, mm_features=features, get_num_encoder_embeds=lambda index: each[index])


def use(manager: EncoderCacheManager, one: Any) -> list[str]:
    """A request from its first pass to its end. Returns the evicted items."""
    hold(manager, one)
    manager.free(one)
    return list(manager.get_freed_mm_hashes())


def hold(manager: EncoderCacheManager, one: Any) -> None:
    for index in range(len(one.mm_features)):
        assert grant(manager, one, index)


def grant(manager: EncoderCacheManager, one: Any, index: int) -> bool:
    """Ask and allocate, as vLLM's scheduler does for each item of a pass."""
    if manager.check_and_update_cache(one, index):
        return True
    if not manager.can_allocate(one, index, PLENTY, 0):
        return False
    manager.allocate(one, index)
    return True


def managers(size: int, lower_tiers: LowerTiers | None = None) -> list[EncoderCacheManager]:
    return [
        EncoderCacheManager(size),
        TierAwareEncoderCacheManager(size),
        TierAwareEncoderCacheManager(size, lower_tiers or Tiers()),
    ]


# ---- the order


def test_vllms_own_manager_evicts_in_the_order_of_last_release() -> None:
    """The item of a long request that came first and ended last is kept longest. Ours evicts by last access."""
    freed = []
    for manager in managers(12)[:2]:
        long = request("long", "early")
        hold(manager, long)
        use(manager, request("short", "late"))
        use(manager, request("short", "later"))
        manager.free(long)
        freed.append(use(manager, request("next", "new")))
    assert freed == [["late"], ["early"]]


def test_items_that_memory_holds_go_before_items_that_would_be_encoded_again() -> None:
    tiers = Tiers(stored=LOAD_S)
    manager = TierAwareEncoderCacheManager(12, tiers)
    for name in ("lost", "stored", "owed"):
        use(manager, request(name, name))
    assert use(manager, request("next", "new")) == ["stored"]
    assert use(manager, request("next", "newer")) == ["lost"], "among equals the least recently accessed"


def test_an_item_that_a_tier_has_lost_since_is_kept_from_then_on() -> None:
    """Its cost is evaluated at the moment of eviction, from what the tiers hold then."""
    tiers = Tiers(one=LOAD_S, two=LOAD_S)
    manager = TierAwareEncoderCacheManager(8, tiers)
    use(manager, request("a", "one"))
    use(manager, request("b", "two"))
    del tiers.costs_s["one"]
    assert use(manager, request("c", "new")) == ["two"]


def test_a_crawl_does_not_flush_items_in_steady_use() -> None:
    """All items are in LocalCPU: the number of uses decides."""
    tiers = Tiers(**{f"page {number}": LOAD_S for number in range(99)}, popular=LOAD_S)
    own, ours = EncoderCacheManager(16), TierAwareEncoderCacheManager(16, tiers)
    for number in range(6):
        for manager in (own, ours):
            use(manager, request(f"fan {number}", "popular"))
            for page in range(4 * number, 4 * number + 4):
                use(manager, request(f"crawler {page}", f"page {page}"))
    assert "popular" not in own.cached
    assert "popular" in ours.cached


def test_one_request_that_asks_in_many_passes_counts_as_one_use() -> None:
    """Chunked prefill asks in each pass, and an item may occur in a prompt twice."""
    tiers = Tiers(chunked=LOAD_S, popular=LOAD_S)
    manager = TierAwareEncoderCacheManager(8, tiers)
    use(manager, request("a", "popular"))
    use(manager, request("b", "popular"))
    chunked = request("c", "chunked", "chunked")
    hold(manager, chunked)
    for _ in range(20):
        assert manager.check_and_update_cache(chunked, 0)
    manager.free(chunked)
    assert use(manager, request("d", "new")) == ["chunked"]


def test_the_item_that_takes_less_room_for_the_same_cost_is_kept() -> None:
    manager = TierAwareEncoderCacheManager(16, Tiers())
    use(manager, request("a", "small", rows=2))
    use(manager, request("b", "large", rows=14))
    assert use(manager, request("c", "new", rows=2)) == ["large"]


def test_an_item_that_needs_the_room_of_many_takes_it_and_no_more() -> None:
    manager = TierAwareEncoderCacheManager(120, Tiers())
    for number in range(30):
        use(manager, request(f"r{number}", f"i{number}"))
    assert use(manager, request("next", "large", rows=60)) == [f"i{number}" for number in range(15)]


def test_making_room_asks_about_a_bounded_number_of_entries_and_each_once() -> None:
    """The others are evaluated by their last known costs."""
    tiers = Tiers()
    manager = TierAwareEncoderCacheManager(4000, tiers)
    for number in range(1000):
        use(manager, request(f"r{number}", f"i{number}"))
    assert len(use(manager, request("next", "large", rows=2000))) == 500
    assert len(tiers.asked) == len(set(tiers.asked)) == 32


def test_no_tier_is_asked_while_there_is_room_or_where_there_can_be_none() -> None:
    tiers = Tiers()
    manager = TierAwareEncoderCacheManager(12, tiers)
    held = request("held", "one", "two")
    hold(manager, held)
    assert not manager.can_allocate(request("next", "new", rows=5), 0, PLENTY, 0), "all is in use"
    assert not manager.can_allocate(request("next", "new", rows=4), 0, 3, 0), "over the encoder's budget"
    manager.free(held)
    assert not manager.can_allocate(request("next", "new", rows=4), 0, 3, 0)
    assert not manager.can_allocate(request("next", "huge", rows=13), 0, PLENTY, 0)
    assert tiers.asked == []
    assert manager.get_freed_mm_hashes() == []


# ---- behaviour shared with vLLM's


class Model:
    """A simple model of the cache: items, their rows, their holders, and their order of access."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.reset()

    def reset(self) -> None:
        self.rows: dict[str, int] = {}
        """In order of access, the least recent first."""
        self.holders: dict[str, set[str]] = {}

    def access(self, user: str, item: str, rows: int) -> None:
        self.rows.pop(item, None)
        self.rows[item] = rows
        self.holders.setdefault(item, set()).add(user)

    @property
    def free(self) -> int:
        return self.size - sum(self.rows.values())

    @property
    def unused(self) -> list[str]:
        return [item for item in self.rows if not self.holders[item]]

    def has_room(self, rows: int) -> bool:
        return rows <= self.free + sum(self.rows[item] for item in self.unused)

    def evict(self, victims: list[str], rows: int) -> None:
        """Evict to make room for `rows`: no more than necessary, and no item in use."""
        for victim in victims:
            assert self.free < rows
            assert victim in self.unused
            del self.rows[victim]
        assert self.free >= rows


ITEMS = "abcdefgh"
_Event = tuple[str, Any]
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.lists(st.sampled_from(ITEMS), min_size=1, max_size=3)),
        st.tuples(st.just("go on"), st.integers(0, 7)),
        st.tuples(st.just("past"), st.tuples(st.integers(0, 7), st.integers(0, 2))),
        st.tuples(st.just("end"), st.integers(0, 7)),
        st.tuples(st.just("lose"), st.sampled_from(ITEMS)),
        st.tuples(st.just("reset"), st.none()),
    ),
    max_size=60,
)
"""A request begins, has another chunk computed, is past one of its items, or ends or is preempted. A tier loses an
item. The cache is emptied, as vLLM allows it: while no request holds anything."""


@pytest.mark.parametrize("policy", ["lru", "cost"])
@given(
    size=st.integers(1, 30),
    lengths=st.lists(st.integers(1, 9), min_size=len(ITEMS), max_size=len(ITEMS)),
    events=EVENTS,
)
def test_our_manager_grants_what_vllms_grants_and_evicts_no_more_than_it_must_whatever_happens(
    policy: str, size: int, lengths: list[int], events: list[_Event]
) -> None:
    rows_of = dict(zip(ITEMS, lengths, strict=True))
    tiers = Tiers(**{item: LOAD_S if number % 2 else ENCODE_S for number, item in enumerate(ITEMS)})
    own = EncoderCacheManager(size)
    ours = TierAwareEncoderCacheManager(size, tiers if policy == "cost" else None)
    model = Model(size)
    running: list[Any] = []
    held: set[str] = set()  # what a worker holds

    def take_up(one: Any) -> None:
        for index, feature in enumerate(one.mm_features):
            item, rows, before = feature.identifier, rows_of[feature.identifier], len(ours.freed)
            can = item in model.rows or model.has_room(rows)
            order = model.unused
            assert grant(ours, one, index) == grant(own, one, index) == can
            victims = ours.freed[before:]
            if not can:
                assert victims == []
                break
            if item not in model.rows:
                model.evict(victims, rows)
            if policy == "lru":
                assert victims == order[: len(victims)]
            model.access(one.request_id, item, rows)

    def let_go(one: Any, indices: Iterable[int]) -> None:
        for index in indices:
            for manager in (own, ours):
                manager.free_encoder_input(one, index)
        for feature in one.mm_features:
            if one.request_id not in own.cached.get(feature.identifier, ()):
                model.holders.get(feature.identifier, set()).discard(one.request_id)

    for number, (what, which) in enumerate(events):
        if what == "ask":
            one = request(f"request {number}", *which, rows=tuple(rows_of[item] for item in which))
            running.append(one)
            take_up(one)
        elif what == "lose":
            tiers.costs_s[which] = ENCODE_S
        elif what == "reset":
            if not any(ours.cached.values()):
                for each in (own, ours, model):
                    each.reset()
                held.clear()
        elif running and what == "go on":
            take_up(running[which % len(running)])
        elif running and what == "past":
            one = running[which[0] % len(running)]
            let_go(one, [which[1] % len(one.mm_features)])
        elif running:
            one = running.pop(which % len(running))
            let_go(one, sorted(ours.get_cached_input_ids(one)))
        held = (held | ours.cached.keys()) - set(ours.get_freed_mm_hashes())
        assert held == ours.cached.keys() == model.rows.keys()
        assert ours.num_free_slots == size - sum(model.rows.values()) >= 0
        assert ours.num_freeable_slots == ours.num_free_slots + sum(ours.freeable.values()) == own.num_freeable_slots
        assert {item for item, users in ours.cached.items() if users} == {i for i, u in own.cached.items() if u}
        assert ours._known.keys() == set(ours._order) == ours.cached.keys(), "nothing is kept of what was evicted"


def test_an_item_evicted_and_given_room_again_in_one_pass_stays_with_the_workers() -> None:
    for manager in managers(4):
        use(manager, request("a", "one"))
        assert manager.can_allocate(request("b", "two"), 0, PLENTY, 0)  # no KV blocks for it: no allocation
        hold(manager, request("c", "one"))
        assert manager.get_freed_mm_hashes() == []


def test_an_emptied_cache_remembers_nothing() -> None:
    tiers = Tiers(one=LOAD_S)
    manager = TierAwareEncoderCacheManager(8, tiers)
    for number in range(9):
        use(manager, request(f"r{number}", "one"))
    manager.reset()
    assert not manager.check_and_update_cache(request("a", "one"), 0)
    use(manager, request("a", "one"))
    tiers.costs_s["two"] = LOAD_S
    use(manager, request("b", "two"))
    assert use(manager, request("c", "new")) == ["one"]


# ---- how vLLM creates one


def configured(encoder_decoder: bool = False, **manager_config: Any) -> Any:
    return SimpleNamespace(
        ec_manager_config=SimpleNamespace(manager_config=manager_config),
        ec_transfer_config=None,
        model_config=SimpleNamespace(is_encoder_decoder=encoder_decoder),
    )


@pytest.mark.parametrize("manager_config", [{}, {"policy": "cost"}, {"policy": "lru"}])
def test_without_our_connector_every_policy_is_the_least_recently_accessed(manager_config: dict[str, Any]) -> None:
    made = TierAwareEncoderCacheManager.create_manager(cache_size=8, vllm_config=configured(**manager_config))
    assert isinstance(made, TierAwareEncoderCacheManager)
    for name in ("one", "two"):
        use(made, request(name, name))
    assert use(made, request("next", "new")) == ["one"]


def test_encoder_decoder_models_get_the_manager_that_vllm_has_for_them() -> None:
    made = TierAwareEncoderCacheManager.create_manager(cache_size=8, vllm_config=configured(encoder_decoder=True))
    assert isinstance(made, EncoderDecoderCacheManager)


@pytest.mark.parametrize(
    ("manager_config", "expected"),
    [({"policy": "fifo"}, "policy is 'fifo'; it must be one of cost, lru"), ({"polcy": "lru"}, "unknown key 'polcy'")],
)
def test_an_invalid_configuration_is_named(manager_config: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        TierAwareEncoderCacheManager.create_manager(cache_size=8, vllm_config=configured(**manager_config))


def test_an_engine_that_does_not_name_it_does_not_import_it() -> None:
    module = "lmcache_ec.adapters.vllm.encoder_cache_manager"
    assert [name for name, imported in graph().items() if module in imported] == []


# ---- what an entry is worth


def test_restoring_an_entry_costs_no_more_than_its_encode() -> None:
    assert restore_s(Below.NOTHING, 1 << 20, 256, 0.02) == 0.02
    assert restore_s(Below.DISK, 100 << 20, 256, 0.02) == 0.02, "encoded sooner than read"
    costs = [restore_s(below, 1 << 20, 256, 0.02) for below in Below]
    assert costs == sorted(costs)
    assert restore_s(Below.NOTHING, 1 << 20, 256) > restore_s(Below.MEMORY, 1 << 20, 256), "also where it is a guess"


def test_worth_falls_with_size_and_rises_with_cost_and_uses() -> None:
    least = worth(8, 0.01, 1.0)
    assert worth(16, 0.01, 1.0) < least < worth(8, 0.02, 1.0)
    assert least < worth(8, 0.01, 2.0)


def test_the_count_of_uses_decays_by_halves() -> None:
    uses = Uses(half_life=10)
    for _ in range(4):
        uses.add("one")
    many = uses.count("one")
    for number in range(10):
        uses.add(f"other {number}")
    assert uses.count("one") == pytest.approx(many / 2)
    assert uses.count("never") == 0.0
