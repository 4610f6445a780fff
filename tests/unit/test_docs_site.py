# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site: built and read without a network, with each page as GitHub shows it."""

import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from benchmarks.testbed.models import ROOT

pytest.importorskip("properdocs", reason="the extra `docs` is not installed")

SOURCES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "configs" / "README.md"]
PAGES = [path.relative_to(ROOT) for path in (*SOURCES, *sorted((ROOT / "docs").glob("*.md")))]
BUILD = """
import runpy, sys
def offline(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise OSError(f"the build wants {arguments}")
sys.addaudithook(offline)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
BLOCKS = {*("h1", "h2", "h3", "ul", "ol", "li", "table", "th", "td", "pre", "code", "a", "img", "em", "strong")}
"""Not paragraphs: a blank line in a list turns some or all of its items into paragraphs, which only adds space."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-c", BUILD, str(ROOT / "docs" / "build_site.py"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith(f"{out}/index.html")
    return out


def built(site: Path, page: Path) -> str:
    path = site / page.with_suffix(".html")
    return (path.with_name("index.html") if page.name == "README.md" else path).read_text()


class Elements(HTMLParser):
    """Counts elements, and records what is fetched to show a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] += tag in BLOCKS
        if tag in ("script", "link", "img", "iframe", "source", "object"):
            self.fetched += [value for name, value in attrs if name in ("src", "href", "data") and value]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_has_the_blocks_that_github_makes_of_it(site: Path, page: Path) -> None:
    """The site's Markdown is not GitHub's: blocks nested in a list, or directly after a paragraph, may differ."""
    html = built(site, page)
    content = re.search(r'role="main".*?(?=<footer)', html, re.S)
    assert content is not None
    github = MarkdownIt("commonmark").enable("table").render((ROOT / page).read_text())
    assert +Elements(content[0]).counts == +Elements(github).counts


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_fetches_nothing_from_elsewhere(site: Path, page: Path) -> None:
    fetched = Elements(built(site, page)).fetched
    assert fetched
    assert not [address for address in fetched if "//" in address]


def test_styles_fetch_nothing_from_elsewhere(site: Path) -> None:
    styles = list(site.rglob("*.css"))
    assert styles
    for style in styles:
        assert not re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", style.read_text()), style


def test_a_link_or_heading_that_is_missing_ends_the_build(tmp_path: Path) -> None:
    """So does a page that docs/README.md does not list."""
    copy = tmp_path / "copy"
    for page in (*PAGES, Path("properdocs.yml"), Path("docs/build_site.py")):
        (copy / page).parent.mkdir(parents=True, exist_ok=True)
        (copy / page).write_text((ROOT / page).read_text())
    for folder in ("configs", "benchmarks/results"):
        for path in (ROOT / folder).iterdir():
            (copy / folder).mkdir(parents=True, exist_ok=True)
            (copy / folder / path.name).write_bytes(path.read_bytes())
    (copy / "docs" / "dashboard.svg").write_text("<svg/>")
    (copy / "docs" / "gpu.md").write_text("# GPU\n\n[x](nowhere.md) [y](../configs/none.yaml) [z](plan.md#nothing)\n")
    (copy / "docs" / "new.md").write_text("# New\n")
    command = [sys.executable, str(copy / "docs" / "build_site.py"), "--out", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    for missing in ("nowhere.md", "../configs/none.yaml", "plan.md#nothing", "docs/new.md"):
        assert missing in done.stderr
