# SPDX-License-Identifier: Apache-2.0
"""What the pages under docs/ state about the repository is true."""

import re

import pytest

from benchmarks.testbed.models import ROOT
from lmcache_ec.config.reference import markdown

FILES = sorted(path.relative_to(ROOT) for top in ("lmcache_ec", "adapters") for path in (ROOT / top).rglob("*.py"))
PAGES = sorted(path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")))


def test_the_map_names_every_file_and_no_other() -> None:
    """Each under its folder: several folders may have a file of the same name."""
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


def test_the_table_of_keys_is_the_one_that_the_code_makes() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert markdown() in page, "put in what `lmcache-ec keys --markdown` prints"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_to_a_heading_finds_it(page: object) -> None:
    path = ROOT / str(page)
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", path.read_text()):
        if "://" not in link:
            target = path.parent / link if link else path
            headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", target.read_text(), flags=re.S), flags=re.M)
            assert anchor in {_anchor(heading) for heading in headings}, f"{link}#{anchor}"


def _anchor(heading: str) -> str:
    """The anchor that GitHub derives from a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_messages_under_troubleshooting_are_in_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = page.partition("## The engine does not start")[2].partition("##")[0]
    source = "".join((ROOT / path).read_text() for path in FILES)
    quoted = [text for row in re.findall(r"^\| (.*?) \|", table, flags=re.M) for text in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) >= 8
    for part in (part.strip() for text in quoted for part in text.split("…")):
        assert part in source or part in source.replace("{{", "{").replace("}}", "}"), part
