# SPDX-License-Identifier: Apache-2.0
"""The table of versions says what was found, and no more."""

from xml.etree import ElementTree

from lmcache_ec.adapters.vllm.versions import NEWEST, OLDEST, supported
from tests import versions


def test_the_page_has_the_table_that_the_results_make() -> None:
    page = versions.PAGE.read_text().partition(versions.BEGIN)[2].partition(versions.END)[0]
    assert page.strip() == versions.table(versions.known())


def test_every_supported_version_has_a_row() -> None:
    minors = [row.vllm.rpartition(".")[0] for row in versions.known()]
    assert minors == [f"0.{minor}" for minor in range(int(OLDEST[2:]), int(NEWEST[2:]) + 1)]
    assert all(supported(row.vllm) for row in versions.known())


def test_a_run_in_which_nothing_passed_is_no_success() -> None:
    skipped = ElementTree.fromstring("<s><testcase name='a'><skipped/></testcase></s>")
    assert versions.summed(skipped, 1.0) == ("not run: 0 passed, 1 skipped in 1 s", ())


def test_what_failed_is_named() -> None:
    mixed = "<s><testcase name='a'><failure/></testcase><testcase name='b'/><testcase name='c'><error/></testcase></s>"
    assert versions.summed(ElementTree.fromstring(mixed), 2.0) == ("1 passed, 2 failed in 2 s", ("a", "c"))
