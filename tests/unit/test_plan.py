# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec plan`: its answers for traces with known outcomes, and for wrong input."""

import json
import math
from collections import Counter
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from lmcache_ec.cli.commands import app
from lmcache_ec.plan.money import Prices, monthly
from lmcache_ec.plan.simulate import Outcome, Scenario, replay
from lmcache_ec.plan.synthetic import NAMED, Synthetic, generate, parse
from lmcache_ec.plan.traces import Batch, TraceError, number_of, read, sampled, write

MIB = 1 << 20


def trace(*names: int, size: int = MIB, encode_s: float = 1.0) -> Batch:
    batch = Batch()
    for number, name in enumerate(names):
        batch.add(float(number), name, size, encode_s)
    return batch


def replayed(batch: Batch, tiers: dict[str, float], policy: str = "lru", **how: int | str) -> Outcome:
    return replay([batch], Scenario(tiers, policy, **how))  # type: ignore[arg-type]


def identifiers(made: Synthetic, share: float = 1.0) -> list[int]:
    return list(chain.from_iterable(batch.identifiers for batch in generate(made, share)))


def test_each_request_is_answered_by_the_first_tier_that_has_it() -> None:
    outcome = replayed(trace(1, 1, 2, 3, 1, 3), {"gpu": MIB, "cpu": 2 * MIB, "disk": 10 * MIB})
    assert {name: served.requests for name, served in outcome.by_tier.items()} == {"gpu": 1, "cpu": 1, "disk": 1}
    assert outcome.encoder.requests == 3
    assert outcome.saved_share == 0.5


def test_pictures_that_two_replicas_share_are_encoded_once_and_others_twice() -> None:
    everything = trace(*(number for number in range(50) for _ in range(40)))
    alone = replayed(everything, {"cpu": math.inf}, replicas=2)
    shared = replayed(everything, {"cpu": math.inf, "redis": math.inf}, replicas=2)
    kept = replayed(everything, {"cpu": math.inf}, replicas=2, routing="picture")
    assert (alone.encoder.requests, shared.encoder.requests, kept.encoder.requests) == (100, 50, 50)
    assert shared.by_tier["redis"].requests == 50
    assert shared.network_bytes == 100 * MIB


def test_an_output_that_is_encoded_sooner_than_read_is_encoded() -> None:
    outcome = replayed(trace(1, 1, encode_s=0.001), {"s3": math.inf})
    assert (outcome.encoder.requests, outcome.by_tier["s3"].requests) == (2, 0)


def test_a_crawl_does_not_flush_pictures_in_steady_use() -> None:
    names = [name for round_ in range(60) for name in (*range(20), *range(1000 * (round_ + 1), 1000 * round_ + 1200))]
    lru, cost = (replayed(trace(*names), {"cpu": 60 * MIB}, policy) for policy in ("lru", "cost"))
    assert lru.saved_s == 0
    assert cost.saved_s >= 0.8 * 59 * 20


def test_the_cost_policy_keeps_what_takes_long_to_encode() -> None:
    batch = Batch()
    for number in range(2000):
        name = number % 40
        batch.add(float(number), name, MIB, 10.0 if name < 10 else 0.01)
    lru, cost = (replayed(batch, {"cpu": 15 * MIB}, policy) for policy in ("lru", "cost"))
    assert lru.saved_s == 0
    assert cost.saved_share > 0.9


@pytest.mark.parametrize("name", NAMED)
def test_a_synthetic_trace_is_the_same_each_time_and_in_the_order_of_time(name: str) -> None:
    made = parse(f"{name}:requests=150000,pictures=5000")
    batches = list(generate(made))
    times = list(chain.from_iterable(batch.times_s for batch in batches))
    assert times == sorted(times)
    assert len(times) == pytest.approx(150_000, rel=0.02)
    assert [batch.identifiers for batch in batches] == [batch.identifiers for batch in generate(made)]


def test_popularity_follows_zipfs_law_however_many_pictures_there_are() -> None:
    asked = Counter(identifiers(Synthetic(requests=200_000, pictures=10**8, exponent=1.0)))
    ranked = [number for _, number in asked.most_common(10)]
    whole = sum(1 / rank for rank in range(1, 10**6)) + math.log(100)
    assert ranked[0] == pytest.approx(200_000 / whole, rel=0.05)
    assert ranked[9] == pytest.approx(ranked[0] / 10, rel=0.15)


def test_a_crawl_asks_for_each_of_its_pictures_once_in_the_middle_of_the_time() -> None:
    batches = list(generate(Synthetic(requests=60_000, pictures=10, scan=0.5, hours=3)))
    requests = [pair for batch in batches for pair in zip(batch.identifiers, batch.times_s, strict=True)]
    asked = Counter(name for name, _ in requests)
    crawled = [time_s for name, time_s in requests if asked[name] == 1]
    assert len(crawled) == pytest.approx(30_000, rel=0.01)
    assert min(crawled) >= 3600
    assert max(crawled) <= 7200


def test_with_drift_other_pictures_become_popular() -> None:
    still = set(identifiers(Synthetic(requests=50_000, pictures=100)))
    drifting = set(identifiers(Synthetic(requests=50_000, pictures=100, lifetime_h=6)))
    assert len(still) <= 100
    assert len(drifting) >= 350


def test_a_conversation_comes_back_to_its_picture() -> None:
    asked = Counter(identifiers(Synthetic(requests=60_000, conversations=1.0, turns=6)))
    assert sum(asked.values()) / len(asked) == pytest.approx(6, rel=0.05)


def test_a_sample_saves_the_same_share_as_the_whole_trace() -> None:
    made = Synthetic(requests=300_000, pictures=50_000)
    tiers: dict[str, float] = {"cpu": 8 << 30}
    whole = replay(list(generate(made)), Scenario(tiers))
    part = replay(list(generate(made, 0.2)), Scenario(tiers), 0.2)
    assert part.requests == pytest.approx(0.2 * whole.requests, rel=0.25)
    assert part.saved_share == pytest.approx(whole.saved_share, abs=0.05)


def test_a_trace_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    for path in (tmp_path / "trace.csv", tmp_path / "trace.csv.gz"):
        batch = trace(1, 2, 1)
        assert [one.identifiers for one in write([batch], path)] == [[1, 2, 1]]
        [found] = read(path)
        assert (found.times_s, found.sizes, found.encodes_s) == (batch.times_s, batch.sizes, batch.encodes_s)
        assert found.identifiers == [number_of(f"{name:016x}") for name in (1, 2, 1)]
        assert sum(map(len, sampled(read(path), 1.0))) == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "when,what\n",
        "time_s,identifier,bytes,encode_s\n2,a,1,1\n1,a,1,1\n",
        "time_s,identifier,bytes,encode_s\n1,a,0,1\n",
        "time_s,identifier,bytes,encode_s\n1,a,9,nan\n",
        "time_s,identifier,bytes,encode_s\n1,a,9\n",
        "time_s,identifier,bytes,encode_s\n1,a,9,1,1\n",
    ],
)
def test_a_line_that_does_not_belong_in_a_trace_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(TraceError, match=r"trace.csv line \d: expected "):
        list(read(tmp_path / "trace.csv"))


def test_costs_are_for_a_month_of_the_whole_fleet() -> None:
    batch = Batch([0.0, 3600.0], [1, 1], [MIB, MIB], [36.0, 36.0])
    outcome = replayed(batch, {"cpu": 1 << 30, "s3": math.inf}, replicas=3, routing="picture")
    costs = monthly(outcome, Prices(gpu_hour=2.0, cpu_gib_month=5.0, s3_gib_month=0.0, s3_1000_writes=1.0), 1.0)
    assert costs["encoder"] == pytest.approx(36 / 3600 * 2.0 * 730)
    assert costs["cpu"] == 15.0
    assert costs["s3"] == pytest.approx(0.001 * 730)


def asked(*arguments: str) -> dict[str, object]:
    done = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def decided(answer: dict[str, object]) -> list[object]:
    scenarios = answer["scenarios"]
    assert isinstance(scenarios, list)
    return [(one["policy"], one["hits"], one["encodes"]) for one in scenarios]


def test_the_command_answers_with_a_table_json_and_a_picture(tmp_path: Path) -> None:
    picture, kept = tmp_path / "plan.svg", tmp_path / "kept.csv"
    arguments = [
        "scan:requests=5000,pictures=100",
        "--tiers",
        "gpu=0.01,cpu=0.1",
        "--policy",
        "lru",
        "--policy",
        "cost",
    ]
    answer = asked(*arguments, "--picture", str(picture), "--write-trace", str(kept))
    again = asked(str(kept), *arguments[1:])
    assert decided(answer) == decided(again)
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    shown = CliRunner().invoke(app, ["plan", *arguments])
    assert shown.exit_code == 0
    assert "cpu 0.1: cost" in shown.stdout


def test_no_figure_of_the_table_is_cut_off_however_many_tiers_there_are() -> None:
    tiers = "gpu=0.05,cpu=0.25,disk=16.125,redis=2000.5,s3=inf"
    shown = CliRunner().invoke(
        app, ["plan", "scan:requests=2000", "--tiers", tiers, "--policy", "lru", "--policy", "cost"]
    )
    assert shown.exit_code == 0
    assert "2,000 requests in 24 h; sizes in GiB" in shown.stdout
    assert "cost per month" in shown.stdout
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["missing.csv"],
        ["zipf:colour=1"],
        ["zipf:requests=x"],
        ["zipf:requests=9,requests=8"],
        ["zipf:requests=9", "--tiers", "cpu=inf,cpu=2"],
        ["zipf:requests=9", "--price", "gpu_hour=1", "--price", "gpu_hour=2"],
        ["zipf:scan=2"],
        ["zipf:requests=9", "--tiers", "tape=1"],
        ["zipf:requests=9", "--tiers", "cpu=1.2.3"],
        ["zipf:requests=9", "--policy", "FIFO"],
        ["zipf:requests=9", "--routing", "sticky"],
        ["zipf:requests=9", "--price", "gold=1"],
        ["zipf:requests=9", "--price", "gpu_hour=-1"],
        ["zipf:requests=9", "--picture", "/no/such/folder/plan.svg"],
        ["zipf:requests=9", "--write-trace", "/dev/full/kept.csv"],
    ],
    ids=" ".join,
)
def test_wrong_input_is_one_line_and_status_2(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["plan", *arguments])
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout


def test_a_misspelled_key_of_a_synthetic_trace_is_answered_with_the_one_that_was_meant() -> None:
    done = CliRunner().invoke(app, ["plan", "zipf:reqests=9"])
    assert done.stderr == "'reqests' is no key of a synthetic trace: did you mean requests?\n"


def test_a_program_also_learns_which_tiers_are_too_small_for_the_sample() -> None:
    arguments = ["zipf:requests=5000", "--tiers", "gpu=0.05,cpu=100", "--sample", "0.2"]
    notes = asked(*arguments)["notes"]
    assert isinstance(notes, list)
    [note] = notes
    assert note.startswith("gpu: in the sample there is room for ")
    assert note in CliRunner().invoke(app, ["plan", *arguments]).stdout
    assert asked(*arguments[:-2])["notes"] == []
