# SPDX-License-Identifier: Apache-2.0
"""Differences between versions of vLLM; and a table of versions that shows exactly what was found."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.testbed.servers.openai import server_flags
from lmcache_ec.adapters.vllm.versions import NEWEST, OLDEST, measure_output_widths, output_widths, supported
from tests import versions


@pytest.mark.parametrize(("version", "trusting"), [("0.30.0", False), ("0.31.0", True), ("0.33.0+cu129", True)])
def test_a_server_is_started_only_with_options_that_its_version_knows(version: str, trusting: bool) -> None:
    assert ("--trust-request-mm-kwargs" in server_flags(version)) == trusting


def test_the_page_has_the_table_that_the_results_make() -> None:
    page = versions.PAGE.read_text().partition(versions.BEGIN)[2].partition(versions.END)[0]
    assert page.strip() == versions.table(versions.known())


def test_every_supported_version_has_a_row() -> None:
    minors = [row.vllm.rpartition(".")[0] for row in versions.known()]
    assert minors == [f"0.{minor}" for minor in range(int(OLDEST[2:]), int(NEWEST[2:]) + 1)]
    assert all(supported(row.vllm) for row in versions.known())


def test_a_run_in_which_nothing_passed_is_not_a_success() -> None:
    skipped = ElementTree.fromstring("<s><testcase name='a'><skipped/></testcase></s>")
    assert versions.summed(skipped, 1.0) == ("not run: 0 passed, 1 skipped in 1 s", ())


def test_failed_tests_are_named() -> None:
    mixed = "<s><testcase name='a'><failure/></testcase><testcase name='b'/><testcase name='c'><error/></testcase></s>"
    assert versions.summed(ElementTree.fromstring(mixed), 2.0) == ("1 passed, 2 failed in 2 s", ("a", "c"))


def test_a_test_that_fails_twice_counts_once() -> None:
    twice = "<s><testcase name='a'><failure/></testcase><testcase name='a'><error/></testcase></s>"
    assert versions.summed(ElementTree.fromstring(twice), 2.0) == ("0 passed, 1 failed in 2 s", ("a",))


def test_failed_tests_may_run_again_and_the_row_shows_both_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = versions.Row("0.31.0", versions.ALL, "1 passed, 2 failed in 2 s", failed=("a[one]", "a[two]", "b"))

    def run(row: versions.Row, folder: Path, index: object, tests: Sequence[str]) -> versions.Row:
        assert tests == (*versions.TESTS, "-k", "a or b")
        return replace(row, result="2 passed, 1 failed in 1 s", failed=("b",))

    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.setattr(versions, "_run_engines", run)
    second = versions.run_engines("0.31.0", (), (), keep=False, again=first)
    assert second.tests == versions.ALL
    assert second.result == "1 passed, 2 failed in 2 s; second run of the failed tests: 2 passed, 1 failed in 1 s"
    assert second.failed == ("b",)


def engine(name: str, **transfer: Any) -> Any:
    return SimpleNamespace(
        instance_id="",
        parallel_config=SimpleNamespace(data_parallel_index=0),
        ec_transfer_config=SimpleNamespace(engine_id=name, **transfer),
    )


def test_where_vllm_measures_no_widths_a_producers_workers_do() -> None:
    """Here the first rank has no encoder."""
    producer = engine("producer before 0.32", is_ec_producer=True)
    measure_output_widths(producer, lambda function: [{}, {"image": 256}, {"image": 256}])
    assert output_widths(producer) == {"image": 256}


@pytest.mark.parametrize(
    ("transfer", "widths"),
    [
        ({"is_ec_producer": True, "mm_encoder_output_widths": {"image": 64}}, {"image": 64}),
        ({"is_ec_producer": False}, {}),
    ],
    ids=["vLLM does", "a consumer"],
)
def test_else_no_worker_is_asked(transfer: dict[str, Any], widths: dict[str, int]) -> None:
    def asked(function: object) -> list[dict[str, int]]:
        raise AssertionError

    measure_output_widths(engine("another", **transfer), asked)
    assert output_widths(engine("another", **transfer)) == widths
