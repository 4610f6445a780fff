# SPDX-License-Identifier: Apache-2.0
"""vLLM's own schedulers, both sides of the real connector and a real store process, under random requests.

A seed determines the sizes of all caches, the requests, and when which part fails. The progress of the store process is
not deterministic: a seed that failed once may pass the next time, and is worth running several times.
"""

import enum
import itertools
import random
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from benchmarks.testbed.models import model_path
from benchmarks.testbed.stand_ins import WIDTH, digest
from benchmarks.testbed.waiting import wait_until
from lmcache_ec.adapters.vllm.encoder_cache_manager import TierAwareEncoderCacheManager
from lmcache_ec.adapters.vllm.lower_tiers import below
from lmcache_ec.adapters.vllm.scheduler import SchedulerSide
from tests.integration.runner import V1Runner
from tests.unit.test_namespace import vllm_config

SEEDS = 10
PASSES = 600
PATIENCE_S = 60.0
BLOCK_TOKENS = 16
SCARCE_BLOCKS = 16
"""Room for the longest request, but not for two of them."""
LARGEST_ROWS = 15
LONGEST_PROMPT = 160
TWINS = ("one name", digest("one name"))
"""Names that clients give to two items of different length; vLLM fails some requests that use them, we fail others."""


class Fault(enum.StrEnum):
    """The part that fails in a run."""

    NOTHING = "nothing"
    KILLS = "kills"
    """The store process is killed repeatedly."""
    RANK = "rank"
    """A worker hook fails: the rank leaves the cache while requests with leases wait."""
    SCHEDULER = "scheduler"
    """A scheduler hook fails, anywhere in a pass. These runs have no items without pixels: an item that was promised in
    the same pass can only be encoded."""


HOOKS = {
    Fault.RANK: ("save", "finish_step"),
    Fault.SCHEDULER: (
        "ensure_cache_available",
        "has_cache_item",
        "update_state_after_alloc",
        "build_connector_meta",
        "restore_s",
        "_standing",
        "_reserve",
        "_orders",
        "cache.drain",
        "cache.hand_ledger",
        "cache.book.pin",
        "cache.book.send_load",
        "cache.book.send_save",
        "cache.book.report",
    ),
}
"""Where a hook fails, as a path from the connector's delegate."""


METADATA_ONLY = {
    Fault.NOTHING: (0.0, 0.2, 0.5),
    Fault.KILLS: (0.0, 0.2, 0.5),
    Fault.RANK: (0.5,),
    Fault.SCHEDULER: (0.0,),
}
"""Shares of items with nothing to encode."""

HELD = (
    *(f"places_{state}" for state in ("reserved", "writing", "sealing", "filling", "orphaned")),
    *("pins", "leases", "orders", "fetches_under_way", "staged", "requests"),
    *("dirty_bytes", "filling_bytes", "leased_bytes", "unwritten"),
)
"""Counts that are zero once nothing is under way."""


class Prompts:
    """Random requests over a fixed set of items, and what is certain about their endings."""

    def __init__(self, dice: random.Random, metadata_only: float) -> None:
        """`metadata_only` is the share of items with nothing to encode."""
        self._dice = dice
        self._metadata_only = metadata_only
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        names = [digest(f"picture {number}") for number in range(dice.choice([3, 10, 40]))]
        self._rows = {name: dice.randint(1, LARGEST_ROWS) for name in (*names, "a name", "another", "a third", *TWINS)}
        self.asked = 0
        self.may_fail: set[str] = set()

    def next(self) -> Request:
        dice, features = self._dice, list[MultiModalFeatureSpec]()
        position = dice.randint(0, 20)
        chosen = dice.choices(list(self._rows), k=dice.choice([0, 1, 1, 2, 3, 6]))
        if dice.random() < 0.15:
            chosen = [dice.choice(TWINS)] * 2
        for identifier in chosen:
            rows = self._rows[identifier]
            if identifier in TWINS and dice.random() < 0.3:
                rows += 1
            if position + rows > LONGEST_PROMPT:
                break
            features.append(self._feature(identifier, position, rows))
            position += rows + dice.choice([0, 1, 10, 60])
        return self.request(min(position, LONGEST_PROMPT) + dice.randint(1, 20), features)

    def request(self, tokens: int, features: list[MultiModalFeatureSpec]) -> Request:
        """Half of the requests share as much prefix, and so KV blocks, as they can."""
        name = f"request {self.asked}"
        self.asked += 1
        if any(feature.data is None or feature.identifier in TWINS for feature in features):
            self.may_fail.add(name)
        tokens = max([tokens, *(f.mm_position.offset + f.mm_position.length + 1 for f in features)])
        first = 1 if self._dice.random() < 0.5 else self.asked + 1
        sampling = SamplingParams(max_tokens=self._dice.choice([1, 3, 12]))
        ids = [first] + [1] * (tokens - 1)
        return Request(name, ids, sampling, None, mm_features=features, block_hasher=self._hasher)

    def _feature(self, identifier: str, offset: int, rows: int) -> MultiModalFeatureSpec:
        pixels = None if self._dice.random() < self._metadata_only else MultiModalKwargsItem.dummy()
        where = PlaceholderRange(offset=offset, length=rows)
        return MultiModalFeatureSpec(data=pixels, modality="image", identifier=identifier, mm_position=where)


@dataclass
class Wait:
    """Minimum time a request has waited, in seconds; `since` is the start of the current wait."""

    total_s: float = 0.0
    since: float | None = None
    overdue_passes: int = 0


class Waits:
    """Wraps `ensure_cache_available`: checks that no request is deferred once it has waited long enough.

    A wait is only ever underestimated, so that a slow machine fails no test. A request without pixels for an item is
    failed instead of scheduled; vLLM learns that from a step's output, which may be two passes behind.
    """

    def __init__(self, connector: Any, deadline_s: float) -> None:
        self._ask: Callable[[Request, int], bool] = connector.ensure_cache_available
        self._deadline_s = deadline_s
        self._waits: dict[str, Wait] = {}
        self.pass_began = 0.0
        self.deferred = 0
        connector.ensure_cache_available = self.ensure_cache_available

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        available = self._ask(request, num_computed_tokens)
        wait = self._waits.setdefault(request.request_id, Wait())
        waited_s = wait.total_s + (0.0 if wait.since is None else max(0.0, self.pass_began - wait.since))
        if available:
            wait.total_s, wait.since = waited_s, None
            return True
        self.deferred += 1
        wait.since = wait.since or time.monotonic()
        wait.overdue_passes += waited_s >= self._deadline_s
        assert wait.overdue_passes <= 3, f"{request.request_id} is put off after {waited_s} of {self._deadline_s} s"
        return False


class Engine:
    """vLLM's scheduler and a rank's runner, in the test's thread; with `AsyncScheduler` outputs are a step behind."""

    def __init__(self, dice: random.Random, folder: Path, scheduler: type[Scheduler], fault: Fault) -> None:
        self._dice = dice
        self._fault = fault
        self._behind = int(issubclass(scheduler, AsyncScheduler))
        self._steps: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.prompts = Prompts(dice, dice.choice(METADATA_ONLY[fault]))
        self.endings: dict[str, FinishReason] = {}
        self.resets = self.preemptions = 0
        self.ordered: Counter[str] = Counter()
        """Encodes and loads that have been sent with steps."""
        self.handed: list[dict[str, Any]] = []
        """What vLLM's front ends have received for the metrics."""

        deadline_ms = dice.choice([1, 20, 200])
        config = _configuration(dice, folder, deadline_ms)
        if fault is Fault.RANK:
            config.cache_config.num_gpu_blocks = SCARCE_BLOCKS  # so that requests wait with their leases
        self.runner = V1Runner.of(config)
        self.scheduler = scheduler(config, _kv_cache(config), _no_grammars(), BLOCK_TOKENS, log_stats=True)
        rows = dice.choice([16, 40, 100, 400])
        ours, tiers = TierAwareEncoderCacheManager, below(config)
        assert tiers is not None
        self.scheduler.encoder_cache_manager = dice.choice([EncoderCacheManager(rows), ours(rows), ours(rows, tiers)])
        self.scheduler.max_num_encoder_input_tokens = dice.choice([16, 64, 400])
        self.connector = self.scheduler.ec_connector
        self.side: SchedulerSide = self.connector._scheduler
        self.waits = Waits(self.connector, deadline_ms / 1000)

    # ---- passes

    def ask(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def step(self) -> None:
        """A pass, its step, and vLLM's processing of the output that is due."""
        self.waits.pass_began = time.monotonic()
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        self.ordered["encodes"] += sum(map(len, output.scheduled_encoder_inputs.values()))
        self.ordered["loads"] += sum(load.place != 0 for load in output.ec_connector_metadata.loads)
        self.runner.run(output)
        self._steps.append((output, self._sampled(output)))
        behind = self._behind if output.total_num_scheduled_tokens else 0
        while len(self._steps) > behind:
            self._take_in(*self._steps.popleft())
        if not output.total_num_scheduled_tokens:
            time.sleep(0.001)  # as vLLM's EngineCore does, to yield the core

    def _sampled(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """A token for each request that is past its prompt."""
        names = list(output.num_scheduled_tokens)
        tokens = [[] if self.scheduler.requests[name].is_prefill_chunk else [7] for name in names]
        indices = {name: index for index, name in enumerate(names)}
        return ModelRunnerOutput(req_ids=names, req_id_to_index=indices, sampled_token_ids=tokens)

    def _take_in(self, output: SchedulerOutput, sampled: ModelRunnerOutput) -> None:
        for of_a_client in self.scheduler.update_from_output(output, sampled).values():
            stats = of_a_client.scheduler_stats
            if stats is not None and stats.ec_connector_stats is not None:
                self.handed.append(stats.ec_connector_stats)
            for answer in of_a_client.outputs:
                if answer.finish_reason is not None:
                    assert answer.request_id not in self.endings, f"{answer.request_id} ended twice"
                    self.endings[answer.request_id] = answer.finish_reason

    def until(self, what: str, condition: Callable[[], object]) -> None:
        """Run passes until `condition` holds, with a text-only request in each that would be empty."""

        def met() -> object:
            found = condition()
            if not found:
                if not self.scheduler.has_requests():
                    self.ask(self.prompts.request(4, []))
                self.step()
            return found

        wait_until(what, met, PATIENCE_S, pause_s=0)

    def end_all(self) -> None:
        """Run until every request has ended, by itself or at the deadline of what it waits for."""

        def ended() -> bool:
            if self.scheduler.has_requests() or self._steps:
                self.step()
                return False
            return True

        try:
            wait_until("all requests have ended", ended, PATIENCE_S, pause_s=0)
        except AssertionError as error:
            raise AssertionError(f"{error}: {sorted(self.scheduler.requests)}") from None

    # ---- what happens to an engine

    def disturb(self) -> None:
        """Now and then, an action of clients or operators."""
        # Policy `fcfs` only: under `priority` vLLM 0.32 drops the encodes of a request that it preempts in the step
        # that scheduled them, and leaves them in its encoder cache (`Scheduler.schedule`, v1/core/sched/scheduler.py).
        dice, scheduler = self._dice, self.scheduler
        if len(scheduler.requests) < 8 and dice.random() < 0.5:
            self.ask(self.prompts.next())
        if dice.random() < 0.03 and scheduler.requests:
            name = dice.choice(list(scheduler.requests))
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.endings[name] = FinishReason.ABORT
        if dice.random() < 0.01 and not self._steps:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        if dice.random() < 0.03 and not self._steps and not scheduler.running:
            scheduler.reset_encoder_cache()
            self.runner.cache.clear()
            self.resets += 1
        if dice.random() < 0.02:
            self.runner.change_weights(dice.choice([1.0, 1.0, 2.0, 4.0]))
        if self._fault is Fault.KILLS and dice.random() < 0.01 and self.side.cache._store.process.introduced:
            self.side.cache._store.process.kill()

    def break_hook(self) -> None:
        """From the next call or a later one on, one hook of the connector raises. Others never do."""
        if self._fault not in HOOKS:
            return
        *owners, name = self._dice.choice(HOOKS[self._fault]).split(".")
        owner: Any = self.runner.connector._worker if self._fault is Fault.RANK else self.side
        for part in owners:
            owner = getattr(owner, part)
        hook, calls = getattr(owner, name), self._dice.randint(0, 4)

        def breaks(*arguments: Any, **keys: Any) -> Any:
            nonlocal calls
            calls -= 1
            if calls < 0:
                raise RuntimeError(f"{name} is broken by the test")
            return hook(*arguments, **keys)

        setattr(owner, name, breaks)

    # ---- what is left

    def left_over(self) -> dict[str, int]:
        counts = self.side.snapshot()
        return {name: counts[name] for name in HELD if counts[name]}

    def close(self) -> None:
        self.scheduler.shutdown()
        self.runner.connector.shutdown()


def _configuration(dice: random.Random, folder: Path, deadline_ms: int) -> Any:
    keys = {
        "local_disk": str(folder),
        "max_local_cpu_size": dice.choice([0.0001, 0.0005, 0.01]),
        "load_deadline_ms": deadline_ms,
        "start_timeout_s": PATIENCE_S,
        "persist_updated_weights": dice.choice([False, True]),
    }
    transfer = {
        "ec_connector": "ECLMCacheConnector",
        "ec_connector_module_path": "lmcache_ec.adapters.vllm.connector",
        "ec_role": "ec_both",
        "engine_id": uuid.uuid4().hex,
        "ec_connector_extra_config": keys,
    }
    config = vllm_config(
        model_path("qwen3vl"),
        ec_transfer_config=transfer,
        max_model_len=512,
        max_num_batched_tokens=dice.choice([64, 128, 512]),
        max_num_seqs=dice.choice([2, 4, 8]),
    )
    config.ec_transfer_config.mm_encoder_output_widths = {"image": WIDTH}
    config.cache_config.num_gpu_blocks = dice.choice([SCARCE_BLOCKS, 40, 200])
    return config


def _kv_cache(config: Any) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
    blocks = config.cache_config.num_gpu_blocks
    return KVCacheConfig(blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


def _no_grammars() -> Any:
    return SimpleNamespace(should_advance=lambda request: False, accept_tokens=lambda request, tokens: True)


@contextmanager
def life(seed: int, scheduler: type[Scheduler], fault: Fault, folder: Path) -> Iterator[Engine]:
    """An engine after random requests and `fault`, once all its requests have ended."""
    dice = random.Random(seed)
    engine = Engine(dice, folder, scheduler, fault)
    try:
        engine.until("the cache is ready", lambda: engine.side.cache.ready)
        breaks_at = dice.randint(PASSES // 10, PASSES // 3)
        for number in range(PASSES):
            if number == breaks_at:
                engine.break_hook()
            engine.disturb()
            engine.step()
        engine.end_all()
        yield engine
    finally:
        engine.close()


CASES = list(itertools.product((Scheduler, AsyncScheduler), Fault, range(SEEDS)))


@pytest.mark.slow  # two minutes and more on two cores
@pytest.mark.parametrize(
    ("scheduler", "fault", "seed"), CASES, ids=[f"{case[0].__name__}-{case[1]}-seed {case[2]}" for case in CASES]
)
def test_any_requests_are_served_correctly_and_leave_nothing_behind(
    scheduler: type[Scheduler], fault: Fault, seed: int, tmp_path: Path
) -> None:
    """The runner and `Waits` check every step; the rest is checked at the end."""
    with life(seed, scheduler, fault, tmp_path) as engine:
        assert engine.endings.keys() == {f"request {number}" for number in range(engine.prompts.asked)}
        failed = {name for name, ending in engine.endings.items() if ending is FinishReason.ERROR}
        assert failed <= engine.prompts.may_fail
        if fault in HOOKS:
            return
        assert not engine.connector._gave_up
        assert not engine.runner.connector._gave_up
        engine.until(f"nothing is left of {engine.left_over()}", lambda: not engine.left_over())
        assert engine.runner.cache.keys() <= engine.scheduler.encoder_cache_manager.cached.keys()
        snapshot = engine.side.snapshot()
        assert snapshot["mirror_resets"] <= engine.resets


@pytest.mark.parametrize("scheduler", [Scheduler, AsyncScheduler])
def test_the_metrics_that_front_ends_receive_add_up_whatever_is_killed(
    scheduler: type[Scheduler], tmp_path: Path
) -> None:
    with life(2, scheduler, Fault.KILLS, tmp_path) as engine:
        handed: Counter[str] = Counter()

        def add_up() -> Counter[str]:
            """Sums by metric and labels, and by metric only."""
            while engine.handed:
                for key, number in engine.handed.pop()["counters"].items():
                    handed[key] += number
                    handed[key.partition("|")[0]] += number if "|" in key else 0
            return handed

        def all_of_it() -> dict[str, tuple[int, int]]:
            """The differences: as handed, as counted."""
            counted, own = engine.side.cache.tallies.totals(), engine.side.snapshot()
            truth = {
                "misses_total": engine.ordered["encodes"],
                "hits_total": engine.ordered["loads"],
                "saves_total": own["saves"],
                "store_restarts_total": own["store_losses"],
                **{f"tier_{name}_total|disk": counted[f"disk_{name}"] for name in ("hits", "writes", "read_bytes")},
            }
            add_up()
            return {name: (handed[name], value) for name, value in truth.items() if handed[name] != value}

        engine.until("nothing is left", lambda: not engine.left_over())
        engine.until("all of it is handed over", lambda: not all_of_it())
        lookups = {result: handed[f"lookups_total|image|{result}"] for result in ("hit", "miss")}
        assert lookups == {"hit": engine.ordered["loads"], "miss": engine.ordered["encodes"]}
