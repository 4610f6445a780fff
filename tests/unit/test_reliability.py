# SPDX-License-Identifier: Apache-2.0
"""The table of faults in docs/reliability.md has the faults that the suite has, and no other."""

from collections import Counter

from tests.reliability import declared, listed


def test_the_table_has_each_fault_that_a_test_or_the_soak_brings_about_once_and_no_other() -> None:
    assert Counter(listed()) == Counter(declared())
    assert len(listed()) >= 60
