# SPDX-License-Identifier: Apache-2.0
"""The pages under docs/ say of the repository what is true of it."""

import re

import pytest

from benchmarks.testbed.models import ROOT

FILES = sorted(path.relative_to(ROOT) for top in ("lmcache_ec", "adapters") for path in (ROOT / top).rglob("*.py"))
PAGES = sorted(path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")))


def test_the_map_names_every_file_and_no_other() -> None:
    """Under the folder that it is in: several folders may have a file of the same name."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## The map")[2]
    named = set()
    for section in re.split(r"(?=^\*\*`)", text, flags=re.M)[1:]:
        [folder] = re.findall(r"^\*\*`([a-z_/]+)/`", section)
        named |= {f"{folder}/{name}" for name in re.findall(r"`(\w+\.py)`", section)}
    there = {str(path) for path in FILES if path.name != "__init__.py" or str(path) == "lmcache_ec/__init__.py"}
    assert named == there


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_to_a_file_leads_somewhere(page: object) -> None:
    path = ROOT / str(page)
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if "://" not in link and not link.startswith("mailto:"):
            assert (path.parent / link).exists(), link
