# SPDX-License-Identifier: Apache-2.0
"""The table in docs/reliability.md has exactly the faults that the suite declares."""

from collections import Counter

from tests.reliability import declared, listed


def test_the_table_has_each_fault_that_a_test_or_the_soak_brings_about_once_and_no_other() -> None:
    assert Counter(listed()) == Counter(declared())
    assert len(listed()) >= 60
